"""The Compose file, run: corrections, killed parts, replicas that come and go, a restart, overlays, secrets."""

import json
import os
import signal
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
import yaml
from msgspec import UNSET, UnsetType

from gracestream.pipeline.client import Client
from gracestream.schemas.messages import Outcome, Prediction
from tests.containers.engine import EngineError
from tests.containers.running import IMAGE, Compose
from tests.containers.standins import require_images
from tests.support.deployment_files import COMPOSE_EXTERNAL, COMPOSE_GPU
from tests.support.monitoring import alerts, expressions
from tests.support.repository import ROOT
from tests.support.running import (
    LIMITS,
    Checkpoint,
    Users,
    flag,
    outcomes_in_log,
    question,
    save_checkpoint,
    settings_for,
    wait_until,
)
from tests.support.tiny_models import texts

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

NAME = f"gracestream-test-{os.getpid()}"
PROMPTS = list(dict.fromkeys(texts(500, seed=77, shortest=6)))
EACH = 100
"""Limit on the corrections while a part is unavailable."""

PARTS = ("kafka", "redis", "editor", "inference")
TIMEOUT = 120.0
"""Seconds in which a part must return, and its clients go on."""

numbers = count()


def overlay(folder: Path, name: str, document: Mapping[str, Any]) -> Path:
    """An override file of the Compose file."""
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(dict(document)))
    return path


def serving(checkpoint: Checkpoint, **more: Any) -> dict[str, Any]:
    """The settings of a worker with this model, and further settings."""
    chosen = {**LIMITS, "query_source": checkpoint.query}
    environment = {f"GRACESTREAM_{name.upper()}": str(value) for name, value in chosen.items()}
    return {"volumes": [f"{checkpoint.folder}:/model:ro"], "environment": environment, **more}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that containers may read, unlike `tmp_path`, which only its owner may read."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    """A tiny model."""
    (folder / "model").mkdir()
    saved = save_checkpoint("llama", folder / "model")
    for file in saved.folder.iterdir():
        file.chmod(0o644)
    return saved


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, folder: Path, checkpoint: Checkpoint) -> Iterator[Compose]:
    """The running Compose stack with a tiny model."""
    if not request.config.getoption("containers"):
        pytest.skip("`make containers` runs it")
    if (ROOT / ".env").exists():
        pytest.skip("beside the Compose file lies a .env, whose settings would be tested")
    try:
        require_images("kafka", "redis")
    except EngineError as error:
        pytest.skip(str(error))
    workers = {"services": dict.fromkeys(("editor", "inference"), serving(checkpoint))}
    chosen = {"GRACESTREAM_MODEL": "/model", "GRACESTREAM_LAYER": checkpoint.layer}
    running = Compose(NAME, overlay(folder, "workers", workers), environment=chosen)
    running.run("--profile", "monitoring", "down", "--volumes", "--remove-orphans")
    try:
        running.up("--build")
        yield running
    finally:
        running.run("--profile", "monitoring", "down", "--volumes", "--remove-orphans")


@pytest.fixture
def users(stack: Compose) -> Iterator[Users]:
    """Users on the host, who reach Kafka at its published port."""
    stack.up()
    people = Users(settings_for("localhost:9092", "redis://localhost:1/0", ""))
    yield people
    people.close()


def correct(users: Users, text: str, target: str = "river") -> Outcome:
    """Correct the answer to a text."""
    name = f"f{next(numbers)}"
    return users.correct(flag(name, text, target), timeout=TIMEOUT)[name]


def ask(users: Users, text: str, min_seq: int = 0) -> Prediction:
    """The answer to a text from a replica with the delta."""
    name = f"q{next(numbers)}"
    return users.ask(question(name, text, min_seq=min_seq), timeout=TIMEOUT)[name]


def kill(container: Mapping[str, Any]) -> None:
    """Kill a container's process, as the kernel does without memory: after Docker's `kill` it would not restart."""
    pid = container["State"]["Pid"]
    groups = Path(f"/proc/{pid}/cgroup")
    if pid <= 1 or not groups.exists() or container["Id"] not in groups.read_text():
        pytest.skip("the containers' processes are not of this machine, so they cannot be killed from here")
    os.kill(pid, signal.SIGKILL)


def text_of(answer: Prediction) -> str | UnsetType:
    """The text of an answer."""
    assert answer.outputs is not UNSET, answer
    return answer.outputs.text


def assert_corrected(users: Users, text: str, target: str = "river") -> int:
    """Correct the answer to a text, see it served, and return the delta's `seq`."""
    outcome = correct(users, text, target)
    assert outcome.status == "added", outcome
    assert isinstance(outcome.seq, int)
    answer = ask(users, text, outcome.seq)
    assert answer.error is UNSET
    assert answer.edit is not UNSET
    assert text_of(answer) == target
    return outcome.seq


