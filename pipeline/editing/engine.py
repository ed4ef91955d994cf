"""The editing engine: one correction in, one outcome out, and the delta that makes it so (design, section 4).

No Kafka, no Redis, no clock, no global random state: the editor worker, replay and experiments run this same engine.
Decisions are made one at a time, in the order of feedback. `edit` changes nothing; what it decided takes effect when
the record it returned is given to `apply`, which is also how a starting editor learns what its predecessors did.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch
from msgspec import UNSET, UnsetType

from gracestream.pipeline.codebook import (
    BARE_MODEL,
    TRAFFIC_SHARE,
    Applied,
    Codebook,
    CodebookLookup,
    Decision,
    EditMemory,
    KeyIndex,
    Label,
    Neighbour,
    Policy,
    batch_noise,
    decide,
    same_request,
    serving,
    without_expanding,
)
from gracestream.pipeline.editing.calibration import probe_unit
from gracestream.pipeline.editing.candidate import Again, Ahead, Case, Examined, of_similar_length
from gracestream.pipeline.editing.config import Plan
from gracestream.pipeline.editing.context import Sight
from gracestream.pipeline.editing.rephrases import (
    Placed,
    Rephrase,
    any_proved,
    examined_rephrases,
    keep,
    place,
    shared,
    with_forms,
)
from gracestream.pipeline.editing.result import STATUS, Edited, rejected, unchanged
from gracestream.pipeline.editing.roles import why_not_propose
from gracestream.pipeline.editing.scope import ScopeRadius
from gracestream.pipeline.editing.traffic_reservoir import Traffic
from gracestream.pipeline.editing.value_training import Trained, train_on, train_value, train_values
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.model import EditableModel, InputError, Seq2SeqGeneration, Verdict, in_decoder
from gracestream.pipeline.search import NO_SLOT
from gracestream.pipeline.wording import disagreement, in_context
from gracestream.schemas.deltas import (
    Cause,
    Delta,
    EntryChange,
    ExceptionChange,
    Op,
    Standing,
    Tensor,
    rephrase_name,
    seal,
)
from gracestream.schemas.messages import VERSION, Feedback, Inputs, Outcome, one_line

MAX_RECORD_BYTES = 60 * 2**20
"""A larger delta would not fit the topic; only one that gives thousands of edits entries of their own gets there."""

AT_ONCE = 4
"""Corrections that are trained on for their forms in one batch, of up to `forms.MOST_TOKENS` tokens each."""

SHORT = 8
"""Tokens of a target that is no longer than most."""


class EditEngine:
    """A codebook with all that is needed to edit it."""

    def __init__(
        self, model: EditableModel, codebook: str, plan: Plan | None = None, scope: ScopeRadius | None = None
    ) -> None:
        """Start with an empty codebook; engines whose queries come from one encoder may share `scope`."""
        self.model, self.plan = model, plan or Plan()
        self.codebook = Codebook(codebook, model.fingerprint, model.layer)
        self.index = KeyIndex(self.codebook, model.device)
        self.memory = EditMemory()
        self.traffic = Traffic(self.plan.traffic, self.plan.seed)
        self._probe_unit: float | None = None
        self._scope = scope or ScopeRadius(model)

    def apply(self, record: bytes) -> Applied | None:
        """Fold one record of `deltas` into codebook, index and memory; None where it is of a lower term.

        Raises:
            HistoryError: the record does not continue this codebook's history.
        """
        applied = self.codebook.apply(record)
        if applied is not None:
            self.index.refresh(applied)
            self.memory.fold(applied.delta, self.codebook)
            cause = applied.delta.cause
            if cause is not UNSET and cause.entry_id is not UNSET and cause.feedback_id in self.memory:
                query_D = self.memory.query(cause.feedback_id)
                self.traffic.forget(query_D, self.noise(query_D))
                for name in filter(self.memory.__contains__, cause.named_rephrases()):
                    query_D = self.memory.query(name)
                    self.traffic.forget(query_D, self.noise(query_D))
        return applied

    @property
    def lookup(self) -> CodebookLookup:
        """Looks prompts up in the codebook; an undo gives its branch another codebook and index."""
        return CodebookLookup(self.codebook, self.index)

    def lead(self, environment: dict[str, str]) -> bytes:
        """The record by which this editor takes the next term. It is not applied yet."""
        return self.record("lead", term=self.codebook.term + 1, environment=environment)

    def record(self, op: Op, **fields: object) -> bytes:
        """The record that follows what the codebook has seen; `fields` are the delta's."""
        usual = {
            "v": VERSION,
            "codebook": self.codebook.name,
            "model": self.codebook.model,
            "layer": self.codebook.layer,
        }
        place = {"term": self.codebook.term, "seq": self.codebook.seq + 1, "digest": b""}
        return seal(Delta(op=op, **(usual | place | fields)), self.codebook.digest)[0]  # type: ignore[arg-type]

    def observe(self, rank: float, query_D: np.ndarray, wording: str = "") -> None:
        """Hold a query of unflagged traffic (`Traffic.wants` gave its rank), unless an entry answers it already."""
        (match,) = self.lookup.matches(torch.from_numpy(query_D)[None], lambda _row: wording)
        if serving(match) is None:
            self.traffic.hold(rank, query_D, self.noise(query_D), wording)

    def initial_radius(self) -> float:
        """Epsilon_init, absolute: in units of the traffic's median distance, or of probe sentences' without traffic."""
        if self.plan.radius_unit == "absolute":
            return self.plan.radius
        unit = self.traffic.unit()
        if unit is None:
            if self._probe_unit is None:
                self._probe_unit = probe_unit(self.model)
            unit = self._probe_unit
        return self.plan.radius * unit

    def radius_for(self, inputs: Inputs, query_D: np.ndarray) -> float:
        """Epsilon_init of one correction: where the plan says so and it has a subject, its own if that is smaller."""
        own = self._scope(inputs, query_D, self.plan.scope_alpha) if self._scoped() else None
        return self.initial_radius() if own is None else min(self.initial_radius(), own)

    def _scoped(self) -> bool:
        return self.plan.scope_radius and self.plan.policy == "nearest" and self._scope.works

    def warm_start(self, label: Label, query_D: np.ndarray) -> str | UnsetType:
        """The entry whose value a new one starts from: the nearest of its label, where the plan says so."""
        if self.plan.init != "label" or label not in self.codebook.labels:
            return UNSET
        rows = [row for row, other in enumerate(self.codebook.labels) if other == label]
        distances = np.linalg.norm(self.codebook.keys_ND[rows] - query_D, axis=1).tolist()
        return min(zip(distances, (self.codebook.entry_ids[row] for row in rows), strict=True))[1]

    def edit(
        self,
        feedback: Feedback,
        offset: int,
        again: Again | None = None,
        ahead: Ahead | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> Edited:
        """Decide on one correction and train what it takes; nothing changes before `apply`.

        `again` says what a decision that is made another time saw and had the first time; `ahead` is what
        `train_ahead` found for it; `standing` what its sender is allowed (`pipeline.editing.roles`).
        """
        if (forbidden := why_not_propose(feedback, standing)) is not None:
            return rejected(feedback, forbidden)
        case = self._case(feedback, offset, again, ahead, standing)
        if isinstance(case, Edited):
            return case
        edited = self._keep(case) if case.examined.fulfilled else self._decide(case)
        if edited.record is not None:
            return edited
        nearest_id = [] if case.slot == NO_SLOT else [self.codebook.entry_ids[case.slot]]
        return replace(edited, seen=case.sight.deciding(*nearest_id))

    def train_ahead(
        self, corrections: Sequence[tuple[Feedback, int]], at_work: Callable[[], object] = lambda: None
    ) -> dict[int, Ahead]:
        """Train the values that corrections would take if each were decided on now, those of similar length together.

        By offset, of those that need one. A value depends on nothing that another correction changes, unless it starts
        from an entry's (`init=label`): then there are none, nor of a model that cannot be trained with padding. The
        decisions are made by `edit`, one after the other. `at_work` is called at each step of training.

        Raises:
            Whatever the model does on one of them.
        """
        if self.plan.init == "label" or not self.model.passes.pads():
            return {}
        wanting = []
        for feedback, offset in corrections:
            at_work()
            case = self._case(feedback, offset)
            if isinstance(case, Case) and self._wants_value(case):
                wanting.append(case)
        found: dict[int, Ahead] = {}
        for group in of_similar_length(wanting):
            if len(group) > 1:
                found |= self._trained([(case.feedback, case.offset, case.examined) for case in group], at_work)
        return found

    def train_together(self, corrections: Sequence[tuple[Feedback, int]]) -> dict[int, Ahead]:
        """Train the values of just these corrections together, as an editor did, in the same order.

        Raises:
            Whatever the model does on one of them.
        """
        rows = []
        for feedback, offset in corrections:
            assert feedback.inputs is not UNSET
            assert feedback.target is not UNSET
            rows.append((feedback, offset, self.examine(feedback.inputs, feedback.target)))
        return self._trained(rows)

    def _trained(
        self, rows: Sequence[tuple[Feedback, int, Examined]], at_work: Callable[[], object] = lambda: None
    ) -> dict[int, Ahead]:
        """By offset, of corrections that were examined; values are trained on for their forms too."""
        offsets = tuple(offset for _, offset, _ in rows)
        passes, recipe = self.model.passes, self.plan.recipe
        rest = passes.rest_of([examined.supervised for *_, examined in rows])
        starts = [self._usual_start(offset, examined.start_V) for _, offset, examined in rows]
        trained = train_values(passes, rest, starts, recipe, at_work)
        texts_N = [
            with_forms(self, feedback, examined, one)
            for (feedback, _, examined), one in zip(rows, trained, strict=True)
        ]
        wanting = [number for number, texts in enumerate(texts_N) if texts.forms and texts.trained.converged]
        for start in range(0, len(wanting), AT_ONCE):
            group = wanting[start : start + AT_ONCE]
            more = train_on(passes, [texts_N[number] for number in group], recipe, at_work)
            for number, one in zip(group, more, strict=True):
                trained[number] = one
        return {offset: Ahead(one, offsets, examined) for (_, offset, examined), one in zip(rows, trained, strict=True)}

    def _wants_value(self, case: Case) -> bool:
        """Whether a value would have to be trained, were this decided on now."""
        return not case.examined.fulfilled and self._decision(case)[1] is None

    def _case(
        self,
        feedback: Feedback,
        offset: int,
        again: Again | None = None,
        ahead: Ahead | None = None,
        standing: Standing | UnsetType = UNSET,
    ) -> Case | Edited:
        """What there is to be decided on; or what comes of feedback on which there is nothing to be decided."""
        assert feedback.inputs is not UNSET
        assert feedback.target is not UNSET
        if ahead is not None and self._stands(ahead.examined):
            examined = ahead.examined
        else:
            try:
                examined = self.examine(feedback.inputs, feedback.target)
            except InputError as error:
                return rejected(feedback, one_line(error), invalid=True)
        verdict, query_D = examined.verdict, examined.query_D
        if again is not None and again.query_D is not None:
            query_D = again.query_D.copy()
        if not np.isfinite(query_D).all():
            return rejected(feedback, "the model's activations on this input are not finite")
        earlier = self.memory.offsets.get(feedback.feedback_id)
        if earlier is not None:
            if verdict.right and feedback.feedback_id in self.memory.same_input(query_D, self.noise(query_D)):
                return Edited(unchanged(feedback, verdict.loss))
            undone = " and undone" if feedback.feedback_id in self.memory.undone() else ""
            return rejected(feedback, f"its id was used at offset {earlier}{undone}; a new correction needs a new id")
        if (taken := self.why_not_named(feedback)) is not None:
            return rejected(feedback, taken)
        # Of requests within a radius that keeps clear of others about the subject, most ask the same: a few may.
        share = self.plan.scope_alpha if self._scoped() and self._scope.covers(feedback.inputs) else 0.0
        initial_radius = partial(self.radius_for, feedback.inputs, query_D)
        sight = Sight(self.traffic, initial_radius, None if again is None else again.seen, share)
        # For this correction no other entry's radius grows beyond its own.
        largest = min(self.plan.max_radius, sight.radius) if self._scoped() else self.plan.max_radius
        nearest = self.index.nearest(torch.from_numpy(query_D)[None])
        return Case(
            feedback=feedback,
            offset=offset,
            examined=examined,
            query_D=query_D,
            policy=Policy(self.plan.policy, sight.radius, self.plan.expand, self.noise(query_D), largest),
            sight=sight,
            slot=int(nearest.slots_B[0]),
            distance=float(nearest.distances_B[0]),
            known_V=None if again is None else again.value_V,
            ahead=ahead,
            standing=standing,
            rephrases_RD=() if again is None else again.rephrases_RD,
        )

    def why_not_named(self, feedback: Feedback) -> str | None:
        """Why feedback cannot have its id: keys of rephrases are named by numbers after the id of their correction."""
        if (owner := self.memory.owners.get(feedback.feedback_id)) is not None:
            return f"its id is the name of a key of feedback {owner!r}; choose another id"
        for number in range(1, len(feedback.rephrases) + 1):
            name = rephrase_name(feedback.feedback_id, number)
            if (offset := self.memory.offsets.get(name)) is not None:
                return (
                    f"the key of its rephrase {number} would be named {name!r}, the id of feedback at offset {offset}"
                )
        return None

    def examine(self, inputs: Inputs, target: str) -> Examined:
        """What a pass of the edited model tells of an input and its target.

        Raises:
            InputError: the model cannot take them.
        """
        label, supervised = self.model.supervised(inputs, target)
        verdict, session, rest = self.model.passes.examine(supervised, self.lookup)
        hit = session.hits[0]
        return Examined(
            label=label,
            supervised=supervised,
            rest=rest,
            verdict=verdict,
            hit=hit,
            value_V=self.codebook.values_NV[[] if hit is None else hit.slot].copy(),
            query_D=session.queries_BD[0].cpu().numpy(),
            start_V=session.outputs_BV[0],
            wording=self.model.task.asked(supervised.batch)(0),
        )

    def _stands(self, examined: Examined) -> bool:
        """Whether the codebook as it now is would tell the same."""
        query_1D = torch.from_numpy(examined.query_D)[None]
        (match,) = self.lookup.matches(query_1D, lambda _row: examined.wording)
        hit = serving(match)
        if hit is None or examined.hit is None:
            return hit is None and examined.hit is None
        same_hit = replace(hit, slot=examined.hit.slot) == examined.hit  # its place is no matter
        return same_hit and np.array_equal(self.codebook.values_NV[hit.slot], examined.value_V)

    def _keep(self, case: Case) -> Edited:
        """A correction that the model fulfils already: a delta, usually without a change, puts it under the guard.

        Else a later edit could take its query over, and what a reviewer was told to be right would turn wrong.
        """
        hit, changes = case.examined.hit, []
        if hit is not None:
            rephrases = examined_rephrases(self, case, self.codebook.values_NV[hit.slot].copy())
            if any_proved(rephrases):
                return self._extended(case, hit.slot, rephrases, case.examined.verdict.loss)
        outcome = unchanged(case.feedback, case.examined.verdict.loss)
        if hit is not None:
            outcome = msgspec.structs.replace(outcome, entry_id=hit.entry_id)
            reach = _float32(case.policy.cover(hit.distance))
            clearance = self.clearance_of_entry(hit.slot, case)
            if hit.radius < reach <= case.policy.allowed(clearance):
                changes = [EntryChange(entry_id=hit.entry_id, radius=reach)]
        said_otherwise = [
            other
            for other in self.memory.same_input(case.query_D, case.policy.noise)
            if (entry_id := self.memory.serving_entry(other)) not in (BARE_MODEL, outcome.entry_id)
            and self.codebook.labels[self.codebook.slot(entry_id)] != case.examined.label
        ]
        kept = keep(self, case)
        ended = self._ended(case, outcome.entry_id, kept)
        if self.plan.guard:
            same_input = self.memory.same_input(case.query_D, case.policy.noise)
            changes += self._guarded(case, changes, same_input, 0.0, ended)
        return self._sealed(
            case, outcome, "expand", changes, UNSET if hit is None else hit.entry_id, [*said_otherwise, *ended], kept
        )

    def _extended(self, case: Case, slot: int, rephrases: list[Rephrase], loss: float) -> Edited:
        """A correction that the value of the entry in this slot serves, with keys for its rephrases.

        The correction gets a key of its own too. Else a rephrase's key could be nearer to it than the entry's.
        """
        if slot == case.slot and case.distance <= case.policy.noise:
            return self._publish(case, Decision("expand"), None, rephrases, loss=loss)
        value_V = self.codebook.values_NV[slot].copy()
        radius = case.policy.own_radius(self.own_clearance(case))
        if (reason := self.too_near(radius, case, self.wording(case.examined))) is not None:
            return rejected(case.feedback, reason)
        return self._publish(case, Decision("expand", radius=radius), value_V, rephrases, loss=loss)

    def _decision(self, case: Case) -> tuple[Decision, Verdict | None]:
        """What to do; where an entry is to serve this too, with the verdict on its value, which is right."""
        neighbour = None
        if case.slot != NO_SLOT:
            neighbour = Neighbour(
                distance=case.distance,
                radius=float(self.codebook.radii_N[case.slot]),
                same_label=self.codebook.labels[case.slot] == case.examined.label,
                clearance=self.clearance_of_entry(case.slot, case),
            )
        clearance = self.own_clearance(case)
        decision = decide(case.policy, neighbour, clearance)
        if decision.kind == "expand":
            assert neighbour is not None
            if self._joins(case) or self._agrees(case):
                value_V = torch.from_numpy(self.codebook.values_NV[case.slot].copy())
                found = self.model.passes.gives(case.examined.rest, value_V)
                if found.right:
                    return decision, found
            decision = without_expanding(case.policy, neighbour, clearance)
        return decision, None

    def _decide(self, case: Case) -> Edited:
        decision, found = self._decision(case)
        if found is not None:
            rephrases = examined_rephrases(self, case, self.codebook.values_NV[case.slot].copy())
            if any_proved(rephrases):
                return self._extended(case, case.slot, rephrases, found.loss)
            return self._publish(case, decision, None, rephrases, loss=found.loss)
        if (
            decision.radius is not None
            and (reason := self.too_near(decision.radius, case, self.wording(case.examined))) is not None
        ):
            return rejected(case.feedback, reason)
        start_V = self._start(case)
        if case.known_V is not None:
            return self._publish(case, decision, case.known_V, examined_rephrases(self, case, case.known_V))
        trained = None if case.ahead is None else self._proved(case, case.ahead.trained)
        if trained is None:
            case = replace(case, ahead=None)
            trained = train_value(self.model.passes, case.examined.rest, start_V, self.plan.recipe)
        loss = trained.verdict.loss if math.isfinite(trained.verdict.loss) else UNSET
        if not trained.converged:
            return rejected(case.feedback, self.why_no_value(case.examined, trained), steps=trained.steps, loss=loss)
        trained, rephrases = shared(self, case, trained)
        loss = trained.verdict.loss
        return self._publish(case, decision, trained.value_V, rephrases, steps=trained.steps, loss=loss)

    def too_near(self, radius: float, case: Case, wording: str) -> str | None:
        """Why a key with this radius would take an input that is to stay right; None where it does not."""
        if self.plan.guard:
            kept = self.memory.clearance(case.query_D, case.policy.noise, case.query_D, wording)
            if radius > TRAFFIC_SHARE * kept:  # which only the floor under radii brings about
                return (
                    f"an input that is to stay right lies {kept:.3g} away, and in {self.model.query_dtype} inputs that"
                    " near are not told apart"
                )
        return None

    def why_no_value(self, examined: Examined, trained: Trained) -> str:
        """Why training found no value, and what to try."""
        recipe = self.plan.recipe
        if not math.isfinite(trained.verdict.loss):
            return (
                f"no value was found: training diverged after {trained.steps} steps; lower GRACESTREAM_LEARNING_RATE,"
                f" which is {recipe.learning_rate:g}"
            )
        reason = f"no value was found in {trained.steps} steps; the loss is still {trained.verdict.loss:.3g}"
        tokens = len(examined.label)
        reached = self.model.passes.reach(examined.rest, torch.from_numpy(trained.value_V))
        if reached == tokens:
            wider = isinstance(self.model.task, Seq2SeqGeneration) and not in_decoder(self.model.layer)
            replaced = ", set GRACESTREAM_REPLACE=all" if wider and self.model.adaptor.replace == "last" else ""
            shorter = " or give a shorter target" if tokens > SHORT else ""
            return (
                f"{reason}; raise GRACESTREAM_MAX_STEPS, which is {recipe.max_steps}{replaced}, edit another layer"
                f" (`gracestream layers`){shorter}"
            )
        return f"{reason}; at this layer a value reaches {reached} of the target's {tokens} tokens: edit an earlier one"

    def _proved(self, case: Case, trained: Trained) -> Trained | None:
        """A value that was trained with others, if it is right on its own as well; else it is to be trained alone."""
        if not trained.converged:
            return None
        found = self.model.passes.gives(case.examined.rest, torch.from_numpy(trained.value_V))
        return replace(trained, verdict=found) if found.right else None

    def _publish(
        self,
        case: Case,
        decision: Decision,
        value_V: np.ndarray | None,
        rephrases: list[Rephrase],
        **told: object,
    ) -> Edited:
        """Decision, value, keys of rephrases and guard as one delta; without a value the nearest entry's serves."""
        feedback_id, label = case.feedback.feedback_id, case.examined.label
        own_key = decision.radius is not None
        neighbour_id = self.codebook.entry_ids[case.slot] if case.slot != NO_SLOT else ""
        entry_id = feedback_id if own_key else neighbour_id
        if own_key and entry_id in self.codebook:
            return rejected(case.feedback, f"an entry named {entry_id!r} exists; a correction needs an id of its own")
        changes: list[EntryChange] = []
        radius: float | UnsetType = UNSET
        if decision.neighbour_radius is not None and decision.neighbour_radius != self.codebook.radii_N[case.slot]:
            radius = _float32(decision.neighbour_radius)
        wording: str | UnsetType = UNSET
        if not own_key and self._joins(case):
            # The entry serves both wordings from now on. So it must keep clear of what only one of them left out.
            wording = ""
            held = self.codebook.radii_N[case.slot] if radius is UNSET else radius
            limit = case.policy.allowed(self.clearance_of_entry(case.slot, case))
            radius = _float32(max(min(held, limit), case.policy.cover(case.distance)))
        if decision.kind != "replace" and not (radius is UNSET and wording is UNSET):
            changes.append(EntryChange(entry_id=neighbour_id, radius=radius, wording=wording))
        if value_V is not None:
            value = Tensor.of(value_V)
            if decision.kind == "replace":
                changes.append(EntryChange(entry_id=entry_id, value=value, radius=radius, label=label, wording=wording))
            else:
                assert decision.radius is not None
                radius = _float32(decision.radius)
                key = Tensor.of(case.query_D)
                changes.append(
                    EntryChange(
                        entry_id=entry_id,
                        key=key,
                        value=value,
                        radius=radius,
                        label=case.examined.label,
                        wording=self.wording(case.examined) or UNSET,
                    )
                )
        given_V = self.codebook.values_NV[case.slot].copy() if value_V is None else value_V
        by_entry = {change.entry_id: change for change in changes}
        placed = place(self, case, given_V, by_entry, rephrases)
        changes = list(by_entry.values())
        same_input = self.memory.same_input(case.query_D, case.policy.noise)
        superseded = [
            *self.said_otherwise(same_input, label, self.wording(case.examined)),
            *self._ended(case, entry_id, placed),
        ]
        ended = [name for name in (*superseded, *placed.supersedes) if name in self.codebook.exceptions]
        if self.plan.guard:
            changes += self._guarded(case, changes, [*same_input, *placed.same_input], placed.noise, ended)
        unchanged_now = decision.kind == "expand" and not changes and not ended
        outcome = Outcome(
            v=VERSION,
            feedback_id=feedback_id,
            status="unchanged" if unchanged_now else STATUS[decision.kind],
            entry_id=entry_id,
            **told,  # type: ignore[arg-type]
        )
        return self._sealed(case, outcome, decision.kind, changes, entry_id, superseded, placed)

    def _sealed(
        self,
        case: Case,
        outcome: Outcome,
        op: Op,
        changes: list[EntryChange],
        entry_id: str | UnsetType,
        supersedes: list[str],
        placed: Placed,
    ) -> Edited:
        """The outcome with the record that carries it out."""
        nearest = None if case.slot == NO_SLOT else self.codebook.entry_ids[case.slot]
        own_key = any(change.entry_id == entry_id and change.key is not UNSET for change in changes)
        cause = Cause(
            feedback_id=case.feedback.feedback_id,
            offset=case.offset,
            author=case.feedback.author,
            entry_id=entry_id,
            query=UNSET if own_key else Tensor.of(case.query_D),
            wording="" if own_key else case.examined.wording,
            supersedes=tuple(dict.fromkeys([*supersedes, *placed.supersedes])),
            together=() if case.ahead is None or op == "expand" else case.ahead.together,
            seen=case.sight.seen(nearest, case.distance),
            traffic={str(partition): end for partition, end in sorted(self.traffic.positions.items())} or UNSET,
            standing=case.standing,
            rephrases=tuple(placed.keys),
        )
        if placed.left_out:
            outcome = msgspec.structs.replace(outcome, left_out=tuple(placed.left_out))
        ended = tuple(
            ExceptionChange(feedback_id=name, removed=True)
            for name in cause.supersedes
            if name in self.codebook.exceptions
        )
        return self.publish(case.feedback, outcome, op, entries=tuple(changes), exceptions=ended, cause=cause)

    def _ended(self, case: Case, entry_id: str | UnsetType, placed: Placed) -> list[str]:
        """The exceptions that keep the entries which are to serve these prompts from now on from one of them."""
        prompts = [(case.query_D, self.wording(case.examined), entry_id)]
        prompts += [
            (one.query.array(), one.wording, one.entry_id)
            for one in placed.keys
            if one.query is not UNSET and not one.left_out
        ]
        return [
            exception.feedback_id
            for query_D, wording, serving_entry in prompts
            for exception in self.codebook.exceptions.near(query_D, wording, self.noise(query_D))
            if serving_entry in exception.entry_ids
        ]

    def publish(self, feedback: Feedback, outcome: Outcome, op: Op, **fields: object) -> Edited:
        """The outcome, and the next record with these fields; a rejection where no reader would take that record."""
        record = self.record(op, **fields)
        try:
            self.codebook.check(record)  # what is committed can never be taken back
        except HistoryError as fault:
            return rejected(feedback, f"no reader would take its delta: {fault}")
        if len(record) > MAX_RECORD_BYTES:
            return rejected(feedback, f"its delta would have {len(record)} bytes; {MAX_RECORD_BYTES} are allowed")
        return Edited(msgspec.structs.replace(outcome, seq=self.codebook.seq + 1), record)

    def _guarded(
        self, case: Case, changes: list[EntryChange], same_input: list[str], noise: float, ended: list[str]
    ) -> list[EntryChange]:
        """Entries of their own for the edits that these changes would take from the entries that serve them.

        An entry may take an edit, too, of whose prompt it is no longer an exception (`ended`).
        """
        keys = {change.entry_id: self._key_of(change) for change in changes if _may_serve_otherwise(change)}
        for exception in (one for one in self.codebook.exceptions if one.feedback_id in ended):
            for entry_id in exception.entry_ids:
                keys.setdefault(entry_id, self._key_of(EntryChange(entry_id=entry_id)))
        displaced = self.memory.displaced(
            keys=keys,
            shrunk={change.entry_id: change.radius for change in changes if change.radius is not UNSET},
            relabelled={c.entry_id for c in changes if c.value is not UNSET and c.key is UNSET},
            noise=max(case.policy.noise, noise),
            ignore=same_input,
        )
        guarded = []
        for feedback_id in displaced:
            query_D = self.memory.query(feedback_id)
            wording = self._wording_beside(self.memory.wording(feedback_id)) if self.plan.wording else ""
            server = self.codebook.entry(self.codebook.slot(self.memory.serving_entry(feedback_id)))
            policy = replace(case.policy, noise=self.noise(query_D))
            guarded.append(
                EntryChange(
                    entry_id=feedback_id,
                    key=Tensor.of(query_D),
                    value=Tensor.of(server.value_V),
                    radius=_float32(policy.own_radius(self.clearance(feedback_id, query_D, wording, case))),
                    label=server.label,
                    wording=wording or UNSET,
                )
            )
        return guarded

    def _wording_beside(self, wording: str) -> str:
        """The wording of an entry that an earlier edit is given: no prompt of the unedited model has the same words."""
        return in_context(wording) if self.memory.kept_in_same_words(wording) else wording

    def _key_of(self, change: EntryChange) -> np.ndarray:
        """The key of an entry that changes, or that is new."""
        if change.key is not UNSET:
            return change.key.array()
        return self.codebook.entry(self.codebook.slot(change.entry_id)).key_D

    def _joins(self, case: Case) -> bool:
        """Whether the nearest key is the correction's too, within the noise, though its wording disagrees."""
        return case.slot != NO_SLOT and case.distance <= case.policy.noise and not self._agrees(case)

    def _agrees(self, case: Case) -> bool:
        """Whether the wording of the nearest entry agrees with the correction's."""
        return not disagreement(self.codebook.wordings[case.slot], self.wording(case.examined))

    def wording(self, examined: Examined) -> str:
        """The wording that an entry at this prompt is given: without one it serves all prompts within its radius.

        The log keeps every prompt's wording, so that a later plan which compares words knows those of earlier edits.
        """
        return examined.wording if self.plan.wording else ""

    def clearance(self, name: str, key_D: np.ndarray, wording: str, case: Case) -> float:
        """From a key to the nearest input that must stay as it is, which the one being corrected no longer is.

        What an entry with this wording would not serve does not count.
        """
        noise = self.noise(key_D)
        traffic = case.sight.clearance(name, key_D, noise, case.query_D, wording)
        return min(traffic, self.memory.clearance(key_D, noise, case.query_D, wording)) if self.plan.guard else traffic

    def own_clearance(self, case: Case) -> float:
        """The same, of the correction's own key."""
        return self.clearance(case.feedback.feedback_id, case.query_D, self.wording(case.examined), case)

    def clearance_of_entry(self, slot: int, case: Case) -> float:
        """The same, of an entry's key."""
        codebook = self.codebook
        wording = "" if slot == case.slot and self._joins(case) else codebook.wordings[slot]
        return self.clearance(codebook.entry_ids[slot], codebook.keys_ND[slot], wording, case)

    def label_of_edit(self, feedback_id: str) -> Label | None:
        """The label of the entry that serves an edit; None where the bare model does."""
        entry_id = self.memory.serving_entry(feedback_id)
        return None if entry_id == BARE_MODEL else self.codebook.labels[self.codebook.slot(entry_id)]

    def said_otherwise(self, same_input: Sequence[str], label: Label, wording: str) -> list[str]:
        """The edits that a correction supersedes: of those of its input, and of those in its words.

        An exception of its input is superseded only where it is the same request.
        """
        return [
            name
            for name in same_input
            if self.label_of_edit(name) != label
            and (name not in self.codebook.exceptions or same_request(self.memory.wording(name), wording))
        ] + self.memory.kept_in_same_words(wording)

    def _start(self, case: Case) -> torch.Tensor:
        case.sight.start = self.warm_start(case.examined.label, case.query_D)
        if case.sight.start is UNSET:
            return self._usual_start(case.offset, case.examined.start_V)
        return torch.from_numpy(self.codebook.values_NV[self.codebook.slot(case.sight.start)].copy())

    def _usual_start(self, offset: int, output_V: torch.Tensor) -> torch.Tensor:
        """Where a value starts that starts from no entry's: the module's own output, or at random."""
        if self.plan.init != "random":
            return output_V
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + offset)
        return torch.rand(output_V.shape, generator=generator)

    def noise(self, query_D: np.ndarray) -> float:
        """Distances from this query up to this are the same input, seen in another batch."""
        return batch_noise(float(np.linalg.norm(query_D)), self.model.query_dtype)


def _may_serve_otherwise(change: EntryChange) -> bool:
    """Whether an entry serves other prompts after a change than before, or lets a farther entry serve them."""
    return any(field is not UNSET for field in (change.key, change.radius, change.wording))


def _float32(radius: float) -> float:
    """The float32 that the codebook will hold, so that log and Redis say the same."""
    return float(np.float32(radius))
