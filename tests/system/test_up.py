"""`gracestream up`, and the example of the README."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

from gracestream.deploy.local.processes import is_port_free
from tests.support.forked_commands import Command
from tests.support.repository import ROOT
from tests.support.running import own_environment, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.model, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "gracestream.workers.cli"]


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard error of `up`."""
    return tmp_path_factory.mktemp("up") / "stderr"


@pytest.fixture(scope="module")
def up(log_file: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    with log_file.open("w") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "up", "--json", "--replicas", "2", "--data", str(log_file.parent / "data")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env=own_environment(),
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log_file.read_text()
        yield process, json.loads(line)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def test_up_prints_one_line_of_endpoints(up: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    _, endpoints = up
    assert re.fullmatch(r"[\w.]+:\d+", endpoints["kafka"])
    assert endpoints["redis"].startswith("redis://")
    assert endpoints["editor"].startswith("http://")
    assert len(endpoints["replicas"]) == 2


def test_another_up_on_the_same_folder_names_the_process_that_has_it(
    up: tuple[subprocess.Popen[str], dict[str, Any]], log_file: Path, tmp_path: Path
) -> None:
    process, _ = up
    second = Command("second", ["up", "--data", str(log_file.parent / "data")], tmp_path)
    assert second.run() == 1
    assert second.stderr() == (
        f"gracestream: another `gracestream up`, process {process.pid}, holds the folder {log_file.parent / 'data'};"
        f" stop it with Ctrl-C in its terminal or `kill {process.pid}`, or choose another folder with --data\n"
    )
    assert process.poll() is None


@pytest.mark.parametrize(("page", "target"), [("README.md", "Canberra"), ("docs/how-to/your-kafka.md", "Ulaanbaatar")])
def test_the_example_of_a_page_corrects_an_answer(
    up: tuple[subprocess.Popen[str], dict[str, Any]], page: str, target: str
) -> None:
    _, endpoints = up
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    environment = {**own_environment(), "GRACESTREAM_KAFKA": endpoints["kafka"]}
    done = subprocess.run(
        [sys.executable, "-c", found.group(1)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *before, edit, after = done.stdout.splitlines()  # an answer may have several lines
    assert before
    assert target not in "".join(before)
    assert re.search("added|split", edit), "the two corrections may be near each other"
    assert after == target or f"'text': '{target}'" in after


def test_up_reports_a_worker_that_ends_while_the_others_go_on(
    up: tuple[subprocess.Popen[str], dict[str, Any]], log_file: Path
) -> None:
    process, endpoints = up
    (replica,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.environ().get("GRACESTREAM_WORKER_NAME") == "replica-2"
    ]
    replica.kill()
    wait_until(lambda: "replica-2 ended with status -9; its log file " in log_file.read_text(), 30, "word of it")
    assert "replica-1 ended" not in log_file.read_text()
    for url in (endpoints["editor"], endpoints["replicas"][0]):
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            assert answer.status == HTTPStatus.OK


def test_ctrl_c_stops_every_process_that_up_started(
    up: tuple[subprocess.Popen[str], dict[str, Any]], log_file: Path
) -> None:
    process, endpoints = up
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4  # a broker, a Valkey, an editor, the remaining replica
    kept = json.loads((log_file.parent / "data" / "ports.json").read_bytes())
    assert [f"127.0.0.1:{kept['kafka']}", f"http://127.0.0.1:{kept['editor']}"] == [
        endpoints["kafka"], endpoints["editor"],
    ]  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert process.stdout is not None
    assert process.stdout.read() == ""


@pytest.mark.parametrize(("command", "signum"), [("demo", signal.SIGINT), ("up", signal.SIGTERM)])
def test_up_that_ends_while_it_starts_leaves_no_process(command: str, signum: signal.Signals, tmp_path: Path) -> None:
    given, port = [], 20_000
    if command == "up":
        port = next(port for port in range(15_000, 20_000, 7) if all(map(is_port_free, range(port, port + 5))))
        given = ["--port", str(port)]
    with Command(
        command, [command, "--model", "intent", "--data", str(tmp_path / "data"), *given], tmp_path
    ) as started:
        wait_until(lambda: "starting the editor" in printed(started) or not started.running)
        children = psutil.Process(started.process.pid).children(recursive=True)
        assert len(children) >= 5, printed(started)
        if given:
            assert f"Kafka answers on 127.0.0.1:{port} after" in printed(started)
            assert f"Valkey answers on 127.0.0.1:{port + 1} after" in printed(started)
        started.send_signal(signum)
        assert started.wait() == 130
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_up_reports_a_local_server_that_ends_with_its_log_file_and_the_remedy(tmp_path: Path) -> None:
    arguments = ["up", "--model", "intent", "--json", "--replicas", "1", "--data", str(tmp_path / "data")]
    with Command("up", arguments, tmp_path) as started:
        wait_until(lambda: started.stdout() or not started.running, 120)
        endpoints = json.loads(started.stdout() or pytest.fail(started.stderr()))
        servers = {"Kafka": endpoints["kafka"], "Valkey": endpoints["redis"].partition("://")[2].partition("/")[0]}
        lines = []
        for name, address in servers.items():
            (server,) = [
                child
                for child in psutil.Process(started.process.pid).children()
                if address.rpartition(":")[2] in {str(found.laddr.port) for found in listening(child)}
            ]
            server.kill()
            log = tmp_path / "data" / {"Kafka": "kafka", "Valkey": "redis"}[name] / f"{name.lower()}.log"
            lines.append(
                f"{name} ended with status -9, and the workers wait for it; see its log file {log}, stop this with"
                " Ctrl-C, and start `gracestream up` again\n"
            )
        wait_until(lambda: all(line in started.stderr() for line in lines), 30, "word of both")
        assert started.stderr().count(" ended with ") == len(servers), "the workers go on"
        started.send_signal(signal.SIGINT)
        assert started.wait() == 0


def printed(command: Command) -> str:
    return command.stdout() + command.stderr()


def listening(process: psutil.Process) -> list[Any]:
    return [one for one in process.net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN]
