"""Calibration of a layer: how far apart inputs lie there, and which radius would cover the rephrases of an input.

`gracestream layers` compares layers by these figures. The unit of radii is a median distance
(docs/explanation/method.md).

Not promised: that a layer with good figures can be edited. Whether training finds a value shows only in a trial.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.codebook import MAX_TRAFFIC_FRACTION
from gracestream.pipeline.editing.traffic_sample import median_nearest_distance
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model import PROBE_TEXTS, EditableModel, InputError
from gracestream.pipeline.search import exact_distances
from gracestream.schemas.messages import Inputs, check_inputs

CALIBRATION_BATCH_SIZE = 16
"""Inputs of one forward pass."""

RADIUS_GRID = tuple(round(0.1 * step, 1) for step in range(1, 41))
"""Radii that are tried, in units of the median distance: 0.1 to 4.0."""


class CalibrationError(UserError):
    """There are too few inputs to measure distances."""


class LabelledRequest(Struct, frozen=True):
    """One input of real traffic, with an optional rephrase of it and an optional target answer."""

    inputs: Inputs
    rephrase: Inputs | UnsetType = UNSET
    target: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_inputs(self.inputs)
        check_inputs(self.rephrase)
        if self.target is not UNSET and not self.target.strip():
            raise ValueError("`target` is empty")


class Calibration(Struct, frozen=True):
    """The measurements of one layer; the last three are None without rephrases.

    Attributes:
        layer: The path of the layer in the model.
        norm: Median Euclidean norm of a query.
        noise: Largest distance by which batch composition and padding moved a query, over up to eight inputs.
        median: Median distance of an input to its nearest other input: the unit of radii.
        rephrase: Median distance of an input to its rephrase.
        reached: Share of rephrases that the best radius covers and whose nearest key is their own input's.
        radius: The smallest radius, in units of `median`, with the highest share `reached`.
    """

    layer: str
    norm: float
    noise: float
    median: float
    rephrase: float | None = None
    reached: float | None = None
    radius: float | None = None


def calibrate_layer(model: EditableModel, requests: Sequence[LabelledRequest]) -> Calibration:
    """Measure the edited layer of `model` on these requests; equal inputs count once.

    Raises:
        CalibrationError: there are fewer than two different inputs.
        InputError: the model cannot take one of the inputs.
    """
    distinct = {request.inputs: request for request in requests}
    if len(distinct) < 2:
        raise CalibrationError(
            f"distances need two different inputs at least, and there are {len(distinct)}; add lines"
        )
    keys_ND = _compute_queries(model, list(distinct))
    # The keys come from batches. The same input in a batch of its own shows how far batching moves a query.
    alone_D = _compute_queries(model, list(distinct)[:1])
    noise = float(exact_distances(alone_D, keys_ND[None, :1])[0, 0])
    for inputs in list(distinct)[1:8]:
        row = list(distinct).index(inputs)
        noise = max(
            noise, float(exact_distances(_compute_queries(model, [inputs]), keys_ND[None, row : row + 1])[0, 0])
        )
    median = median_nearest_distance(keys_ND.numpy())
    norm = float(keys_ND.norm(dim=1).median())
    pairs = [(row, request.rephrase) for row, request in enumerate(distinct.values()) if request.rephrase is not UNSET]
    if not pairs:
        return Calibration(model.layer, norm, noise, median)
    rows_P = torch.tensor([row for row, _ in pairs])
    rephrased_PD = _compute_queries(model, [rephrase for _, rephrase in pairs])
    to_keys_PN = torch.cat([exact_distances(query_D[None], keys_ND[None]) for query_D in rephrased_PD])
    own_P = to_keys_PN.gather(1, rows_P[:, None])[:, 0]
    nearest_P = to_keys_PN.argmin(dim=1) == rows_P
    between_NN = torch.cat([exact_distances(key_D[None], keys_ND[None]) for key_D in keys_ND]).fill_diagonal_(torch.inf)
    # The editor keeps radii within this share of the distance to other traffic; here the other inputs stand for it.
    limit_P = MAX_TRAFFIC_FRACTION * between_NN.amin(dim=1)[rows_P]
    shares = {
        radius: float((nearest_P & (own_P < torch.clamp(limit_P, max=radius * median))).float().mean())
        for radius in RADIUS_GRID
    }
    best_share = max(shares.values())
    radius = next(radius for radius in RADIUS_GRID if shares[radius] == best_share)
    return Calibration(model.layer, norm, noise, median, float(own_P.median()), best_share, radius)


def _compute_queries(model: EditableModel, inputs: Sequence[Inputs]) -> torch.Tensor:
    """The queries (N, D) of these inputs, on the CPU."""
    prompts = [model.task.tokenize(prompt_inputs) for prompt_inputs in inputs]
    rows = [
        model.queries(prompts[start : start + CALIBRATION_BATCH_SIZE]).cpu()
        for start in range(0, len(prompts), CALIBRATION_BATCH_SIZE)
    ]
    return torch.from_numpy(np.concatenate([row.numpy() for row in rows]))


def radius_unit_from_probes(model: EditableModel) -> float:
    """The median nearest-neighbour distance of the probe sentences: the unit of radii while there is no traffic.

    Sentences that the model cannot take, such as too long ones, are left out.

    Raises:
        InputError: the model takes fewer than two of the sentences.
    """
    prompts = []
    for text in PROBE_TEXTS:
        with suppress(InputError):
            prompts.append(model.task.tokenize(text))
    if len(prompts) < 2:
        raise InputError(
            "the model takes none of the sentences that radii are measured on before there is traffic: choose"
            " GRACESTREAM_RADIUS_UNIT=absolute, or let it take longer inputs"
        )
    return median_nearest_distance(model.queries(prompts).cpu().numpy())
