"""An edited generator says its target whatever generation settings its checkpoint came with."""

from typing import Any

import pytest
import torch

from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.checkpoint import ModelError
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.schemas.messages import Parameters
from tests.support.tiny_models import KINDS, LIMITS, MODEL, SPECIALS, WORDS, correct, editable, texts, tokenizer

TARGET = "train"  # which the prompt has, so that a penalty on repetition would tell


def edited_answer(kind: str, **settings: Any) -> str:
    """Correct one input of a model whose checkpoint has these settings, and ask again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = KINDS[kind].build()
    module.get_output_embeddings().weight.data[SPECIALS.index("</s>")] *= 4
    for name, value in settings.items():
        setattr(module.generation_config, name, value)
    names = tokenizer(KINDS[kind].special_tokens)
    model = EditableModel(module, names, KINDS[kind].layer, limits=LIMITS, fingerprint=MODEL)
    engine = EditEngine(model, "default")
    engine.apply(engine.lead_delta({}))
    outcome, _ = correct(engine, "f0", PROBE_TEXTS[0], TARGET)
    assert outcome.status == "added", outcome
    prompt = model.task.tokenize(PROBE_TEXTS[0])
    served = model.answer([prompt], [Parameters(max_new_tokens=6)], engine.lookup)[0]
    assert served.served_by is not None
    return str(served.answer.outputs.text)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5-encoder", "t5-decoder"])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0},
        {"encoder_repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 3.0},
        {"suppress_tokens": [len(SPECIALS) + WORDS.index("train")]},
        {"min_new_tokens": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_penalties_and_sampling_of_a_checkpoint_do_not_keep_an_edit_from_its_target(
    kind: str, settings: dict[str, Any]
) -> None:
    assert edited_answer(kind, **settings) == TARGET


@pytest.mark.parametrize("kind", ["t5-encoder", "t5-decoder"])
def test_a_token_that_a_checkpoint_forces_at_the_start_stands_before_the_target(kind: str) -> None:
    assert edited_answer(kind, forced_bos_token_id=SPECIALS.index("[CLS]")) in (TARGET, f"[CLS] {TARGET}")


def test_a_causal_classifier_is_queried_at_its_last_token() -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification  # noqa: PLC0415

    module = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=len(SPECIALS) + len(WORDS), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    model = EditableModel(module, tokenizer(), "transformer.h[1].mlp.c_fc", limits=LIMITS, fingerprint=MODEL)
    same_start = [model.task.tokenize(text) for text in PROBE_TEXTS if text.startswith("The ")]
    queries_BD = model.queries(same_start)
    assert torch.cdist(queries_BD, queries_BD).fill_diagonal_(1.0).min() > 1e-3


def test_a_model_without_weights_needs_an_encoder() -> None:
    model = editable("llama")
    with pytest.raises(ModelError, match="set GRACESTREAM_QUERY_SOURCE=encoder"):
        model.drop_weights()
    assert model.queries([model.task.tokenize(texts(1, seed=1)[0])]).device.type == "cpu"
