"""Key spaces compared: which keys bring rephrases near their correction and keep other texts away, and what they cost.

No value is trained. Each correction of zsRE and CounterFact gets a key in several spaces, and so do its rephrase and
questions of Natural Questions:

- `layer`: the product's own: the input of the edited layer at the last token.
- `mean token`: the mean of that input over all tokens.
- `layers`: the inputs of every third block up to that layer at the last token, each scaled to length one.
- `whitened`: `layer`, transformed so that traffic varies equally in all directions.
- `encoder`: a separate sentence encoder (MiniLM), which reads the text itself.

Columns:

- `own`: the share of rephrases with their own correction's key as the nearest key.
- `reached`: the share that is also within the radius: 0.8 of the key's distance to the nearest of 512 traffic
  questions, as in the editor's defaults.
- `captured`: the share of unrelated texts within the radius of the nearest key. They are other questions, and texts
  that the data call unrelated. The baseline is the goal, 0.
- `at-none`: the share of rephrases reached at the largest radius at which nothing is captured. Radii are shares of the
  distance to the traffic, up to twice that distance.
- `milliseconds`: time per request beyond the model's own pass: median CPU time, and synchronised wall time on a GPU.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from gracestream.pipeline.experiments.stream import drop_unsupported, select_examples
from gracestream.pipeline.experiments.tasks import TASKS
from gracestream.pipeline.model.adaptor import last_token_positions
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.layers import enclosing_blocks
from gracestream.pipeline.model.registry import minilm_folder
from gracestream.pipeline.model.sentence_encoder import SentenceEncoder
from gracestream.pipeline.settings import load_settings
from gracestream.workers.bootstrap import load_model
from tests.bench.device import timed
from tests.bench.framework import Options, Row

CORRECTIONS, QUICK_CORRECTIONS, HELD_OUT, TIMED_PROMPTS = 300, 40, 500, 40
RADIUS_FRACTION = 0.8
RADIUS_FRACTIONS = np.arange(0.05, 2.01, 0.05)
MODEL_SPACES = ("layer", "mean token", "layers")
"""The spaces that come from the model's own pass."""

BLOCK_STEP = 3
"""The space `layers` uses one in this many blocks."""

RIDGE = 0.1
"""Added to the covariance of the traffic, relative to its mean variance: there are fewer texts than dimensions."""

Space = Callable[[Sequence[str]], np.ndarray]
"""Maps texts to their keys (N, D)."""


def run(options: Options) -> Iterator[Row]:
    """The rows of both tasks in every space. `--quick` uses fewer corrections."""
    settings = load_settings(model="smollm2", device=options.device, query_source="last")
    model = load_model(settings.model, settings.editing.policy)
    embed = SentenceEncoder.load(str(minilm_folder()), device=options.device)
    for name in ("zsre", "counterfact"):
        task, _ = drop_unsupported(
            select_examples(TASKS[name](), QUICK_CORRECTIONS if options.quick else CORRECTIONS, HELD_OUT), model
        )
        inputs = [edit.example.inputs for edit in task.edits]
        rephrases = [edit.rephrases[0] for edit in task.edits]
        unrelated = [example.inputs for example in task.retention] + task.unrelated[:HELD_OUT]
        model_keys = ModelKeys(model)
        spaces: dict[str, Space] = {
            **{space: model_keys.space(space) for space in MODEL_SPACES},
            "whitened": whitened(model_keys, task.traffic),
            "encoder": partial(_encoded, embed),
        }
        unedited = _milliseconds(model.device, partial(_forward, model), inputs)
        for space, keys_of in spaces.items():
            options.report(f"{name}: {space}")
            keys_ND, others_ND, traffic_RD, unrelated_UD = map(keys_of, (inputs, rephrases, task.traffic, unrelated))
            traffic_distance_N = (
                torch.cdist(torch.from_numpy(keys_ND), torch.from_numpy(traffic_RD)).amin(dim=1).numpy()
            )
            slots_N, distances_N = _nearest(others_ND, keys_ND)
            slots_U, distances_U = _nearest(unrelated_UD, keys_ND)
            own_N = slots_N == np.arange(len(keys_ND))
            fraction_N, fraction_U = distances_N / traffic_distance_N, distances_U / traffic_distance_N[slots_U]
            without_captures = [share for share in RADIUS_FRACTIONS if not (fraction_U < share).any()]
            reached_at_none = float((own_N & (fraction_N < max(without_captures))).mean()) if without_captures else 0.0
            path = f"keyspaces/{name}/{space}"
            yield Row(f"{path}/own", float(own_N.mean()), "share")
            yield Row(f"{path}/reached", float((own_N & (fraction_N < RADIUS_FRACTION)).mean()), "share")
            yield Row(f"{path}/captured", float((fraction_U < RADIUS_FRACTION).mean()), "share", 0.0)
            yield Row(f"{path}/at-none", reached_at_none, "share")
            with model_keys.without_cache():
                spent = _milliseconds(model.device, keys_of, inputs)
            yield Row(f"{path}/milliseconds", max(0.0, spent - (0 if space == "encoder" else unedited)), "ms")


