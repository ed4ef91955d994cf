"""Runs experiments: each as it was asked for, with the editor's settings, into a folder."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pipeline.environment import environment
from pipeline.experiments.editors.grace import Grace
from pipeline.experiments.editors.known import EDITORS
from pipeline.experiments.evaluation import Evaluation
from pipeline.experiments.report import Asked, Report, read, write
from pipeline.experiments.stream import Stream, first, fitting
from pipeline.experiments.tasks import TASKS
from pipeline.model import EditableModel
from pipeline.settings import Settings, load_settings
from workers.boot import load_model, plan_of

OF_THE_MODEL = ("model", "layer", "query", "replace", "device", "dtype", "max_input_tokens", "max_target_tokens")
"""Settings of an editor that choose its model and what of it is edited."""

OF_THE_PLAN = (
    "policy", "radius", "radius_unit", "max_radius", "expand", "guard", "traffic", "init", "max_steps",
    "learning_rate", "margin",
)  # fmt: skip
"""Settings that say how to edit."""

SWEPT = (*OF_THE_MODEL, *OF_THE_PLAN)
"""All of them."""

MODELS = {"scotus": "scotus"}
"""The models of experiments that are about another one than an editor's, unless a model is set."""


class Runner:
    """Runs one experiment after the other. A model that the next one is about too stays loaded."""

    def __init__(self, tell: Callable[[str], object], *, plots: bool) -> None:
        self._tell, self._plots = tell, plots
        self._loaded: tuple[list[object], EditableModel] | None = None

    def run(self, asked: Asked, folder: Path, at_work: Callable[[int, int], object]) -> Report:
        """The report that is in the folder already, if it is of just this; else run it, and write that.

        Args:
            asked: What to run.
            folder: Of the results; it is there.
            at_work: Called with the number of corrections that have come, and of all.
        """
        found = read(folder)
        if found is not None and found.asked == asked:
            return found
        task = first(TASKS[asked.experiment](), asked.edits, asked.retention, asked.seed)
        settings = load_settings(**{**asked.settings, "seed": str(asked.seed)})
        plan, model = plan_of(settings), self._model(settings)
        task, left_out = fitting(task, model)
        if left_out:
            self._tell(f"{left_out} examples and texts are left out: the model cannot take them, or not at this length")
        chosen = {"learning_rate": settings.learning_rate} if "learning_rate" in settings.model_fields_set else {}
        editor = EDITORS[asked.editor](model, plan, task.traffic, chosen)
        used = editor if isinstance(editor, AbstractContextManager) else nullcontext()
        with used:  # at its end the weights are what they were
            stream = Stream(task, editor, Evaluation(model, task.measure))
            stream.at_work = lambda: at_work(len(stream.made), len(task.edits))
            points = list(stream.run([*range(asked.every, len(task.edits), asked.every), len(task.edits)]))
            uses = stream.uses() if editor.entries else []
        report = Report(
            asked=asked, measure=task.measure, model=model.fingerprint, layer=model.layer,
            environment=environment(model, plan), left_out=left_out, points=points, made=stream.made, uses=uses,
        )  # fmt: skip
        write(report, editor.engine.codebook if isinstance(editor, Grace) else None, folder, plots=self._plots)
        return report

    def _model(self, settings: Settings) -> EditableModel:
        chosen = [getattr(settings, name) for name in OF_THE_MODEL]
        if self._loaded is None or self._loaded[0] != chosen:
            self._loaded = None  # which frees it first
            self._loaded = chosen, load_model(settings)
        return self._loaded[1]


def settings_of(experiment: str, given: dict[str, str | None]) -> dict[str, str]:
    """The editor's settings that are set, by the environment or as given, as texts.

    Raises:
        SettingsError: one is wrong.
    """
    settings = load_settings(**given)
    found = {name: str(getattr(settings, name)) for name in SWEPT if name in settings.model_fields_set}
    return {"model": MODELS[experiment], **found} if experiment in MODELS else found
