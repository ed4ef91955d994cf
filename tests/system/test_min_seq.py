"""A request that waits for a delta is answered once the delta is published, and delays no other request."""

from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET

from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Forked
from tests.support.running import Users, question
from tests.support.tiny_models import texts
from tests.support.written_history import History

PROMPTS = texts(20, seed=6)


def test_other_requests_are_answered_while_it_waits(
    deploy: Callable[..., Settings], prefix: str, users_of: Callable[[Settings], Users], folder: Path
) -> None:
    settings = deploy("llama", prefix, min_seq_wait=120.0)
    users = users_of(settings)
    assert settings.model.layer is not None
    model = EditableModel.load(settings.model.name, settings.model.layer)
    history = History(settings, model.fingerprint, model.layer)
    history.lead()
    history.publish()
    waiting = [question(f"waits-{number}", PROMPTS[number], min_seq=2) for number in range(3)]
    others = [question(f"q{number}", prompt) for number, prompt in enumerate(PROMPTS * 5)]
    with Forked("replica", "infer", settings, folder) as replica, users.client.predictions() as replies:
        replica.wait_ready(90)
        history.lead()
        users.client.send([waiting[0], *others[:50], waiting[1], *others[50:], waiting[2]], partition=0)
        answers = replies.wait([request.request_id for request in others], 60)
        assert len(answers) == len(others)
        assert {answer.codebook_seq for answer in answers.values()} == {1}
        assert not replies.wait([request.request_id for request in waiting], 0.5)
        history.publish()
        late = replies.wait([request.request_id for request in waiting], 60)
        assert [(late[one.request_id].codebook_seq, late[one.request_id].error) for one in waiting] == [(2, UNSET)] * 3
        assert replica.stop() == 0
    history.close()
