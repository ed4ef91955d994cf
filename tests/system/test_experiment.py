"""`gracestream experiment`: runs a stream of corrections from files, and writes a folder of results."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gracestream.pipeline.codebook.file import load_codebook
from gracestream.pipeline.experiments.report import exclusive_lock, make_dir
from gracestream.pipeline.model.sentence_encoder import PROMPT_HASH_DIM
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Command, sentence, status_of
from tests.support.running import Checkpoint
from tests.support.tiny_models import texts

TEXTS = texts(24, seed=4, shortest=4, longest=8)
TARGETS = ["train", "bridge", "river"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data files in the experiment's format, in the vocabulary of the tiny models."""
    rows = [
        {"prompt": TEXTS[row], "target_new": TARGETS[row % 3], "subject": "s", "locality_prompt": TEXTS[12 + row],
         "locality_ground_truth": " museum and so"}
        for row in range(6)
    ]  # fmt: skip
    others = [{**row, "locality_prompt": TEXTS[18 + place]} for place, row in enumerate(rows)]
    for name, some in (("hallucination_edit_450", rows), ("hallucination_other_306", others)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, some)))
    return tmp_path


@pytest.fixture
def chosen(checkpoints: dict[str, Checkpoint], data: Path) -> list[str]:
    """The options for model, layer and data."""
    model = checkpoints["llama"]
    return ["--model", str(model.folder), "--layer", model.layer, "--data", str(data)]


