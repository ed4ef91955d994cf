"""A history made step by step, with its undos, as an editor makes it, without Kafka."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook.edit_memory import merge_contexts
from gracestream.pipeline.editing.candidate import RecordedInputs
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.exceptions import decide_exception
from gracestream.pipeline.editing.provenance import describe_environment
from gracestream.pipeline.editing.result import make_correction
from gracestream.pipeline.editing.undo import undo
from gracestream.schemas.deltas import Standing, decode_delta
from gracestream.schemas.messages import Feedback, Outcome
from tests.support.chosen_queries import PointModel, at, point
from tests.support.tiny_models import CODEBOOK


@dataclass
class Story:
    """An engine with its deltas and its feedback."""

    engine: EditEngine
    deltas: list[bytes] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    steps: list[EditConfig | int] = field(default_factory=list)
    """The configuration of each new term, and the offset of each feedback."""

    def for_each_delta(self, on_record: Callable[[bytes], bool]) -> None:
        all(map(on_record, self.deltas))

    def feedback_since(self, since: int) -> Mapping[int, Feedback]:
        return {at: one for at, one in enumerate(self.feedback) if at >= since and not one.is_undo}

    def take(self, feedback: Feedback, standing: Standing | UnsetType = UNSET) -> Outcome:
        offset = len(self.feedback)
        self.feedback.append(feedback)
        self.steps.append(offset)
        if feedback.is_undo:
            edited = undo(self.engine, feedback, offset, self, standing=standing)
        elif feedback.is_exception:
            edited = decide_exception(self.engine, feedback, offset, standing)
        else:
            edited = self.engine.edit(feedback, offset, standing=standing)
        assert edited.outcome is not None
        if edited.delta_record is not None:
            self.apply(edited.delta_record)
        return edited.outcome

    def apply(self, record: bytes) -> None:
        self.deltas.append(record)
        self.engine.apply(record)

    def lead(self, plan: EditConfig) -> None:
        """Start a new term with another configuration."""
        self.engine.config = plan
        self.steps.append(plan)
        self.apply(self.engine.lead_delta(describe_environment(self.engine.model, plan)))

    def correct(
        self,
        name: str,
        place: tuple[float, ...],
        label: int,
        author: str | None = None,
        rephrases: Sequence[tuple[float, ...]] = (),
    ) -> Outcome:
        """Send a correction. Equal rephrases count once."""
        others = tuple(at(*other) for other in dict.fromkeys(rephrases) if at(*other) != at(*place))
        one = fields_of(make_correction(name, at(*place), str(label))) | {"rephrases": others}
        return self.take(Feedback(**(one if author is None else one | {"author": author})))

    def except_from(self, name: str, place: tuple[float, ...], edit: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, inputs=at(*place), except_from=edit))

    def undo(self, name: str, taken_back: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, undo=taken_back))

    def undo_author(self, name: str, author: str) -> Outcome:
        return self.take(Feedback(v=1, feedback_id=name, undo_author=author))

    def served(self) -> dict[str, tuple[str, bytes]]:
        """The serving entry and the query of each edit in force."""
        memory = self.engine.memory
        return {name: (memory.serving_entry_id(name), memory.query(name).tobytes()) for name in memory.feedback_ids}


def fields_of(message: Feedback) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def plan_of(**fields: Any) -> EditConfig:
    usual: dict[str, Any] = {"radius_unit": "absolute", "traffic_sample_size": 8}
    return EditConfig(**(usual | fields))


def new_story(*, worded: bool = False, **plan: Any) -> Story:
    made = Story(EditEngine(PointModel(2, worded=worded), CODEBOOK, plan_of(**plan)))
    made.lead(made.engine.config)
    return made


def without(story: Story, gone: set[str], *, keep_contexts: bool = True) -> Story:
    """The same history without the feedback `gone`, decided and trained again with the recorded decision contexts.

    Without `keep_contexts`, each decision uses a context of its own, in which there is no traffic.
    """
    made = Story(EditEngine(story.engine.model, CODEBOOK, story.engine.config))
    causes = [delta.cause for delta in map(decode_delta, story.deltas) if delta.cause is not UNSET]
    contexts = {cause.feedback_id: cause.context for cause in causes if cause.context is not UNSET}
    for name, later in story.engine.memory.repeated_contexts.items():
        contexts[name] = merge_contexts(contexts[name], later)
    for one in story.steps:
        if isinstance(one, EditConfig):
            made.lead(one)
            continue
        feedback = story.feedback[one]
        if feedback.is_exception and feedback.feedback_id not in gone:
            edited = decide_exception(made.engine, feedback, one)
            if edited.delta_record is not None:
                made.apply(edited.delta_record)
        elif feedback.is_correction and feedback.feedback_id not in gone:
            edited = made.engine.edit(
                feedback, one, RecordedInputs(contexts[feedback.feedback_id]) if keep_contexts else None
            )
            if edited.delta_record is None:
                # It is too near an input with a confirmed answer, which the removed feedback had corrected.
                assert "confirmed answer" in edited.rejection_reason
                continue
            made.apply(edited.delta_record)
    return made


def assert_same(ours: Story, theirs: Story) -> None:
    assert ours.engine.codebook.state_digest() == theirs.engine.codebook.state_digest()
    assert ours.served() == theirs.served()


def see(story: Story, place: tuple[float, ...], offset: int) -> None:
    """Offer one request of unflagged traffic to the engine."""
    score = story.engine.traffic_sample.offer(0, offset, 0.0)
    assert score is not None
    task = story.engine.model.task
    story.engine.add_traffic(score, point(*place), task.wording(task.tokenize(at(*place))))
