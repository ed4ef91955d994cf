"""Who may edit, and how often: decided by the record, the list and Kafka's clock, and the same after every restart."""

import itertools
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.auth.admission import (
    RATE_WINDOW_MS,
    AcceptedFeedback,
    Admission,
    DuplicateFeedback,
    FeedbackRejected,
    SlidingWindowLimiter,
)
from gracestream.pipeline.auth.authors import Author, AuthorsError
from gracestream.pipeline.auth.signing import sign
from gracestream.pipeline.auth.spent_signatures import mark_of_id, mark_of_record
from gracestream.pipeline.editor.accepted_feedback import admission_from_settings
from gracestream.pipeline.settings import Settings, SettingsError, load_settings
from gracestream.schemas.messages import Feedback, decode, encode
from tests.support.examples import examples

CODEBOOK = "default"
ANNS, ANNS_NEW, BOBS, STRANGERS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4))
AUTHORS = {
    "ann": Author("ann", (ANNS.public_key(), ANNS_NEW.public_key())),
    "bob": Author("bob", (BOBS.public_key(),), per_minute=1),
}
NOON = 1_800_000_000_000
FRESH = itertools.count()
"""Ids and offsets that were not there before."""
MANY = examples(2)


def admission(authors: Any = AUTHORS, earlier: Iterable[AcceptedFeedback] = (), **chosen: Any) -> Admission:
    return Admission(
        CODEBOOK,
        None if authors is None else lambda: authors,
        accepted_since=lambda since: [one for one in earlier if one.time_ms > since],
        **{"require_signature": False, "per_minute": 0, "marks": lambda _: (), **chosen},
    )


def record(
    author: str | None = None,
    key: Ed25519PrivateKey | None = None,
    codebook: str = CODEBOOK,
    feedback_id: str | None = None,
    target: str = "y",
) -> bytes:
    fields: dict[str, Any] = {} if author is None else {"author": author}
    name = feedback_id or f"f{next(FRESH)}"
    text = encode(Feedback(v=1, feedback_id=name, inputs="x", target=target, **fields))
    return text if key is None else sign(text, key, codebook)


def admit(judge: Admission, raw: bytes, time: int = NOON, offset: int | None = None) -> AcceptedFeedback:
    return judge.accept(decode(raw, Feedback), raw, next(FRESH) if offset is None else offset, time)


def rejected(judge: Admission, raw: bytes, time: int = NOON, offset: int | None = None) -> FeedbackRejected:
    with pytest.raises(FeedbackRejected) as caught:
        admit(judge, raw, time, offset)
    assert "\n" not in str(caught.value)
    return caught.value


def rejection_reason(judge: Admission, raw: bytes, time: int = NOON) -> str:
    return str(rejected(judge, raw, time))


class TestSignatures:
    @pytest.mark.parametrize("required", [True, False])
    @pytest.mark.parametrize(("author", "key"), [("ann", ANNS), ("ann", ANNS_NEW), ("bob", BOBS)])
    def test_a_listed_author_is_let_in_by_any_of_his_keys(
        self, author: str, key: Ed25519PrivateKey, required: bool
    ) -> None:
        assert admit(admission(require_signature=required), record(author, key)).author == author

    @pytest.mark.parametrize("required", [True, False])
    @pytest.mark.parametrize(
        ("raw", "reason"),
        [
            (record("ann", STRANGERS), "its signature is not valid for author 'ann'"),
            (record("ann", BOBS), "its signature is not valid for author 'ann'"),
            (record("ann", ANNS, "another codebook"), "its signature is not valid for author 'ann'"),
            (record("ann", ANNS).replace(b'"y"', b'"z"'), "its signature is not valid for author 'ann'"),
            (record("ann", ANNS).replace(b'"ann"', b'"bob"'), "its signature is not valid for author 'bob'"),
            (record("ann", ANNS).replace(b'{"v"', b'{"later":1,"v"'), "its signature is not valid for author 'ann'"),
            (record("ann")[:-1] + b',"signature":""}', "its signature is not valid for author 'ann'"),
            (record("mallory", STRANGERS), "author 'mallory' is not on the list of authors"),
            (record(None, ANNS), "it is signed and names no author"),
            (record("ann"), "it is not signed"),
        ],
    )
    def test_anything_else_that_claims_to_be_a_listed_authors_is_rejected(
        self, raw: bytes, reason: str, required: bool
    ) -> None:
        assert reason in rejection_reason(admission(require_signature=required), raw)

    def test_who_is_not_on_the_list_must_sign_only_where_signatures_are_required(self) -> None:
        for author in (None, "mallory"):
            assert admit(admission(), record(author)).author == (author or "")
            assert "it is not signed" in rejection_reason(admission(require_signature=True), record(author))

    def test_without_a_list_a_signature_cannot_be_checked_and_all_else_is_let_in(self) -> None:
        assert admit(admission(None), record("ann")).author == "ann"
        assert "no list of authors to check signatures by" in rejection_reason(admission(None), record("ann", ANNS))

    def test_a_key_taken_off_the_list_is_rejected_from_the_next_record_on(self) -> None:
        authors = dict(AUTHORS)
        judge = admission(authors)
        admit(judge, record("ann", ANNS))
        authors["ann"] = Author("ann", (ANNS_NEW.public_key(),))
        assert "not valid for author 'ann'" in rejection_reason(judge, record("ann", ANNS))
        admit(judge, record("ann", ANNS_NEW))
        del authors["ann"]
        assert "not on the list" in rejection_reason(judge, record("ann", ANNS_NEW))


