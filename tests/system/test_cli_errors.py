"""Errors of users: each is one sentence on standard error, with exit status 1."""

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.kafka import reader as reading
from gracestream.pipeline.kafka.clients import producer
from gracestream.pipeline.kafka.reader import RecordsAndNext
from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Command, explicit_settings, sentence, status_of
from tests.support.running import TIMEOUT, Checkpoint, settings_for, wait_until

ONE = "0123456789abcdef0123456789abcdef01234567"
"""The commit of a revision on the hub."""


@pytest.mark.parametrize("command", ["replay", "infer"])
def test_kafka_out_of_reach(run: Callable[..., Command], command: str) -> None:
    address = f"127.0.0.1:{find_free_port()}"
    message = sentence(run(command, kafka=address, startup_timeout=2))
    assert f"Kafka at {address} does not answer" in message
    assert message.endswith("is GRACESTREAM_KAFKA right?")


@pytest.mark.parametrize(
    ("given", "settings", "named"),
    [
        (["--kafka", "no-host.invalid:9092"], {"kafka": "other:9092"}, "--kafka"),
        (["--kafka=no-host.invalid:9092"], {}, "--kafka"),
        ([], {"kafka": "no-host.invalid:9092"}, "GRACESTREAM_KAFKA"),
        ([], {"kafka": "no-host.invalid:9092,also..wrong:9092"}, "GRACESTREAM_KAFKA"),
    ],
)
def test_a_command_does_not_wait_for_an_unknown_host_and_names_it(
    run: Callable[..., Command], given: list[str], settings: dict[str, str], named: str
) -> None:
    ran = run("inspect", *given, startup_timeout=600, **settings)
    message = sentence(ran)
    assert message.startswith("Kafka at no-host.invalid:9092")
    assert "cannot be reached, its host name is unknown: " in message
    assert message.endswith(f"; is {named} right?")
    assert "waiting" not in ran.stderr()


def test_an_unknown_host_among_others_does_not_hide_a_broker(run: Callable[..., Command], kafka: str) -> None:
    message = sentence(run("inspect", kafka=f"no-host.invalid:9092,{kafka}", topic_prefix="not-there-"))
    assert message.endswith(
        "create the topics with `gracestream topics`, or correct the prefix, GRACESTREAM_TOPIC_PREFIX"
    )
    given = sentence(run("inspect", "--prefix", "not-there-", kafka=kafka))
    assert given.endswith(", or correct the prefix, --prefix")
    waited = run("inspect", kafka=f"127.0.0.1:{find_free_port()},no-host.invalid:9092", startup_timeout=2)
    assert "does not answer" in sentence(waited)
    assert "waiting for Kafka" in waited.stderr()


@pytest.mark.parametrize("command", ["infer", "edit", "topics"])
def test_a_worker_waits_for_a_host_name_that_may_appear_later(run: Callable[..., Command], command: str) -> None:
    ran = run(command, kafka="no-host.invalid:9092", startup_timeout=2)
    assert "does not answer over PLAINTEXT (its host name is unknown: " in sentence(ran)
    assert "waiting for Kafka at no-host.invalid:9092, 2 s more (its host name is unknown: " in ran.stderr()


def test_the_error_for_a_model_of_an_option_names_the_option(run: Callable[..., Command], deployment: Settings) -> None:
    for given, named in ((["--model", "/no/such/model"], "--model"), ([], "GRACESTREAM_MODEL")):
        message = sentence(run("edit", *given, settings=deployment, model="/no/such/model"))
        assert message.endswith(f"; choose another {named}")


def test_the_version_is_that_of_the_package(run: Callable[..., Command]) -> None:
    ran = run("--version")
    assert (status_of(ran), ran.stdout()) == (0, f"gracestream {version('gracestream')}\n")


def test_a_command_does_not_wait_for_a_kafka_without_an_address(run: Callable[..., Command]) -> None:
    for command in ("replay", "infer"):
        ran = run(command, kafka="broker", startup_timeout=600)
        assert sentence(ran).startswith("GRACESTREAM_KAFKA: 'broker' is not host:port; set it to ")
        assert "waiting" not in ran.stderr()


def test_an_invalid_redis_url(run: Callable[..., Command], deployment: Settings) -> None:
    assert "GRACESTREAM_REDIS is not a URL" in sentence(run("infer", settings=deployment, redis="localhost"))


def test_no_topics(run: Callable[..., Command], deployment: Settings) -> None:
    message = sentence(run("infer", settings=deployment, topic_prefix=f"{deployment.kafka.topic_prefix}other-"))
    assert "missing; create them with `gracestream topics`" in message


@pytest.mark.parametrize("command", ["edit", "layers"])
def test_a_model_that_does_not_exist(run: Callable[..., Command], deployment: Settings, command: str) -> None:
    message = sentence(run(command, settings=deployment, model="/no/such/model"))
    assert "'/no/such/model' cannot be loaded" in message


