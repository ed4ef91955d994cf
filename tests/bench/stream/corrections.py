"""The corrections of a stream in random order, and the cases that are checked at its checkpoints."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gracestream.pipeline.experiments.data import BiographyRow, CounterFactRow, ZsreRow, read_rows
from gracestream.pipeline.experiments.tasks import COUNTERFACT_FILE, ZSRE_FILE, format_question, zsre
from tests.bench.scope.streams import KNOWEDIT, KnowEditRow, restatements

COUNTERFACTS = (COUNTERFACT_FILE, "counterfact_edit_8000.jsonl.gz")
BIOGRAPHIES = "hallucination_edit_450.jsonl.gz"

SEED = 0
"""Seed of the order of the corrections, of the order of the cases, and of the authors."""

MAX_CASES_PER_KIND = 500
"""Most cases of one kind at a checkpoint."""

AUTHORS = ("ann", "bob")
"""The authors of the corrections. The corrections of the first one are undone at the end."""

MAX_SUBJECT_WORDS = 8
"""Most words of a subject that is searched for in a prompt."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A prompt with its new answer.

    Attributes:
        text: The corrected prompt.
        target: The new answer.
        subject: The subject of the prompt.
        paraphrases: Prompts with the same meaning, by the name of their kind.
        others: Prompts with another meaning, by the name of their kind.
    """

    text: str
    target: str
    subject: str
    paraphrases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt at a checkpoint. `correction` is the number of its correction, or None."""

    kind: str
    text: str
    correction: int | None
    applies: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a stream: corrections and cases in their random order, and the traffic."""

    corrections: Sequence[Correction]
    cases: Sequence[Case]
    traffic: Sequence[str]


def stream_data() -> Data:
    """The corrections of all data sets, one for each distinct prompt. The order depends only on the data.

    Raises:
        DataError: The data files are missing.
    """
    found: dict[str, Correction] = {}
    for one in chain(_zsre(), _knowedit(), _biographies(), *map(_counterfact, COUNTERFACTS)):
        if one.target.strip():
            found.setdefault(one.text, one)
    corrections = list(found.values())
    random.Random(SEED).shuffle(corrections)
    task = zsre()
    unrelated = [Case("unrelated", example.inputs, None) for example in task.retention]
    return Data(corrections, [*make_cases(corrections), *unrelated], task.traffic)


def make_cases(corrections: Sequence[Correction]) -> list[Case]:
    """The cases of the corrections in random order, without cases that are corrected prompts.

    A prompt with the subject of another correction may ask for the fact that this one changes, so it gets another kind.
    """
    corrected = {one.text for one in corrections}
    subjects = {" ".join(_words(one.subject)) for one in corrections}
    cases = [
        case
        for number, correction in enumerate(corrections)
        for case in _cases(number, correction, subjects)
        if case.text not in corrected
    ]
    random.Random(SEED).shuffle(cases)
    return cases


def select_cases(cases: Sequence[Case], corrected: int) -> list[Case]:
    """The first cases of each kind that belong to one of the first `corrected` corrections, or to none."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        cases_of_kind = found.setdefault(case.kind, [])
        if len(cases_of_kind) < MAX_CASES_PER_KIND and (case.correction is None or case.correction < corrected):
            cases_of_kind.append(case)
    return list(chain.from_iterable(found[kind] for kind in sorted(found)))


def draw_authors(count: int) -> list[str]:
    """The author of each of `count` corrections. A longer list begins with a shorter one."""
    generator = random.Random(SEED)
    return [generator.choice(AUTHORS) for _ in range(count)]


def _cases(number: int, correction: Correction, subjects: set[str]) -> Iterator[Case]:
    for kind, texts in correction.paraphrases.items():
        yield from (Case(kind, text, number, applies=True) for text in texts)
    for kind, texts in correction.others.items():
        for text in texts:
            named = subjects.intersection(_phrases(text)) - {" ".join(_words(correction.subject))}
            yield Case(f"{kind}, corrected subject" if named else kind, text, number)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _phrases(text: str) -> Iterator[str]:
    """All sequences of at most `MAX_SUBJECT_WORDS` consecutive words of a text."""
    words = _words(text)
    for start in range(len(words)):
        for end in range(start + 1, min(start + MAX_SUBJECT_WORDS, len(words)) + 1):
            yield " ".join(words[start:end])


def _zsre() -> Iterator[Correction]:
    for row in read_rows(ZSRE_FILE, ZsreRow):
        paraphrases = {"zsRE paraphrase": (format_question(row.rephrase),)}
        yield Correction(format_question(row.src), row.answers[0], row.subject, paraphrases)


def _knowedit() -> Iterator[Correction]:
    restated = {row for listed in restatements().values() for row in listed}
    for number, row in enumerate(read_rows(KNOWEDIT, KnowEditRow)):
        others = () if number in restated else tuple(map(format_question, row.other_relations))
        yield Correction(
            format_question(row.prompt), row.target_new.strip(), row.subject, others={"other relation": others}
        )


def _biographies() -> Iterator[Correction]:
    for row in read_rows(BIOGRAPHIES, BiographyRow):
        yield Correction(row.prompt, row.target_new, row.subject)


def _counterfact(name: str) -> Iterator[Correction]:
    for row in read_rows(name, CounterFactRow):
        paraphrases = {"CounterFact paraphrase": (row.rephrase_prompt,)}
        yield Correction(
            row.prompt, row.target_new, row.subject, paraphrases, {"CounterFact neighbour": (row.locality_prompt,)}
        )
