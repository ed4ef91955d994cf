"""Corrections for tiny models."""

from collections.abc import Sequence

from gracestream.pipeline.experiments.tasks import Example


def examples_of(kind: str, inputs: Sequence[str]) -> list[Example]:
    """Each text with one of three targets in turn; its subject is its last word."""
    targets = ["right", "wrong", "both"] if kind == "bert" else ["train", "bridge", "river"]
    return [Example(text, targets[place % 3], text.split()[-1]) for place, text in enumerate(inputs)]
