"""Decides whether a feedback record is accepted, before the engine sees it (docs/explanation/security-model.md).

A rejected record has no effect; its outcome has the status `rejected` and the reason. A record is rejected if

- it is signed, but the signature is not valid for these bytes and a key of the listed author that it names;
- it is not signed, and signatures are required, or the author that it names is on the list. Nobody else can use a
  listed name;
- it is signed, and its id is spent: a signed record counts once (`pipeline.auth.spent_signatures`);
- its author has reached the limit of accepted records per minute. Records without an author share one limit. An author
  on the list may have a limit of their own.

An accepted record carries the roles of its sender. Whether they permit its action is decided by the engine
(`pipeline.editing.roles`).

Guarantees of the rate limit:

1. Time is the LogAppendTime of `feedback`, from the clock of the Kafka broker, never from the editor. An editor with a
   backlog decides the same as one without.
2. The window slides. An accepted record counts against the records of the 60 s after it, whatever its outcome. A
   rejected record does not count.
3. The limit survives a change of editors. The outcome of an accepted record has its author and its time as headers, in
   the same transaction. Before its first record, an editor reads the headers of the last minute from `edits`.
4. Times never decrease. If the clock of a new partition leader is behind, a record counts as no earlier than the
   accepted records before it.

Not promised:

- The same decision when a record is read again. The list of authors may have changed; `edits` has the first decision.
- A limit for senders that need not sign. They can name another author in each record.
"""

import datetime as dt
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from gracestream.pipeline.auth.authors import Author, AuthorsByName
from gracestream.pipeline.auth.signing import has_signature, verify
from gracestream.pipeline.auth.spent_signatures import MarkReader, SpentMarks, mark_header, mark_of_id, mark_of_record
from gracestream.pipeline.errors import UserError
from gracestream.schemas import headers
from gracestream.schemas.deltas import UNSIGNED_STANDING, Standing
from gracestream.schemas.messages import Feedback

RATE_WINDOW_MS = 60_000
"""Length of the window of the rate limit, in milliseconds like Kafka's timestamps."""


class FeedbackRejected(UserError):
    """Feedback was rejected; the text gives the reason. `mark` is the mark that its outcome spends, if any."""

    def __init__(self, reason: str, mark: bytes | None = None) -> None:
        super().__init__(reason)
        self.mark = mark


class DuplicateFeedback(FeedbackRejected):
    """A signed record has an id that the feedback at offset `first_offset` has spent."""

    def __init__(self, first_offset: int) -> None:
        super().__init__(
            f"its signed id was used at offset {first_offset} already; `edits` has its outcome; to send it again,"
            " sign with a new id"
        )
        self.first_offset = first_offset


@dataclass(frozen=True, slots=True)
class AcceptedFeedback:
    """An accepted record.

    Attributes:
        author: Author that the record names; empty if it names none.
        time_ms: Time in milliseconds at which it counts towards the rate limit.
        mark: Mark of its id, which it spends; None if it is not signed.
        standing: Roles of the sender; UNSET if there is no list of authors.
    """

    author: str
    time_ms: int
    mark: bytes | None = None
    standing: Standing | UnsetType = UNSET

    def headers(self) -> list[tuple[str, bytes]]:
        """The headers of the outcome, from which the next editor restores the rate limit and the spent marks."""
        rate_headers = [
            (headers.AUTHOR_HEADER, self.author.encode()),
            (headers.ACCEPTED_AT_HEADER, str(self.time_ms).encode()),
        ]
        return rate_headers if self.mark is None else [*rate_headers, mark_header(self.mark)]


