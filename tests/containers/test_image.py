"""The image without a GPU: its size, the size of a change of the code, and that it runs without rights."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import docker  # type: ignore[import-untyped]
import pytest
from msgspec import UNSET

from gracestream.pipeline.kafka.topics import create_topics
from gracestream.pipeline.model.registry import resolve_encoder
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.settings import to_environment_variables
from tests.containers.engine import EngineError
from tests.containers.running import build_image
from tests.containers.standins import require_images
from tests.support.deployment_files import PROJECT
from tests.support.forked_commands import explicit_settings
from tests.support.repository import ROOT
from tests.support.running import Checkpoint, Users, flag, question, save_checkpoint, settings_for
from tests.support.tiny_models import texts

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

IMAGE = "gracestream-cpu:tested"
"""A name other than that of the image that `docker compose` runs on this machine."""

LARGEST = 1.8e9
"""Limit on the bytes that the image adds to its base."""

LARGEST_CHANGE = 20e6
"""Limit on the bytes that a change of the code adds to an image."""

CONFINED = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp"]
PROMPTS = texts(4, seed=77, shortest=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    """A Docker engine that has the image of this source."""
    try:
        require_images()
        build_image(name=IMAGE)
    except EngineError as error:
        pytest.skip(str(error))
    client = docker.from_env()
    yield client
    client.images.remove(IMAGE, force=True)
    client.close()


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    """A tiny model that any user may read."""
    with TemporaryDirectory() as name:  # not `tmp_path`, which only its owner may read
        folder = Path(name)
        folder.chmod(0o755)
        saved = save_checkpoint("llama", folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        yield saved


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", "run", "--rm", *CONFINED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def layers(client: docker.DockerClient, name: str) -> list[str]:
    found: list[str] = client.images.get(name).attrs["RootFS"]["Layers"]
    return found


def test_it_is_small_for_it_has_no_cuda(engine: docker.DockerClient) -> None:
    base = engine.images.get("python:3.11-slim").attrs["Size"]
    assert engine.images.get(IMAGE).attrs["Size"] - base < LARGEST
    program = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    ran = run("--entrypoint", "python", IMAGE, "-W", "error", "-c", program)
    assert (ran.stdout, ran.stderr) == ("False 0\n", "")
    for call in ("torch.cuda.nccl.unique_id()", "torch.zeros(1).cuda()"):
        ran = run("--entrypoint", "python", IMAGE, "-c", f"import torch; {call}")
        assert ran.returncode == 1, "it ends with an exception, not by a signal"
        assert "RuntimeError" in ran.stderr


@pytest.mark.usefixtures("engine")
def test_it_holds_the_encoder_and_needs_no_network_for_it() -> None:
    program = (
        "from gracestream.pipeline.model import SentenceEncoder, resolve_encoder;"
        " print(SentenceEncoder.load(resolve_encoder('minilm'), device='cpu').fingerprint)"
    )
    ran = run("--network", "none", "--entrypoint", "python", IMAGE, "-c", program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == SentenceEncoder.load(resolve_encoder("minilm"), device="cpu").fingerprint


@pytest.mark.usefixtures("engine")
def test_a_build_that_fails_is_no_reason_to_skip(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the image is not built"):
        build_image(tmp_path, f"{IMAGE}-broken")


def test_a_change_of_the_code_is_a_small_layer(engine: docker.DockerClient) -> None:
    changed = f"{IMAGE}-changed"
    with TemporaryDirectory() as name:
        context = Path(name) / "source"
        context.mkdir()
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for path in filter(None, tracked.stdout.split("\0")):
            if (ROOT / path).exists():
                (context / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, context / path, follow_symlinks=False)
        with (context / "workers" / "editor.py").open("a") as source:
            source.write("\n# changed\n")
        build_image(context, changed)
    try:
        both = set(layers(engine, IMAGE)) & set(layers(engine, changed))
        sizes = [step["Size"] for step in engine.images.get(changed).history() if step["Size"]]
        assert len(set(layers(engine, changed)) - both) <= 2, "the code, and an empty folder"
        assert sizes[0] < LARGEST_CHANGE
    finally:
        engine.images.remove(changed, force=True)


@pytest.mark.usefixtures("engine")
def test_it_runs_read_only_as_a_user_without_rights() -> None:
    ran = run("--network", "none", IMAGE, "--version")
    assert (ran.stdout, ran.stderr) == (f"gracestream {PROJECT['version']}\n", "")
    ran = run("--entrypoint", "id", IMAGE, "-u")
    assert ran.stdout == "10001\n"


@pytest.mark.usefixtures("engine")
def test_a_secret_that_it_may_not_read_is_named() -> None:
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        secret = Path(name) / "GRACESTREAM_KAFKA_PASSWORD"
        secret.write_text("hush")
        secret.chmod(0o600)
        ran = run(
            "--volume", f"{name}:/run/secrets:ro", "--env", "GRACESTREAM_SECRETS_DIR=/run/secrets", IMAGE, "topics"
        )
    assert ran.returncode == 1
    assert "/run/secrets/GRACESTREAM_KAFKA_PASSWORD' cannot be read: Permission denied" in ran.stderr
    assert "the user 10001 must have the right" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", [".", "model.safetensors", "tokenizer.json"])
def test_a_model_that_it_may_not_read_is_named(name: str, checkpoint: Checkpoint) -> None:
    (checkpoint.folder / name).chmod(0o600)
    ran = run("--volume", f"{checkpoint.folder}:/model:ro", IMAGE, "layers", "--model", "/model")
    assert ran.returncode == 1
    assert f"the user 10001 may not read '{Path('/model') / name}'; run `chmod -R a+rX" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_workers_of_it_answer_and_are_corrected(
    engine: docker.DockerClient, kafka: str, redis_url: str, prefix: str, checkpoint: Checkpoint
) -> None:
    settings = settings_for(kafka, redis_url, prefix, **checkpoint.settings() | {"query_source": "auto"})
    create_topics(settings.kafka, partitions=2, replication=1)
    inside = settings.replace(model="/model", http_host="127.0.0.1", http_port=0, threads=1)
    users, started = Users(settings), []
    try:
        for command in ("edit", "infer"):
            container = engine.containers.run(
                IMAGE,
                [command],
                environment=to_environment_variables(explicit_settings(inside)),
                network_mode="host",
                read_only=True,
                cap_drop=["ALL"],
                tmpfs={"/tmp": ""},
                volumes={str(checkpoint.folder): {"bind": "/model", "mode": "ro"}},
                detach=True,
            )
            started.append(container)
        outcome = users.correct(flag("f1", PROMPTS[0], "river"), timeout=120)["f1"]
        assert outcome.status == "added", outcome
        answer = users.ask(question("q1", PROMPTS[0], min_seq=outcome.seq), timeout=60)["q1"]
        assert answer.error is UNSET
        assert answer.edit is not UNSET
        for container in started:
            container.kill("SIGTERM")
            assert container.wait(timeout=60)["StatusCode"] == 0
    finally:
        users.close()
        for container in started:
            print(container.logs(tail=20).decode())
            container.remove(force=True)
