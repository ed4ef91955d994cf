"""The image is built from what there is."""

import json
import re
import tomllib
from fnmatch import fnmatch

import pytest

from gracestream.pipeline.model.registry import MINILM_PACKAGES
from tests.support.deployment_files import (
    DEPLOY,
    PROJECT,
    instructions,
)
from tests.support.repository import ROOT


def copied(variant: str) -> list[str]:
    """Paths that the build takes from the repository."""
    sources = [
        source
        for name, arguments in instructions()
        if name == "COPY" and "--from=" not in arguments
        for source in arguments.split()[:-1]
    ]
    return [source.replace("${VARIANT}", variant) for source in sources]


class TestImage:
    @pytest.mark.parametrize("variant", ["cpu", "gpu"])
    def test_what_it_copies_exists_and_is_let_into_the_build(self, variant: str) -> None:
        rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
        assert rules[0] == "*"
        allowed = [rule[1:] for rule in rules if rule[0] == "!"]
        rejected = [rule.removeprefix("**/") for rule in rules[1:] if rule[0] != "!"]
        assert f"deploy/requirements/{variant}.txt" in copied(variant)
        for source in copied(variant):
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed, source
            assert not any(fnmatch(part, rule) for part in source.split("/") for rule in rejected), source

    def test_the_encoder_of_queries_is_in_it(self) -> None:
        assert "deploy/requirements/encoder.txt" in copied("cpu")
        (module,) = MINILM_PACKAGES
        pinned = (DEPLOY / "requirements" / "encoder.txt").read_text()
        assert re.findall(r"^(\S+)==", pinned, re.MULTILINE) == [module.replace("_", "-")]

    def test_it_copies_every_package_that_the_project_consists_of(self) -> None:
        found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
        assert {package.rstrip("*") for package in found["include"]} | {"pyproject.toml", PROJECT["readme"]} <= set(
            copied("cpu")
        )

    def test_every_requirement_is_pinned_by_hash(self) -> None:
        installs = [arguments for name, arguments in instructions() if name == "RUN" and "pip install" in arguments]
        assert len(installs) == 3
        for arguments in installs:
            assert "--require-hashes" in arguments or "--no-deps --no-index /wheels/*.whl" in arguments
        (built,) = [arguments for name, arguments in instructions() if name == "RUN" and "uv build" in arguments]
        assert "--no-build-isolation --offline" in built

    def test_an_image_without_a_gpu_has_none_of_nvidia_s_libraries(self) -> None:
        pinned = (DEPLOY / "requirements" / "cpu.txt").read_text()
        assert re.findall(r"^(?:nvidia-|cuda-|triton)\S*", pinned, re.MULTILINE) == []
        assert re.findall(r"^nvidia-\S*", (DEPLOY / "requirements" / "gpu.txt").read_text(), re.MULTILINE)

    def test_it_runs_the_project_s_command_on_the_oldest_python_that_is_pinned(self) -> None:
        (entry,) = [json.loads(arguments) for name, arguments in instructions() if name == "ENTRYPOINT"]
        assert entry == list(PROJECT["scripts"])
        oldest = PROJECT["requires-python"].removeprefix(">=")
        bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
        assert bases == [f"python:{oldest}", "dependencies", f"python:{oldest}-slim"]
        for variant in ("cpu", "gpu"):
            assert f"--python-version {oldest} " in (DEPLOY / "requirements" / f"{variant}.txt").read_text()[:500]
