"""Trial edits as settings ask for them: the model, the candidates, and the variables to set afterwards."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gracestream.pipeline.editing import SHORT, Sample
from gracestream.pipeline.model import (
    UNIT,
    CausalGeneration,
    Classification,
    Encoder,
    InputError,
    ModelError,
    known_layer,
    load_checkpoint,
    naming_known,
    resolve_encoder,
)
from gracestream.pipeline.settings import Settings, as_environment
from gracestream.pipeline.tuning.layers import candidate_layers
from gracestream.pipeline.tuning.samples import Requests
from gracestream.pipeline.tuning.trials import Choice, Material, Measuring, Tried
from gracestream.pipeline.tuning.workbench import ENCODER, Answers, Checkpoint, Workbench
from gracestream.workers.bootstrap import limits_of, plan_of, resolved

TUNED = frozenset({"layer", "query", "radius", "radius_unit", "scope_radius", "scope_alpha"})
"""Settings that are chosen here, whatever they were."""

KEPT = (
    "model", "encoder", "replace", "device", "dtype", "max_input_tokens", "max_target_tokens", "policy", "max_radius",
    "expand", "guard", "wording", "traffic", "init", "forms", "max_steps", "learning_rate", "margin",
)  # fmt: skip
"""Settings that are given, and that the chosen ones were measured with."""

MULTIPLES = (1.0, 0.5, 1.5, 2.0)
"""Radii of a layer's queries and of classifiers, in units of the default."""

SCOPES: tuple[dict[str, Any], ...] = (
    {}, {"scope_alpha": 0.01}, {"scope_alpha": 0.2}, {"radius": 0.6}, {"radius": 0.8},
)  # fmt: skip
"""Radii of an encoder's queries of generators: by the scope of each correction, and one for all."""

ANSWER = SHORT + 4
"""Tokens of an answer, unless a given target is longer: targets that are made here have `SHORT` tokens at most."""


class Tuning:
    """Trial edits on one model, with the samples of a user."""

    def __init__(
        self,
        settings: Settings,
        samples: Sequence[Sample],
        layers: Sequence[str],
        trials: int,
        ended: Callable[[], bool],
        step: Callable[[str], object],
    ) -> None:
        """Load the model and divide the samples; without `layers` some are chosen by rules.

        Raises:
            ModelError: the model cannot be loaded.
            WorkbenchError: no layer can be tried.
            CalibrationError: too few samples.
        """
        self.notes: list[str] = []
        self._settings = _untuned(settings)
        checkpoint = self._checkpoint()
        bench = Workbench.of(checkpoint, layers or self._layers(settings, checkpoint.module))
        self.notes += [f"{layer} is left out: {fault}" for layer, fault in bench.faults.items()]
        requests = Requests.of(samples)
        answers = Answers(bench.task, _tokens(bench, requests))
        material = Material.of(bench, answers, requests, trials)
        self.notes += material.notes
        self.choices = self._choices(bench)
        self.measuring = Measuring(bench, material, answers, ended, step)
        self.material = material

    def variables(self, chosen: Tried) -> dict[str, str]:
        """The environment variables that differ from the defaults, with a candidate's settings."""
        updates = chosen.settings | {"layer": chosen.layer}
        known = {name: getattr(self._settings, name) for name in KEPT} | updates
        if chosen.query != ENCODER:
            known.pop("encoder")
        defaults = {name: field.default for name, field in Settings.model_fields.items()}
        defaults["layer"] = known_layer(self._settings.model)
        return as_environment({name: value for name, value in known.items() if value != defaults[name]})

    def _checkpoint(self) -> Checkpoint:
        settings = self._settings
        with naming_known(settings.model):
            module, tokenizer = load_checkpoint(resolved(settings), device=settings.device, dtype=settings.dtype)
        return Checkpoint(
            module,
            tokenizer,
            limits_of(settings),
            None if settings.replace == "auto" else settings.replace,
            self._encoder(),
        )

    def _encoder(self) -> Encoder | None:
        """The sentence encoder, where one can be loaded."""
        settings = self._settings
        try:
            return Encoder.load(
                resolve_encoder(settings.encoder), device=settings.device, cache=settings.cache.expanduser()
            )
        except (ModelError, OSError) as error:
            self.notes.append(f"queries of an encoder are not tried: {error}")
            return None

    def _layers(self, settings: Settings, module: Any) -> list[str]:
        """The layer that is set or known for this model, and the candidates."""
        chosen = settings.layer or known_layer(settings.model)
        return [*([chosen] if chosen else []), *candidate_layers(module)]

    def _choices(self, bench: Workbench) -> list[Choice]:
        """All kinds of query with their radii."""
        causal = isinstance(bench.task, CausalGeneration)
        default = ENCODER if causal and self._settings.policy != "paper" else bench.task.query  # as `query` auto has it
        kinds = dict.fromkeys(kind for models in bench.models.values() for kind in models)
        made = []
        for kind in kinds:
            query: dict[str, Any] = {} if kind == default else {"query": kind}
            scoped = kind == ENCODER and not isinstance(bench.task, Classification)
            for radius in _radii(kind, scoped=scoped):
                changed = {**query, **radius}
                plan = plan_of(self._settings.model_copy(update=changed), reads_text=kind == ENCODER)
                in_words = f"scope {plan.scope_alpha:g}" if scoped and plan.scope_radius else f"{plan.radius:g}"
                made.append(Choice(kind, in_words, changed, plan))
        return made


def _untuned(settings: Settings) -> Settings:
    """The settings without those that are chosen here."""
    kept = {name: getattr(settings, name) for name in settings.model_fields_set - TUNED}
    return Settings.model_construct(_fields_set=set(kept), **kept)


def _tokens(bench: Workbench, requests: Requests) -> int:
    """Tokens of an answer that is as long as the longest target that was given and can be taught."""
    lengths = [ANSWER]
    for inputs, target in requests.targets.items():
        with suppress(InputError):
            lengths.append(len(bench.task.label(inputs, target)))
    return min(max(lengths), bench.task.limits.new_tokens_limit)


def _radii(kind: str, *, scoped: bool) -> list[dict[str, Any]]:
    """The settings of radii to try, the default first; `scoped`: each correction has a radius of its own."""
    if scoped:
        return list(SCOPES)
    unit = UNIT if kind == ENCODER else 1.0
    return [{} if multiple == 1.0 else {"radius": round(multiple * unit, 2)} for multiple in MULTIPLES]
