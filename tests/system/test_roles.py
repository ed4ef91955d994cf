"""Roles: who may propose and who may undo, in an editor that requires no signatures, and in a reproduction."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from gracestream.pipeline.client import SignedFeedback
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Feedback, encode
from tests.support.forked_commands import Command, status_of
from tests.support.signers import ANN, BOB, CARL, PROMPTS, Deployment, line, signed, signed_as

BEFORE = line("ann", ANN) + line("bob", BOB) + line("carl", CARL, roles=["undo_any"])
AFTER = line("bob", BOB, roles=[]) + line("carl", CARL, roles=["propose"])


def unsigned(feedback_id: str, **fields: Any) -> SignedFeedback:
    return SignedFeedback(feedback_id, encode(Feedback(v=1, feedback_id=feedback_id, **fields)))


@pytest.fixture
def running(deploy: Callable[..., Settings], prefix: str, folder: Path) -> Iterator[Deployment]:
    authors = folder / "authors.toml"
    authors.write_text(BEFORE)
    deployment = Deployment(deploy("llama", prefix, authors_file=str(authors)), folder)
    with deployment.editor as editor:
        editor.wait_ready(90)
        yield deployment
        deployment.users.close()


def is_rejected(running: Deployment, sent: SignedFeedback, reason: str) -> bool:
    (outcome,) = running.send(sent)
    return (outcome.status, outcome.seq, reason in str(outcome.reason)) == ("rejected", UNSET, True)


@pytest.mark.slow
def test_an_undo_needs_the_right_role_also_when_roles_change(running: Deployment, run: Callable[..., Command]) -> None:
    anns, anonymous = signed("ann", PROMPTS[0], ANN), unsigned("anonymous", inputs=PROMPTS[1], target="museum")
    assert {one.status for one in running.send(anns, anonymous)} == {"added"}
    by_ann = f"feedback {anns.feedback_id!r} is by 'ann', signed, and this undo is "
    assert is_rejected(running, unsigned("u0", undo=anns.feedback_id), by_ann + "without an author")
    assert is_rejected(running, unsigned("u1", undo=anns.feedback_id, author="eve"), by_ann + "by 'eve', not signed")
    assert is_rejected(running, unsigned("u2", undo_author="ann"), "may not undo what 'ann' sent")
    assert is_rejected(running, unsigned("u3", undo_author="ann", author="ann"), "it is not signed, and author 'ann'")
    assert is_rejected(running, signed_as("bob", BOB, undo=anns.feedback_id), by_ann + "by 'bob', signed")
    assert is_rejected(running, signed_as("bob", BOB, undo_author="ann"), "author 'bob' may not undo what 'ann' sent")
    assert is_rejected(running, signed("carl", PROMPTS[2], CARL), "'carl' may not make corrections without the role")
    assert running.deltas() == 2
    undo = signed_as("carl", CARL, undo=anns.feedback_id)
    assert [one.status for one in running.send(undo, unsigned("u4", undo="anonymous"))] == ["undone", "undone"]
    assert is_rejected(
        running, signed_as("ann", ANN, undo=undo.feedback_id), "is by 'carl', signed, and this undo is by"
    )

    running.authors.write_text(AFTER)
    running.editor.kill()
    running.editor.start()
    running.editor.wait_ready(90)
    assert is_rejected(running, signed_as("carl", CARL, undo=undo.feedback_id), "may not undo without the role")
    assert is_rejected(running, signed("bob", PROMPTS[2], BOB), "'bob' may not make corrections")
    assert is_rejected(running, unsigned("u5", undo=anns.feedback_id, author="ann"), by_ann + "by 'ann', not signed")
    assert running.send(signed("carl", PROMPTS[2], CARL))[0].status == "added"
    assert running.deltas() == 5
    replayed = run("replay", "--reproduce", "--json", settings=running.settings, authors_file="", within=180)
    assert status_of(replayed) == 0, replayed.stderr()
    found = json.loads(replayed.stdout())
    assert found["first_difference"] is None
    assert found["digest"] == found["recorded_digest"]
    # All rejections except that of the listed name without a signature, which is made by admission.
    assert found["same_without_delta"] == 10
