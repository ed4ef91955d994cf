"""Runs experiments: each as it was asked for, with the editor's settings, into a folder."""

import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from gracestream.deploy.local.stack import running_stack
from gracestream.pipeline.editing import environment
from gracestream.pipeline.experiments.editors.editor import Editor
from gracestream.pipeline.experiments.editors.known import EDITORS, REQUIRE
from gracestream.pipeline.experiments.editors.piped import Piped
from gracestream.pipeline.experiments.editors.serving import Served
from gracestream.pipeline.experiments.evaluation import Evaluation
from gracestream.pipeline.experiments.report import CODEBOOK, METRICS, Asked, Report, complete, in_words, read, write
from gracestream.pipeline.experiments.stream import Stream, first, fitting
from gracestream.pipeline.experiments.tasks import Task
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.settings import Settings, SettingsError, load_settings
from gracestream.workers.bootstrap import load_model, plan_of

OF_THE_MODEL = (
    "model", "layer", "query", "encoder", "replace", "device", "dtype", "max_input_tokens", "max_target_tokens",
)  # fmt: skip
"""Settings of an editor that choose its model and what of it is edited."""

OF_THE_PLAN = (
    "policy", "radius", "radius_unit", "max_radius", "expand", "guard", "traffic", "init", "wording", "forms",
    "max_steps", "learning_rate", "margin",
)  # fmt: skip
"""Settings that say how to edit."""

SWEPT = (*OF_THE_MODEL, *OF_THE_PLAN)
"""All of them."""

OWN: dict[str, dict[str, str]] = {
    "scotus": {"model": "scotus"},
    "zsre": {"query": "last"},
    "counterfact": {"query": "last"},
    "hallucination": {"query": "last"},
}
"""Settings of experiments that are not an editor's, unless they are set: all take the queries from the layer."""


REPLICAS = 2
"""Of a run through Kafka."""

PIPELINE = ".pipeline"
"""The folder of such a run's own logs and data, within that of its results."""


PINNED: dict[str, Any] = {"snapshot_url": "", "authors": "", "require_signature": False, "edits_per_minute": 0}
"""Settings of its workers that would make another run of it, or reach beyond it."""


