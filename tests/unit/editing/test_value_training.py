"""A value is trained as if the whole model ran, with nothing else a parameter, and twice the same to the bit."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gracestream.pipeline.codebook.lookup import CodebookLookup
from gracestream.pipeline.device import deterministic_algorithms
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.value_training import TrainedValue, ValueTrainingConfig, train_value, train_values
from gracestream.pipeline.model.activation_cache import ActivationCache
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.model.suffix_pass import SuffixPass, check_target
from gracestream.pipeline.model.tasks.base import InputError
from tests.support.tiny_models import LIMITS, MODEL, WORDS, correct, editable, index_of, new_codebook, texts

TEXT = texts(1, seed=3)[0]
TARGET = {"bert": "both"}
SHORT = ValueTrainingConfig(max_steps=12, stop_margin=1e9)


def target(kind: str) -> str:
    return TARGET.get(kind, WORDS[5])


def prepared(model: EditableModel, text: str, wanted: str) -> tuple[SuffixPass, torch.Tensor]:
    _, supervised = model.prepare_correction(text, wanted)
    nothing = new_codebook(model.fingerprint, model.layer)
    _, session, rest = model.suffix_runner.inspect(supervised, CodebookLookup(nothing, index_of(nothing)))
    return rest, session.outputs_BV[0]


def losses(model: EditableModel, kind: str, skip: bool) -> tuple[list[float], TrainedValue]:
    """The loss at each step, with only what depends on the value run, or the whole model."""
    rest, start_V = prepared(model, TEXT, target(kind))
    if not skip:
        rest = SuffixPass(model.prepare_correction(TEXT, target(kind))[1], ActivationCache([]))
    seen: list[float] = []

    def listening(*args: Any) -> Any:
        found, loss = check_target(*args)
        seen.append(found.loss)
        return found, loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gracestream.pipeline.model.suffix_pass.check_target", listening)
        return seen, train_value(model.suffix_runner, rest, start_V, SHORT)


def test_running_only_what_depends_on_the_value_changes_no_number(model: EditableModel, kind: str) -> None:
    quick, quick_value = losses(model, kind, skip=True)
    slow, slow_value = losses(model, kind, skip=False)
    assert len(quick) == SHORT.max_steps + 1
    np.testing.assert_allclose(quick, slow, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(quick_value.value_V, slow_value.value_V, atol=1e-3, rtol=1e-4)  # Adam magnifies rounding


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that copy what is there."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket.__name__ in ("clone", "cat", "lift_fresh")
        return func(*args, **(kwargs or {}))


def test_a_step_copies_as_much_whatever_the_number_of_blocks_that_it_leaves_out() -> None:
    """Neither their outputs, but for one that all of them give, nor the keys and values of their attention."""
    copies = {}
    for blocks in (3, 8):
        config = editable("llama").module.config
        config.num_hidden_layers, config.layer_types = blocks, None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = type(editable("llama").module)(config)
        layer = f"model.layers[{blocks - 1}].mlp.down_proj"
        model = EditableModel(module, editable("llama").task.tokenizer, layer, limits=LIMITS, fingerprint=MODEL)
        rest, start_V = prepared(model, TEXT, target("llama"))
        whole = SuffixPass(model.prepare_correction(TEXT, target("llama"))[1], ActivationCache([]))
        with Copies() as counted:  # type: ignore[no-untyped-call]
            loss = model.suffix_runner.check_value(rest, start_V).loss
        assert loss == pytest.approx(model.suffix_runner.check_value(whole, start_V).loss, rel=1e-4)
        copies[blocks] = counted.count
    assert copies[8] == copies[3]


def test_a_trained_value_makes_the_model_right_by_the_margin(model: EditableModel, kind: str) -> None:
    rest, start_V = prepared(model, TEXT, target(kind))
    before = model.suffix_runner.check_value(rest, start_V)
    trained = train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig())
    assert trained.converged
    assert 0 < trained.steps <= 100
    assert trained.target_check.margin >= 1.0
    assert trained.target_check.loss < before.loss
    found = model.suffix_runner.check_value(rest, torch.from_numpy(trained.value_V))
    assert found.margin == pytest.approx(trained.target_check.margin, abs=1e-4)


def test_the_weights_take_no_gradient_and_do_not_change(model: EditableModel, kind: str) -> None:
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    rest, start_V = prepared(model, TEXT, target(kind))
    started = start_V.clone()
    train_value(model.suffix_runner, rest, start_V, SHORT)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.module.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.module.state_dict().items())
    assert torch.equal(start_V, started)


def test_fault_step_time_grows_with_the_codebook_since_the_optimiser_holds_all_values(
    model: EditableModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimiser sees one parameter: the value."""
    given: list[tuple[int, ...]] = []
    adam = torch.optim.Adam

    def listening(parameters: Any, **fields: Any) -> Any:
        given.extend(tuple(parameter.shape) for parameter in parameters)
        return adam(parameters, **fields)

    monkeypatch.setattr(torch.optim, "Adam", listening)
    rest, start_V = prepared(model, TEXT, target(kind))
    train_value(model.suffix_runner, rest, start_V, SHORT)
    assert given == [tuple(start_V.shape)]