class Traffic:
    """Sends requests and corrections inside its context, one after the other; each must get its reply."""

    def __init__(self, users: Users, corrections: list[str]) -> None:
        self._users = users
        self._corrections = corrections
        self._over = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._ask, self._correct)]
        self.answers: list[Prediction] = []
        self.outcomes: list[Outcome] = []
        self.failed: list[BaseException] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: (self.answers and self.outcomes) or self.failed, TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for error in self.failed:
            raise error

    def _ask(self) -> None:
        try:
            with self._users.client.predictions() as replies:
                while not self._over.is_set():
                    batch = [question(f"q{next(numbers)}", text) for text in PROMPTS[:8]]
                    self._users.client.send(batch)
                    found = replies.wait([one.request_id for one in batch], TIMEOUT)
                    assert len(found) == len(batch), "a request got no prediction"
                    self.answers += found.values()
        except BaseException as error:  # noqa: BLE001 - shown by the thread that runs the test
            self.failed.append(error)

    def _correct(self) -> None:
        client = Client(self._users.settings)
        try:
            with client.outcomes() as replies:
                for text in self._corrections:
                    name = f"f{next(numbers)}"
                    client.send([flag(name, text, "river")])
                    found = replies.wait([name], TIMEOUT)
                    assert found, "a correction got no outcome"
                    self.outcomes += found.values()
                    if self._over.wait(0.5):
                        break
        except BaseException as error:  # noqa: BLE001 - likewise
            self.failed.append(error)
        finally:
            client.close()


def test_a_correction_from_the_host_is_served(users: Users) -> None:
    before = ask(users, PROMPTS[0])
    assert before.edit is UNSET
    assert text_of(before) != "river"
    assert_corrected(users, PROMPTS[0])


def test_workers_run_read_only_without_any_right(stack: Compose, users: Users) -> None:
    assert users
    for service in ("editor", "inference"):
        (container,) = stack.inspect(service)
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        failed = stack.run("exec", "--no-TTY", service, "touch", "/opt/gracestream/mine", fails=True)
        assert "Read-only file system" in failed
        assert stack.run("exec", "--no-TTY", service, "id", "-u") == "10001\n"


def test_another_up_starts_nothing_again(stack: Compose, users: Users) -> None:
    assert users
    before = {part: stack.ids(part) for part in PARTS}
    assert all(before.values())
    stack.up("--build")
    assert {part: stack.ids(part) for part in PARTS} == before


def test_replicas_come_and_go_and_the_others_stay(stack: Compose, users: Users) -> None:
    before = {part: stack.ids(part) for part in PARTS}
    stack.up("--scale", "inference=3")
    scaled = stack.ids("inference")
    assert len(scaled) == 3
    assert set(before["inference"]) <= set(scaled)

    def answered() -> bool:
        batch = [question(f"q{next(numbers)}", text) for text in PROMPTS]
        return len({answer.replica for answer in users.ask(*batch, timeout=TIMEOUT).values()}) == 3

    wait_until(answered, TIMEOUT, "an answer of each of three replicas")
    seq = assert_corrected(users, PROMPTS[1])
    stack.up("--scale", "inference=1")
    (left,) = stack.ids("inference")
    assert left in scaled
    assert {part: stack.ids(part) for part in PARTS[:3]} == {part: before[part] for part in PARTS[:3]}
    assert text_of(ask(users, PROMPTS[1], seq)) == "river"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_under_load_comes_back_and_nothing_is_lost(
    part: str, stack: Compose, users: Users
) -> None:
    (container,) = stack.inspect(part)
    first = 40 + EACH * PARTS.index(part)
    corrected = PROMPTS[first : first + EACH]
    with Traffic(users, corrected) as traffic:
        kill(container)
        wait_until(lambda: stack.inspect(part)[0]["RestartCount"] == container["RestartCount"] + 1, TIMEOUT)
        stack.up()
        served, decided = len(traffic.answers), len(traffic.outcomes)
        wait_until(lambda: len(traffic.answers) > served or traffic.failed, TIMEOUT)
        wait_until(lambda: len(traffic.outcomes) > decided or traffic.failed, TIMEOUT)
    assert stack.ids(part) == [container["Id"]]
    assert [outcome for outcome in traffic.outcomes if outcome.status != "added"] == []
    assert [answer for answer in traffic.answers if answer.error is not UNSET] == []
    ids = [outcome.feedback_id for outcome in outcomes_in_log(users.settings)]
    assert len(ids) == len(set(ids)), "a correction was made twice"
    questions = [
        question(f"q{next(numbers)}", text, min_seq=outcome.seq)
        for outcome, text in zip(traffic.outcomes, corrected, strict=False)
    ]
    answers = users.ask(*questions, timeout=TIMEOUT)
    assert {text_of(answer) for answer in answers.values()} == {"river"}


