"""Our image, and the project's Compose files run with it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.containers.engine import EngineError, require_compose
from tests.support.deployment_files import DOCKERFILE, PROJECT
from tests.support.repository import ROOT

IMAGE = f"gracestream-cpu:{PROJECT['version']}"

CERTIFICATES = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
"""Build arguments by which the build trusts the certificates of this machine."""


def build_image(context: Path = ROOT, name: str = IMAGE) -> None:
    """Build our image without a GPU.

    Raises:
        EngineError: no command of Docker here builds with BuildKit.
        AssertionError: the build fails.
    """
    secret = ["--secret", f"id=ca,src={CERTIFICATES}"] if CERTIFICATES.exists() else []
    arguments = ["build", *secret, "--file", str(context / DOCKERFILE.relative_to(ROOT)), "--tag", name, str(context)]
    # A newer command needs the plugin buildx for it; Debian's brings it along.
    for command in dict.fromkeys(filter(None, (shutil.which("docker"), shutil.which("docker", path="/usr/bin")))):
        environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        done = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        assert "buildx" in done.stderr, f"the image is not built: {done.stderr[-2000:]}"
    raise EngineError("no docker command here has BuildKit: install its plugin buildx")


class Compose:
    """A project of the Compose files, under a name of its own; `files` lie over docker-compose.yml.

    A file `.env` in `directory`, the repository if none is given, has further settings.
    """

    def __init__(
        self, name: str, *files: Path, environment: Mapping[str, str] | None = None, directory: Path = ROOT
    ) -> None:
        chosen = [option for path in (ROOT / "docker-compose.yml", *files) for option in ("--file", str(path))]
        self._command = [*require_compose(), "--project-name", name, "--project-directory", str(directory), *chosen]
        trusted = {"BUILD_CA": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
        self._environment = {**os.environ, **trusted, **(environment or {})}

    def run(self, *arguments: str, fails: bool = False) -> str:
        """Run one command; returns its output. It must succeed, or fail with `fails`."""
        command = [*self._command, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if (done.returncode != 0) is not fails:
            sys.stderr.write(f"{done.stderr[-4000:]}\n")
            if not fails:
                logs = [*self._command, "logs", "--tail", "20"]
                subprocess.run(logs, env=self._environment, stdout=sys.stderr, check=False)
            raise AssertionError(f"{arguments} ended with {done.returncode}")
        return done.stdout + (done.stderr if fails else "")

    def configured(self) -> dict[str, Any]:
        """The merged files, as Compose reads them."""
        found: dict[str, Any] = json.loads(self.run("config", "--format", "json"))
        return found

    def up(self, *arguments: str) -> None:
        """Start all services that do not run, and wait until all are healthy."""
        self.run("up", "--detach", "--wait", "--wait-timeout", "240", *arguments)

    def ids(self, service: str) -> list[str]:
        """The ids of a service's running containers."""
        return sorted(self.run("ps", "--quiet", service).split())

    def inspect(self, service: str) -> list[dict[str, Any]]:
        """Docker's description of these containers."""
        ids = self.ids(service)
        if not ids:
            return []
        output = subprocess.run(["docker", "inspect", *ids], capture_output=True, text=True, check=True).stdout
        found: list[dict[str, Any]] = json.loads(output)
        return found
