"""The tasks of the paper's experiments (section 4 and the appendix on data): edits, and examples that must not change.

A task has a stream of edits in a fixed order, and:

- `retention`: examples that the unedited model is good at (the paper's D_test, measured by TRR);
- `unrelated`: texts that no edit should reach;
- `traffic`: unflagged requests, disjoint from both.

The selection of rows is the same on every run.
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
"""The paper's measures: `f1` for answers, `accuracy` for classes, `perplexity` for sentences."""

PromptFormat = Callable[[str], str]
"""Turns a question into a prompt."""

NUM_TRAFFIC_QUESTIONS = 512
"""Questions of Natural Questions that serve as unflagged requests."""

MAX_RETENTION_EXAMPLES = 500
"""Largest number of examples for TRR."""

HELD_OUT_DIVISOR = 7
"""The last seventh of zsRE's questions are not edited; a model may be trained on them and is tested on them (ARR)."""

NQ_FILE, ZSRE_FILE, COUNTERFACT_FILE = "nq_open_dev_3610.jsonl.gz", "zsre_700.jsonl.gz", "counterfact_val_1919.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its target; `subject` is the prompt's subject, or empty if the data do not name it."""

    inputs: str
    target: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class TaskCorrection:
    """A correction of a task; `rephrases` are other prompts with the same target."""

    example: Example
    rephrases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExperimentTask:
    """One experiment's data.

    Attributes:
        name: Name of the experiment.
        measure: Measure of answers.
        edits: The corrections, in order.
        retention: Examples that the unedited model is good at.
        accurate: Candidates for ARR: unedited examples of the same form as the edits.
        unrelated: Texts that no edit should reach.
        traffic: Unflagged requests; GRACE samples the last `GRACESTREAM_TRAFFIC_SAMPLE_SIZE` of them.
    """

    name: str
    measure: Measure
    edits: list[TaskCorrection]
    retention: list[Example]
    accurate: list[Example] = field(default_factory=list)
    unrelated: list[str] = field(default_factory=list)
    traffic: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """The SHA-256 of the whole task, in hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


ISSUE_AREAS = (
    "Criminal Procedure", "Civil Rights", "First Amendment", "Due Process", "Privacy", "Attorneys", "Unions",
    "Economic Activity", "Judicial Power", "Federalism", "Interstate Relations", "Federal Taxation", "Miscellaneous",
    "Private Action",
)  # fmt: skip
"""The issue areas of SCOTUS, in the order of their codes, from 1."""

TRAINING_RELABELS = {
    "First Amendment": "Civil Rights",
    "Due Process": "Civil Rights",
    "Unions": "Economic Activity",
}
"""Issue areas that the paper relabels in the classifier's training data, so that there is something to correct."""

TRAINING_TERMS, RETENTION_TERMS, EDIT_TERMS = (0, 1982), (1983, 1990), (1991, 2009)
"""First and last terms (years) of the SCOTUS cases for training, retention and edits."""


def format_question(text: str) -> str:
    """The prompt for a language model that was not trained to answer questions."""
    return f"Question: {text.strip().removesuffix('?')}? Answer:"


def zsre(prompt_format: PromptFormat = format_question) -> ExperimentTask:
    """The zsRE task: questions and answers; retention and traffic come from Natural Questions.

    Raises:
        DataError: the data are missing or malformed.
    """
    rows = read_rows(ZSRE_FILE, ZsreRow)
    edits = _deduplicate(
        TaskCorrection(Example(prompt_format(row.src), row.answers[0], row.subject), (prompt_format(row.rephrase),))
        for row in rows
    )
    unrelated = (prompt_format(row.loc.removeprefix("nq question: ")) for row in rows)
    num_edited = len(edits) - len(edits) // HELD_OUT_DIVISOR
    accurate = [correction.example for correction in edits[num_edited:]]
    return replace(_fact_task("zsre", edits[:num_edited], unrelated, prompt_format), accurate=accurate)


def zsre_training() -> list[Example]:
    """Training examples for a model that should know the retained answers: `retention` and `accurate` of zsRE.

    Raises:
        DataError: the data are missing or malformed.
    """
    task = zsre()
    return [*task.retention, *task.accurate]


def answer_names() -> list[str]:
    """The distinct answers of zsRE and Natural Questions, without their questions.

    Raises:
        DataError: the data are missing or malformed.
    """
    zsre_answers = (row.answers[0] for row in read_rows(ZSRE_FILE, ZsreRow))
    nq_answers = (row.answer[0] for row in read_rows(NQ_FILE, QuestionRow))
    return [name for name in dict.fromkeys((*zsre_answers, *nq_answers)) if name.strip()]


def counterfact() -> ExperimentTask:
    """The CounterFact task: statements with a counterfactual end; retention and traffic come from Natural Questions.

    The unrelated texts are CounterFact's neighbouring statements, which share the true end.

    Raises:
        DataError: the data are missing or malformed.
    """
    rows = read_rows(COUNTERFACT_FILE, CounterFactRow)
    edits = _deduplicate(
        TaskCorrection(Example(row.prompt, row.target_new, row.subject), (row.rephrase_prompt,)) for row in rows
    )
    return _fact_task("counterfact", edits, (row.locality_prompt for row in rows), format_question)