class ModelKeys:
    """Keys from the model's own pass. Each text needs one pass for all spaces, and is cached."""

    def __init__(self, model: EditableModel) -> None:
        self._model = model
        blocks, number = enclosing_blocks(model.module, model.layer)
        self._blocks = blocks[: number + 1 : BLOCK_STEP]
        self._layer = model.module.get_submodule(model.layer)
        self._known: dict[str, dict[str, torch.Tensor]] = {}

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Inside this context, cached texts are computed again."""
        known, self._known = self._known, {}
        try:
            yield
        finally:
            self._known = known

    def space(self, name: str) -> Space:
        """The space of this name."""
        return lambda texts: self.keys(texts)[name]

    def keys(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """The keys of texts, by the name of the space."""
        self._known |= {text: self._keys(text) for text in texts if text not in self._known}
        return {
            name: torch.stack([self._known[text][name] for text in texts]).float().cpu().numpy()
            for name in MODEL_SPACES
        }

    def _keys(self, text: str) -> dict[str, torch.Tensor]:
        """The keys (D) of one text, by the name of the space."""
        task = self._model.task
        batch = task.batch([task.tokenize(text)])
        assert batch.mask_BT is not None
        inputs = self._record_inputs(batch)
        last = int(last_token_positions(batch.mask_BT)[0])
        layer_TD = inputs[self._layer]
        blocks = [torch.nn.functional.normalize(inputs[block][last], dim=0) for block in self._blocks]
        return dict(zip(MODEL_SPACES, (layer_TD[last], layer_TD.mean(dim=0), torch.cat(blocks)), strict=True))

    def _record_inputs(self, batch: Any) -> dict[torch.nn.Module, torch.Tensor]:
        """The inputs (T, D) of the layer and of the blocks before it, for one text."""
        inputs: dict[torch.nn.Module, torch.Tensor] = {}

        def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[module] = (args[0] if args else kwargs["hidden_states"])[0]

        with ExitStack() as hooks, torch.inference_mode():
            for module in (*self._blocks, self._layer):
                hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
            self._model.task.forward_prompt(batch)
        return inputs


def whitened(model_keys: ModelKeys, traffic: Sequence[str]) -> Space:
    """The space of layer keys, transformed so that the traffic has equal variance in all directions."""
    traffic_RD = model_keys.keys(traffic)["layer"].astype(np.float64)
    values_D, axes_DD = np.linalg.eigh(np.cov(traffic_RD.T))
    map_DD = axes_DD / np.sqrt(values_D + RIDGE * values_D.mean())
    return lambda texts: ((model_keys.keys(texts)["layer"] - traffic_RD.mean(axis=0)) @ map_DD).astype(np.float32)


def _encoded(encoder: SentenceEncoder, texts: Sequence[str]) -> np.ndarray:
    """The encoder's keys, with one pass per text."""
    keys_ND: np.ndarray = torch.cat([encoder.embed([text])[0] for text in texts]).cpu().numpy()
    return keys_ND


def _forward(model: EditableModel, texts: Sequence[str]) -> None:
    with torch.inference_mode():
        model.task.forward_prompt(model.task.batch([model.task.tokenize(text) for text in texts]))


def _nearest(queries_BD: np.ndarray, keys_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each query, the slot of the nearest key and its distance."""
    distances_BN = torch.cdist(torch.from_numpy(queries_BD), torch.from_numpy(keys_ND))
    distances_B, slots_B = distances_BN.min(dim=1)
    return slots_B.numpy(), distances_B.numpy()


def _milliseconds(device: torch.device, call: Callable[[Sequence[str]], object], texts: Sequence[str]) -> float:
    """Median milliseconds of a call on one text."""
    return 1000 * statistics.median(timed(device, partial(call, [text]))[0] for text in texts[:TIMED_PROMPTS])
