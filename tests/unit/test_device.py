"""A fault of the device is told from a fault of one input: only the second becomes an answer."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec import UNSET

from pipeline.clients import redis_client
from pipeline.codebook import Codebook, DeltaFault
from pipeline.device import DeviceFault, raise_if_broken
from pipeline.follower import Follower
from pipeline.index import KeyIndex
from pipeline.mirror import Mirror
from pipeline.radius_store import RadiusStore
from pipeline.serving import Record, Server
from pipeline.settings import load_settings
from schemas.messages import Prediction, Request, decode, encode
from tests.unit.engine.tiny import Failing, editable, texts


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
    ids=repr,
)
def test_an_error_that_leaves_a_dead_context_is_a_fault_of_the_device(error: RuntimeError) -> None:
    with pytest.raises(DeviceFault, match=r"^the device failed: ") as raised:
        raise_if_broken(error)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("a tensor of no shape"),
        ValueError("CUDA error: as a prompt may say"),
        MemoryError(),
    ],
    ids=repr,
)
def test_an_error_of_an_input_is_none(error: Exception) -> None:
    raise_if_broken(error)


@contextlib.contextmanager
def failing(error: Exception, room: int) -> Any:
    """A server of a model of which one layer fails, that layer, and a batch of four records."""
    model = editable("llama")
    layers = model.module.model.layers
    layers[2].mlp = Failing(layers[2].mlp, error, room)
    settings = load_settings()
    codebook = Codebook("default", model.fingerprint, model.layer)
    with redis_client(settings) as client:
        mirror = Mirror(
            codebook, KeyIndex(codebook, model.device), RadiusStore(client, settings), Follower(settings), settings
        )
        yield Server(model, mirror, settings, "replica"), layers[2].mlp


def batch(server: Server) -> Any:
    prompts = texts(4, seed=2)
    requests = [Request(v=1, request_id=f"q{number}", inputs=prompt) for number, prompt in enumerate(prompts)]
    work = server.read(Record(encode(one), "requests", 0, place, 0.0) for place, one in enumerate(requests))
    return work.questions


def answers(replies: Sequence[Any]) -> dict[str, Prediction]:
    return {prediction.request_id: prediction for prediction in (decode(reply.value, Prediction) for reply in replies)}


def test_a_dead_context_answers_nothing() -> None:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with failing(error, room=0) as (server, _), pytest.raises(DeviceFault, match="unspecified launch failure"):
        server.answer(batch(server))


def test_a_history_that_cannot_be_followed_answers_nothing() -> None:
    def settle() -> None:
        raise DeltaFault("delta 3 does not follow delta 1")

    with failing(RuntimeError("none"), room=4) as (server, layer), pytest.raises(DeltaFault, match="delta 3"):
        server.answer(batch(server), settle)
    assert not layer.batches, "nothing after the edited layer was run"


def test_a_batch_that_does_not_fit_is_answered_one_by_one() -> None:
    with failing(torch.OutOfMemoryError("CUDA out of memory"), room=1) as (server, layer):
        found = answers(server.answer(batch(server)))
    assert layer.batches[0] == 4
    assert set(layer.batches[1:]) == {1}
    assert sorted(found) == ["q0", "q1", "q2", "q3"]
    assert all(prediction.error is UNSET for prediction in found.values())


def test_a_request_that_does_not_fit_alone_is_told_so() -> None:
    with failing(torch.OutOfMemoryError("CUDA out of memory"), room=0) as (server, _):
        found = answers(server.answer(batch(server)))
    assert {prediction.error for prediction in found.values()} == {
        "the model failed: OutOfMemoryError: CUDA out of memory"
    }
