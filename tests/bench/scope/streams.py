"""The streams of corrections: from the data sets, and from pairs written for this benchmark."""

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct

from gracestream.pipeline.experiments.data import CounterFactRow, find_data_file, read_rows
from gracestream.pipeline.experiments.tasks import COUNTERFACT_FILE, TaskCorrection, counterfact, format_question, zsre
from tests.bench.scope.cases import Case, Correction, Part, Stream
from tests.bench.scope.forms import FORMS, ITSELF, CaseKind, related

OWN_DATA = Path(__file__).parent / "data"
"""The data written for this benchmark."""

HELD_OUT_ROWS = 200
"""Held-out rows of zsRE and CounterFact: the first ones. The defaults were chosen on later rows."""

UNRELATED = 500

KNOWEDIT = "knowedit_zsre_600.jsonl.gz"

ALIASES = frozenset({
    8, 18, 27, 28, 34, 64, 105, 142, 195, 249, 281, 283, 296, 331, 412, 444, 460, 480, 521, 558, 569,
})  # fmt: skip
"""Rows of KnowEdit with an alias that asks the same. Others ask something else ("What is the function of ...?")."""

INTENTS = {
    "request_refund": "speak_to_agent",
    "Refund_not_showing_up": "invoice",
    "lost_or_stolen_card": "fraud_review",
    "declined_card_payment": "speak_to_agent",
    "card_payment_not_recognised": "card_lost",
    "edit_personal_details": "login_help",
    "passcode_forgotten": "speak_to_agent",
}
"""Intents of Banking77, and their corrected label: a class of the demo's classifier that it does not choose itself."""


class KnowEditRow(Struct, frozen=True):
    """A question with its new answer, and other questions about its subject."""

    prompt: str
    target_new: str
    subject: str
    other_relations: list[str]
    aliases: list[str] = []


class PairRow(Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt with its corrected answer, a similar prompt with another answer, and the kind of difference."""

    prompt: str
    target: str
    other: str
    differs: str


def restatements() -> dict[str, list[int]]:
    """Rows of KnowEdit with an other relation that restates the edit's question, by the name of the relation.

    All 600 rows were labelled. The rule: a full answer to one of the two questions also answers the other.
    """
    found: dict[str, list[int]] = json.loads((OWN_DATA / "restatements.json").read_text(encoding="utf-8"))
    return found


def relation_of(row: KnowEditRow) -> str:
    """The name of the other relation. The data's second wording consists of the subject and this name."""
    return row.other_relations[1].removeprefix(row.subject).strip()


def pairs() -> list[PairRow]:
    """The pairs of similar prompts."""
    lines = (OWN_DATA / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=PairRow) for line in lines]


def every_second(rows: Sequence[Correction], part: Part) -> list[Correction]:
    """The rows of one part. Rows with odd numbers are held out."""
    return list(rows[1::2] if part == "held-out" else rows[::2])


def make_cases(corrections: Sequence[Correction], kinds: Iterable[CaseKind], part: Part, forms: int) -> Iterator[Case]:
    """The cases of all corrections, kind by kind. Only the first `forms` corrections get forms made by rules."""
    for kind in kinds:
        some = corrections[:forms] if kind in FORMS else corrections
        for number, correction in enumerate(some):
            for text in kind.texts(correction, part):
                yield Case(kind.name, text, correction.target, kind.applies, number, kind.chat)


def unrelated_cases(questions: Iterable[str]) -> list[Case]:
    """Cases that belong to no edit."""
    return [Case("unrelated", question, "", applies=False) for question in questions]


def zsre_stream(part: Part, edits: int, forms: int) -> Stream:
    """Questions of zsRE with a paraphrase, and the same questions about other subjects."""
    task = zsre()
    chosen = _first(task.edits, part)[:edits]
    subjects = _same_question(chosen, task.edits)
    corrections = [
        Correction(
            edit.example.inputs,
            edit.example.target,
            edit.example.inputs.removeprefix("Question: ").removesuffix(" Answer:"),
            {"paraphrase": edit.rephrases, "subject": others},
        )
        for edit, others in zip(chosen, subjects, strict=True)
    ]
    kinds = (ITSELF, related("paraphrase", applies=True), *FORMS, related("subject", applies=False))
    unrelated = unrelated_cases(example.inputs for example in task.retention[:UNRELATED])
    cases = [*make_cases(corrections, kinds, part, forms), *unrelated]
    return Stream("zsre", corrections, cases, task.traffic)


def counterfact_stream(part: Part, edits: int, forms: int) -> Stream:
    """Statements of CounterFact with a paraphrase, and the neighbours of the edited rows."""
    task = counterfact()
    neighbours = _neighbours()
    corrections = [
        Correction(
            correction.example.inputs,
            correction.example.target,
            correction.example.inputs,
            {"paraphrase": correction.rephrases, "neighbour": neighbours[correction.example.inputs]},
        )
        for correction in _first(task.edits, part)[:edits]
    ]
    kinds = (ITSELF, related("paraphrase", applies=True), *FORMS, related("neighbour", applies=False))
    return Stream("counterfact", corrections, list(make_cases(corrections, kinds, part, forms)), task.traffic)


