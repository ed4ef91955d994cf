"""The tasks of the paper's experiments (section 4, and the appendix on data): what is edited, and what must stay.

Each is one stream of edits in a fixed order. Beside it lie the examples that the model was good at before (`retention`,
the paper's D_test, of which TRR tells), texts that no edit should reach (`unrelated`), and requests that nobody flagged
(`traffic`), which overlap with neither. No row is drawn at random from one run to the next.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np

from gracestream.pipeline.experiments.data import (
    BiographyRow,
    CounterFactRow,
    CourtCaseRow,
    DataError,
    QuestionRow,
    ZsreRow,
    read_rows,
)

Measure = Literal["f1", "accuracy", "perplexity"]
"""How well a model does, as the paper measures it: of answers, of classes, and of sentences."""

PromptFormat = Callable[[str], str]
"""Puts a question into the words that a model is asked it in."""

NUM_TRAFFIC_QUESTIONS = 512
"""Questions of Natural Questions that are requests which nobody flagged."""

MAX_RETENTION_EXAMPLES = 500
"""Examples of which TRR tells, at most."""

HELD_OUT_DIVISOR = 7
"""Of zsRE's questions the last, one in so many, are no edits, but such as a model may know already (ARR)."""

NQ_FILE, ZSRE_FILE, COUNTERFACT_FILE = "nq_open_dev_3610.jsonl.gz", "zsre_700.jsonl.gz", "counterfact_val_1919.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Example:
    """A text, and what the model should say to it; `subject` is what it is about, where the data tell."""

    inputs: str
    target: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """A correction. `rephrases` ask the same in other words."""

    example: Example
    rephrases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExperimentTask:
    """One experiment's data.

    Attributes:
        name: Of the experiment.
        measure: What is measured of answers.
        edits: In the order in which they come.
        retention: What the model knew before.
        accurate: What it may say right before and is asked about in the same way as edits (the paper's ARR).
        unrelated: Texts that no edit should reach.
        traffic: Requests that nobody flagged; GRACE sees the last of them, as many as its settings say.
    """

    name: str
    measure: Measure
    edits: list[Edit]
    retention: list[Example]
    accurate: list[Example] = field(default_factory=list)
    unrelated: list[str] = field(default_factory=list)
    traffic: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


ISSUE_AREAS = (
    "Criminal Procedure", "Civil Rights", "First Amendment", "Due Process", "Privacy", "Attorneys", "Unions",
    "Economic Activity", "Judicial Power", "Federalism", "Interstate Relations", "Federal Taxation", "Miscellaneous",
    "Private Action",
)  # fmt: skip
"""The topics of SCOTUS, in the order of their codes, from 1."""

TRAINING_RELABELS = {
    "First Amendment": "Civil Rights",
    "Due Process": "Civil Rights",
    "Unions": "Economic Activity",
}
"""What the paper changes in what the classifier is taught, so that it has something to be corrected on."""

TRAINING_TERMS, RETENTION_TERMS, EDIT_TERMS = (0, 1982), (1983, 1990), (1991, 2009)
"""The first and last terms of SCOTUS's cases that are trained on, retained and edited."""


def format_question(text: str) -> str:
    """For a language model that was not trained to answer questions."""
    return f"Question: {text.strip().removesuffix('?')}? Answer:"


def zsre(prompt_format: PromptFormat = format_question) -> ExperimentTask:
    """Questions and answers; retention and traffic are of Natural Questions.

    Raises:
        DataError: the data are not there.
    """
    found = read_rows(ZSRE_FILE, ZsreRow)
    edits = _deduplicate(
        Edit(Example(prompt_format(row.src), row.answers[0], row.subject), (prompt_format(row.rephrase),))
        for row in found
    )
    unrelated = (prompt_format(row.loc.removeprefix("nq question: ")) for row in found)
    edited = len(edits) - len(edits) // HELD_OUT_DIVISOR
    accurate = [edit.example for edit in edits[edited:]]
    return replace(_fact_task("zsre", edits[:edited], unrelated, prompt_format), accurate=accurate)


def zsre_training() -> list[Example]:
    """What a model is taught that should know what is retained: Natural Questions, and zsRE's that are not edited.

    Raises:
        DataError: the data are not there.
    """
    task = zsre()
    return [*task.retention, *task.accurate]


def answer_names() -> list[str]:
    """What answers are, each once, of zsRE's and of Natural Questions; not which question it answers.

    Raises:
        DataError: the data are not there.
    """
    of_zsre = (row.answers[0] for row in read_rows(ZSRE_FILE, ZsreRow))
    of_nq = (row.answer[0] for row in read_rows(NQ_FILE, QuestionRow))
    return [name for name in dict.fromkeys((*of_zsre, *of_nq)) if name.strip()]


