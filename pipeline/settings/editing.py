"""Settings of the editor: its policy, radii, training of values, and batches."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from gracestream.pipeline.settings.group import NONE_WORD, SettingsGroup

Policy = Literal["nearest", "paper"]
"""How edits change the codebook."""


class EditingSettings(SettingsGroup):
    """How the editor decides on corrections and trains values."""

    policy: Policy = Field("nearest", description="How edits change the codebook; paper: Algorithm 1.")
    radius: FiniteFloat = Field(
        1.0,
        gt=0,
        description="Radius of a new entry, in units of `radius_unit`; if not set, 0.6 for queries of an encoder.",
    )
    radius_unit: Literal["median", "absolute"] = Field(
        "median",
        description="Unit of `radius`: the median nearest-neighbour distance of recent traffic, or 1 (absolute).",
    )
    max_radius: Annotated[FiniteFloat | None, NONE_WORD] = Field(
        None,
        gt=0,
        description="Limit on every radius, absolute, except for the numerical tolerance; none: no limit. If not set,"
        " 1 for queries of an encoder, otherwise no limit.",
    )
    use_scope_radius: bool = Field(
        True,
        description="For queries of an encoder, `policy` nearest and a generator: a new radius also excludes other"
        " requests about the subject of its entry. Off if `radius` is set, unless this is set, too.",
    )
    scope_error_rate: FiniteFloat = Field(
        0.05,
        ge=0.01,
        le=0.2,
        description="For `use_scope_radius`: the share of other requests about a subject, and of the traffic sample,"
        " that may be within a radius.",
    )
    retention_guard: bool = Field(
        True,
        description="Retention guard: give an earlier edit its own entry if a decision would change its answer, and"
        " keep new radii clear of confirmed inputs.",
    )
    check_wording: bool = Field(
        True,
        description="Do not serve a prompt within a radius if its wording disagrees with the correction's: numbers,"
        " names, negation, words that exclude each other. And serve a prompt in the same words at any distance. If not"
        " set, false for `policy` paper.",
    )
    traffic_sample_size: int = Field(
        512,
        ge=0,
        description="Number of recent unflagged queries that new radii exclude, except for the share"
        " `scope_error_rate` of them with `use_scope_radius`; 0: none.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the editor's random numbers.")
    max_steps: int = Field(
        100,
        ge=1,
        description="Limit on the optimisation steps of a value; for targets over 16 tokens, proportionally higher.",
    )
    learning_rate: FiniteFloat = Field(2.0, gt=0, le=1e6, description="Adam's learning rate for values.")
    stop_margin: FiniteFloat = Field(3.0, ge=0, description="Logit margin at which a value counts as trained.")
    training_batch_size: int = Field(
        16, ge=1, le=64, description="Limit on the waiting corrections whose values are trained in one batch."
    )
    value_init: Literal["layer", "label", "random"] = Field(
        "layer", description="Initial value: the output of the layer, the value of an entry with the label, or random."
    )
    train_prompt_forms: bool = Field(
        True,
        description="Train a causal model's values on other forms of the inputs, too; if not set, false for `policy`"
        " paper.",
    )