def test_training_twice_gives_the_same_bits_and_draws_no_random_number(model: EditableModel, kind: str) -> None:
    rest, start_V = prepared(model, TEXT, target(kind))
    state = torch.get_rng_state()
    values = []
    for _ in range(2):
        trained = train_value(model.suffix_runner, rest, start_V, SHORT)
        values.append((trained.value_V.tobytes(), trained.steps, trained.target_check))
        torch.get_rng_state()
    assert values[0] == values[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_training_in_a_fresh_model_gives_the_same_bits(kind: str) -> None:
    values = []
    for _ in range(2):
        model = editable(kind)
        values.append(train_value(model.suffix_runner, *prepared(model, TEXT, target(kind)), SHORT).value_V.tobytes())
    assert values[0] == values[1]


@pytest.mark.parametrize("kind", ["gpt2", "t5-decoder", "bert"])
def test_a_value_that_does_not_reach_the_label_has_not_converged(model: EditableModel, kind: str) -> None:
    rest, start_V = prepared(model, TEXT, target(kind))
    trained = train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig(max_steps=1, learning_rate=1e-6))
    assert (trained.converged, trained.steps) == (False, 1)
    assert trained.target_check.margin < 0


def test_training_that_diverges_ends_unconverged(gpt2_model: EditableModel) -> None:
    rest, start_V = prepared(gpt2_model, TEXT, WORDS[5])
    trained = train_value(gpt2_model.suffix_runner, rest, torch.full_like(start_V, torch.nan), ValueTrainingConfig())
    assert (trained.converged, trained.steps) == (False, 0)


def test_a_tie_is_not_right_even_without_a_margin() -> None:
    """In half precision two logits are often equal; training goes on until the label alone is on top."""
    found, loss = check_target(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]))
    assert (found.margin, found.predicts_target) == (0.0, False)
    assert float(loss) == pytest.approx(found.loss)


def test_a_tie_at_the_start_is_trained_away(gpt2_model: EditableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rest, start_V = prepared(gpt2_model, TEXT, WORDS[5])
    first = [True]

    def tied(logits_LC: torch.Tensor, label_L: torch.Tensor) -> Any:
        found, loss = check_target(logits_LC, label_L)
        return (dataclasses.replace(found, margin=0.0) if first.pop() else found, loss) if first else (found, loss)

    monkeypatch.setattr("gracestream.pipeline.model.suffix_pass.check_target", tied)
    assert train_value(gpt2_model.suffix_runner, rest, start_V, ValueTrainingConfig(stop_margin=0.0)).steps > 0


def test_fault_labels_compared_by_the_mean_of_their_token_ids(gpt2_model: EditableModel) -> None:
    """[10, 30] and [20, 20] have the same mean; they are different labels."""
    low, middle, high = (gpt2_model.task.decode_label((token,)) for token in (10, 20, 30))
    one, two = (
        gpt2_model.task.encode_target(TEXT, f"{low} {high}"),
        gpt2_model.task.encode_target(TEXT, f"{middle} {middle}"),
    )
    assert (one, two) == ((10, 30, 4), (20, 20, 4))
    assert np.mean(one) == np.mean(two)
    assert one != two


def test_a_target_is_said_whole_and_ended(gpt2_model: EditableModel) -> None:
    label = gpt2_model.task.encode_target(TEXT, f"  {WORDS[5]} {WORDS[9]} ")
    assert label[-1] == gpt2_model.task.tokenizer.eos_token_id
    assert gpt2_model.task.decode_label(label) == f"{WORDS[5]} {WORDS[9]}"


def test_a_prompt_and_target_that_exceed_the_context_are_rejected(gpt2_model: EditableModel) -> None:
    """Positions that the model does not have would be an index error in the middle of an edit."""
    wide = editable("gpt2", limits=dataclasses.replace(gpt2_model.task.limits, max_input_tokens=64))
    with pytest.raises(InputError, match="room for 64"):
        wide.prepare_correction(" ".join(WORDS[:62]), " ".join(WORDS[:4]))
    wide.prepare_correction(" ".join(WORDS[:59]), " ".join(WORDS[:4]))


def test_only_the_label_alone_decides_what_is_right(model: EditableModel, kind: str) -> None:
    """The verdict of a value agrees with what the model then says."""
    supervised = model.prepare_correction(TEXT, target(kind))[1]
    trained = train_value(model.suffix_runner, *prepared(model, TEXT, target(kind)), ValueTrainingConfig())
    with torch.no_grad(), model.adaptor.inject(supervised.batch, torch.from_numpy(trained.value_V)[None]):
        (logits_LC,) = model.task.logits(supervised)
    assert logits_LC.argmax(dim=1).tolist() == supervised.labels[0].tolist()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_step_runs_the_last_prompt_token_and_the_target_alone(model: EditableModel) -> None:
    """What lies before the token that takes the value never changes: its keys and values are kept."""
    label, supervised = model.prepare_correction(TEXT, f"{WORDS[5]} {WORDS[9]}")
    nothing = new_codebook(model.fingerprint, model.layer)
    _, session, rest = model.suffix_runner.inspect(supervised, CodebookLookup(nothing, index_of(nothing)))
    widths: list[int] = []
    model.module.get_submodule(model.layer).register_forward_hook(lambda _m, args, _o: widths.append(args[0].shape[1]))
    train_value(model.suffix_runner, rest, session.outputs_BV[0], SHORT)
    assert set(widths) == {len(label)}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_prompt_of_one_token_is_trained_as_any_other(model: EditableModel) -> None:
    rest, start_V = prepared(model, WORDS[3], WORDS[5])
    assert len(model.task.tokenize(WORDS[3])) == 1
    assert train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig()).converged


