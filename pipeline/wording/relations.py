"""Relations that requests ask for, as templates with a place for the subject; the package's file holds them.

They were written for this project, of persons, places, companies, works, things, rules and events, each in several
wordings: as a question, as a statement to be completed, as a noun phrase.
"""

import re
from functools import cache
from importlib.resources import files

SUBJECT_PLACEHOLDER = "{s}"
"""Where the subject stands in a template."""


@cache
def relation_templates() -> tuple[tuple[str, ...], ...]:
    """The templates of each relation, in the order of the file."""
    lines = (
        files("gracestream.pipeline.wording")
        .joinpath("words", "relations.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [line.split("|") for line in lines if line.strip() and not line.startswith("[")]
    return tuple(tuple(one.strip() for one in row[1:]) for row in rows)


@cache
def template_words() -> frozenset[str]:
    """The words of all templates, in lower case: what many requests have, whatever they are about."""
    words = (re.findall(r"\w+", one.replace(SUBJECT_PLACEHOLDER, " ")) for row in relation_templates() for one in row)
    return frozenset(word.lower() for row in words for word in row)