def hallucination() -> ExperimentTask:
    """The hallucination task: biographies and their true next sentence; retention is web text as in pretraining.

    Raises:
        DataError: the data are missing or malformed.
    """
    rows = read_rows("hallucination_edit_450.jsonl.gz", BiographyRow)
    edits = _deduplicate(TaskCorrection(Example(row.prompt, row.target_new, row.subject)) for row in rows)
    other_rows = read_rows("hallucination_other_306.jsonl.gz", BiographyRow)
    web_examples = (_cut_between_words(row.locality_prompt, row.locality_ground_truth) for row in rows)
    retention = [example for example in web_examples if example.inputs and example.target]
    traffic = [row.locality_prompt for row in other_rows]
    unrelated = [example.inputs for example in retention]
    return ExperimentTask("hallucination", "perplexity", edits, retention, unrelated=unrelated, traffic=traffic)


def _cut_between_words(beginning: str, rest: str) -> Example:
    """Split a text between words near its original split, and drop its last word.

    The data cut texts at arbitrary characters: in two, and at the end. So the split may fall into a word, and the last
    word may be incomplete.
    """
    text = beginning + rest
    start = text.rfind(" ", 0, len(beginning) + 1)
    return Example(text[: max(start, 0)].rstrip(), text[start : text.rfind(" ")].strip())


def scotus() -> ExperimentTask:
    """The SCOTUS task: court cases and their issue areas in order of their terms.

    Retention has earlier cases, and traffic the earliest ones. The retained cases have the labels of the classifier's
    training data, because the classifier should still predict them.

    Raises:
        DataError: the data are missing or malformed.
    """
    edits = _deduplicate(TaskCorrection(example) for example in _court_cases(EDIT_TERMS))
    traffic = [case.inputs for case in _court_cases(TRAINING_TERMS)]
    return ExperimentTask(
        "scotus", "accuracy", edits, _relabel_for_training(_court_cases(RETENTION_TERMS)), traffic=traffic
    )


def scotus_training() -> list[Example]:
    """The classifier's training examples: cases of `TRAINING_TERMS`, relabelled as in the paper.

    Raises:
        DataError: the data are missing or malformed, or have no such case.
    """
    cases = _relabel_for_training(_court_cases(TRAINING_TERMS))
    if not cases:
        raise DataError(f"the data have no case of a term up to {TRAINING_TERMS[1]} to train on")
    return cases


def _relabel_for_training(cases: Sequence[Example]) -> list[Example]:
    return [Example(case.inputs, TRAINING_RELABELS.get(case.target, case.target)) for case in cases]


def _court_cases(terms: tuple[int, int]) -> list[Example]:
    first, last = terms
    rows = [row for row in read_rows("scotus_facts_to_2009.jsonl.gz", CourtCaseRow) if first <= row.term <= last]
    rows.sort(key=lambda row: row.term)  # stable: cases of one term keep the order of the file
    return [Example(f"{row.facts} {row.question}", ISSUE_AREAS[row.issue_area - 1]) for row in rows]


def _fact_task(
    name: str, edits: list[TaskCorrection], unrelated: Iterable[str], prompt_format: PromptFormat
) -> ExperimentTask:
    """A task of facts, with retention and traffic from Natural Questions."""
    traffic, retention = _natural_questions(prompt_format)
    return ExperimentTask(name, "f1", edits, retention, unrelated=_without_edited(unrelated, edits), traffic=traffic)


def _natural_questions(prompt_format: PromptFormat) -> tuple[list[str], list[Example]]:
    """Questions for the traffic, and other questions with their answers for the retention, in a fixed random order."""
    rows = read_rows(NQ_FILE, QuestionRow)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    examples = [Example(prompt_format(rows[index].question), rows[index].answer[0]) for index in order]
    return [example.inputs for example in examples[:NUM_TRAFFIC_QUESTIONS]], examples[NUM_TRAFFIC_QUESTIONS:][
        :MAX_RETENTION_EXAMPLES
    ]


def _deduplicate(edits: Iterable[TaskCorrection]) -> list[TaskCorrection]:
    """The edits without repeated prompts (the first one stays) and without blank targets."""
    by_prompt: dict[str, TaskCorrection] = {}
    for correction in edits:
        if correction.example.target.strip():
            by_prompt.setdefault(correction.example.inputs, correction)
    return list(by_prompt.values())


def _without_edited(texts: Iterable[str], edits: Iterable[TaskCorrection]) -> list[str]:
    """The distinct texts that are not prompts of the edits."""
    edited = {correction.example.inputs for correction in edits}
    return [text for text in dict.fromkeys(texts) if text not in edited]


TASKS: dict[str, Callable[[], ExperimentTask]] = {
    "scotus": scotus,
    "zsre": zsre,
    "counterfact": counterfact,
    "hallucination": hallucination,
}
"""The tasks by name; each reads its data when it is called."""