def counterfact() -> ExperimentTask:
    """Statements with another end; retention and traffic are of Natural Questions, the unrelated are its neighbours.

    Raises:
        DataError: the data are not there.
    """
    found = read_rows(COUNTERFACT_FILE, CounterFactRow)
    edits = _deduplicate(
        Edit(Example(row.prompt, row.target_new, row.subject), (row.rephrase_prompt,)) for row in found
    )
    return _fact_task("counterfact", edits, (row.locality_prompt for row in found), format_question)


def hallucination() -> ExperimentTask:
    """Biographies and their true next sentence; retention is of web text, as the model was trained on.

    Raises:
        DataError: the data are not there.
    """
    found = read_rows("hallucination_edit_450.jsonl.gz", BiographyRow)
    edits = _deduplicate(Edit(Example(row.prompt, row.target_new, row.subject)) for row in found)
    others = read_rows("hallucination_other_306.jsonl.gz", BiographyRow)
    web = (_cut_between_words(row.locality_prompt, row.locality_ground_truth) for row in found)
    retention = [example for example in web if example.inputs and example.target]
    traffic = [row.locality_prompt for row in others]
    unrelated = [example.inputs for example in retention]
    return ExperimentTask("hallucination", "perplexity", edits, retention, unrelated=unrelated, traffic=traffic)


def _cut_between_words(beginning: str, rest: str) -> Example:
    """A text that was cut in two anywhere, even within a word, and ends anywhere: cut anew, without the last word."""
    text = beginning + rest
    start = text.rfind(" ", 0, len(beginning) + 1)
    return Example(text[: max(start, 0)].rstrip(), text[start : text.rfind(" ")].strip())


def scotus() -> ExperimentTask:
    """Cases of the Supreme Court and their topics, as they came; retention is of the terms before, traffic older.

    What is retained has the topics that the classifier was taught, since that is what it should still do.

    Raises:
        DataError: the data are not there.
    """
    edits = _deduplicate(Edit(example) for example in _court_cases(EDIT_TERMS))
    traffic = [case.inputs for case in _court_cases(TRAINING_TERMS)]
    return ExperimentTask(
        "scotus", "accuracy", edits, _relabel_for_training(_court_cases(RETENTION_TERMS)), traffic=traffic
    )


def scotus_training() -> list[Example]:
    """What the classifier is trained on: earlier cases, under the labels of their time.

    Raises:
        DataError: the data are not there, or have no such case.
    """
    cases = _relabel_for_training(_court_cases(TRAINING_TERMS))
    if not cases:
        raise DataError(f"of the terms up to {TRAINING_TERMS[1]} there is no case to train on")
    return cases


def _relabel_for_training(cases: Sequence[Example]) -> list[Example]:
    return [Example(case.inputs, TRAINING_RELABELS.get(case.target, case.target)) for case in cases]


def _court_cases(terms: tuple[int, int]) -> list[Example]:
    first, last = terms
    found = [row for row in read_rows("scotus_facts_to_2009.jsonl.gz", CourtCaseRow) if first <= row.term <= last]
    found.sort(key=lambda row: row.term)  # stable: within a term as the file has them
    return [Example(f"{row.facts} {row.question}", ISSUE_AREAS[row.issue_area - 1]) for row in found]


def _fact_task(name: str, edits: list[Edit], unrelated: Iterable[str], prompt_format: PromptFormat) -> ExperimentTask:
    """Edits of facts, whose retention and traffic are of Natural Questions."""
    traffic, retention = _natural_questions(prompt_format)
    return ExperimentTask(name, "f1", edits, retention, unrelated=_without_edited(unrelated, edits), traffic=traffic)


def _natural_questions(prompt_format: PromptFormat) -> tuple[list[str], list[Example]]:
    """Questions as traffic, and others with their answers, in an order of no meaning."""
    found = read_rows(NQ_FILE, QuestionRow)
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    examples = [Example(prompt_format(found[place].question), found[place].answer[0]) for place in order]
    return [example.inputs for example in examples[:NUM_TRAFFIC_QUESTIONS]], examples[NUM_TRAFFIC_QUESTIONS:][
        :MAX_RETENTION_EXAMPLES
    ]


def _deduplicate(edits: Iterable[Edit]) -> list[Edit]:
    """The first of those with the same text; without those whose target is nothing."""
    found: dict[str, Edit] = {}
    for edit in edits:
        if edit.example.target.strip():
            found.setdefault(edit.example.inputs, edit)
    return list(found.values())


def _without_edited(texts: Iterable[str], edits: Iterable[Edit]) -> list[str]:
    """Each text once that is not edited itself."""
    edited = {edit.example.inputs for edit in edits}
    return [text for text in dict.fromkeys(texts) if text not in edited]


TASKS: dict[str, Callable[[], ExperimentTask]] = {
    "scotus": scotus,
    "zsre": zsre,
    "counterfact": counterfact,
    "hallucination": hallucination,
}
