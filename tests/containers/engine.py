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

from gracestream.deploy.local.containers import is_docker_available
from gracestream.pipeline.settings import load_settings

COMPOSE = "v2.40.3"
COMPOSE_MODULE = "github.com/docker/compose/v2"
OLDEST_COMPOSE = (2, 24)

START_SECONDS = 60


class EngineError(Exception):
    """There is no engine or no Compose, and none can be installed; the text gives the reason."""


def require_engine() -> None:
    """Ensure that a Docker engine answers on this machine.

    Raises:
        EngineError: no engine answers, and none can be started.
    """
    if is_docker_available():
        return
    if "DOCKER_HOST" in os.environ:
        raise EngineError("the Docker engine that DOCKER_HOST names does not answer on this machine")
    if os.geteuid() != 0:
        raise EngineError("no Docker engine answers, and only root can start one: start Docker, or run this as root")
    if shutil.which("dockerd") is None:
        install("docker.io")
    log_file = cache() / "dockerd.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        engine = subprocess.Popen(["dockerd"], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_SECONDS
    while not is_docker_available():
        if engine.poll() is not None or time.monotonic() > deadline:
            engine.terminate()
            last = log_file.read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineError(f"dockerd does not start here: {' '.join(last) or 'it says nothing'}")
        time.sleep(0.2)
    print(f"started a Docker engine; `kill {engine.pid}` ends it", file=sys.stderr)


def require_compose() -> list[str]:
    """The command of a Docker Compose that reads the project's files.

    Raises:
        EngineError: there is none, and none can be compiled.
    """
    folder = cache() / f"compose-{COMPOSE}"
    compiled = [str(folder / "cmd")]
    for command in (["docker", "compose"], ["docker-compose"], compiled):
        if _version(command) >= OLDEST_COMPOSE:
            return command
    compile_go(folder, COMPOSE, f"{COMPOSE_MODULE}/cmd", flags=f"-X {COMPOSE_MODULE}/internal.Version={COMPOSE}")
    return compiled


def compile_go(target: Path, version: str, *packages: str, flags: str = "") -> None:
    """Compile Go programs into a folder, in a module of its own: `go install` rejects some that replace dependencies.

    Raises:
        EngineError: there is no Go, or they cannot be compiled.
    """
    names = " and ".join(package.rpartition("/")[2] for package in packages)
    if shutil.which("go") is None:
        raise EngineError(f"there is no Go here that could compile {names} {version}")
    print(f"compiling {names} {version}, which takes minutes once", file=sys.stderr)
    target.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CGO_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            ["mod", "init", "compiled"],
            ["get", "-tool", *(f"{package}@{version}" for package in packages)],
            ["build", "-ldflags", f"-s -w {flags}", "-o", f"{target}/", *packages],
        ):
            command = ["go", *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EngineError(f"{names} {version} cannot be compiled: {done.stderr.strip().splitlines()[-1]}")


def _version(command: list[str]) -> tuple[int, ...]:
    try:
        version = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ()
    found = re.match(r"v?(\d+)\.(\d+)", version.strip())
    return tuple(map(int, found.groups())) if found else ()


def install(package: str) -> None:
    """Install a Debian package.

    Raises:
        EngineError: it cannot be installed.
    """
    if shutil.which("apt-get") is None:
        raise EngineError(f"{package} is not installed, and there is no apt-get to install it")
    print(f"installing {package}", file=sys.stderr)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-remove", "--no-install-recommends", package]):
        done = subprocess.run(["apt-get", "-qq", *command], env=quiet, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            message = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
            raise EngineError(f"apt-get cannot install {package}: {message}")


def cache() -> Path:
    """The folder of downloaded and compiled programs."""
    return load_settings().model.cache_dir.expanduser() / "containers"


if __name__ == "__main__":
    try:
        require_engine()
    except EngineError as error:
        sys.exit(f"{error}")