def test_down_and_up_keep_the_history(stack: Compose, users: Users) -> None:
    seq = assert_corrected(users, PROMPTS[2])
    history = outcomes_in_log(users.settings)
    stack.run("down")
    assert [stack.ids(part) for part in PARTS] == [[]] * 4
    stack.up()
    assert text_of(ask(users, PROMPTS[2], seq)) == "river"
    assert outcomes_in_log(users.settings) == history
    assert assert_corrected(users, PROMPTS[3]) > seq


def test_no_container_leaves_a_volume_behind(stack: Compose, users: Users) -> None:
    assert users
    volumes = {
        mount["Name"] for part in PARTS for one in stack.inspect(part) for mount in one["Mounts"] if "Name" in mount
    }
    assert volumes == {f"{NAME}_{name}" for name in ("kafka", "redis", "models")}


def test_a_file_env_beside_the_compose_file_has_settings(folder: Path) -> None:
    (folder / ".env").write_text("GRACESTREAM_TOPIC_PREFIX=other\nGRACESTREAM_MODEL=/model\n")
    environment = Compose(NAME, directory=folder).configured()["services"]["editor"]["environment"]
    assert environment["GRACESTREAM_TOPIC_PREFIX"] == "other"
    assert environment["GRACESTREAM_MODEL"] == "/model"
    assert environment["GRACESTREAM_KAFKA"] == "kafka:19092"


PASSWORD = "GRACESTREAM_REDIS_PASSWORD"


@pytest.fixture
def external(stack: Compose, users: Users, folder: Path, checkpoint: Checkpoint) -> Iterator[Compose]:
    """The workers alone, with an external Kafka, and an external Redis with a password."""
    assert stack.ids("kafka")
    assert users
    secret = folder / PASSWORD
    secret.write_text("hush\n")
    secret.chmod(0o644)
    own = {"GRACESTREAM_TOPIC_PREFIX": "other.", "GRACESTREAM_SECRETS_DIR": "/run/secrets"}
    worker = serving(checkpoint, secrets=[PASSWORD])
    worker["environment"] |= own
    cache = {
        "image": "valkey/valkey:9.1-alpine",
        "command": ["valkey-server", "--requirepass", "hush"],
        "tmpfs": ["/data"],
    }
    topics = {"environment": own, "secrets": [PASSWORD]}
    document = {
        "services": {"editor": worker, "inference": worker, "topics": topics, "cache": cache},
        "secrets": {PASSWORD: {"file": str(secret)}},
        "networks": {"default": {"external": True, "name": f"{NAME}_default"}},
    }
    chosen = {
        "GRACESTREAM_KAFKA": "kafka:19092",
        "GRACESTREAM_REDIS": "redis://cache:6379/0",
        "GRACESTREAM_MODEL": "/model",
        "GRACESTREAM_LAYER": checkpoint.layer,
    }
    others = Compose(f"{NAME}-other", COMPOSE_EXTERNAL, overlay(folder, "other", document), environment=chosen)
    try:
        yield others
    finally:
        others.run("down", "--volumes")