class TestSpent:
    def test_a_copy_is_rejected_and_names_the_first(self) -> None:
        judge, raw = admission(), record("ann", ANNS)
        admit(judge, raw, offset=7)
        found = rejected(judge, raw, offset=9)
        assert isinstance(found, DuplicateFeedback)
        assert (found.first_offset, found.mark) == (7, None)
        assert str(found).startswith("its signed id was used at offset 7 already; ")

    def test_a_record_that_is_read_again_after_a_failure_is_no_copy(self) -> None:
        judge, raw = admission(), record("ann", ANNS)
        first = admit(judge, raw, offset=7)
        judge.reset()
        assert admit(judge, raw, offset=7) == first

    def test_another_text_under_a_spent_id_is_rejected(self) -> None:
        judge = admission()
        admit(judge, record("ann", ANNS, feedback_id="f"))
        assert isinstance(rejected(judge, record("ann", ANNS_NEW, feedback_id="f", target="z")), DuplicateFeedback)

    def test_nobody_spends_the_ids_of_others(self) -> None:
        judge = admission()
        admit(judge, record("bob", BOBS, feedback_id="f"))
        admit(judge, record(None, feedback_id="f"))
        for forged in (record("ann", STRANGERS, feedback_id="f"), record("ann", feedback_id="f")):
            rejected(judge, forged)
        admit(judge, record("ann", ANNS, feedback_id="f"))

    def test_what_is_not_signed_is_not_spent(self) -> None:
        judge, raw = admission(), record("mallory")
        assert admit(judge, raw).mark is admit(judge, raw).mark is None

    @pytest.mark.parametrize("before", [{}, {"ann": Author("ann", (ANNS_NEW.public_key(),))}], ids=["name", "key"])
    def test_what_was_rejected_before_its_author_was_listed_is_spent(self, before: dict[str, Author]) -> None:
        authors = dict(before)
        judge, raw = admission(authors), record("ann", ANNS)
        assert rejected(judge, raw, offset=3).mark == mark_of_record(raw)
        assert rejected(judge, raw, offset=4).mark is None, "a copy spends nothing more"
        authors["ann"] = AUTHORS["ann"]
        found = rejected(judge, raw, offset=5)
        assert isinstance(found, DuplicateFeedback)
        assert found.first_offset == 3
        admit(judge, record("ann", ANNS))

    def test_what_was_rejected_when_there_was_no_list_is_spent(self) -> None:
        raw = record("ann", ANNS)
        mark = rejected(admission(None), raw, offset=3).mark
        assert isinstance(rejected(admission(marks=lambda _: [(0, mark, 3)]), raw, offset=4), DuplicateFeedback)

    def test_what_a_limit_rejects_is_spent_and_a_copy_counts_against_no_limit(self) -> None:
        judge, sent, late = admission(), record("bob", BOBS), record("bob", BOBS)
        admit(judge, sent, NOON)
        found = rejected(judge, late, NOON, offset=8)
        assert str(found).endswith("after 2027-01-15T08:01:00Z, signed with a new id")
        assert found.mark is not None
        for raw in (sent, late):
            assert isinstance(rejected(judge, raw, NOON + RATE_WINDOW_MS), DuplicateFeedback)
        admit(judge, record("bob", BOBS), NOON + RATE_WINDOW_MS)

    def test_an_editor_knows_what_its_predecessors_spent(self) -> None:
        raw, log = record("ann", ANNS), list[tuple[int, bytes | None, int]]()
        standby = admission(marks=lambda since: [one for one in log if one[0] >= since])
        standby.catch_up()
        log += [(10, None, 6), (11, admit(admission(), raw, offset=7).mark, 7)]
        found = rejected(standby, raw, offset=9)
        assert isinstance(found, DuplicateFeedback)
        assert found.first_offset == 7


