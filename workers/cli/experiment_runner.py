"""Running experiments by their specification, with the editor's settings, into a folder of results."""

import dataclasses
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from gracestream.deploy.local.stack import running_stack
from gracestream.pipeline.editing import EditConfig, describe_environment
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
from gracestream.pipeline.settings import EditingSettings, Settings, SettingsError, load_settings, to_text
from gracestream.workers.bootstrap import edit_config_from_settings, load_model

MODEL_SETTINGS = (
    "model", "layer", "query_source", "encoder", "inject_tokens", "device", "dtype", "max_input_tokens",
    "max_target_tokens",
)  # fmt: skip
"""Settings of an editor that choose its model, layer and queries."""

EDIT_SETTINGS = (
    "policy", "radius", "radius_unit", "max_radius", "retention_guard", "traffic_sample_size", "value_init",
    "check_wording", "train_prompt_forms", "max_steps", "learning_rate", "stop_margin",
)  # fmt: skip
"""Settings of an editor that control its edits."""

SWEEPABLE_SETTINGS = (*MODEL_SETTINGS, *EDIT_SETTINGS)
"""All settings that apply to an experiment."""

EXPERIMENT_SETTINGS: dict[str, dict[str, str]] = {
    "scotus": {"model": "scotus"},
    "zsre": {"query_source": "last"},
    "counterfact": {"query_source": "last"},
    "hallucination": {"query_source": "last"},
}
"""Defaults of each experiment that differ from the editor's: the paper takes the queries from the layer."""

NUM_REPLICAS = 2
"""Replicas of a run through Kafka."""

STACK_FOLDER = ".pipeline"
"""The folder with the log files and data of a run through Kafka, inside the folder of its results."""

WORKER_SETTINGS: dict[str, Any] = {
    "snapshot_url": "",
    "authors_file": "",
    "require_signature": False,
    "feedback_rate_limit": "none",
}
"""Overrides for the workers of a run through Kafka: the user's values would reject feedback or write snapshots."""


