"""`calibrate --auto`: trial edits on a user's file, and the settings that it recommends."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracestream.pipeline.settings import load_settings
from tests.support.forked_commands import Command, sentence, status_of
from tests.support.running import Checkpoint, wait_until
from tests.support.tiny_models import WORDS, texts

PROMPTS = texts(16, seed=5, shortest=6, longest=9)
REWORDED = texts(4, seed=6, shortest=6, longest=9)
TAUGHT = [
    {"inputs": one, "rephrase": other, "target": target}
    for one, other, target in zip(PROMPTS, REWORDED, WORDS, strict=False)
]
LAYER = "model.layers[1].mlp.down_proj"

NO_ENCODER: dict[str, Any] = {"query_source": "encoder", "encoder": "/no/such/folder"}
"""Only layers, because an encoder takes seconds to load."""


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, [*TAUGHT, *PROMPTS[len(TAUGHT) :]])))
    return path


@pytest.fixture
def auto(run: Callable[..., Command], requests: Path, checkpoints: dict[str, Checkpoint]) -> Callable[..., Command]:
    """Runs `calibrate --auto` on a tiny model; keywords are settings."""

    def ran(*arguments: str, path: Path = requests, kind: str = "llama", **chosen: Any) -> Command:
        model = str(checkpoints[kind].folder)
        settings = {"threads": 1, **NO_ENCODER, **chosen}
        return run("calibrate", str(path), "--auto", "--model", model, *arguments, **settings)

    return ran


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_it_prints_a_table_and_valid_settings_of_an_editor(
    auto: Callable[..., Command], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plot = tmp_path / "reach.svg"
    command = auto("--layer", LAYER, "--false-positives", "1", "--plot", str(plot), max_steps=150)
    assert status_of(command) == 0, command.stderr()
    printed = command.stdout().splitlines()
    assert any("rephrases" in line and "s/value" in line for line in printed)
    assert "queries of an encoder are not tried" in command.stderr()
    assert "Settings to use" in command.stderr()
    variables = dict(line.split("=", 1) for line in printed if line.startswith("GRACESTREAM_"))
    assert variables["GRACESTREAM_LAYER"] == "model.layers.1.mlp.down_proj"
    assert variables["GRACESTREAM_MAX_STEPS"] == "150", "a setting of the user is a part of the recommendation"
    assert variables["GRACESTREAM_QUERY_SOURCE"] in ("last", "mean"), "the default of a causal model is an encoder"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings().model.layer == "model.layers.1.mlp.down_proj"
    assert "reach" in plot.read_text()


def test_json_has_every_candidate_and_then_the_settings(auto: Callable[..., Command]) -> None:
    command = auto("--layer", LAYER, "--false-positives", "1", "--trials", "3", "--json")
    assert status_of(command) == 0, command.stderr()
    *candidates, last = lines(command.stdout())
    assert {(one["query"], one["radius"]) for one in candidates} == {
        (query, radius) for query in ("last", "mean") for radius in ("0.5", "1", "1.5", "2")
    }
    assert all(one["edited"]["of"] == 3 and one["layer"] == "model.layers.1.mlp.down_proj" for one in candidates)
    assert {"GRACESTREAM_MODEL", "GRACESTREAM_LAYER"} <= last["settings"].keys()
    assert last["findings"], "few requests do not bound a share"


@pytest.mark.parametrize(("kind", "layer"), [("bert", "bert.encoder.layer."), ("t5", "encoder.block.")])
def test_other_kinds_of_model_have_layers_by_rule_and_made_targets(
    auto: Callable[..., Command], requests: Path, kind: str, layer: str
) -> None:
    requests.write_text("\n".join(map(json.dumps, PROMPTS)))
    command = auto("--false-positives", "1", "--trials", "2", "--json", kind=kind)
    *candidates, _ = lines(command.stdout())
    assert candidates, command.stderr()
    assert all(one["layer"].startswith(layer) for one in candidates)
    assert {one["edited"]["of"] for one in candidates} == {2}


def test_it_ends_with_status_1_and_the_reason_if_no_value_trains(auto: Callable[..., Command]) -> None:
    command = auto("--layer", LAYER, "--json", max_steps=1, learning_rate=1e-4)
    assert status_of(command) == 1
    last = lines(command.stdout())[-1]
    assert last["settings"] == {}
    assert "0 of 8 trial edits gave their target" in last["findings"][0]
    assert "raise GRACESTREAM_MAX_STEPS" in last["findings"][0]


def test_unreadable_lines_are_named_and_the_others_measured(auto: Callable[..., Command], requests: Path) -> None:
    bad = [
        b'{"inputs": "\xff"}',
        b"{",
        b'{"inputs": "x", "rephrases": ["y"]}',
        json.dumps(" ".join(WORDS[:1] * 90)).encode(),
    ]
    requests.write_bytes(requests.read_bytes() + b"\n" + b"\n".join(bad))
    command = auto("--layer", LAYER, "--trials", "1", "--minutes", "0", "--json")
    first = len(PROMPTS) + 1
    for number in (first, first + 1, first + 2):
        assert f"line {number}" in command.stderr()
    assert "utf-8" in command.stderr()
    assert f"line {first + 2}: unknown field `rephrases`; did you mean `rephrase`?" in command.stderr()
    assert "1 request is left out: the prompt has 90 tokens" in command.stderr()
    assert [one["edited"]["of"] for one in lines(command.stdout())[:-1]][:1] == [1]


def test_too_few_requests_are_one_sentence(auto: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "one").write_text(json.dumps(PROMPTS[0]))
    command = auto("--layer", LAYER, path=tmp_path / "one")
    assert status_of(command) == 1
    assert "trial edits need two different requests at least, and there are 1; add lines" in command.stderr()


def test_ctrl_c_prints_the_results_so_far(folder: Path, requests: Path, checkpoints: dict[str, Checkpoint]) -> None:
    model = str(checkpoints["llama"].folder)
    arguments = ["calibrate", str(requests), "--auto", "--model", model, "--trials", "2", "--json"]
    command = Command("calibrate", arguments, folder, **NO_ENCODER, threads=1)
    command.start()
    wait_until(lambda: command.stdout().count("\n") >= 1)
    assert command.process.pid is not None
    os.kill(command.process.pid, signal.SIGINT)
    assert command.wait() in (0, 1)
    *candidates, last = lines(command.stdout())
    assert candidates
    assert last.keys() == {"settings", "findings"}
    assert "stopped" in command.stderr()
    assert any("settings were tried" in finding for finding in last["findings"])


def test_options_of_trial_edits_need_auto(run: Callable[..., Command], requests: Path) -> None:
    for option, value in (("--trials", "3"), ("--false-positives", "0.1"), ("--minutes", "1"), ("--plot", "x.svg")):
        command = run("calibrate", str(requests), option, value)
        assert status_of(command) == 2
        assert f"{option} needs --auto" in " ".join(command.stderr().replace("│", "").split())


def test_a_plot_that_cannot_be_written_is_reported_before_the_work(auto: Callable[..., Command]) -> None:
    assert "must end in .svg" in sentence(auto("--plot", "plot.txt"))
    assert "there is no folder" in sentence(auto("--plot", "/no/such/folder/plot.svg"))
