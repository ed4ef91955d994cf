"""A history to reproduce: the records of `deltas`, `feedback` and `edits` as an editor writes them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gracestream.pipeline.auth.admission import RATE_WINDOW_MS, Admission
from gracestream.pipeline.auth.authors import AuthorsByName
from gracestream.pipeline.editing.candidate import DraftValue
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editor.feedback import FeedbackRecord, ParsedFeedback
from gracestream.pipeline.editor.feedback_processor import FeedbackProcessor
from gracestream.pipeline.model.editable import EditableModel
from gracestream.pipeline.reproduction.reproduce import ReproductionRun
from gracestream.schemas.deltas import decode_delta, seal_delta
from gracestream.schemas.headers import FEEDBACK_OFFSET_HEADER
from gracestream.schemas.messages import Feedback, InvalidMessage, Outcome, decode, encode
from gracestream.schemas.no_change import NoChangeDecision, parse_no_change
from tests.support.chosen_queries import PointModel, at, point
from tests.support.doubles.kafka import Stored
from tests.support.tiny_models import CODEBOOK

PLAN = EditConfig(
    policy="nearest",
    radius=1.5,
    radius_unit="absolute",
    retention_guard=True,
    traffic_sample_size=8,
    value_init="random",
    seed=7,
)


class Recorded:
    """A history with its feedback, made by one engine. Each author may send one record a minute."""

    def __init__(
        self,
        plan: EditConfig = PLAN,
        authors: AuthorsByName | None = None,
        model: Callable[[], EditableModel] = lambda: PointModel(2),
        **environment_of_term: str,
    ) -> None:
        self._model = model
        self.engine = EditEngine(model(), CODEBOOK, plan)
        self.deltas: list[bytes] = []
        self.feedback: dict[int, Feedback] = {}
        self.edits: list[Stored] = []
        listed = None if authors is None else lambda: authors
        admission = Admission(
            CODEBOOK, listed, require_signature=False, per_minute=1, accepted_since=lambda _: (), marks=lambda _: ()
        )
        self._processor = FeedbackProcessor(self.engine, admission, self, max_bytes=10_000)
        self._offset = self._minute = 0
        self.lead(plan, **environment_of_term)

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        all(map(on_record, self.deltas))

    def feedback_since(self, since: int) -> dict[int, Feedback]:
        return {offset: one for offset, one in self.feedback.items() if offset >= since}

    def lead(self, plan: EditConfig, **environment: str) -> None:
        """Start a new term with a configuration; `environment` overrides what its `lead` delta records."""
        self.engine.config = plan
        self._apply(
            self.engine.lead_delta({**describe_environment(self.engine.model, plan), "editor": "one", **environment})
        )

    def send(self, *values: bytes, minutes: int = 1) -> list[Outcome | None]:
        """The outcomes of records that arrive `minutes` after each other, waiting for the editor together."""
        read: list[ParsedFeedback] = []
        for value in values:
            offset, self._offset = self._offset, self._offset + 1
            self._minute += minutes
            with suppress(InvalidMessage):
                self.feedback[offset] = decode(value, Feedback)
            read.append(self._processor.parse(FeedbackRecord(offset, self._minute * RATE_WINDOW_MS, None, value)))
        drafts = self._processor.draft_values(read)
        return [self._decide(one, drafts.get(one.offset)) for one in read]

    def _decide(self, one: ParsedFeedback, draft: DraftValue | None) -> Outcome | None:
        decided = self._processor.decide(one, draft)
        outcome = decided.result.outcome
        if outcome is not None:
            headers = [(FEEDBACK_OFFSET_HEADER, str(one.offset).encode()), *decided.headers]
            self.edits.append(Stored("edits", len(self.edits), None, encode(outcome), headers, "committed"))
        if decided.result.delta_record is not None:
            self._apply(decided.result.delta_record)
        return outcome

    def take(self, one: Feedback) -> Outcome:
        (outcome,) = self.send(encode(one))
        assert outcome is not None
        return outcome

    def correct(self, name: str, place: tuple[float, float], label: int) -> Outcome:
        return self.take(make_correction(name, at(*place), str(label)))

    def undo(self, name: str, taken_back: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, undo=taken_back))

    def see(self, offset: int, *place: float) -> None:
        score = self.engine.traffic_sample.offer(0, offset, 0.0)
        assert score is not None
        self.engine.add_traffic(score, point(*place))

    def no_change_decisions(self) -> list[NoChangeDecision]:
        """The decisions without a delta, from the headers of their outcomes."""
        return [found for found in map(parse_no_change, self.edits) if found is not None]

    def reproduced(self, deltas: int | None = None) -> ReproductionRun:
        """A reproduction of the history, or of its first `deltas` records of `deltas`."""
        engine = self.engine
        made = ReproductionRun(
            self._model(),
            self.feedback_since(0),
            lambda plan: describe_environment(engine.model, plan),
            self.no_change_decisions(),
        )
        if all(map(made.reproduce, self.deltas[:deltas])):
            made.finish_seq()
        return made

    def rewrite(self, seq: int, **fields: Any) -> None:
        """Change fields of one delta, and the digests of all later deltas."""
        digest, changed = bytes(32), []
        for record in self.deltas:
            delta = decode_delta(record)
            if delta.seq == seq:
                delta = msgspec.structs.replace(delta, **fields)
            sealed, made = seal_delta(delta, digest)
            changed.append(sealed)
            digest = made.digest
        self.deltas = changed

    def _apply(self, record: bytes) -> None:
        self.deltas.append(record)
        self.engine.apply(record)
