"""The models of the speed benchmarks: three with random weights, and two public checkpoints."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gracestream.pipeline.experiments.data import CounterFactRow, QuestionRow, ZsreRow, read_rows
from gracestream.pipeline.experiments.tasks import COUNTERFACT_FILE, NQ_FILE, ZSRE_FILE
from gracestream.pipeline.model.batch import Prompt
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import load_settings
from gracestream.workers.bootstrap import load_model
from tests.bench.framework import BenchError, Options
from tests.bench.random_models import BERT, GPT2, T5, RandomModel, prompts

TOKENS = 20
"""Tokens of a prompt for a model with random weights."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model of a benchmark.

    Attributes:
        name: The name in rows and in `--only`.
        load: Loads the model onto a device.
        random: The architecture, if the weights are random.
    """

    name: str
    load: Callable[[str], EditableModel]
    random: RandomModel | None = None

    def prompts(self, model: EditableModel, count: int) -> list[Prompt]:
        """Prompts for this model: real questions for a trained model, `TOKENS` random tokens for random weights.

        Raises:
            DataError: The files of questions are missing.
            BenchError: The files have fewer than `count` questions.
        """
        if self.random is not None:
            return prompts(model, count, TOKENS, seed=1)
        texts = questions()
        if len(texts) < count:
            raise BenchError(f"the benchmark needs {count} questions, but the data have only {len(texts)}")
        return [model.task.tokenize(text) for text in texts[:count]]


def questions() -> list[str]:
    """Distinct questions and beginnings of sentences, written by people, in a fixed random order.

    Raises:
        DataError: The data files are missing.
    """
    texts = {row.question for row in read_rows(NQ_FILE, QuestionRow)}
    texts |= {text for row in read_rows(ZSRE_FILE, ZsreRow) for text in (row.src, row.rephrase)}
    texts |= {row.prompt for row in read_rows(COUNTERFACT_FILE, CounterFactRow)}
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return ordered


def load_known(name: str, query: str, device: str) -> EditableModel:
    """A model known by name, with queries from this source, on a device."""
    settings = load_settings(model=name, query_source=query, device=device, default_max_new_tokens=1)
    return load_model(settings.model, settings.editing.policy)


MODELS = (
    *(BenchModel(random_model.name, random_model.load, random_model) for random_model in (BERT, GPT2, T5)),
    BenchModel("smollm2", partial(load_known, "smollm2", "last")),
    BenchModel("minilm", partial(load_known, "intent", "first")),
)


def select_models(options: Options, models: Sequence[BenchModel]) -> Sequence[BenchModel]:
    """The models that `--only` selects.

    Raises:
        BenchError: No model has this name.
    """
    selected = [model for model in models if options.only in ("", model.name)]
    if not selected:
        raise BenchError(
            f"{options.only!r} is not a model of this benchmark; use {', '.join(model.name for model in models)}"
        )
    return selected
