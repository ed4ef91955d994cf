"""Admission: whether a feedback record may edit at all, before the engine sees it (design, section 6).

What its sender may do is passed on with an admitted record; whether that is enough is the engine's to decide
(`pipeline.editing.roles`).

A record is refused, with an outcome `rejected` that says why and without any effect, where

- it is signed, and not by a key of the listed author whom it names, over just these bytes;
- it is not signed, and signatures are required, or the author whom it names is on the list: a listed name is no one
  else's to use;
- it is signed, and its id is spent: a signed record counts once (`pipeline.auth.spent_signatures`);
- its author has had as many records admitted in the last minute as the limit allows. Records without an author share
  one limit; an author on the list may have one of their own.

What is promised of the limit:

1. Time is that of Kafka's clock at the broker, `feedback`'s LogAppendTime, never the editor's. An editor that lags
   behind, or works through a backlog, decides as one that keeps up.
2. It slides: an admitted record counts against those of the 60 s after it, whatever then became of it. A refused one
   counts against nothing.
3. It survives the editor. Each admitted record's outcome says in its headers whose it was and when it came, in the
   transaction of the outcome; before its first record an editor reads those of the last minute from `edits`.
4. Times never go back: where a new leader's clock is behind, records count as no earlier than those before them.

Not promised: that the same feedback read again is admitted again. The list of authors may be another by then; what was
decided stands in `edits`. That a limit binds who need not sign: such a one may name another author each time.
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
"""Milliseconds, as Kafka's timestamps are."""


class FeedbackRefused(UserError):
    """Feedback that may not edit; the text says why. `mark` is what its outcome spends, if it spends anything."""

    def __init__(self, reason: str, mark: bytes | None = None) -> None:
        super().__init__(reason)
        self.mark = mark


class DuplicateFeedback(FeedbackRefused):
    """A signed record whose id is spent, by the feedback at offset `first_offset`."""

    def __init__(self, first_offset: int) -> None:
        super().__init__(
            f"its signed id was used at offset {first_offset}, and counts once; `edits` says what became of that;"
            " to ask again, sign with a new id"
        )
        self.first_offset = first_offset


@dataclass(frozen=True, slots=True)
class AcceptedFeedback:
    """A record that was let in: its author (empty: it names none), and its time in ms as it counts for the limit.

    `mark` is what it spends: its author's id where it is signed. `standing` is what its sender is allowed.
    """

    author: str
    time_ms: int
    mark: bytes | None = None
    standing: Standing | UnsetType = UNSET

    def headers(self) -> list[tuple[str, bytes]]:
        """What the outcome carries, for the next editor."""
        counted = [
            (headers.AUTHOR_HEADER, self.author.encode()),
            (headers.ACCEPTED_AT_HEADER, str(self.time_ms).encode()),
        ]
        return counted if self.mark is None else [*counted, mark_header(self.mark)]


