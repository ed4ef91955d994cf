"""Templates of requests with a placeholder for the subject, from the package's file `words/relations.txt`.

Each relation has several templates: a question, a statement to complete, a noun phrase. The relations concern persons,
places, companies, works, things, rules and events. They were written for this project.
"""

import re
from functools import cache
from importlib.resources import files

SUBJECT_PLACEHOLDER = "{s}"
"""The placeholder for the subject in a template."""


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
    return tuple(tuple(template.strip() for template in row[1:]) for row in rows)


@cache
def template_words() -> frozenset[str]:
    """The words of all templates, in lower case: usual words of requests about any subject."""
    words = (
        re.findall(r"\w+", template.replace(SUBJECT_PLACEHOLDER, " "))
        for row in relation_templates()
        for template in row
    )
    return frozenset(word.lower() for row in words for word in row)
