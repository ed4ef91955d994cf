"""What is installed: one package, its data, and a public API that needs no torch."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gracestream
from tests.support.repository import ROOT

FOLDERS = ("pipeline", "workers", "schemas", "deploy")


def test_the_wheel_has_one_top_level_package_with_all_modules_data_and_types(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files beside its sources
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("gracestream", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["uv", "build", "--wheel", "--no-build-isolation", "--offline", "--quiet", "--out-dir", str(tmp_path)]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    built = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"gracestream"}
    modules = {f"gracestream/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    data = {
        "gracestream/py.typed",
        "gracestream/deploy/acls.sh",
        "gracestream/deploy/demo/facts.jsonl",
        *(f"gracestream/{file.relative_to(ROOT)}" for file in (ROOT / "pipeline").rglob("words/*.txt")),
        *(f"gracestream/{file.relative_to(ROOT)}" for file in (ROOT / "schemas").glob("json/*.json")),
    }
    assert modules | data <= names


@pytest.mark.parametrize("name", gracestream.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(gracestream, name).__doc__
    assert name in dir(gracestream)


def test_a_name_that_is_not_public_is_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        gracestream.Nothing  # noqa: B018


@pytest.mark.parametrize(
    "imported", ["from gracestream import Client, Feedback, load_settings", "import gracestream.workers.cli.app"]
)
def test_clients_and_commands_that_need_no_model_load_no_torch(imported: str) -> None:
    """Importing torch and transformers takes a process seconds, and most commands only talk to Kafka."""
    script = f"import sys; {imported}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


RUN_WITHOUT_KAFKA = """
import json, sys
from gracestream.pipeline.errors import UserError
from gracestream.workers.cli import app, common

def connected(*_, **__):
    raise UserError("connected")  # each command has imported what it needs before it connects

common.wait_for_kafka = connected
for command in json.loads(sys.argv[1]):
    try:
        app.run(command)
    except SystemExit:
        pass
    heavy = {"torch", "faiss", "transformers", "gracestream.pipeline.model", "gracestream.pipeline.editing"}
    print(json.dumps([command, sorted(heavy & sys.modules.keys())]))
"""
"""Runs commands in one process up to their connection to Kafka; prints each with the slow modules imported so far."""


def test_commands_that_read_the_history_import_no_model() -> None:
    """Only a codebook needs torch: its key searches import it."""
    reading = [["inspect"], ["near-misses"], ["near-misses", "--except", "r"], ["audit"]]
    replaying = [["replay"], ["diff", "1", "2"], ["corrections"], ["snapshot"]]
    command = [sys.executable, "-c", RUN_WITHOUT_KAFKA, json.dumps([*reading, *replaying])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("connected") == len(reading) + len(replaying)
    imported = [json.loads(line) for line in done.stdout.splitlines()]
    assert imported == [[command, []] for command in reading] + [[command, ["torch"]] for command in replaying]
