"""vLLM's server with corrections, as a process in its own virtual environment."""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gracestream.deploy.local.processes import find_free_port
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import explicit_settings
from tests.support.repository import ROOT
from tests.support.running import own_environment, status, wait_until
from tests.support.vllm_environment import VARIABLES, vllm_python

START_SECONDS = 600.0
"""vLLM's three processes import torch and vLLM one after the other, which takes minutes on busy cores."""

ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--block-size", "32")


def vllm_variables() -> dict[str, str]:
    """The environment variables of a process with vLLM, without any setting of gracestream."""
    return {**own_environment(), **VARIABLES, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: its id, texts, and headers in lower case."""

    id: str
    texts: list[str]
    headers: Mapping[str, str]

    @property
    def entry(self) -> str | None:
        """The entry that answered."""
        return self.headers.get("x-gracestream-entry")


class VllmServer:
    """A server of a deployment. It is ready inside its context."""

    def __init__(self, settings: Settings, checkpoint: Path, folder: Path, *arguments: str) -> None:
        self._settings, self._checkpoint, self._folder, self._arguments = settings, checkpoint, folder, arguments
        self.port, self.health_port = find_free_port(), find_free_port()
        self.log = folder / "vllm.log"

    def __enter__(self) -> Self:
        self.start()
        wait_until(self._is_answering, START_SECONDS, "vLLM's start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process."""
        settings = {f"GRACESTREAM_{name.upper()}": str(value) for name, value in self._variables().items()}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._checkpoint),
                    "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port),
                    *ARGUMENTS, *self._arguments,
                ],
                env={**vllm_variables(), **settings, "VLLM_PLUGINS": "gracestream"},
                stdout=log, stderr=log, cwd=self._folder, start_new_session=True,
            )  # fmt: skip

    def _variables(self) -> dict[str, Any]:
        return {**explicit_settings(self._settings), "http_port": self.health_port}

    def _is_answering(self) -> bool:
        if (code := self.process.poll()) is not None:
            raise AssertionError(f"vLLM ended with status {code}: {self.log.read_text()[-3000:]}")
        return status(self.port, "/health")[0] == 200 and status(self.health_port, "/ready")[0] == 200

    def kill(self) -> None:
        """Kill all processes of the server."""
        if self.process.poll() is None:
            subprocess.run(["pkill", "-KILL", "-s", str(self.process.pid)], check=False)
            self.process.wait(30)

    def stop(self) -> int:
        """Stop the server as an operator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def state(self) -> dict[str, Any]:
        """The state of the codebook."""
        found: dict[str, Any] = json.loads(status(self.health_port, "/state")[1])
        return found

    def complete(self, prompt: str | Sequence[str], min_seq: int = 0, **fields: Any) -> Answer:
        """The answers to one or several texts."""
        return self._answer("/v1/completions", {"prompt": prompt, **fields}, {"x-gracestream-min-seq": str(min_seq)})

    def chat(self, *messages: tuple[str, str], **fields: Any) -> Answer:
        """The answer to a chat of roles and contents."""
        listed = [{"role": role, "content": content} for role, content in messages]
        return self._answer("/v1/chat/completions", {"messages": listed, **fields})

    def post(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of a POST request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, response.read(), {k.lower(): v for k, v in response.headers.items()}
        except urllib.error.HTTPError as error:
            return error.code, error.read(), {}

    def _answer(self, path: str, fields: Mapping[str, Any], given: Mapping[str, str] | None = None) -> Answer:
        code, body, headers = self.post(path, {"model": "model", "max_tokens": 12, "temperature": 0, **fields}, given)
        assert code == 200, body
        if fields.get("stream"):
            chunks = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
            text = "".join(choice.get("text", "") for chunk in chunks for choice in chunk["choices"])
            return Answer(chunks[0]["id"], [text], headers)
        found = json.loads(body)
        return Answer(
            found["id"],
            [one["text"] if "text" in one else one["message"]["content"] for one in found["choices"]],
            headers,
        )
