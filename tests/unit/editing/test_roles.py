"""Roles: no author undoes feedback without the right, directly or indirectly, and a reproduction decides the same."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gracestream.pipeline.auth.authors import Author, AuthorsByName
from gracestream.pipeline.auth.signing import sign
from gracestream.schemas.deltas import UNSIGNED_STANDING, Role, Standing, decode_delta
from gracestream.schemas.messages import Feedback, Outcome, encode
from tests.support.chosen_queries import at
from tests.support.editing_stories import Story, new_story
from tests.support.examples import examples
from tests.support.recorded_history import Recorded
from tests.support.tiny_models import CODEBOOK

ANNS, BOBS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(2))


def allowed(*roles: Role) -> Standing:
    return Standing(roles=roles, signed=True)


USUAL, OWN, ANY = allowed("propose", "undo_own"), allowed("undo_own"), allowed("undo_any")


def correct(story: Story, name: str, place: float, author: str | None, standing: Any = USUAL) -> Outcome:
    whose: dict[str, Any] = {} if author is None else {"author": author}
    return story.take(Feedback(v=1, feedback_id=name, inputs=at(place, place), target="1", **whose), standing)


def undo(story: Story, name: str, author: str | None, standing: Any = OWN, **what: Any) -> Outcome:
    whose: dict[str, Any] = {} if author is None else {"author": author}
    return story.take(Feedback(v=1, feedback_id=name, **what, **whose), standing)


@pytest.mark.parametrize(
    ("author", "standing", "what", "expected_reason"),
    [
        ("ann", OWN, {"undo": "a"}, None),
        ("ann", OWN, {"undo_author": "ann"}, None),
        ("ann", OWN, {"undo": "early"}, None),
        (
            "bob",
            OWN,
            {"undo": "a"},
            "feedback 'a' is by 'ann', signed, and this undo is by 'bob', signed; to undo it, s",
        ),
        (
            "bob",
            OWN,
            {"undo_author": "ann"},
            "author 'bob' may not undo what 'ann' sent; to undo it, sign as an author ",
        ),
        ("bob", ANY, {"undo": "a"}, None),
        ("bob", ANY, {"undo_author": "ann"}, None),
        ("bob", UNSET, {"undo": "a"}, None),
        (
            "ann",
            allowed("propose"),
            {"undo": "a"},
            "author 'ann' may not undo without the role 'undo_own' or 'undo_any'",
        ),
        ("ann", allowed(), {"undo_author": "ann"}, "author 'ann' may not undo"),
        (
            None,
            UNSIGNED_STANDING,
            {"undo": "a"},
            "feedback 'a' is by 'ann', signed, and this undo is without an author; ",
        ),
        (None, UNSIGNED_STANDING, {"undo_author": "ann"}, "feedback without an author may not undo what 'ann' sent"),
        (None, UNSIGNED_STANDING, {"undo": "nameless"}, None),
        (
            None,
            UNSIGNED_STANDING,
            {"undo": "claimed"},
            "feedback 'claimed' is by 'carl', not signed, and this undo is without an",
        ),
        ("carl", UNSIGNED_STANDING, {"undo": "claimed"}, None),
        (
            "carl",
            UNSIGNED_STANDING,
            {"undo": "nameless"},
            "feedback 'nameless' is without an author, and this undo is by 'carl'",
        ),
        (
            "ann",
            UNSIGNED_STANDING,
            {"undo": "a"},
            "feedback 'a' is by 'ann', signed, and this undo is by 'ann', not signed",
        ),
        (
            "ann",
            UNSIGNED_STANDING,
            {"undo_author": "ann"},
            "feedback 'a' is by 'ann', signed, and this undo is by 'ann', not si",
        ),
        ("carl", OWN, {"undo": "claimed"}, None),
    ],
)
def test_who_may_take_back_whose(
    author: str | None, standing: Any, what: dict[str, str], expected_reason: str | None
) -> None:
    story = new_story()
    correct(story, "early", 9, "ann", UNSET)
    correct(story, "a", 0, "ann")
    correct(story, "nameless", 3, None, UNSIGNED_STANDING)
    correct(story, "claimed", 6, "carl", UNSIGNED_STANDING)
    outcome = undo(story, "u", author, standing, **what)
    assert (outcome.status == "rejected") == (expected_reason is not None), outcome.reason
    assert (expected_reason or "") in str(outcome.reason)
    assert len(story.engine.codebook) == (4 if expected_reason else 2 if what == {"undo_author": "ann"} else 3)


def test_a_correction_takes_the_role_propose() -> None:
    story = new_story()
    outcome = correct(story, "a", 0, "ann", allowed("undo_own", "undo_any"))
    assert outcome.reason == "author 'ann' may not make corrections without the role 'propose'"
    assert correct(story, "a", 0, "ann", allowed("propose")).status == "added"


def test_an_undo_of_ones_own_undo_does_not_take_back_anew_what_one_may_not() -> None:
    """Bob had the right to take back what Ann sent, gave it up himself, and lost the role."""
    story = new_story()
    correct(story, "a", 0, "ann")
    undo(story, "u", "bob", ANY, undo="a")
    undo(story, "v", "bob", OWN, undo="u")
    outcome = undo(story, "w", "bob", OWN, undo="v")
    assert outcome.status == "rejected"
    assert "feedback 'a', which would be undone again, is by 'ann', signed, and this undo is by" in str(outcome.reason)
    assert story.engine.codebook.entry_ids == ["a"]
    assert undo(story, "x", "bob", ANY, undo="v").status == "undone"


def test_what_a_moderator_took_back_its_author_does_not_bring_again() -> None:
    story = new_story()
    correct(story, "a", 0, "ann")
    undo(story, "u", "bob", ANY, undo="a")
    assert undo(story, "v", "ann", OWN, undo="u").status == "rejected"
    assert len(story.engine.codebook) == 0


names = st.sampled_from(["ann", "bob", None])
standings = st.sampled_from([OWN, UNSIGNED_STANDING, ANY, UNSET])
steps = st.lists(
    st.tuples(names, standings, st.integers(0, 6), st.sampled_from(["correct", "undo", "undo", "undo_author"])),
    min_size=3,
    max_size=8,
)


@examples(0.6)
@given(steps)
def test_what_is_newly_undone_is_always_the_senders_own(given_steps: list[tuple[str | None, Any, int, str]]) -> None:
    story = new_story()
    for number, (author, standing, which, kind) in enumerate(given_steps):
        memory, name = story.engine.memory, f"f{number}"
        before = memory.undone_ids()
        if kind == "correct" or number == 0:
            correct(story, name, number, author, USUAL if standing is OWN else standing)
            continue
        undo(story, name, author, standing, **{kind: f"f{which}" if kind == "undo" else ("ann", "bob")[which % 2]})
        if standing is OWN or standing is UNSIGNED_STANDING:
            for gone in memory.undone_ids() - before:
                assert memory.authors.get(gone) == author
                assert standing.signed or gone not in memory.signed_ids


class TestReplay:
    def test_it_decides_as_the_list_of_that_time_did(self) -> None:
        authors: AuthorsByName = {
            "ann": Author("ann", (ANNS.public_key(),)),
            "bob": Author("bob", (BOBS.public_key(),), roles=("undo_any",)),
        }
        history = Recorded(authors=authors)
        keys = {"ann": ANNS, "bob": BOBS}

        def send(name: str, author: str, **fields: Any) -> str:
            text = encode(Feedback(v=1, feedback_id=name, author=author, **fields))
            (outcome,) = history.send(sign(text, keys[author], CODEBOOK))
            assert outcome is not None
            return outcome.status

        assert send("a", "ann", inputs=at(0, 0), target="1") == "added"
        assert send("b", "bob", inputs=at(5, 5), target="1") == "rejected"
        assert history.undo("unsigned", "a").status == "rejected"
        assert send("u", "bob", undo="a") == "undone"
        authors["bob"] = Author("bob", (BOBS.public_key(),))
        assert send("v", "bob", undo="u") == "undone"
        assert send("w", "bob", undo="a") == "rejected"
        assert send("x", "bob", inputs=at(5, 5), target="1") == "added"
        authors.clear()
        assert history.undo("y", "x").status == "rejected"
        compared = history.reproduced().report
        assert compared.first_difference is None
        assert (compared.same_records, compared.same_without_delta) == (4, 4)
        assert history.engine.memory.signed_ids == {"a", "u", "v", "x"}

    def test_an_undo_that_was_not_allowed_is_the_first_difference(self) -> None:
        history = Recorded(authors={"ann": Author("ann", (ANNS.public_key(),))})
        text = encode(Feedback(v=1, feedback_id="a", author="ann", inputs=at(0, 0), target="1"))
        history.send(sign(text, ANNS, CODEBOOK))
        history.send(sign(encode(Feedback(v=1, feedback_id="u", author="ann", undo="a")), ANNS, CODEBOOK))
        cause = decode_delta(history.deltas[2]).cause
        assert cause is not UNSET
        history.rewrite(
            3, cause=type(cause)(feedback_id="u", offset=1, author="ann", undoes=("a",), standing=UNSIGNED_STANDING)
        )
        found = str(history.reproduced().report.first_difference)
        assert "it is rejected now: feedback 'a' is by 'ann', signed, and this undo is by 'ann', not signed" in found


def test_without_a_list_nothing_is_recorded_and_everything_is_allowed() -> None:
    history = Recorded()
    history.correct("a", (0, 0), 1)
    assert history.undo("u", "a").status == "undone"
    assert all(delta.cause is UNSET or delta.cause.standing is UNSET for delta in map(decode_delta, history.deltas))
