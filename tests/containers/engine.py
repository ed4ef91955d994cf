"""A Docker engine and Docker Compose, obtained where this machine has none.

    python -m tests.containers.engine

Both are taken as they are where they are there. Else root on Debian gets Debian's engine, which then runs until the
machine stops, and Docker Compose is compiled by Go, as Debian 12 has none that is new enough.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deploy.local.containers import docker_answers
from pipeline.settings import load_settings

COMPOSE = "v2.40.3"
COMPOSE_MODULE = "github.com/docker/compose/v2"
OLDEST_COMPOSE = (2, 24)

START_SECONDS = 60


class EngineError(Exception):
    """Why there is no engine, or no Compose, and none can be had."""


def require_engine() -> None:
    """Let a Docker engine answer on this machine.

    Raises:
        EngineError: none does, and none can be started.
    """
    if docker_answers():
        return
    if os.geteuid() != 0:
        raise EngineError("no Docker engine answers, and only root can start one: start Docker, or run this as root")
    if shutil.which("dockerd") is None:
        install("docker.io")
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "dockerd.log").open("wb") as log:
        engine = subprocess.Popen(["dockerd"], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_SECONDS
    while not docker_answers():
        if engine.poll() is not None or time.monotonic() > deadline:
            last = (cache / "dockerd.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineError(f"dockerd does not start here: {' '.join(last) or 'it says nothing'}")
        time.sleep(0.2)


def require_compose() -> list[str]:
    """The command of a Docker Compose that reads the project's files.

    Raises:
        EngineError: there is none, and none can be compiled.
    """
    compiled = _cache() / f"docker-compose-{COMPOSE}"
    for command in (["docker", "compose"], ["docker-compose"], [str(compiled)]):
        if _version(command) >= OLDEST_COMPOSE:
            return command
    if shutil.which("go") is None:
        raise EngineError("no Docker Compose 2.24 or newer is installed, nor Go, which could compile one")
    _compile(compiled)
    return [str(compiled)]


def _compile(target: Path) -> None:
    """Compile Compose in a module of its own, since `go install` refuses one that replaces or excludes dependencies.

    Raises:
        EngineError: it cannot be compiled.
    """
    print(f"compiling Docker Compose {COMPOSE}, which takes minutes once", file=sys.stderr)
    command = f"{COMPOSE_MODULE}/cmd"
    stamp = f"-s -w -X {COMPOSE_MODULE}/internal.Version={COMPOSE}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            ["mod", "init", "compose"],
            ["get", "-tool", f"{command}@{COMPOSE}"],
            ["build", "-o", str(target), "-ldflags", stamp, command],
        ):
            done = subprocess.run(["go", *arguments], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EngineError(f"Docker Compose cannot be compiled: {done.stderr.strip().splitlines()[-1]}")


def _version(command: list[str]) -> tuple[int, ...]:
    try:
        said = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ()
    found = re.match(r"v?(\d+)\.(\d+)", said.strip())
    return tuple(map(int, found.groups())) if found else ()


def install(package: str) -> None:
    """Install a Debian package.

    Raises:
        EngineError: it cannot be had.
    """
    if shutil.which("apt-get") is None:
        raise EngineError(f"{package} is not installed, and there is no apt-get to install it")
    print(f"installing {package}", file=sys.stderr)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", package]):
        done = subprocess.run(["apt-get", "-qq", *command], env=quiet, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
            raise EngineError(f"apt-get cannot install {package}: {said}")


def _cache() -> Path:
    return load_settings().cache.expanduser() / "containers"


if __name__ == "__main__":
    try:
        require_engine()
    except EngineError as error:
        sys.exit(f"{error}")
