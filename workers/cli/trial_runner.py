"""Setting up trial edits from the settings: the model, the combinations to try, and the variables to set afterwards."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gracestream.pipeline.editing import SHORT_TARGET_TOKENS, LabelledRequest
from gracestream.pipeline.model import (
    ENCODER_DEFAULT_RADIUS,
    CausalGeneration,
    Classification,
    InputError,
    ModelError,
    SentenceEncoder,
    default_layer,
    load_checkpoint,
    resolve_encoder,
    suggest_known_models,
)
from gracestream.pipeline.settings import VARIABLES, ModelSettings, Settings, to_environment_variables
from gracestream.pipeline.tuning.layers import candidate_layers
from gracestream.pipeline.tuning.trial_texts import UserRequests
from gracestream.pipeline.tuning.trials import ConfigChoice, TrialMaterial, TrialMeasurement, TrialResult
from gracestream.pipeline.tuning.workbench import ENCODER_QUERY, AnswerCache, LoadedCheckpoint, Workbench
from gracestream.workers.bootstrap import checkpoint_from_settings, edit_config_from_settings, limits_from_settings

TUNED_SETTINGS = frozenset({"layer", "query_source", "radius", "radius_unit", "use_scope_radius", "scope_error_rate"})
"""Settings that the trial edits choose; the user's values are ignored."""

FIXED_SETTINGS = (
    "model", "encoder", "inject_tokens", "device", "dtype", "max_input_tokens", "max_target_tokens", "policy",
    "max_radius", "retention_guard", "check_wording", "traffic_sample_size", "value_init",
    "train_prompt_forms", "max_steps", "learning_rate", "stop_margin",
)  # fmt: skip
"""Settings that stay as the user set them; the measurement depends on them, so they are printed with the choice."""

RADIUS_MULTIPLES = (1.0, 0.5, 1.5, 2.0)
"""Radii to try for a layer's queries and for classifiers, as multiples of the default; the default first."""

SCOPE_SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"scope_error_rate": 0.01}, {"scope_error_rate": 0.2}, {"radius": 0.6}, {"radius": 0.8},
)  # fmt: skip
"""Radii to try for a generator's encoder queries: a radius for each correction's scope, and one radius for all."""

MIN_ANSWER_TOKENS = SHORT_TARGET_TOKENS + 4
"""Smallest limit on the tokens of an answer: made targets have at most `SHORT_TARGET_TOKENS` tokens; 4 more show
whether the answer goes on."""


