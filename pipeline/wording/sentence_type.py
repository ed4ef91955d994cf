"""A question as a statement to complete, and the other way round, by English rules.

`What is the capital of Mongolia?` and `The capital of Mongolia is` ask for the same. A model goes on from them in
different ways, so a value that was trained on one often fails on the other.

Not promised: that a request has another type. Questions of `what`, `who` and `which` are rewritten that have a form of
`be` or a regular verb, and statements that end in a form of `be`.
"""

import re

BE = "is|was|are|were"

OF_BE = re.compile(rf"(?:what|who|which) ({BE}) (the [^?]+?)( called| named)?\s*\??", re.IGNORECASE)
"""`What is the capital of Mongolia?`"""

OF_DOING = re.compile(r"who (\w+ed|wrote|made|built|led|won) ([^?]+?)\s*\??", re.IGNORECASE)
"""`Who invented dynamite?`"""

PARTICIPLES = {"wrote": "written"}
"""Of verbs whose participle is not their past tense."""

STATED = re.compile(rf"(the [^?!]+?) ({BE})( called| named)?(?: the| a| an)?:?\s*", re.IGNORECASE)
"""`The capital of Mongolia is`"""

UNFINISHED = re.compile(r"\b(?:that|which|where|who|whose|to|in|from|for|by|at|on|with)$", re.IGNORECASE)
"""Ends of what no form of `be` can follow: `What is the place that Ann comes from?`"""


def other_type(text: str) -> str | None:
    """The same request as a statement where it is a question, as a question where it is a statement; None: unknown."""
    if found := OF_BE.fullmatch(text):
        be, subject, called = found.groups()
        return None if UNFINISHED.search(subject) else f"{_capital(subject)} {be.lower()}{called or ''}"
    if found := OF_DOING.fullmatch(text):
        verb = found[1].lower()
        return f"{_capital(found[2])} was {PARTICIPLES.get(verb, verb)} by"
    if found := STATED.fullmatch(text):
        subject, be, called = found.groups()
        return f"What {be.lower()} {subject[0].lower()}{subject[1:]}{called or ''}?"
    return None


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
