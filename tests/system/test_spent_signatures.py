"""A copy of a signed record has an outcome and no effect, whatever the outcome of the original."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gracestream.pipeline.client import SignedFeedback
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Outcome
from tests.support.forked_commands import Forked
from tests.support.running import deltas_in_log, headers_of, records
from tests.support.signers import ANN, BOB, CARL, PROMPTS, Deployment, line, signed, signed_as


@pytest.fixture
def running(deploy: Callable[..., Settings], prefix: str, folder: Path) -> Iterator[Deployment]:
    authors = folder / "authors.toml"
    authors.write_text(line("ann", ANN) + line("bob", BOB, per_minute=1))
    deployment = Deployment(deploy("llama", prefix, authors_file=str(authors), require_signature=True), folder)
    with deployment.editor as editor:
        editor.wait_ready(90)
        yield deployment
        deployment.users.close()


def killed_and_started(running: Deployment, _folder: Path) -> Generator[None, None, None]:
    yield
    running.editor.kill()
    running.editor.start()
    running.editor.wait_ready(90)


def killed_with_a_standby(running: Deployment, folder: Path) -> Generator[None, None, None]:
    with Forked("standby", "edit", running.settings, folder) as standby:
        standby.wait_ready(90)
        yield
        running.editor.kill()
        yield


def left_alone(_running: Deployment, _folder: Path) -> Generator[None, None, None]:
    yield


Interruption = Callable[[Deployment, Path], Generator[None, None, None]]


def rejected_as_copies(outcomes: list[Outcome]) -> bool:
    return all(one.status == "rejected" and "its signed id was used at offset " in str(one.reason) for one in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("interruption", [left_alone, killed_and_started, killed_with_a_standby])
def test_a_copy_of_a_record_without_effect_has_no_effect(
    running: Deployment, folder: Path, interruption: Interruption
) -> None:
    """An attacker keeps a record that could not take effect, and sends it when it could."""
    with closing(interruption(running, folder)) as interrupting:
        next(interrupting)
        early = [
            signed_as("ann", ANN, undo="later"),
            signed_as("ann", ANN, undo_author="ann"),
            signed("carl", PROMPTS[0], CARL),
        ]
        reasons = ["no feedback 'later' has had an effect", "no feedback of the author 'ann'", "'carl' is not on the"]
        for outcome, reason in zip(running.send(*early), reasons, strict=True):
            assert (outcome.status, reason in str(outcome.reason)) == ("rejected", True)
        (kept,) = running.send(signed_as("ann", ANN, feedback_id="later", inputs=PROMPTS[1], target="museum"))
        assert kept.status == "added"
        next(interrupting, None)
        running.authors.write_text(running.authors.read_text() + line("carl", CARL))
        before = running.deltas()
        for _ in range(2):
            assert rejected_as_copies(running.send(*early))
        assert running.deltas() == before
        assert running.send(signed("carl", PROMPTS[0], CARL))[0].status == "added", (
            "feedback with a new signature is accepted"
        )


def test_copies_do_not_count_towards_a_limit_and_a_record_over_the_limit_is_spent(running: Deployment) -> None:
    sent = [signed("bob", prompt, BOB) for prompt in PROMPTS[:2]]
    first, late = running.send(*sent)
    assert (first.status, late.status) == ("added", "rejected")
    assert str(late.reason).endswith("Z, signed with a new id")
    before = running.deltas()
    copied, spent = running.send(*sent)
    assert (copied.status, rejected_as_copies([spent])) == ("unchanged", True)
    counted = [edit for edit in records(running.settings, "edits") if headers_of(edit).get("author") == "bob"]
    assert len(counted) == 1
    assert running.deltas() == before


def test_a_copy_of_an_undone_correction_or_of_an_undo_changes_nothing(running: Deployment) -> None:
    wrong = signed("ann", PROMPTS[0], ANN)
    undo = signed_as("ann", ANN, undo=wrong.feedback_id)
    back = signed_as("ann", ANN, undo=undo.feedback_id)
    statuses = [outcome.status for outcome in running.send(wrong, undo, back)]
    assert statuses == ["added", "undone", "undone"]
    before = running.deltas()
    copies = {one.status for one in running.send(undo)}
    assert copies == {"rejected"}, "the undo is undone"
    assert [one.status for one in running.send(wrong, back)] == ["unchanged", "unchanged"]
    assert running.deltas() == before


def test_another_spelling_of_a_signed_record_is_not_accepted_and_spends_no_id(running: Deployment) -> None:
    sent = signed_as("ann", ANN, feedback_id="f", inputs=PROMPTS[0], target="museum")
    text = sent.record.decode()
    spellings = [
        text.replace(":", ": ", 1),
        " " + text,
        text + "\n",
        text.replace('"f"', '"\\u0066"'),
        '{"author":"ann",' + text.replace('"author":"ann",', "")[1:],
        text[:-1] + ',"author":"ann"}',
    ]
    for spelling in spellings:
        (rejected,) = running.send(SignedFeedback("f", spelling.encode()))
        assert "its signature is not valid for author 'ann'" in str(rejected.reason)
    assert len(deltas_in_log(running.settings)) == 1
    assert running.send(sent)[0].status == "added"
