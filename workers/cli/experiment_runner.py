"""Runs experiments: each as it was asked for, with the editor's settings, into a folder."""

import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from gracestream.deploy.local.stack import running_stack
from gracestream.pipeline.editing import describe_environment
from gracestream.pipeline.experiments.editors.editor import ModelEditor
from gracestream.pipeline.experiments.editors.known import EDITOR_FACTORIES, EDITOR_REQUIREMENTS
from gracestream.pipeline.experiments.editors.piped import DeploymentEditor
from gracestream.pipeline.experiments.editors.serving import CodebookEditor
from gracestream.pipeline.experiments.evaluation import Evaluator
from gracestream.pipeline.experiments.report import (
    CODEBOOK_FILE,
    METRICS_FILE,
    RunReport,
    RunSpec,
    format_measurement,
    read_report,
    refresh_outputs,
    write_report,
)
from gracestream.pipeline.experiments.stream import EditStream, drop_unsupported, select_examples
from gracestream.pipeline.experiments.tasks import ExperimentTask
from gracestream.pipeline.model import EditableModel
from gracestream.pipeline.settings import Settings, SettingsError, load_settings
from gracestream.workers.bootstrap import edit_config_from_settings, load_model

MODEL_SETTINGS = (
    "model", "layer", "query", "encoder", "replace", "device", "dtype", "max_input_tokens", "max_target_tokens",
)  # fmt: skip
"""Settings of an editor that choose its model and what of it is edited."""

EDIT_SETTINGS = (
    "policy", "radius", "radius_unit", "max_radius", "expand", "guard", "traffic", "init", "wording", "forms",
    "max_steps", "learning_rate", "margin",
)  # fmt: skip
"""Settings that say how to edit."""

SWEEPABLE_SETTINGS = (*MODEL_SETTINGS, *EDIT_SETTINGS)
"""All of them."""

EXPERIMENT_SETTINGS: dict[str, dict[str, str]] = {
    "scotus": {"model": "scotus"},
    "zsre": {"query": "last"},
    "counterfact": {"query": "last"},
    "hallucination": {"query": "last"},
}
"""Settings of experiments that are not an editor's, unless they are set: all take the queries from the layer."""


NUM_REPLICAS = 2
"""Of a run through Kafka."""

STACK_FOLDER = ".pipeline"
"""The folder of such a run's own logs and data, within that of its results."""


WORKER_SETTINGS: dict[str, Any] = {"snapshot_url": "", "authors": "", "require_signature": False, "edits_per_minute": 0}
"""Settings of its workers that would make another run of it, or reach beyond it."""


