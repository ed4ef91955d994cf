"""vLLM as a contender of the benchmark `serving`, with and without gracestream. Both run on one engine of vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.engines.base import CodebookView, Finished
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.vllm.engine import VllmEngine
from gracestream.pipeline.vllm.injection import InjectedLayer
from gracestream.pipeline.vllm.startup import start_engine
from gracestream.workers.bootstrap import checkpoint_from_settings

ARGUMENTS = "--enforce-eager --max-model-len 1024 --no-enable-prefix-caching --max-num-seqs {rows}"
"""No cached prefixes: all rounds send the same prompts. No compiler: turns wrap and unwrap the layer."""


class VllmContenders:
    """An engine of vLLM that answers with a codebook, or as if gracestream were not installed."""

    def __init__(self, model: EditableModel, settings: Settings, rows: int) -> None:
        chosen = settings.replace(vllm_args=ARGUMENTS.format(rows=rows))
        self._model, self._rows = model, rows
        self._llm = start_engine(model, checkpoint_from_settings(settings.model), chosen)

    def corrected(self, lookup: CodebookLookup) -> Any:
        """The engine of a replica."""
        return VllmEngine(self._llm, self._model, lookup, max_rows=self._rows, check_answers=True)

    @contextmanager
    def plain(self, lookup: CodebookLookup) -> Iterator[Any]:
        """vLLM alone: nothing is looked up, and inside this context the layer is not wrapped."""
        (wrapped,) = self._llm.apply_model(_unwrap)
        try:
            yield _Plain(self._llm, self._model, lookup, max_rows=self._rows, check_answers=False)
        finally:
            for parent, name, layer in wrapped:
                setattr(parent, name, layer)


class _Plain(VllmEngine[Any]):
    """Gives vLLM the requests as they are."""

    def _join(self, requests: Sequence[Any]) -> list[Finished[Any]]:
        return [finished for request in requests for finished in self._start(request, CodebookView(None, (), 0, 0))]


def _unwrap(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put each wrapped layer back; the parents, names and wrapped layers."""
    found: list[tuple[nn.Module, str, nn.Module]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, InjectedLayer)
    ]
    for parent, name, child in found:
        setattr(parent, name, child.layer)
    return found