def admission_of(settings: Settings) -> Admission:
    return admission_from_settings(settings.auth, settings.kafka, settings.model.codebook)


class TestSettings:
    def test_signatures_need_a_list(self) -> None:
        with pytest.raises(SettingsError, match=r"GRACESTREAM_REQUIRE_SIGNATURE needs .* set GRACESTREAM_AUTHORS_FILE"):
            admission_of(load_settings(require_signature=True))

    def test_a_list_that_cannot_be_read_is_an_error_at_start(self, tmp_path: Path) -> None:
        with pytest.raises(AuthorsError, match="cannot be read"):
            admission_of(load_settings(authors_file=str(tmp_path / "none.toml")))


class TestLimit:
    def test_it_says_whose_it_is_and_when_to_send_again(self) -> None:
        judge = admission(per_minute=2)
        for time in (NOON, NOON + 20_400):
            admit(judge, record("carl"), time)
        said = rejection_reason(judge, record("carl"), NOON + 30_000)
        assert said == "author 'carl' is limited to 2 a minute; send this again after 2027-01-15T08:01:00Z"
        admit(judge, record("carl"), NOON + RATE_WINDOW_MS)
        assert "after 2027-01-15T08:01:21Z" in rejection_reason(judge, record("carl"), NOON + RATE_WINDOW_MS)

    def test_what_is_rejected_counts_against_nothing(self) -> None:
        judge = admission(per_minute=1)
        admit(judge, record("carl"), NOON)
        for time in range(NOON, NOON + RATE_WINDOW_MS, 1000):
            rejection_reason(judge, record("carl"), time)
        admit(judge, record("carl"), NOON + RATE_WINDOW_MS)

    def test_forged_records_do_not_use_up_an_authors_share(self) -> None:
        judge = admission(per_minute=1)
        for forged in (record("ann"), record("ann", STRANGERS)):
            rejection_reason(judge, forged)
        admit(judge, record("ann", ANNS))

    def test_a_listed_author_may_have_a_limit_of_his_own(self) -> None:
        authors = {**AUTHORS, "ann": Author("ann", (ANNS.public_key(),), per_minute=0)}
        judge = admission(authors, per_minute=3)
        for _ in range(10):
            admit(judge, record("ann", ANNS))
        admit(judge, record("bob", BOBS))
        assert "limited to 1 a minute" in rejection_reason(judge, record("bob", BOBS))

    def test_records_without_an_author_share_one(self) -> None:
        judge = admission(per_minute=2)
        admit(judge, record(None))
        admit(judge, record(None))
        assert "feedback without an author is limited to 2" in rejection_reason(judge, record(None))
        admit(judge, record("carl"))

    def test_a_clock_that_goes_back_gives_nobody_more(self) -> None:
        judge = admission(per_minute=1)
        admit(judge, record("carl"), NOON)
        rejection_reason(judge, record("carl"), NOON - 5 * RATE_WINDOW_MS)
        admit(judge, record("dora"), NOON + 2 * RATE_WINDOW_MS)
        admit(judge, record("carl"), NOON)
        rejection_reason(judge, record("carl"), NOON + 2 * RATE_WINDOW_MS)