def test_it_writes_metrics_a_table_and_the_codebook(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    command = run("experiment", "hallucination", *chosen, "--every", "4", "--out", str(out), "--json")
    assert status_of(command) == 0, command.stderr()
    metrics = json.loads((out / "metrics.json").read_text())
    points = [json.loads(line) for line in command.stdout().splitlines()]
    assert points == metrics["points"]
    assert [point["corrections"] for point in points] == [0, 4, 6]
    assert metrics["asked"]["experiment"] == "hallucination"
    assert (metrics["measure"], metrics["left_out"]) == ("perplexity", 0)
    assert metrics["environment"]["policy"] == "nearest"
    before, _, after = points
    assert before["es"]["value"] is None
    assert after["es"]["value"] < before["coming"]["value"], "targets became more probable"
    assert len(metrics["made"]) == 6
    codebook = load_codebook(out / "codebook.safetensors")
    assert len(codebook) == after["entries"] > 0
    assert np.isfinite(codebook.keys_ND).all()
    assert len((out / "table.md").read_text().splitlines()) == 2 + len(points)
    assert (out / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert sum(use["edits"] for use in metrics["uses"]) == 6


def test_options_limit_the_edits_and_the_retention_examples(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    command = run(
        "experiment", "hallucination", *chosen, "--edits", "2", "--retention", "1", "--out", str(tmp_path / "r")
    )
    assert status_of(command) == 0, command.stderr()
    assert "TRR" in command.stdout()
    assert "rephrases" not in command.stdout(), "these data have none"
    assert len(json.loads((tmp_path / "r" / "metrics.json").read_text())["made"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("editor", ["ft", "ewc", "retrain", "memory", "defer", "mend", "rome"])
def test_other_editors_run_the_same_stream(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path, editor: str
) -> None:
    out = tmp_path / "results"
    command = run("experiment", "hallucination", *chosen, "--editor", editor, "--out", str(out), "--json")
    assert status_of(command) == 0, command.stderr()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["asked"]["editor"] == editor
    after = metrics["points"][-1]
    assert (after["corrections"], after["entries"]) == (6, 0)
    if editor != "defer":  # its gate learns which inputs to serve
        assert after["captured"] == 1
        assert after["agreement"] < 1, "a value that serves all inputs changes all answers"
    assert not (out / "codebook.safetensors").exists()


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize(("query", "traffic"), [("last", 512), ("encoder", 2)])
def test_a_run_through_the_whole_pipeline_gives_the_same_results(
    run: Callable[..., Command],
    deployment: Settings,
    chosen: list[str],
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    query: str,
    traffic: int,
) -> None:
    own = {
        "query_source": query,
        "traffic_sample_size": traffic,
        **({"encoder": str(checkpoints["bert"].folder)} if query == "encoder" else {}),
    }
    metrics = {}
    for through in ("engine", "kafka"):
        out = tmp_path / through
        given = ["experiment", "hallucination", *chosen, "--through", through, "--every", "3", "--out", str(out)]
        command = run(*given, settings=deployment, within=240, threads=1, **own)
        assert status_of(command) == 0, command.stderr()
        metrics[through] = json.loads((out / "metrics.json").read_text())
    decisions = [[(one["status"], one["steps"]) for one in result["made"]] for result in metrics.values()]
    assert decisions[0] == decisions[1]
    assert "added" in dict(decisions[0])
    points = [[{**point, "seconds": None} for point in result["points"]] for result in metrics.values()]
    assert points[0] == points[1]
    codebooks = [load_codebook(tmp_path / through / "codebook.safetensors") for through in metrics]
    for array in ("keys_ND", "values_NV", "radii_N"):
        np.testing.assert_array_equal(*(getattr(codebook, array) for codebook in codebooks))
    assert codebooks[0].keys_ND.shape[1] == (48 + PROMPT_HASH_DIM if query == "encoder" else 384)
    assert metrics["kafka"]["agreeing"] == 1
    assert metrics["engine"]["agreeing"] is None
    assert not (tmp_path / "kafka" / ".pipeline").exists()


@pytest.mark.slow
def test_a_grid_runs_each_combination_once_and_resumes_after_a_kill(
    run: Callable[..., Command], chosen: list[str], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    swept = ["--sweep", "policy=paper,nearest", "--sweep", "seed=1,2", "--edits", "3", "--out", str(out)]
    command = run("experiment", "hallucination", *chosen, *swept)
    assert status_of(command) == 0, command.stderr()
    folders = [out / f"policy={policy}, seed={seed}" for policy in ("paper", "nearest") for seed in (1, 2)]
    metrics = {folder: json.loads((folder / "metrics.json").read_text()) for folder in folders}
    assert [one["environment"]["policy"] for one in metrics.values()] == ["paper", "paper", "nearest", "nearest"]
    assert [one["environment"]["seed"] for one in metrics.values()] == ["1", "2", "1", "2"]
    table = (out / "sweep.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["policy=paper", "policy=nearest"]
    assert all(" ± " in line for line in table[2:])
    assert (out / "sweep.png").exists()
    (folders[1] / "metrics.json").unlink()  # a killed run leaves none
    again = run("experiment", "hallucination", *chosen, *swept, "--no-plots")
    assert status_of(again) == 0, again.stderr()
    for place, (folder, before) in enumerate(metrics.items()):
        after = json.loads((folder / "metrics.json").read_text())
        assert (after == before) == (place != 1), "times of repeated runs differ"
        assert [point["err"] for point in after["points"]] == [point["err"] for point in before["points"]]
    (data / "hallucination_edit_450.jsonl.gz").write_bytes((data / "hallucination_other_306.jsonl.gz").read_bytes())
    changed = run("experiment", "hallucination", *chosen, *swept, "--no-plots")
    assert status_of(changed) == 0, changed.stderr()
    assert all(json.loads((folder / "metrics.json").read_text()) != metrics[folder] for folder in folders)
    other = run("experiment", "hallucination", *chosen, *swept[:-4], "--edits", "2", "--out", str(out))
    assert status_of(other) == 0, other.stderr()
    assert {len(json.loads((folder / "metrics.json").read_text())["made"]) for folder in folders} == {2}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("kafka=a", "'kafka' cannot be swept, only "),
        ("policy", "it takes one or more values of policy, each once"),
        ("policy=paper,paper", "it takes one or more values of policy, each once"),
        ("learning_rate=1e7", "GRACESTREAM_LEARNING_RATE"),
        ("editor=grace,gracie", "--sweep editor: 'gracie' is not one of grace, ft"),
        ("expand=wide", "--sweep expand: 'wide' is not one of cover, paper"),
        ("seed=-1", "'-1' is not a number from 0 to 4294967295"),
        ("seed=4294967296", "is not a number from 0 to 4294967295"),
        ("policy=no", "GRACESTREAM_POLICY"),
        ("through=kafka", "'through' cannot be swept"),
        ("seed=0,00", "seed=00 is given twice"),
        ("radius=1,1.0", "radius=1.0 is given twice"),
        ("layer=model.layers.1.mlp.down_proj,model.layers.9.mlp", "layer 'model.layers.9.mlp' not found in"),
    ],
)
def test_an_invalid_grid_is_reported_before_any_run(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path, given: str, complaint: str
) -> None:
    own = [*chosen[:2], *chosen[4:]] if given.startswith("layer") else chosen
    asked = ["experiment", "hallucination", *own, "--sweep", given, "--out", str(tmp_path / "out")]
    command = run(*asked)
    assert status_of(command) not in {0, None}
    assert complaint in " ".join(command.stderr().replace("│", " ").split()), command.stderr()
    assert "Traceback" not in command.stderr()
    assert not (tmp_path / "out").exists()


def test_options_of_grace_alone_are_not_swept_for_other_editors(run: Callable[..., Command], chosen: list[str]) -> None:
    given = ["--sweep", "editor=ft", "--sweep", "policy=paper,nearest"]
    assert "ft has no policy: only grace has" in sentence(run("experiment", "hallucination", *chosen, *given))
    for other in (["--editor", "ft"], ["--through", "kafka"]):
        command = run("experiment", "hallucination", *chosen, "--expand", "paper", *other)
        assert status_of(command) == 2
        assert "expand=paper: only grace has it, and only with --through engine" in command.stderr()


def test_a_run_uses_its_own_model_and_keeps_nothing_of_the_run_before(
    run: Callable[..., Command], chosen: list[str], checkpoints: dict[str, Checkpoint], data: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "model"
    shutil.copytree(checkpoints["llama"].folder, moved)
    given = ["experiment", "hallucination", "--data", str(data), "--model", str(moved), *chosen[2:4], "--edits", "1"]
    out = tmp_path / "results"
    assert status_of(run(*given, "--out", str(out))) == 0
    first = json.loads((out / "metrics.json").read_text())
    weights = load_file(moved / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    assert status_of(run(*given, "--out", str(out))) == 0
    assert json.loads((out / "metrics.json").read_text())["model"] != first["model"]
    assert status_of(run(*given, "--editor", "ft", "--no-plots", "--out", str(out))) == 0
    assert sorted(path.name for path in out.iterdir()) == [".lock", "metrics.json", "table.md"]


def test_an_unsupported_model_is_reported_before_the_grid_runs_and_costs_no_results(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")]
    grid = ["--sweep", "layer=model.layers.1.mlp.down_proj,model.layers.1.mlp", "--sweep", "editor=grace,mend"]
    own = [*chosen[:2], *chosen[4:]]
    assert "is not a linear layer" in sentence(run("experiment", "hallucination", *own, *grid, *out))
    assert not (tmp_path / "out").exists()
    for option, own in (("layer", []), ("editor", ["--editor", "ft"]), ("seed", ["--seed", "0", "--sweep", "seed=1"])):
        grid = ["--sweep", "layer=a"] if option == "layer" else ["--sweep", "editor=grace,mend"]
        given = run("experiment", "hallucination", *chosen, *own, *grid, *out)
        complaint = f"--{option} and --sweep {option} contradict each other"
        assert complaint in " ".join(given.stderr().replace("│", " ").split())


def test_results_stay_until_another_run_replaces_them_and_damaged_ones_are_repaired(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    asked = ["experiment", "hallucination", *chosen, "--no-plots", "--out", str(out)]
    assert status_of(run(*asked, "--edits", "1")) == 0
    (out / "pipeline").mkdir()
    (out / "pipeline" / "mine.py").write_text("")
    before = {name: (out / name).read_bytes() for name in ("metrics.json", "table.md", "codebook.safetensors")}
    (out / "table.md").write_text("| corr")
    assert status_of(run(*asked, "--edits", "1")) == 0
    assert (out / "table.md").read_bytes() == before["table.md"]
    assert (out / "metrics.json").read_bytes() == before["metrics.json"], "it was not run again"
    (out / "codebook.safetensors").unlink()
    assert status_of(run(*asked, "--edits", "1")) == 0
    assert (out / "codebook.safetensors").read_bytes() == before["codebook.safetensors"]
    failed = run(*asked, "--edits", "2", "--editor", "ft", "--sweep", "learning_rate=1e7")
    assert status_of(failed) == 1
    assert (out / "metrics.json").exists()
    other = run(*asked, "--edits", "2")
    assert status_of(other) == 0
    assert "are of another run; this run will replace them" in other.stderr()
    assert len(json.loads((out / "metrics.json").read_text())["made"]) == 2
    assert (out / "pipeline" / "mine.py").exists()


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [
        ("null", "Expected `object`, got `null`"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Expected `object`, got `null`"),
        ('{"asked": {"version": 2}, "points": []}', "missing required field"),
        ("{", "Input data was truncated"),
    ],
    ids=["null", "array", "empty", "pointless", "cut"],
)
def test_an_invalid_report_is_reported_before_the_grid_runs(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path, kept: str, complaint: str
) -> None:
    out = tmp_path / "out"
    (out / "seed=2").mkdir(parents=True)
    (out / "seed=2" / "metrics.json").write_text(kept)
    message = sentence(run("experiment", "hallucination", *chosen, "--sweep", "seed=1,2", "--out", str(out)))
    assert complaint in message
    assert message.endswith("; remove it to run this again")
    assert not (out / "seed=1" / "metrics.json").exists()


def test_a_run_of_a_grid_does_not_write_to_a_locked_folder(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with exclusive_lock(make_dir(out / "seed=1")):
        ran = run("experiment", "hallucination", *chosen, "--sweep", "seed=1", "--out", str(out))
        assert status_of(ran) == 1
        assert "another process writes to" in ran.stderr().splitlines()[-1]


def test_only_grace_runs_in_an_editor_worker(run: Callable[..., Command], chosen: list[str]) -> None:
    command = run("experiment", "hallucination", *chosen, "--through", "kafka", "--editor", "ft")
    assert "an editor worker runs GRACE, not ft" in " ".join(command.stderr().replace("│", " ").split())


def test_missing_or_invalid_data_give_an_error_of_one_sentence(
    run: Callable[..., Command], chosen: list[str], checkpoints: dict[str, Checkpoint], data: Path, tmp_path: Path
) -> None:
    assert "zsre_700.jsonl.gz: it is not in" in sentence(run("experiment", "zsre", *chosen))
    model = checkpoints["bert"]
    other = ["--model", str(model.folder), "--layer", model.layer, "--data", str(data)]
    assert sentence(run("experiment", "hallucination", *other)).startswith("the model can take none of the 6 edits of")
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "folder")
    assert "cannot be written to" in sentence(run("experiment", "hallucination", *chosen, "--edits", "1", "--out", out))
    out = str(tmp_path / "file")
    assert sentence(run("experiment", "hallucination", *chosen, "--out", out)).endswith("file: it is not a folder")
    (tmp_path / "metrics.json").write_text("{}")
    out = str(tmp_path)
    assert "is not a report: " in sentence(run("experiment", "hallucination", *chosen, "--edits", "1", "--out", out))


def test_missing_plots_of_a_finished_run_are_drawn_later(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    asked = ["experiment", "hallucination", *chosen, "--edits", "1", "--out", str(out)]
    assert status_of(run(*asked, "--no-plots")) == 0
    assert not (out / "plots.png").exists()
    written = (out / "metrics.json").stat().st_mtime_ns
    assert status_of(run(*asked)) == 0
    assert (out / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "metrics.json").stat().st_mtime_ns == written, "it was not run again"


def test_more_examples_than_there_are_is_reported(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    ran = run(
        "experiment", "hallucination", *chosen, "--edits", "9", "--retention", "99", "--no-plots", "--out", str(out)
    )
    assert status_of(ran) == 0
    there = len(json.loads((out / "metrics.json").read_bytes())["made"])
    assert f"there are only {there} corrections" in ran.stderr()
    assert " examples to measure TRR on" in ran.stderr()


def test_only_one_of_two_processes_writes_to_a_folder(
    run: Callable[..., Command], chosen: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results"
    out.mkdir()
    with exclusive_lock(out):
        command = run("experiment", "hallucination", *chosen, "--edits", "1", "--out", str(out))
        assert sentence(command) == f"another process writes to {out}: name another folder with --out"
    assert [path.name for path in out.iterdir()] == [".lock"]