def test_output_to_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gracestream.workers.cli", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "gracestream: cannot write: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_model_of_a_hub_that_cannot_be_reached(tmp_path: Path, offline: str) -> None:
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{find_free_port()}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
    done = subprocess.run(
        [sys.executable, "-m", "gracestream.workers.cli", "layers", "--model", "bert-base-cased"],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gracestream: the model 'bert-base-cased' cannot be loaded: there is no such folder, it was not loaded from a "
        "hub before, and the hub cannot be reached"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("revision", "complaint"), [(ONE, ""), (ONE[::-1], "it was not loaded from a hub before")])
def test_a_model_of_a_hub_has_the_named_revision(
    tmp_path: Path, checkpoints: dict[str, Checkpoint], revision: str, complaint: str
) -> None:
    """The hub's cache has one revision."""
    kept = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ONE
    shutil.copytree(checkpoints["bert"].folder, kept)
    done = subprocess.run(
        [sys.executable, "-m", "gracestream.workers.cli", "layers", "--model", f"org/tiny@{revision}"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        timeout=120,
        check=False,
    )
    assert (done.returncode, complaint in done.stderr) == (int(bool(complaint)), True)
    assert ("bert.encoder.layer" in done.stdout) == (not complaint)


def test_a_layer_that_does_not_exist(run: Callable[..., Command], deployment: Settings) -> None:
    message = sentence(run("infer", settings=deployment, layer="model.layers.99.mlp.down_proj"))
    assert "layer 'model.layers.99.mlp.down_proj' not found in LlamaForCausalLM; it has " in message
    assert "model.layers.0" in message


@pytest.mark.parametrize("command", ["infer", "edit"])
def test_a_layer_that_cannot_be_edited(run: Callable[..., Command], deployment: Settings, command: str) -> None:
    assert sentence(run(command, settings=deployment, layer="lm_head")) == (
        "layer 'lm_head' cannot be edited: it runs for some of a prompt's tokens only, as an LM head does;"
        " layers that can: model.layers.1.mlp.down_proj, model.layers.1.mlp.up_proj, model.layers.1.mlp.gate_proj"
    )


@pytest.mark.parametrize(
    "given", [("replay", "--at", "yesterday"), ("diff", "1", "yesterday"), ("diff", "1", "9" * 5000)]
)
def test_an_invalid_time_is_reported_before_any_connection(run: Callable[..., Command], given: list[str]) -> None:
    ran = run(*given, kafka=f"127.0.0.1:{find_free_port()}", startup_timeout=600)
    assert status_of(ran) == 2
    assert "like 2026-11-20T18:00:00" in " ".join(ran.stderr().split())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("send", "none.jsonl"), "none.jsonl'; give a file of JSON lines, or -"),
        (("correct", "deep.jsonl"), "deep.jsonl, line 1 is nested too deeply"),
        (("undo", ""), "Expected `str` of length >= 1"),
        (("keys", "new", "--author", ""), "--author '': Expected `str` of length >= 1"),
    ],
)
def test_invalid_arguments_are_reported_before_any_connection(
    run: Callable[..., Command], tmp_path: Path, given: list[str], complaint: str
) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    there = [str(tmp_path / one) if one.endswith(".jsonl") else one for one in given]
    ran = run(*there, kafka=f"127.0.0.1:{find_free_port()}", startup_timeout=600)
    assert status_of(ran) == 2
    assert complaint in " ".join(ran.stderr().replace("│", " ").split())