class ExperimentRunner:
    """Runs one experiment after the other. A model that the next one is about too stays loaded."""

    def __init__(self, report: Callable[[str], None], *, plots: bool) -> None:
        self._report, self._plots = report, plots
        self._loaded_model: tuple[list[object], EditableModel] | None = None
        self._supported_tasks: dict[str, tuple[ExperimentTask, int]] = {}
        """By the data's digest, what of them that model can take."""

    def check_runs(self, runs: Iterable[RunSpec]) -> None:
        """Load the model of each run, as it is to be edited: before hours of work and not after them.

        Raises:
            ModelError, LayerError: one cannot be loaded, or has no such layer.
            EditorError: the editor of a run cannot edit its model there.
        """
        editors: dict[str, tuple[Settings, set[str]]] = {}
        for asked in runs:
            settings = _load_run_settings(asked)
            editors.setdefault(str(_model_setting_values(settings)), (settings, set()))[1].add(asked.editor)
        for settings, names in editors.values():
            model = self._load_model(settings)
            for name in sorted(names & EDITOR_REQUIREMENTS.keys()):
                EDITOR_REQUIREMENTS[name](model)

    def run(
        self, spec: RunSpec, task: ExperimentTask, folder: Path, on_progress: Callable[[int, int], object]
    ) -> RunReport:
        """The report that is in the folder already, if it is of just this; else run it, and write that.

        Args:
            spec: What to run.
            task: Its data, all of them.
            folder: Of the results; it is there.
            on_progress: Called with the number of corrections that have come, and of all.
        """
        settings = _load_run_settings(spec)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        model = self._load_model(settings)
        found = read_report(folder)
        whole = spec.editor != "grace" or (folder / CODEBOOK_FILE).exists()
        if found is not None and whole and (found.asked, found.model) == (spec, model.fingerprint):
            refresh_outputs(found, folder, plots=self._plots)
            return found
        if (folder / METRICS_FILE).exists():
            self._report(f"the results in {folder} are of another run; those of this one will replace them")
        task, left_out = self._select_examples(task, spec, model)
        with ExitStack() as used:  # at its end weights are what they were
            editor = self._make_editor(spec, settings, task, model, folder, used)
            evaluation = Evaluator(model, task.measure)
            stream = EditStream(task, editor, evaluation)
            stream.on_correction = lambda: on_progress(len(stream.outcomes), len(task.edits))
            points = []
            for point in stream.run([*range(spec.every, len(task.edits), spec.every), len(task.edits)]):
                points.append(point)
                self._report(format_measurement(point))
            uses = editor.served_counts(task.edits) if isinstance(editor, CodebookEditor) else []
            told = describe_environment(model, edit_config_from_settings(settings, uses_encoder=model.reads_text))
            if not isinstance(editor, CodebookEditor):
                told = {name: value for name, value in told.items() if name not in EDIT_SETTINGS}
                told["learning_rate"] = str(getattr(editor, "learning_rate", ""))
            corrected = [edit.example for edit in task.edits]
            agreeing = None
            if isinstance(editor, DeploymentEditor):
                agreeing = editor.agreement_rate(corrected, evaluation.score(editor, corrected))
        if spec.through == "kafka":
            shutil.rmtree(folder / STACK_FOLDER, ignore_errors=True)  # after a failure its logs stay
        report = RunReport(
            asked=spec, measure=task.measure, model=model.fingerprint, layer=model.layer,
            environment=told, left_out=left_out, points=points, made=stream.outcomes,
            uses=uses, agreeing=agreeing,
        )  # fmt: skip
        write_report(report, editor.codebook if isinstance(editor, CodebookEditor) else None, folder, plots=self._plots)
        return report

    def _make_editor(
        self,
        spec: RunSpec,
        settings: Settings,
        task: ExperimentTask,
        model: EditableModel,
        folder: Path,
        exit_stack: ExitStack,
    ) -> ModelEditor:
        seen = task.traffic[-settings.traffic :] if settings.traffic else []
        if spec.through == "kafka":
            own: dict[str, Any] = {**spec.settings, "seed": str(spec.seed)}
            name = f"experiment-{secrets.token_hex(3)}"
            stack = running_stack(
                folder / STACK_FOLDER,
                replicas=NUM_REPLICAS,
                report=self._report,
                prefix=f"{name}.",
                codebook=name,
                **(WORKER_SETTINGS | own),
            )
            return exit_stack.enter_context(DeploymentEditor(model, exit_stack.enter_context(stack).settings, seen))
        chosen = {"learning_rate": settings.learning_rate} if "learning_rate" in settings.model_fields_set else {}
        traffic = seen if spec.editor == "grace" else task.traffic
        plan = edit_config_from_settings(settings, uses_encoder=model.reads_text)
        editor = EDITOR_FACTORIES[spec.editor](model, plan, traffic, chosen)
        if isinstance(editor, AbstractContextManager):
            exit_stack.enter_context(editor)
        return editor

    def _select_examples(self, task: ExperimentTask, spec: RunSpec, model: EditableModel) -> tuple[ExperimentTask, int]:
        """What a run is about, and how much of the data its model cannot take; where that is less, it is told."""
        if spec.data not in self._supported_tasks:
            self._supported_tasks[spec.data] = drop_unsupported(task, model)
        task, left_out = self._supported_tasks[spec.data]
        task = select_examples(task, spec.edits, spec.retention, spec.seed)
        if left_out:
            self._report(
                f"{left_out} examples and texts are left out: the model cannot take them, or not at this length"
            )
        if len(task.edits) < (spec.edits or 0):
            self._report(f"there are no more than {len(task.edits)} corrections")
        if not task.retention:
            self._report("no example is left of which TRR and agreement could tell")
        elif len(task.retention) < (spec.retention or 0):
            self._report(f"there are no more than {len(task.retention)} examples that TRR is measured on")
        return task, left_out

    def _load_model(self, settings: Settings) -> EditableModel:
        chosen = _model_setting_values(settings)
        if self._loaded_model is None or self._loaded_model[0] != chosen:
            self._loaded_model, self._supported_tasks = None, {}  # which frees it first
            self._loaded_model = chosen, load_model(settings)
        return self._loaded_model[1]


def _load_run_settings(spec: RunSpec) -> Settings:
    return load_settings(**{**spec.settings, "seed": str(spec.seed)})


def _model_setting_values(settings: Settings) -> list[object]:
    """What decides on the loaded model; by default the policy decides on the queries, too."""
    names = (*MODEL_SETTINGS, "policy") if settings.query == "auto" else MODEL_SETTINGS
    return [getattr(settings, name) for name in names]


def explicit_settings(experiment: str, editor: str, overrides: dict[str, str | None]) -> dict[str, str]:
    """The editor's settings that are set, by the environment or as given, as texts.

    Raises:
        SettingsError: one is wrong, or the editor has no such.
    """
    settings = load_settings(**overrides)
    read_by = SWEEPABLE_SETTINGS if editor == "grace" else (*MODEL_SETTINGS, "learning_rate")
    if unread := sorted(name for name, value in overrides.items() if value is not None and name not in read_by):
        raise SettingsError(f"{editor} has no {', '.join(unread)}: only grace has")
    found = {name: str(getattr(settings, name)) for name in read_by if name in settings.model_fields_set}
    if found.get("query") not in ("auto", "encoder"):
        found.pop("encoder", None)
    return EXPERIMENT_SETTINGS[experiment] | found