class SlidingWindowLimiter:
    """The accepted records of the last minute, for the rate limit.

    Each record is added once and removed once, so the amortised cost of a decision is constant.
    """

    def __init__(self, accepted: Iterable[AcceptedFeedback] = ()) -> None:
        self._accepted: deque[AcceptedFeedback] = deque()
        self._times_by_author: dict[str, deque[int]] = {}
        """Times of the records by author, in ascending order. An author without a record has no item."""
        for record in sorted(accepted, key=lambda record: record.time_ms):
            self._add(record)

    def __len__(self) -> int:
        return len(self._accepted)

    @property
    def author_count(self) -> int:
        """Number of authors with a record in the window."""
        return len(self._times_by_author)

    def accept(self, author: str, time_ms: int, limit: int | None) -> AcceptedFeedback:
        """Count one more record of an author at `time_ms`, and return it. A `limit` of None or 0 means no limit.

        Raises:
            FeedbackRejected: the author has `limit` records in the window already.
        """
        if self._accepted:
            time_ms = max(time_ms, self._accepted[-1].time_ms)  # guarantee 4
        start, own = time_ms - RATE_WINDOW_MS, self._times_by_author.get(author, ())
        # The author's times are in order, so at least `limit` of them are in the window if and only if the `limit`-th
        # newest is in it. `own` may hold older times, because the window is trimmed only below.
        if limit and len(own) >= limit and own[-limit] > start:
            # That record leaves the window at its time plus the window. Adding 999 rounds up to a full second.
            retry_at = dt.datetime.fromtimestamp((own[-limit] + RATE_WINDOW_MS + 999) // 1000, dt.UTC)
            sender = f"author {author!r}" if author else "feedback without an author"
            raise FeedbackRejected(
                f"{sender} is limited to {limit} a minute; send this again after {retry_at:%Y-%m-%dT%H:%M:%SZ}"
            )
        while self._accepted and self._accepted[0].time_ms <= start:
            self._drop_oldest()
        accepted = AcceptedFeedback(author, time_ms)
        self._add(accepted)
        return accepted

    def _add(self, accepted: AcceptedFeedback) -> None:
        self._accepted.append(accepted)
        self._times_by_author.setdefault(accepted.author, deque()).append(accepted.time_ms)

    def _drop_oldest(self) -> None:
        """Remove the oldest record, which is also the oldest of its author."""
        author = self._accepted.popleft().author
        own = self._times_by_author[author]
        own.popleft()
        if not own:
            del self._times_by_author[author]


class Admission:
    """Accepts or rejects feedback records, one after the other, in the order of the log.

    Args:
        codebook: Name of the codebook that signatures must be for.
        authors: Returns the current list of authors. None: there is no list.
        require_signature: Reject unsigned records.
        per_minute: Limit of accepted records per minute for each author without an own limit; None: no limit.
        accepted_since: Reads from `edits` the records accepted since a time in milliseconds.
        marks: Reads from `edits` the marks that earlier records have spent.
    """

    def __init__(
        self,
        codebook: str,
        authors: Callable[[], AuthorsByName] | None,
        *,
        require_signature: bool,
        per_minute: int | None,
        accepted_since: Callable[[int], Iterable[AcceptedFeedback]],
        marks: MarkReader,
    ) -> None:
        self._codebook, self._authors = codebook, authors
        self._require_signature, self._per_minute, self._accepted_since = require_signature, per_minute, accepted_since
        self._limiter: SlidingWindowLimiter | None = None
        self._spent_marks, self._has_read_marks = SpentMarks(marks), False

    def reset(self) -> None:
        """Forget what was read from `edits`; the next record reads it again, since another editor may have written."""
        self._limiter, self._has_read_marks = None, False

    def catch_up(self) -> None:
        """Read the spent marks from `edits`. Call it before the first record, because a long topic takes time.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        if self._authors is not None:  # without a list, every signed record is rejected, so no mark is needed
            self._spent_marks.catch_up()

    def accept(self, feedback: Feedback, record: bytes, offset: int, time_ms: int) -> AcceptedFeedback:
        """Accept a record.

        Args:
            feedback: The decoded record.
            record: The bytes of the record.
            offset: Its offset in `feedback`.
            time_ms: Its Kafka timestamp in milliseconds.

        Raises:
            DuplicateFeedback: the record is signed, and its id is spent.
            FeedbackRejected: the record is rejected for another reason.
            KafkaError: `edits` cannot be read.
        """
        name = "" if feedback.author is UNSET else feedback.author
        try:
            author = self._verify_author(feedback, name, record)
        except FeedbackRejected as rejection:
            raise FeedbackRejected(str(rejection), self.unverified_mark(record, offset)) from None
        mark = None if author is None else self._spend(mark_of_id(name, feedback.feedback_id), record, offset)
        limit = self._per_minute if author is None or author.per_minute is None else author.per_minute
        if self._limiter is None:
            self._limiter = SlidingWindowLimiter(self._accepted_since(time_ms - RATE_WINDOW_MS))
        try:
            accepted = self._limiter.accept(name, time_ms, limit)
        except FeedbackRejected as rejection:
            # The id is spent also by a record over the limit, so a repetition needs another id.
            raise FeedbackRejected(str(rejection) + (", signed with a new id" if mark else ""), mark) from None
        return replace(accepted, mark=mark, standing=self._standing(author))

    def unverified_mark(self, record: bytes, offset: int) -> bytes | None:
        """The mark of a record whose signature cannot be verified; None if it is unsigned or a copy.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        if not has_signature(record):
            return None
        mark = mark_of_record(record)
        return mark if self._first_offset(mark, offset) is None else None

    def _standing(self, author: Author | None) -> Standing | UnsetType:
        """The roles of a sender: of a listed author who signed, of an unsigned sender, or UNSET without a list."""
        if author is not None:
            return Standing(roles=author.roles, signed=True)
        return UNSET if self._authors is None else UNSIGNED_STANDING

    def _spend(self, mark: bytes, record: bytes, offset: int) -> bytes:
        """Spend the mark of a verified id, and return it.

        Raises:
            DuplicateFeedback: the id is spent; or the same bytes were rejected before their author was listed.
        """
        record_spent_at = self._first_offset(mark_of_record(record), offset, add=False)
        first = self._first_offset(mark, offset) if record_spent_at is None else record_spent_at
        if first is not None:
            raise DuplicateFeedback(first)
        return mark

    def _first_offset(self, mark: bytes, offset: int, *, add: bool = True) -> int | None:
        """The offset of the other record that spent a mark; None if there is none.

        In this case, with `add` and a list of authors, this record spends the mark.
        """
        if not self._has_read_marks:
            self.catch_up()
            self._has_read_marks = True
        first = self._spent_marks.first_offset(mark)
        if first is None and add and self._authors is not None:
            self._spent_marks.add(mark, offset)
        return None if first == offset else first  # a record that is read again is not a copy of itself

    def _verify_author(self, feedback: Feedback, name: str, record: bytes) -> Author | None:
        """The listed author who signed a record; None for an unsigned record, if it need not be signed.

        Raises:
            FeedbackRejected: the signature is missing or not valid.
        """
        listed = None if self._authors is None else self._authors()
        author = None if listed is None else listed.get(name)
        if feedback.signature is UNSET:
            if self._require_signature:
                raise FeedbackRejected("it is not signed; `gracestream keys sign` signs feedback")
            if author is not None:
                raise FeedbackRejected(f"it is not signed, and author {name!r} is on the list of those who sign")
            return None
        if listed is None:
            raise FeedbackRejected("it is signed, and this editor has no list of authors to check signatures by")
        if author is None:
            raise FeedbackRejected(
                f"author {name!r} is not on the list of authors" if name else "it is signed and names no author"
            )
        if not verify(record, author.keys, self._codebook):
            raise FeedbackRejected(f"its signature is not valid for author {name!r}, this record and this codebook")
        return author