def knowedit_stream(part: Part, edits: int, _forms: int) -> Stream:
    """Questions of KnowEdit, and other relations of their subjects. Rows with an alias come first."""
    rows = read_rows(KNOWEDIT, KnowEditRow)
    restated = {row for listed in restatements().values() for row in listed}
    corrections = []
    for number, row in enumerate(rows):
        kind = "restatement" if number in restated else "relation"
        others = {kind: tuple(map(format_question, row.other_relations))}
        aliases = {"alias": tuple(map(format_question, row.aliases))} if number in ALIASES else {}
        text = format_question(row.prompt)
        corrections.append(Correction(text, row.target_new.strip(), row.prompt, others | aliases))
    some = sorted(every_second(corrections, part), key=lambda one: "alias" not in one.related)[:edits]
    kinds = (ITSELF, related("alias", applies=True), *(related(kind, applies=False) for kind in RELATIONS))
    return Stream("knowedit", some, list(make_cases(some, kinds, part, 0)), zsre().traffic)


RELATIONS = ("relation", "restatement")


def pairs_stream(part: Part, edits: int, _forms: int) -> Stream:
    """The pairs written for this benchmark. The kind of a case is the kind of difference."""
    rows = every_second(
        [Correction(row.prompt, row.target, row.prompt, {row.differs: (row.other,)}) for row in pairs()],
        part,
    )[:edits]
    differences = sorted({name for row in rows for name in row.related})
    kinds = (ITSELF, *(related(name, applies=False) for name in differences))
    return Stream("pairs", rows, list(make_cases(rows, kinds, part, 0)), zsre().traffic)


def intents_stream(part: Part, edits: int, _forms: int) -> Stream:
    """Utterances of Banking77 for the demo's classifier. Some intents get another label.

    Of every four utterances with these intents, one is a correction and one is a case.
    """
    rows = _banking77("test" if part == "held-out" else "train")
    known = [(text, INTENTS[intent]) for text, intent in rows if intent in INTENTS][: 4 * edits]
    others = [text for text, intent in rows if intent not in INTENTS]
    corrections = [Correction(text, intent, text) for text, intent in known[::4]]
    utterances = [Case("utterance", text, intent, applies=True) for text, intent in known[1::4]]
    cases = [
        *make_cases(corrections, (ITSELF,), part, 0),
        *utterances,
        *(Case("other intent", text, "", applies=False) for text in others[1::8][:UNRELATED]),
    ]
    return Stream("intents", corrections, cases, others[::2][:512], model="intent")


STREAMS: Mapping[str, Callable[[Part, int, int], Stream]] = {
    "zsre": zsre_stream,
    "counterfact": counterfact_stream,
    "knowedit": knowedit_stream,
    "pairs": pairs_stream,
    "intents": intents_stream,
}
"""The makers of streams by name. Their arguments: the part, the number of corrections, and of those with forms."""


def _first(edits: Sequence[TaskCorrection], part: Part) -> Sequence[TaskCorrection]:
    return edits[:HELD_OUT_ROWS] if part == "held-out" else edits[HELD_OUT_ROWS:]


def _same_question(chosen: Sequence[TaskCorrection], edits: Sequence[TaskCorrection]) -> list[tuple[str, ...]]:
    """For each edit, one unedited question that differs only in the subject, if the data have one."""
    edited = {correction.example.inputs for correction in chosen}
    by_template: dict[str, list[str]] = {}
    for correction in edits:
        by_template.setdefault(_template(correction), []).append(correction.example.inputs)
    found = []
    for correction in chosen:
        others = [text for text in by_template[_template(correction)] if text not in edited]
        found.append(tuple(others[:1]) if correction.example.subject in correction.example.inputs else ())
    return found


def _template(correction: TaskCorrection) -> str:
    return correction.example.inputs.replace(correction.example.subject, "\0")


def _neighbours() -> dict[str, tuple[str, ...]]:
    """The neighbour of each statement of CounterFact."""
    return {row.prompt: (row.locality_prompt,) for row in read_rows(COUNTERFACT_FILE, CounterFactRow)}


def _banking77(name: str) -> list[tuple[str, str]]:
    """The utterances of Banking77 with their intents, in rounds of one per intent."""
    with gzip.open(find_data_file(f"banking77_{name}.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        rows = [(row["text"].strip(), row["category"]) for row in csv.DictReader(file)]
    by_intent: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        by_intent.setdefault(row[1], []).append(row)
    rounds = range(max(map(len, by_intent.values())))
    return list(chain.from_iterable([of[i] for of in by_intent.values() if i < len(of)] for i in rounds))
