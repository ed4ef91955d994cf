"""A device fault ends the worker: its current records get no answer or outcome, and are not committed."""

import asyncio
import threading

import pytest
import torch

from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.editor.accepted_feedback import admission_from_settings
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.observability.health import Health
from gracestream.pipeline.settings import Settings
from gracestream.workers.bootstrap import WorkerContext
from gracestream.workers.editor import build_editor
from gracestream.workers.inference import build_replica
from tests.support.running import Users, flag, members, outcomes_in_log, question, records, wait_until
from tests.support.tiny_models import Failing, editable, texts

PROMPTS = texts(6, seed=4)


@pytest.fixture
def broken() -> EditableModel:
    """A model whose device fails in the last layer."""
    model = editable("llama")
    layers = model.module.model.layers
    layers[2].mlp = Failing(layers[2].mlp, torch.AcceleratorError("CUDA error: unspecified launch failure"), room=0)
    return model


def test_a_replica_ends_with_the_reason_and_leaves_its_batch(
    deployment: Settings, users: Users, broken: EditableModel
) -> None:
    users.client.send([question(f"q{number}", prompt) for number, prompt in enumerate(PROMPTS)])
    worker = WorkerContext("replica", Health(), broken, threading.Event())
    broken.module.model.layers[2].mlp.room = len(PROMPTS)  # the probe of the engine passes
    replica = build_replica(worker, deployment)
    broken.module.model.layers[2].mlp.room = 0
    assert asyncio.run(replica.run()) == 1
    assert not worker.health.ready
    assert worker.health.reason == "the device failed: CUDA error: unspecified launch failure"
    assert records(deployment, "predictions") == []
    wait_until(lambda: not members(deployment))

    mended = WorkerContext("replica", Health(), editable("llama"), threading.Event())

    async def serve() -> int:
        running = asyncio.create_task(build_replica(mended, deployment).run())
        while len(await asyncio.to_thread(records, deployment, "predictions")) < len(PROMPTS):
            await asyncio.sleep(0.1)
        mended.stop.set()
        return await running

    assert asyncio.run(serve()) == 0


def test_an_editor_ends_and_its_feedback_is_decided_by_the_next(
    deployment: Settings, users: Users, broken: EditableModel
) -> None:
    users.client.send([flag("f", PROMPTS[0], "river")])
    for model, expected in ((broken, []), (editable("llama"), ["f"])):
        stop = threading.Event()
        editor = build_editor(
            WorkerContext("editor", Health(), model, stop),
            deployment,
            admission_from_settings(deployment.auth, deployment.kafka, deployment.model.codebook),
        )
        if expected:
            working = threading.Thread(target=editor.run, args=[stop])
            working.start()
            while not outcomes_in_log(deployment):
                pass
            stop.set()
            working.join()
        else:
            with pytest.raises(DeviceLostError, match="unspecified launch failure"):
                editor.run(stop)
        assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == expected
