"""Cost of an undo, compared with one replay of the log. The replay is the floor, because an undo reads every delta.

An undo also decides again on each correction that depended on the removed ones, with a pass through the model. Where
many depended on them, this is the larger floor.

The corrections are points in clusters, so that entries expand, split and take over queries from each other. The log is
in memory, so the cost of Kafka is not included.

- `fold`: one replay of the log, in seconds.
- `newest`, `middle`, `oldest`: an undo of one correction.
- `author`: an undo of every other correction, the work of one of two authors. `decided-again` counts the corrections
  with a new decision. `author-back`: the undo of that undo.
- `seconds`: the best of three decisions; the baseline is `fold`. `of-fold`: `seconds` divided by `fold`.
"""

import time
from collections.abc import Iterator

import numpy as np

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.compare import EditState
from gracestream.pipeline.codebook.edit_memory import EditMemory
from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.editing.undo import undo
from gracestream.schemas.deltas import decode_delta
from gracestream.schemas.messages import Feedback
from tests.bench.framework import BenchError, Options, Row
from tests.support.chosen_queries import PointModel
from tests.support.editing_stories import Story
from tests.support.tiny_models import CODEBOOK

WIDTH = 64
AUTHORS = ("ann", "bob")
REPEATS = 3


def run(options: Options) -> Iterator[Row]:
    """The rows for a log of 10,000 corrections. `--quick` makes a tenth of them.

    Raises:
        BenchError: The options name a GPU.
    """
    if options.device != "cpu":
        raise BenchError(
            f"undo runs no model, so it cannot use {options.device!r}: it replays a log on the host; use --device cpu"
        )
    corrections = 1_000 if options.quick else 10_000
    config = EditConfig(radius_unit="absolute", radius=2.0, traffic_sample_size=0)
    story = Story(EditEngine(PointModel(WIDTH), CODEBOOK, config))
    story.lead(config)
    generator = np.random.default_rng(0)
    centres_ND = generator.normal(0, 3, (corrections // 3, WIDTH))
    for number in range(corrections):
        point_D = centres_ND[generator.integers(len(centres_ND))] + generator.normal(0, 0.1, WIDTH)
        story.correct(f"f{number}", tuple(point_D), int(generator.integers(1, 4)), AUTHORS[number % 2])
        if number % 1000 == 999:
            options.report(f"{number + 1} corrections made, {len(story.engine.codebook)} entries")
    name = f"undo/{corrections}"
    floor = min(_apply_seconds(story) for _ in range(REPEATS))
    yield Row(f"{name}/fold/seconds", floor, "s")
    undos = {
        "newest": Feedback(v=1, feedback_id="undo", undo=f"f{corrections - 1}"),
        "middle": Feedback(v=1, feedback_id="undo", undo=f"f{corrections // 2}"),
        "oldest": Feedback(v=1, feedback_id="undo", undo="f0"),
        "author": Feedback(v=1, feedback_id="undo", undo_author=AUTHORS[0]),
    }
    for target, feedback in undos.items():
        yield from _rows(f"{name}/{target}", story, feedback, floor)
    story.take(undos["author"])
    decided_again = len(decode_delta(story.deltas[-1]).decided)
    yield Row(f"{name}/author/decided-again", decided_again, "corrections")
    yield from _rows(f"{name}/author-back", story, Feedback(v=1, feedback_id="back", undo="undo"), floor)


def _rows(name: str, story: Story, feedback: Feedback, floor: float) -> Iterator[Row]:
    seconds = min(_undo_seconds(story, feedback) for _ in range(REPEATS))
    yield Row(f"{name}/seconds", seconds, "s", baseline=floor)
    yield Row(f"{name}/of-fold", seconds / floor, "x")


def _apply_seconds(story: Story) -> float:
    book = story.engine.codebook
    applied = EditState(Codebook(book.name, book.model, book.layer), EditMemory())
    started = time.perf_counter()
    for record in story.deltas:
        applied.apply(record)
    return time.perf_counter() - started


def _undo_seconds(story: Story, feedback: Feedback) -> float:
    """Seconds of the decision alone. It is not applied, so it can be repeated."""
    started = time.perf_counter()
    undo(story.engine, feedback, len(story.feedback), story)
    return time.perf_counter() - started