class SlidingWindowLimiter:
    """The records admitted in the last minute.

    A record is added once and dropped once, so the cost of a decision does not grow with the number of records.
    """

    def __init__(self, accepted: Iterable[AcceptedFeedback] = ()) -> None:
        self._accepted: deque[AcceptedFeedback] = deque()
        self._times_by_author: dict[str, deque[int]] = {}
        """The times of each author's records, in order; nothing of an author without a record."""
        for admitted in sorted(accepted, key=lambda admitted: admitted.time_ms):
            self._add(admitted)

    def __len__(self) -> int:
        return len(self._accepted)

    @property
    def author_count(self) -> int:
        """How many authors these records have."""
        return len(self._times_by_author)

    def accept(self, author: str, time_ms: int, limit: int) -> AcceptedFeedback:
        """Let one more record of an author in; `limit` 0: however many there are.

        Raises:
            FeedbackRefused: there are `limit` already.
        """
        if self._accepted:
            time_ms = max(time_ms, self._accepted[-1].time_ms)
        start, own = time_ms - RATE_WINDOW_MS, self._times_by_author.get(author, ())
        # Times are in order, so the limit is reached exactly where the last but `limit` is of this minute.
        if limit and len(own) >= limit and own[-limit] > start:
            again = dt.datetime.fromtimestamp((own[-limit] + RATE_WINDOW_MS + 999) // 1000, dt.UTC)
            whose = f"author {author!r}" if author else "feedback without an author"
            raise FeedbackRefused(
                f"{whose} is limited to {limit} a minute; send this again after {again:%Y-%m-%dT%H:%M:%SZ}"
            )
        while self._accepted and self._accepted[0].time_ms <= start:
            self._drop_oldest()
        admitted = AcceptedFeedback(author, time_ms)
        self._add(admitted)
        return admitted

    def _add(self, accepted: AcceptedFeedback) -> None:
        self._accepted.append(accepted)
        self._times_by_author.setdefault(accepted.author, deque()).append(accepted.time_ms)

    def _drop_oldest(self) -> None:
        """Forget the oldest record, which is its author's oldest as well."""
        author = self._accepted.popleft().author
        own = self._times_by_author[author]
        own.popleft()
        if not own:
            del self._times_by_author[author]


class Admission:
    """Judges one feedback record after the other, in the order of the log.

    Args:
        codebook: What signatures must be for.
        authors: Gives the list of this moment; None: there is none.
        require_signature: Refuse what is not signed.
        per_minute: The limit of each author that has no other; 0: none.
        accepted_since: Gives the records admitted since a time in ms, as `edits` has them.
        marks: Gives what earlier records have spent, likewise.
    """

    def __init__(
        self,
        codebook: str,
        authors: Callable[[], AuthorsByName] | None,
        *,
        require_signature: bool,
        per_minute: int,
        accepted_since: Callable[[int], Iterable[AcceptedFeedback]],
        marks: MarkReader,
    ) -> None:
        self._codebook, self._authors = codebook, authors
        self._require_signature, self._per_minute, self._accepted_since = require_signature, per_minute, accepted_since
        self._limiter: SlidingWindowLimiter | None = None
        self._spent_marks, self._has_read_marks = SpentMarks(marks), False

    def reset(self) -> None:
        """Another editor may have written since: the next record is judged by what `edits` says then."""
        self._limiter, self._has_read_marks = None, False

    def catch_up(self) -> None:
        """Read what `edits` says of spent signatures; ahead of the first record, since a long topic takes its time.

        Raises:
            KafkaError: it cannot be read.
        """
        if self._authors is not None:  # else no signature is verified, and nothing that is signed has an effect
            self._spent_marks.catch_up()

    def accept(self, feedback: Feedback, record: bytes, offset: int, time_ms: int) -> AcceptedFeedback:
        """Let a record in. `feedback` is what was decoded from `record`, `time_ms` its timestamp in ms.

        Raises:
            DuplicateFeedback: it is signed, and its id is spent.
            FeedbackRefused: it may not edit.
            KafkaError: `edits` cannot be read.
        """
        name = "" if feedback.author is UNSET else feedback.author
        try:
            author = self._verify_author(feedback, name, record)
        except FeedbackRefused as refused:
            raise FeedbackRefused(str(refused), self.unverified_mark(record, offset)) from None
        mark = None if author is None else self._spend(mark_of_id(name, feedback.feedback_id), record, offset)
        limit = self._per_minute if author is None or author.per_minute is None else author.per_minute
        if self._limiter is None:
            self._limiter = SlidingWindowLimiter(self._accepted_since(time_ms - RATE_WINDOW_MS))
        try:
            counted = self._limiter.accept(name, time_ms, limit)
        except FeedbackRefused as refused:
            raise FeedbackRefused(str(refused) + (", signed with a new id" if mark else ""), mark) from None
        return replace(counted, mark=mark, standing=self._standing(author))

    def unverified_mark(self, record: bytes, offset: int) -> bytes | None:
        """What a record spends whose signature cannot be verified; None where it has none, or is a copy.

        Raises:
            KafkaError: `edits` cannot be read.
        """
        if not has_signature(record):
            return None
        mark = mark_of_record(record)
        return mark if self._first_offset(mark, offset) is None else None

    def _standing(self, author: Author | None) -> Standing | UnsetType:
        """What a sender is allowed: an author who signed, one who need not, or anyone where there is no list."""
        if author is not None:
            return Standing(roles=author.roles, signed=True)
        return UNSET if self._authors is None else UNSIGNED_STANDING

    def _spend(self, mark: bytes, record: bytes, offset: int) -> bytes:
        """Spend the mark of a signed id; `record` may be spent itself, from before its author was listed.

        Raises:
            DuplicateFeedback: one of the two is spent.
        """
        of_record = self._first_offset(mark_of_record(record), offset, add=False)
        first = self._first_offset(mark, offset) if of_record is None else of_record
        if first is not None:
            raise DuplicateFeedback(first)
        return mark

    def _first_offset(self, mark: bytes, offset: int, *, add: bool = True) -> int | None:
        """The offset at which another record spent this; None where none did, and then this one does (`add`)."""
        if not self._has_read_marks:
            self.catch_up()
            self._has_read_marks = True
        first = self._spent_marks.first_offset(mark)
        if first is None and add and self._authors is not None:
            self._spent_marks.add(mark, offset)
        return None if first == offset else first

    def _verify_author(self, feedback: Feedback, name: str, record: bytes) -> Author | None:
        """The listed author who signed a record; None for one that need not be signed."""
        listed = None if self._authors is None else self._authors()
        author = None if listed is None else listed.get(name)
        if feedback.signature is UNSET:
            if self._require_signature:
                raise FeedbackRefused("it is not signed; `gracestream keys sign` signs feedback")
            if author is not None:
                raise FeedbackRefused(f"it is not signed, and author {name!r} is on the list of those who sign")
            return None
        if listed is None:
            raise FeedbackRefused("it is signed, and this editor has no list of authors to check signatures by")
        if author is None:
            raise FeedbackRefused(
                f"author {name!r} is not on the list of authors" if name else "it is signed and names no author"
            )
        if not verify(record, author.keys, self._codebook):
            raise FeedbackRefused(f"its signature is not one by author {name!r} over this record for this codebook")
        return author