steps = st.lists(
    st.tuples(
        st.sampled_from(["", "ann", "bob"]),
        st.integers(-20_000, 40_000) | st.sampled_from([0, RATE_WINDOW_MS - 1, RATE_WINDOW_MS, RATE_WINDOW_MS + 1]),
    ),
    max_size=40,
)


def decisions(
    given: list[tuple[str, int]], limit: int, restarts: Collection[int] = ()
) -> list[AcceptedFeedback | None]:
    """Each record's admission, by an editor that is restarted before some of them and reads what was admitted."""
    window, time = SlidingWindowLimiter(), NOON
    made: list[AcceptedFeedback | None] = []
    for number, (author, later) in enumerate(given):
        time += later
        if number in restarts:
            window = SlidingWindowLimiter(
                one for one in made if one is not None and one.time_ms > time - RATE_WINDOW_MS
            )
        try:
            made.append(window.accept(author, time, limit))
        except FeedbackRejected:
            made.append(None)
    return made


class TestLastMinute:
    @MANY
    @given(steps, st.integers(1, 4), st.sets(st.integers(0, 39)))
    def test_restarts_change_no_decision(self, given: list[tuple[str, int]], limit: int, restarts: set[int]) -> None:
        assert decisions(given, limit) == decisions(given, limit, restarts)

    @MANY
    @given(steps, st.integers(1, 4))
    def test_no_minute_has_more_than_the_limit_and_none_is_rejected_for_less(
        self, given: list[tuple[str, int]], limit: int
    ) -> None:
        made = decisions(given, limit)
        time = NOON
        for number, ((author, later), admitted) in enumerate(zip(given, made, strict=True)):
            time += later
            before = [one for one in made[:number] if one is not None]
            now = max([time, *(one.time_ms for one in before)])
            own = sum(one.author == author and now - RATE_WINDOW_MS < one.time_ms <= now for one in before)
            assert (admitted is not None) == (own < limit)
            assert admitted is None or admitted.time_ms == now

    @given(steps)
    def test_without_a_limit_all_are_admitted(self, given: list[tuple[str, int]]) -> None:
        assert None not in decisions(given, 0)


class Tick(int):
    """A time that counts how often times are compared, also within C code."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Tick.comparisons += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Tick.comparisons += 1
        return int(self) > int(other)

    def __le__(self, other: int) -> bool:
        Tick.comparisons += 1
        return int(self) <= int(other)

    def __ge__(self, other: int) -> bool:
        Tick.comparisons += 1
        return int(self) >= int(other)


class TestCost:
    @pytest.mark.parametrize("limit", [0, 500])
    @pytest.mark.parametrize("authors", [1, 700])
    def test_a_decision_compares_as_many_times_however_many_records_the_minute_has(
        self, authors: int, limit: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tick, "comparisons", 0)
        window, records = SlidingWindowLimiter(), 3000
        for number in range(records):
            with suppress(FeedbackRejected):
                window.accept(f"author-{number % authors}", Tick(NOON + number), limit)
        assert Tick.comparisons <= 4 * records
        assert len(window) == (limit if limit and authors == 1 else records)

    def test_nothing_is_kept_of_who_sent_nothing_in_the_last_minute(self) -> None:
        window = SlidingWindowLimiter()
        for number in range(5000):
            window.accept(f"author-{number}", NOON + number * 1000, 1)
        assert len(window) == window.author_count == 60


def test_an_editor_takes_up_the_minute_of_its_predecessor() -> None:
    earlier = [
        AcceptedFeedback("carl", NOON - 1000),
        AcceptedFeedback("carl", NOON - RATE_WINDOW_MS - 1),
        AcceptedFeedback("dora", NOON),
    ]
    judge = admission(earlier=earlier, per_minute=1)
    rejection_reason(judge, record("carl"), NOON)
    admit(judge, record("ed"), NOON)
    judge.reset()
    rejection_reason(judge, record("dora"), NOON + 1)


def test_the_headers_of_an_outcome_tell_all_that_counts() -> None:
    assert AcceptedFeedback("zoë", NOON).headers() == [("author", "zoë".encode()), ("admitted", str(NOON).encode())]
    signed = AcceptedFeedback("ann", NOON, mark_of_id("ann", "f"))
    assert signed.headers()[2:] == [("spends", mark_of_id("ann", "f").hex().encode())]