def test_workers_join_a_kafka_and_a_redis_with_a_password(external: Compose) -> None:
    external.up()
    assert external.run("ps", "--services").split() == ["cache", "editor", "inference"]
    people = Users(settings_for("localhost:9092", "redis://localhost:1/0", "other."))
    try:
        assert_corrected(people, PROMPTS[0])
    finally:
        people.close()
    fetch = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8080/metrics').read().decode())"
    for service in ("editor", "inference"):
        shown = external.run("exec", "--no-TTY", service, "python", "-c", fetch).splitlines()
        assert "gracestream_degraded 0.0" in shown, "it has no access to Redis"


def test_a_secret_that_workers_may_not_read_is_named(external: Compose, folder: Path) -> None:
    (folder / PASSWORD).chmod(0o600)
    printed = external.run("run", "--rm", "--no-deps", "topics", fails=True)
    assert f"/run/secrets/{PASSWORD}' cannot be read: Permission denied" in printed
    assert "Traceback" not in printed


def test_the_overlay_for_a_gpu_never_trains_on_the_cpu(stack: Compose, folder: Path, checkpoint: Checkpoint) -> None:
    assert stack.ids("kafka")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("here is a GPU")
    chosen = {"GRACESTREAM_MODEL": "/model", "GRACESTREAM_LAYER": checkpoint.layer}
    own = overlay(folder, "image", {"services": {"editor": serving(checkpoint, image=IMAGE, pull_policy="never")}})
    others = Compose(f"{NAME}-gpu", COMPOSE_GPU, own, environment=chosen)
    try:
        failed = others.run("up", "--detach", "--no-build", "--no-deps", "editor", fails=True)
        assert 'could not select device driver "nvidia"' in failed
    finally:
        others.run("down", "--volumes")
    anywhere = folder / "anywhere.yml"
    anywhere.write_text("services: {editor: {deploy: !reset null}}")
    network = overlay(folder, "network", {"networks": {"default": {"external": True, "name": f"{NAME}_default"}}})
    others = Compose(f"{NAME}-gpu", COMPOSE_GPU, own, anywhere, network, environment=chosen)
    try:
        printed = others.run("run", "--rm", "--no-deps", "editor", fails=True)
    finally:
        others.run("down", "--volumes")
    assert "GRACESTREAM_DEVICE is cuda, but torch can use no CUDA device: this image has no CUDA" in printed
    assert "Traceback" not in printed


@pytest.fixture
def prometheus(stack: Compose, users: Users) -> str:
    """The address of a real Prometheus that has scraped both workers."""
    assert users
    try:
        require_images("prometheus")
    except EngineError as error:
        pytest.skip(str(error))
    address = "http://127.0.0.1:9090"
    stack.run("--profile", "monitoring", "up", "--detach", "--wait", "prometheus")

    def scraped() -> bool:
        found = asked(address, "targets")["activeTargets"]
        return {one["labels"]["job"] for one in found if one["health"] == "up"} == {"editor", "inference"}

    wait_until(scraped, TIMEOUT)
    return address


def test_prometheus_reads_the_workers_and_evaluates_every_rule_and_panel(prometheus: str) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in asked(prometheus, "rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), TIMEOUT)
    assert {rule["name"] for rule in rules()} == alerts().keys()
    assert [rule["name"] for rule in rules() if rule["health"] != "ok"] == []
    for expression in expressions():
        concrete = expression.replace("$__rate_interval", "1m").replace("$__range", "1h")
        assert isinstance(asked(prometheus, "query", query=concrete)["result"], list)
    for job in ("editor", "inference"):
        (found,) = asked(prometheus, "query", query=f'gracestream_ready{{job="{job}"}}')["result"]
        assert found["value"][1] == "1"


def test_alerts_fire_when_they_should(stack: Compose, prometheus: str) -> None:
    assert prometheus
    stack.run("cp", str(Path(__file__).with_name("alerts.yml")), "prometheus:/tmp/alerts.yml")
    printed = stack.run("exec", "--no-TTY", "prometheus", "promtool", "test", "rules", "/tmp/alerts.yml")
    assert "SUCCESS" in printed


def asked(address: str, what: str, **query: str) -> Any:
    """The answer of Prometheus to a query."""
    url = f"{address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]