class Runner:
    """Runs one experiment after the other. A model that the next one is about too stays loaded."""

    def __init__(self, tell: Callable[[str], None], *, plots: bool) -> None:
        self._tell, self._plots = tell, plots
        self._loaded: tuple[list[object], EditableModel] | None = None
        self._fits: dict[str, tuple[Task, int]] = {}
        """By the data's digest, what of them that model can take."""

    def require(self, runs: Iterable[Asked]) -> None:
        """Load the model of each run, as it is to be edited: before hours of work and not after them.

        Raises:
            ModelError, LayerError: one cannot be loaded, or has no such layer.
            EditorError: the editor of a run cannot edit its model there.
        """
        editors: dict[str, tuple[Settings, set[str]]] = {}
        for asked in runs:
            settings = _settings(asked)
            editors.setdefault(str(_chosen(settings)), (settings, set()))[1].add(asked.editor)
        for settings, names in editors.values():
            model = self._model(settings)
            for name in sorted(names & REQUIRE.keys()):
                REQUIRE[name](model)

    def run(self, asked: Asked, task: Task, folder: Path, at_work: Callable[[int, int], object]) -> Report:
        """The report that is in the folder already, if it is of just this; else run it, and write that.

        Args:
            asked: What to run.
            task: Its data, all of them.
            folder: Of the results; it is there.
            at_work: Called with the number of corrections that have come, and of all.
        """
        settings = _settings(asked)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        model = self._model(settings)
        found = read(folder)
        whole = asked.editor != "grace" or (folder / CODEBOOK).exists()
        if found is not None and whole and (found.asked, found.model) == (asked, model.fingerprint):
            complete(found, folder, plots=self._plots)
            return found
        if (folder / METRICS).exists():
            self._tell(f"the results in {folder} are of another run; those of this one will replace them")
        task, left_out = self._cut(task, asked, model)
        with ExitStack() as used:  # at its end weights are what they were
            editor = self._editor(asked, settings, task, model, folder, used)
            evaluation = Evaluation(model, task.measure)
            stream = Stream(task, editor, evaluation)
            stream.at_work = lambda: at_work(len(stream.made), len(task.edits))
            points = []
            for point in stream.run([*range(asked.every, len(task.edits), asked.every), len(task.edits)]):
                points.append(point)
                self._tell(in_words(point))
            uses = editor.uses(task.edits) if isinstance(editor, Served) else []
            told = environment(model, plan_of(settings, reads_text=model.reads_text))
            if not isinstance(editor, Served):
                told = {name: value for name, value in told.items() if name not in OF_THE_PLAN}
                told["learning_rate"] = str(getattr(editor, "learning_rate", ""))
            corrected = [edit.example for edit in task.edits]
            agreeing = None
            if isinstance(editor, Piped):
                agreeing = editor.agreeing(corrected, evaluation.scores(editor, corrected))
        if asked.through == "kafka":
            shutil.rmtree(folder / PIPELINE, ignore_errors=True)  # after a failure its logs stay
        report = Report(
            asked=asked, measure=task.measure, model=model.fingerprint, layer=model.layer,
            environment=told, left_out=left_out, points=points, made=stream.made,
            uses=uses, agreeing=agreeing,
        )  # fmt: skip
        write(report, editor.codebook if isinstance(editor, Served) else None, folder, plots=self._plots)
        return report

    def _editor(
        self, asked: Asked, settings: Settings, task: Task, model: EditableModel, folder: Path, used: ExitStack
    ) -> Editor:
        seen = task.traffic[-settings.traffic :] if settings.traffic else []
        if asked.through == "kafka":
            own: dict[str, Any] = {**asked.settings, "seed": str(asked.seed)}
            name = f"experiment-{secrets.token_hex(3)}"
            stack = running_stack(
                folder / PIPELINE,
                replicas=REPLICAS,
                report=self._tell,
                prefix=f"{name}.",
                codebook=name,
                **(PINNED | own),
            )
            return used.enter_context(Piped(model, used.enter_context(stack).settings, seen))
        chosen = {"learning_rate": settings.learning_rate} if "learning_rate" in settings.model_fields_set else {}
        traffic = seen if asked.editor == "grace" else task.traffic
        plan = plan_of(settings, reads_text=model.reads_text)
        editor = EDITORS[asked.editor](model, plan, traffic, chosen)
        if isinstance(editor, AbstractContextManager):
            used.enter_context(editor)
        return editor

    def _cut(self, task: Task, asked: Asked, model: EditableModel) -> tuple[Task, int]:
        """What a run is about, and how much of the data its model cannot take; where that is less, it is told."""
        if asked.data not in self._fits:
            self._fits[asked.data] = fitting(task, model)
        task, left_out = self._fits[asked.data]
        task = first(task, asked.edits, asked.retention, asked.seed)
        if left_out:
            self._tell(f"{left_out} examples and texts are left out: the model cannot take them, or not at this length")
        if len(task.edits) < (asked.edits or 0):
            self._tell(f"there are no more than {len(task.edits)} corrections")
        if not task.retention:
            self._tell("no example is left of which TRR and agreement could tell")
        elif len(task.retention) < (asked.retention or 0):
            self._tell(f"there are no more than {len(task.retention)} examples that TRR is measured on")
        return task, left_out

    def _model(self, settings: Settings) -> EditableModel:
        chosen = _chosen(settings)
        if self._loaded is None or self._loaded[0] != chosen:
            self._loaded, self._fits = None, {}  # which frees it first
            self._loaded = chosen, load_model(settings)
        return self._loaded[1]


def _settings(asked: Asked) -> Settings:
    return load_settings(**{**asked.settings, "seed": str(asked.seed)})


def _chosen(settings: Settings) -> list[object]:
    """What decides on the loaded model; by default the policy decides on the queries, too."""
    names = (*OF_THE_MODEL, "policy") if settings.query == "auto" else OF_THE_MODEL
    return [getattr(settings, name) for name in names]


def settings_of(experiment: str, editor: str, given: dict[str, str | None]) -> dict[str, str]:
    """The editor's settings that are set, by the environment or as given, as texts.

    Raises:
        SettingsError: one is wrong, or the editor has no such.
    """
    settings = load_settings(**given)
    read_by = SWEPT if editor == "grace" else (*OF_THE_MODEL, "learning_rate")
    if unread := sorted(name for name, value in given.items() if value is not None and name not in read_by):
        raise SettingsError(f"{editor} has no {', '.join(unread)}: only grace has")
    found = {name: str(getattr(settings, name)) for name in read_by if name in settings.model_fields_set}
    if found.get("query") not in ("auto", "encoder"):
        found.pop("encoder", None)
    return OWN[experiment] | found