class ExperimentRunner:
    """Runs experiments one after the other; a model that the next run needs, too, stays loaded."""

    def __init__(self, report: Callable[[str], None], *, plots: bool) -> None:
        self._report, self._plots = report, plots
        self._loaded_model: tuple[list[object], EditableModel] | None = None
        self._supported_tasks: dict[str, tuple[ExperimentTask, int]] = {}
        """The supported part of each task for the loaded model, and the number of unsupported texts, by data digest."""

    def check_runs(self, runs: Iterable[RunSpec]) -> None:
        """Load the model of each run and check its editor, so that failures show before hours of work.

        Raises:
            ModelError, LayerError: a model cannot be loaded, or has no such layer.
            EditorError: the editor of a run cannot edit its model at the layer.
        """
        # Runs with equal model settings are grouped, so that each model is loaded once.
        editors: dict[str, tuple[Settings, set[str]]] = {}
        for spec in runs:
            settings = _load_run_settings(spec)
            editors.setdefault(str(_model_setting_values(settings)), (settings, set()))[1].add(spec.editor)
        for settings, names in editors.values():
            model = self._load_model(settings)
            for name in sorted(names & EDITOR_REQUIREMENTS.keys()):
                EDITOR_REQUIREMENTS[name](model)

    def run(
        self, spec: RunSpec, task: ExperimentTask, folder: Path, on_progress: Callable[[int, int], object]
    ) -> RunReport:
        """Return the report in the folder if it is of this very run; otherwise run it, and write and return its report.

        Args:
            spec: The run's specification.
            task: The whole task of the experiment.
            folder: The folder of the results, which must exist.
            on_progress: Called with the number of corrections so far, and with their total number.
        """
        settings = _load_run_settings(spec)
        if settings.model.threads is not None:
            torch.set_num_threads(settings.model.threads)
        model = self._load_model(settings)
        existing = read_report(folder)
        has_codebook = spec.editor != "grace" or (folder / CODEBOOK_FILE).exists()
        if existing is not None and has_codebook and (existing.asked, existing.model) == (spec, model.fingerprint):
            refresh_outputs(existing, folder, plots=self._plots)
            return existing
        if (folder / METRICS_FILE).exists():
            self._report(f"the results in {folder} are of another run; this run will replace them")
        task, left_out = self._select_examples(task, spec, model)
        with ExitStack() as resources:  # its end restores the original weights
            editor = self._make_editor(spec, settings, task, model, folder, resources)
            evaluator = Evaluator(model, task.measure)
            stream = EditStream(task, editor, evaluator)
            stream.on_correction = lambda: on_progress(len(stream.outcomes), len(task.edits))
            measurements = []
            for measurement in stream.run([*range(spec.every, len(task.edits), spec.every), len(task.edits)]):
                measurements.append(measurement)
                self._report(format_measurement(measurement))
            served_counts = editor.served_counts(task.edits) if isinstance(editor, CodebookEditor) else []
            environment = describe_environment(model, _edit_config(spec, settings.editing, model))
            # Other editors read no settings of GRACE but the learning rate, which may be their own default.
            if not isinstance(editor, CodebookEditor):
                environment = {
                    name: value for name, value in environment.items() if name not in (*EDIT_SETTINGS, "expand")
                }
                environment["learning_rate"] = str(getattr(editor, "learning_rate", ""))
            corrections = [edit.example for edit in task.edits]
            agreement = None
            if isinstance(editor, DeploymentEditor):
                agreement = editor.agreement_rate(corrections, evaluator.score(editor, corrections))
        if spec.through == "kafka":
            shutil.rmtree(folder / STACK_FOLDER, ignore_errors=True)  # an exception above keeps the logs
        report = RunReport(
            asked=spec, measure=task.measure, model=model.fingerprint, layer=model.layer,
            environment=environment, left_out=left_out, points=measurements, made=stream.outcomes,
            uses=served_counts, agreeing=agreement,
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
        """Make the run's editor; the end of `exit_stack` restores the weights and stops the pipeline."""
        sampled_traffic = (
            task.traffic[-settings.editing.traffic_sample_size :] if settings.editing.traffic_sample_size else []
        )
        if spec.through == "kafka":
            worker_settings: dict[str, Any] = {**spec.settings, "seed": str(spec.seed)}
            name = f"experiment-{secrets.token_hex(3)}"
            stack = running_stack(
                folder / STACK_FOLDER,
                replicas=NUM_REPLICAS,
                report=self._report,
                topic_prefix=f"{name}.",
                codebook=name,
                **(WORKER_SETTINGS | worker_settings),
            )
            return exit_stack.enter_context(
                DeploymentEditor(model, exit_stack.enter_context(stack).settings, sampled_traffic)
            )
        editor_options = (
            {"learning_rate": settings.editing.learning_rate}
            if "learning_rate" in settings.editing.model_fields_set
            else {}
        )
        # GRACE samples as many requests as its settings say; the other editors estimate statistics on all of them.
        traffic = sampled_traffic if spec.editor == "grace" else task.traffic
        config = _edit_config(spec, settings.editing, model)
        editor = EDITOR_FACTORIES[spec.editor](model, config, traffic, editor_options)
        if isinstance(editor, AbstractContextManager):
            exit_stack.enter_context(editor)
        return editor

    def _select_examples(self, task: ExperimentTask, spec: RunSpec, model: EditableModel) -> tuple[ExperimentTask, int]:
        """The part of the task that the run uses, and the number of unsupported texts; reports what is missing."""
        if spec.data not in self._supported_tasks:
            self._supported_tasks[spec.data] = drop_unsupported(task, model)
        task, left_out = self._supported_tasks[spec.data]
        task = select_examples(task, spec.edits, spec.retention, spec.seed)
        if left_out:
            self._report(
                f"{left_out} examples and texts are left out: the model cannot take them, for example at their length"
            )
        if len(task.edits) < (spec.edits or 0):
            self._report(f"there are only {len(task.edits)} corrections")
        if not task.retention:
            self._report("no example is left to measure TRR and agreement on")
        elif len(task.retention) < (spec.retention or 0):
            self._report(f"there are only {len(task.retention)} examples to measure TRR on")
        return task, left_out

    def _load_model(self, settings: Settings) -> EditableModel:
        key = _model_setting_values(settings)
        if self._loaded_model is None or self._loaded_model[0] != key:
            self._loaded_model, self._supported_tasks = None, {}  # frees the old model before the new one is loaded
            self._loaded_model = key, load_model(settings.model, settings.editing.policy)
        return self._loaded_model[1]


def _load_run_settings(spec: RunSpec) -> Settings:
    return load_settings(**{**spec.settings, "seed": str(spec.seed)})


def _edit_config(spec: RunSpec, settings: EditingSettings, model: EditableModel) -> EditConfig:
    config = edit_config_from_settings(settings, uses_encoder=model.reads_text)
    return dataclasses.replace(config, expand=spec.expand)


def _model_setting_values(settings: Settings) -> list[object]:
    """The settings that determine the loaded model; with query `auto` the policy determines the queries, too."""
    names = (*MODEL_SETTINGS, "policy") if settings.model.query_source == "auto" else MODEL_SETTINGS
    return [settings.value(name) for name in names]


def explicit_settings(experiment: str, editor: str, overrides: dict[str, str | None]) -> dict[str, str]:
    """The editor's settings that are set explicitly, by the environment or by `overrides`, as texts.

    Raises:
        SettingsError: a setting is wrong, or the editor does not read it.
    """
    settings = load_settings(**overrides)
    names = SWEEPABLE_SETTINGS if editor == "grace" else (*MODEL_SETTINGS, "learning_rate")
    if unread := sorted(name for name, value in overrides.items() if value is not None and name not in names):
        raise SettingsError(f"{editor} has no {', '.join(unread)}: only grace has")
    explicit = {name: to_text(name, value) for name, value in settings.explicit_values().items() if name in names}
    if explicit.get("query_source") not in ("auto", "encoder"):
        explicit.pop("encoder", None)
    return EXPERIMENT_SETTINGS[experiment] | explicit
