"""`gracestream experiment`: a stream of edits from files to a folder of results."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.codebook_file import load
from tests.integration.forked import Command, sentence, status_of
from tests.integration.running import Checkpoint
from tests.unit.engine.tiny import texts

TEXTS = texts(24, seed=4, shortest=4, longest=8)
TARGETS = ["train", "bridge", "river"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files as those of the experiment are, in the words of the tiny models."""
    rows = [
        {"prompt": TEXTS[row], "target_new": TARGETS[row % 3], "subject": "s", "locality_prompt": TEXTS[12 + row],
         "locality_ground_truth": "museum"}
        for row in range(6)
    ]  # fmt: skip
    others = [{**row, "locality_prompt": TEXTS[18 + place]} for place, row in enumerate(rows)]
    for name, some in (("hallucination_edit_450", rows), ("hallucination_other_306", others)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, some)))
    return tmp_path


@pytest.fixture
def chosen(checkpoints: dict[str, Checkpoint], data: Path) -> list[str]:
    """The options that name model, layer and data."""
    model = checkpoints["llama"]
    return ["--model", str(model.folder), "--layer", model.layer, "--data", str(data)]


def test_it_writes_metrics_a_table_and_the_codebook(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    command = run("experiment", "hallucination", *chosen, "--every", "4", "--out", str(out), "--json")
    assert status_of(command) == 0, command.said()
    metrics = json.loads((out / "metrics.json").read_text())
    points = [json.loads(line) for line in command.told().splitlines()]
    assert points == metrics["points"]
    assert [point["corrections"] for point in points] == [0, 4, 6]
    assert (metrics["experiment"], metrics["measure"], metrics["left_out"]) == ("hallucination", "perplexity", 0)
    assert metrics["environment"]["policy"] == "nearest"
    before, _, after = points
    assert before["success"]["value"] is None
    assert after["success"]["value"] < before["coming"]["value"], "the targets are likelier than they were"
    assert len(metrics["made"]) == 6
    codebook = load(out / "codebook.safetensors")
    assert len(codebook) == after["entries"] > 0
    assert np.isfinite(codebook.keys_ND).all()
    assert len((out / "table.md").read_text().splitlines()) == 2 + len(points)


def test_fewer_edits_and_less_to_retain_can_be_asked_for(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    command = run(
        "experiment", "hallucination", *chosen, "--edits", "2", "--retention", "1", "--out", str(tmp_path / "r")
    )
    assert status_of(command) == 0, command.said()
    assert "rephrases" in command.told()
    assert len(json.loads((tmp_path / "r" / "metrics.json").read_text())["made"]) == 2


@pytest.mark.parametrize("editor", ["ft", "ewc", "retrain", "mend", "rome"])
def test_other_editors_run_the_same_stream(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path, editor: str
) -> None:
    out = tmp_path / "results"
    command = run("experiment", "hallucination", *chosen, "--editor", editor, "--out", str(out), "--json")
    assert status_of(command) == 0, command.said()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["editor"] == editor
    after = metrics["points"][-1]
    assert (after["corrections"], after["entries"], after["captured"]) == (6, 0, 1)
    assert after["agreement"] < 1, "all weights are everybody's"
    assert not (out / "codebook.safetensors").exists()


def test_what_is_missing_or_does_not_fit_is_one_sentence(
    run: Callable[..., Command], chosen: list[str], checkpoints: dict[str, Checkpoint], data: Path, tmp_path: Path
) -> None:
    assert "which is not in" in sentence(run("experiment", "zsre", *chosen))
    model = checkpoints["bert"]
    other = ["--model", str(model.folder), "--layer", model.layer, "--data", str(data)]
    assert sentence(run("experiment", "hallucination", *other)).startswith("the model can take none of the edits of")
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "folder")
    assert "cannot be written to" in sentence(run("experiment", "hallucination", *chosen, "--edits", "1", "--out", out))