def test_a_file_in_place_of_the_data_folder(run: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert sentence(run("up", "--data", str(tmp_path / "file"))) == f"{tmp_path / 'file'} is not a folder"
    inside = tmp_path / "file" / "folder"
    assert sentence(run("up", "--data", str(inside))) == f"the folder {inside} cannot be made: Not a directory"


def halting(folder: Path) -> None:
    """Make a command halt after its first record, until the file `go-on` exists."""
    read_bulk = reading.read_bulk

    def halted(*args: Any, **options: Any) -> Generator[RecordsAndNext, None, None]:
        for batch in read_bulk(*args, **options):
            yield batch
            (folder / "halted").touch()
            wait_until((folder / "go-on").exists)

    reading.read_bulk = halted
    reading.BULK_FETCH_BYTES = 2**16  # so that more records have to be fetched


@pytest.mark.slow
@pytest.mark.kafka
def test_log_lines_of_libraries_are_not_in_the_output_of_a_command(own_kafka: LocalKafka, tmp_path: Path) -> None:
    settings = settings_for(own_kafka.bootstrap, "redis://unused", "away-")
    create_topics(settings.kafka, 1, 1)
    sender = producer(settings.kafka)
    for number in range(reading.BULK_MIN_OFFSETS + 1000):
        sender.send(settings.kafka.topic("requests.dlq"), value=b"%0100d" % number, partition=0)
    sender.close()
    reader = Command(
        "reader", ["dlq", "resend", "requests", "--all", "--dry-run"], tmp_path,
        sabotage=functools.partial(halting, tmp_path), **explicit_settings(settings),
    )  # fmt: skip
    reader.start()
    wait_until((tmp_path / "halted").exists)
    own_kafka.kill()
    (tmp_path / "go-on").touch()
    own_kafka.start()
    assert (reader.wait(), reader.stderr()) == (0, "")
    assert reader.stdout() == f"would send {reading.BULK_MIN_OFFSETS + 1000} to {settings.kafka.topic('requests')}\n"


class TestUp:
    """An error is reported before anything starts, so Kafka has no data folder."""

    def test_a_layer_that_does_not_exist(
        self, run: Callable[..., Command], tmp_path: Path, checkpoints: dict[str, Checkpoint]
    ) -> None:
        model = str(checkpoints["llama"].folder)
        ran = run("up", "--model", model, "--layer", "nope", "--data", str(tmp_path / "data"))
        assert "gracestream: layer 'nope' not found in LlamaForCausalLM" in ran.stderr().splitlines()[-1]
        assert "starting" not in ran.stderr()
        assert not (tmp_path / "data" / "kafka").exists()

    def test_a_model_that_does_not_exist(self, run: Callable[..., Command], tmp_path: Path) -> None:
        ran = run("up", "--model", "/no/such/model", "--data", str(tmp_path / "data"))
        assert "the model '/no/such/model' cannot be loaded" in ran.stderr().splitlines()[-1]
        assert ran.stderr().splitlines()[-1].endswith("; choose another --model")
        assert not (tmp_path / "data" / "kafka").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot be read: No such file or directory; is GRACESTREAM_AUTHORS_FILE right?"),
            ("ann = ", "is not a valid list of authors"),
        ],
    )
    def test_an_invalid_list_of_authors(
        self, run: Callable[..., Command], tmp_path: Path, content: str | None, message: str
    ) -> None:
        authors = tmp_path / "authors.toml"
        if content is not None:
            authors.write_text(content)
        ran = run("up", "--data", str(tmp_path / "data"), authors_file=authors, model="/no/such/model")
        assert message in sentence(ran)
        assert "GRACESTREAM_AUTHORS_FILE" in sentence(ran)
        assert not (tmp_path / "data" / "kafka").exists()

    def test_a_port_in_use(self, run: Callable[..., Command], tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            message = sentence(run("up", "--port", str(port - 2), "--data", str(tmp_path / "data")))
        assert (
            message == f"port {port} of 127.0.0.1, wanted for editor, is in use; stop its user or choose another --port"
        )
        assert not (tmp_path / "data" / "kafka").exists()

    @pytest.mark.parametrize("which", ["kafka", "redis"])
    def test_an_existing_server_whose_name_is_unknown(
        self, run: Callable[..., Command], tmp_path: Path, which: str
    ) -> None:
        address = {"kafka": "no-host.invalid:9092", "redis": "redis://no-host.invalid:6379"}[which]
        message = sentence(run("up", "--data", str(tmp_path / "data"), **{which: address}))
        assert message.startswith(f"GRACESTREAM_{which.upper()} is '{address}', and no ")
        assert not (tmp_path / "data" / "kafka").exists()


def test_ctrl_c_while_a_command_is_being_imported(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    argv = [sys.executable, "-m", "gracestream.workers.cli", "inspect", "--kafka", f"127.0.0.1:{find_free_port()}"]
    with errors.open("wb") as written, subprocess.Popen(argv, stderr=written) as child:
        loaded = Path(f"/proc/{child.pid}/maps")
        wait_until(lambda: "msgspec" in loaded.read_text(encoding="utf-8"))  # an early import
        child.send_signal(signal.SIGINT)
        # Python dies by the signal if it arrives inside an `exec`; a shell reports 130 for that, too.
        assert child.wait(TIMEOUT) in (130, -signal.SIGINT)
    assert "Traceback" not in errors.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["infer", "edit"])
def test_a_port_in_use(run: Callable[..., Command], deployment: Settings, command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = sentence(run(command, settings=deployment, http_port=port))
    remedy = "choose another GRACESTREAM_HTTP_PORT, or 0 for a free one"
    assert message == f"cannot listen on 127.0.0.1:{port}: Address already in use; {remedy}"


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("request_batch_size", "many", "GRACESTREAM_REQUEST_BATCH_SIZE: 'many' should be a valid integer"),
        ("radius", "-1", "GRACESTREAM_RADIUS: '-1' should be greater than 0"),
        ("policy", "best", "GRACESTREAM_POLICY: 'best' should be 'nearest' or 'paper'"),
        ("topic_prefix", "a b", "GRACESTREAM_TOPIC_PREFIX: 'a b' should match pattern"),
        (
            "max_new_tokens",
            "63",
            "GRACESTREAM_MAX_NEW_TOKENS: 63 should be at least GRACESTREAM_DEFAULT_MAX_NEW_TOKENS, which",
        ),
    ],
)
def test_an_invalid_setting(run: Callable[..., Command], setting: str, value: str, complaint: str) -> None:
    assert sentence(run("topics", **{setting: value})).startswith(complaint)


def test_a_command_that_does_not_exist(run: Callable[..., Command]) -> None:
    command = run("inferr")
    assert status_of(command) == 2
    assert "inferr" in command.stderr()