def test_a_layer_of_a_decoder_is_trained_without_its_encoder() -> None:
    model = editable("t5-decoder")
    rest, start_V = prepared(model, TEXT, WORDS[5])
    ran: list[int] = []
    model.module.encoder.register_forward_hook(lambda *_: ran.append(1))
    train_value(model.suffix_runner, rest, start_V, SHORT)
    assert not ran


def test_every_usual_model_is_trained_with_all_shortcuts(model: EditableModel) -> None:
    prepared(model, TEXT, "both" if model.task.query == "first" else WORDS[5])
    assert model.suffix_runner._optimisations == "all"


def test_training_as_on_a_gpu_gives_the_same_bits_each_time(
    model: EditableModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic kernels alone, and attention by plain products: here on the CPU."""
    rest, start_V = prepared(model, TEXT, target(kind))
    usual = train_value(model.suffix_runner, rest, start_V, SHORT)
    inside: list[tuple[bool, bool]] = []
    attention: Any = torch.backends.cuda

    def look() -> None:
        fused = attention.flash_sdp_enabled() or attention.mem_efficient_sdp_enabled()
        inside.append((torch.are_deterministic_algorithms_enabled(), fused))

    monkeypatch.setattr(
        "gracestream.pipeline.editing.value_training.deterministic_algorithms",
        lambda _: deterministic_algorithms(torch.device("cuda")),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of an operation that has no deterministic kernel
        found = [train_values(model.suffix_runner, rest, [start_V], SHORT, look)[0] for _ in range(2)]
    assert set(inside) == {(True, False)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert attention.flash_sdp_enabled()
    assert found[0].value_V.tobytes() == found[1].value_V.tobytes()
    np.testing.assert_allclose(found[0].value_V, usual.value_V, atol=1e-3, rtol=1e-4)


class TestHalfPrecision:
    """A model in float16, on the CPU: what is smaller than 3e-8 is 0 there, and what is larger than 65504 overflows."""

    @staticmethod
    def half(embeddings: float = 1.0, norm: float = 1.0) -> EditableModel:
        model = editable("llama")
        model.module.model.embed_tokens.weight.data *= embeddings
        model.module.model.norm.weight.data *= norm
        model.module.half()
        return EditableModel(model.module, model.task.tokenizer, model.layer, limits=LIMITS, fingerprint=MODEL)

    def test_gradients_too_small_for_float16_train_a_value_all_the_same(self) -> None:
        model = self.half(embeddings=2000, norm=1e-4)
        rest, start_V = prepared(model, TEXT, WORDS[5])
        value_1V = start_V[None].clone().requires_grad_()
        (gradient_1V,) = torch.autograd.grad(model.suffix_runner.evaluate(rest, value_1V)[0][1], value_1V)
        assert (gradient_1V == 0).float().mean() > 0.5, "this is what is to be helped"
        trained = train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig(max_steps=1, stop_margin=1e9))
        assert (trained.value_V != start_V.numpy()).mean() > 0.9

    def test_a_gradient_that_overflows_lowers_the_scale(self) -> None:
        model = self.half(norm=2000)
        rest, start_V = prepared(model, TEXT, WORDS[5])
        trained = train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig(max_steps=1, stop_margin=1e9))
        assert np.array_equal(trained.value_V, start_V.numpy()), "the first step was left out"
        trained = train_value(model.suffix_runner, rest, start_V, ValueTrainingConfig(max_steps=60))
        assert trained.converged

    def test_edits_of_a_model_in_float16_are_right(self) -> None:
        model = self.half()
        engine = EditEngine(model, "default")
        engine.apply(engine.lead_delta({}))
        statuses = [correct(engine, f"f{n}", text, WORDS[n])[0].status for n, text in enumerate(texts(4, seed=5))]
        assert set(statuses) <= {"added", "split"}