class TrialRunner:
    """Trial edits on one model with a user's requests.

    Attributes:
        notes: Sentences about everything that was left out.
        choices: The combinations to try.
        measurement: Measures them.
        material: The trials and other texts.
    """

    def __init__(
        self,
        settings: Settings,
        labelled_requests: Sequence[LabelledRequest],
        layers: Sequence[str],
        trials: int,
        is_time_up: Callable[[], bool],
        on_step: Callable[[str], object],
    ) -> None:
        """Load the model and divide the requests; without `layers`, candidate layers are tried.

        Raises:
            ModelError: the model cannot be loaded.
            WorkbenchError: no layer can be tried.
            CalibrationError: there are too few requests.
        """
        self.notes: list[str] = []
        self._settings = settings.without(TUNED_SETTINGS)  # as if the user had not set them
        checkpoint = self._load_checkpoint()
        bench = Workbench.wrap_layers(checkpoint, layers or self._default_layers(settings.model, checkpoint.module))
        self.notes += [f"{layer} is left out: {reason}" for layer, reason in bench.layer_errors.items()]
        requests = UserRequests.from_labelled(labelled_requests)
        answers = AnswerCache(bench.task, _max_answer_tokens(bench, requests))
        material = TrialMaterial.from_requests(bench, answers, requests, trials)
        self.notes += material.notes
        self.choices = self._make_choices(bench)
        self.measurement = TrialMeasurement(bench, material, answers, is_time_up, on_step)
        self.material = material

    def environment_variables(self, candidate: TrialResult) -> dict[str, str]:
        """The environment variables to set for a combination: its settings and the fixed ones, without defaults."""
        updates = candidate.settings | {"layer": candidate.layer}
        values = {name: self._settings.value(name) for name in FIXED_SETTINGS} | updates
        if candidate.query != ENCODER_QUERY:
            values.pop("encoder")
        defaults = {variable.flat_name: variable.info.default for variable in VARIABLES.values()}
        defaults["layer"] = default_layer(self._settings.model.name)
        return to_environment_variables({name: value for name, value in values.items() if value != defaults[name]})

    def _load_checkpoint(self) -> LoadedCheckpoint:
        settings = self._settings.model
        with suggest_known_models(settings.name):
            module, tokenizer = load_checkpoint(
                checkpoint_from_settings(settings), device=settings.device, dtype=settings.dtype
            )
        return LoadedCheckpoint(
            module,
            tokenizer,
            limits_from_settings(settings),
            None if settings.inject_tokens == "auto" else settings.inject_tokens,
            self._load_encoder(),
        )

    def _load_encoder(self) -> SentenceEncoder | None:
        """The sentence encoder; None if it cannot be loaded, with a note."""
        settings = self._settings.model
        try:
            return SentenceEncoder.load(
                resolve_encoder(settings.encoder), device=settings.device, cache=settings.cache_dir.expanduser()
            )
        except (ModelError, OSError) as error:
            self.notes.append(f"queries of an encoder are not tried: {error}")
            return None

    def _default_layers(self, settings: ModelSettings, module: Any) -> list[str]:
        """The layer that is set, or else the known layer of this model; then the candidates."""
        first = settings.layer or default_layer(settings.name)
        return [*([first] if first else []), *candidate_layers(module)]

    def _make_choices(self, bench: Workbench) -> list[ConfigChoice]:
        """All kinds of query, each with its radii."""
        causal = isinstance(bench.task, CausalGeneration)
        default = (
            ENCODER_QUERY if causal and self._settings.editing.policy != "paper" else bench.task.query
        )  # the kind that GRACESTREAM_QUERY_SOURCE=auto selects
        kinds = dict.fromkeys(kind for models in bench.models.values() for kind in models)
        choices = []
        for kind in kinds:
            query: dict[str, Any] = {} if kind == default else {"query_source": kind}
            is_scoped = kind == ENCODER_QUERY and not isinstance(bench.task, Classification)
            for radius in _radius_settings(kind, is_scoped=is_scoped):
                changes = {**query, **radius}
                config = edit_config_from_settings(
                    self._settings.replace(**changes).editing, uses_encoder=kind == ENCODER_QUERY
                )
                radius_text = (
                    f"scope {config.scope_error_rate:g}"
                    if is_scoped and config.use_scope_radius
                    else f"{config.radius:g}"
                )
                choices.append(ConfigChoice(kind, radius_text, changes, config))
        return choices


def _max_answer_tokens(bench: Workbench, requests: UserRequests) -> int:
    """The limit on the tokens of an answer: the longest usable target, but at least `MIN_ANSWER_TOKENS`."""
    lengths = [MIN_ANSWER_TOKENS]
    for inputs, target in requests.targets.items():
        with suppress(InputError):
            lengths.append(len(bench.task.encode_target(inputs, target)))
    return min(max(lengths), bench.task.limits.max_new_tokens)


def _radius_settings(query_kind: str, *, is_scoped: bool) -> list[dict[str, Any]]:
    """The radius settings to try, the default first; `is_scoped`: each correction has a radius of its own."""
    if is_scoped:
        return list(SCOPE_SETTINGS)
    unit = ENCODER_DEFAULT_RADIUS if query_kind == ENCODER_QUERY else 1.0
    return [{} if multiple == 1.0 else {"radius": round(multiple * unit, 2)} for multiple in RADIUS_MULTIPLES]
