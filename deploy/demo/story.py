"""The demo's story, on a real stack: wrong answers, corrections, both replicas right, a crash, a replay.

Each chapter makes a claim and checks it; the exit status is 1 as soon as one of them does not hold.
"""

import secrets
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import UNSET
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table

from gracestream.deploy.demo.cases import Case, Script, answer_of, is_wrong, script_of
from gracestream.deploy.local.stack import Stack, Worker, running_stack
from gracestream.pipeline.client import Client
from gracestream.pipeline.editing import correction
from gracestream.pipeline.history import replay_deltas
from gracestream.schemas.messages import VERSION, Inputs, Outcome, Prediction, Request, in_one_text

TIMEOUT = 120.0
PARTITIONS = 8
ONE_BY_ONE = 5
"""Corrections that are sent alone, to measure the way from a correction to the corrected answer."""


@dataclass
class Story:
    """What has been claimed, and whether it held; what was measured on the way."""

    screen: Console
    claims: list[tuple[str, bool, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    def claim(self, text: str, holds: bool, detail: str = "") -> None:
        """Say what should be so, and whether it is."""
        self.claims.append((text, holds, detail))
        self.screen.print(
            f"  {'[green]✔[/]' if holds else '[red]✘[/]'} {text}{f' [dim]({detail})[/]' if detail else ''}"
        )


def tell(model: str, data: Path, screen: Console) -> int:
    """Tell the whole story; the exit status."""
    script = script_of(model)
    started = time.monotonic()
    name = f"demo-{secrets.token_hex(3)}"
    folder = data / name
    story = Story(screen)
    screen.print(Rule(f"gracestream: {script.title}"))

    def step(line: str) -> None:
        screen.print(f"  [dim]{line}[/]")

    chosen: dict[str, Any] = {"model": model, "prefix": f"{name}.", "codebook": "demo"}
    with running_stack(folder, replicas=2, partitions=PARTITIONS, report=step, **chosen) as stack:
        screen.print(f"  an editor and two replicas are ready after {time.monotonic() - started:.0f} s")
        client = Client(stack.settings)
        try:
            _play(story, stack, client, script)
        finally:
            client.close()
    _conclude(story, time.monotonic() - started, model)
    if all(holds for _, holds, _ in story.claims):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    screen.print(f"  the logs are in {folder / 'logs'}")
    return 1


def _play(story: Story, stack: Stack, client: Client, script: Script) -> None:
    screen = story.screen
    screen.print(Rule("1. The model answers", align="left"))
    inputs: list[Inputs] = [*(case.inputs for case in script.cases), *script.controls]
    before = {asked: answer_of(found) for asked, found in _ask(client, script, inputs, screen).items()}
    wrong = [case for case in script.cases if is_wrong(before[case.inputs], case.target)]
    right = [case for case in script.cases if case not in wrong]
    screen.print(f"  {len(wrong)} of {len(script.cases)} are wrong, for example:")
    screen.print(_answers("it said", wrong[:6], before))
    story.claim("every request got an answer", len(before) == len(inputs), f"{len(before)} of {len(inputs)}")

    screen.print(Rule("2. Someone flags what is wrong, and the editor learns it", align="left"))
    _correct(story, client, script, wrong)
    live = max((outcome.seq for outcome in story.outcomes if outcome.seq is not UNSET), default=0)

    screen.print(Rule("3. Both replicas answer right, and nothing else changed", align="left"))
    routes = _partitions_of_replicas(client, script)
    story.claim("both replicas serve requests", len(routes) == len(stack.replicas), ", ".join(sorted(routes)))
    controls = list(dict.fromkeys([*script.controls, *(case.inputs for case in right)]))
    after: dict[Inputs, str] = {}
    for replica, partition in sorted(routes.items()):
        asked: list[Inputs] = [*(case.inputs for case in wrong), *controls]
        found = _ask(client, script, asked, screen, partition=partition, min_seq=live)
        after = {inputs: answer_of(prediction) for inputs, prediction in found.items()}
        fixed = [case for case in wrong if after.get(case.inputs) == case.target]
        same = [inputs for inputs in controls if after.get(inputs) == before[inputs]]
        story.claim(
            f"{replica} gives the exact target for every wrong one", fixed == wrong, f"{len(fixed)} of {len(wrong)}"
        )
        story.claim(
            f"{replica} answers the rest as before, to the letter", same == controls, f"{len(same)} of {len(controls)}"
        )
        served_by = {prediction.replica for prediction in found.values()}
        story.claim(f"{replica} it was", served_by == {replica}, ", ".join(served_by))
    screen.print(_answers("now it says", wrong[:6], after))
    for place, way in enumerate(script.ways):
        others = [case.others[place] for case in wrong]
        said = _ask(client, script, others, screen, min_seq=live)
        reached = sum(not is_wrong(answer_of(said[case.others[place]]), case.target) for case in wrong)
        screen.print(f"  [dim]asked {way}, {reached} of {len(wrong)} come out right too, with no edit of their own[/]")

    screen.print(Rule("4. A replica is killed (SIGKILL) and comes back", align="left"))
    _crash(story, stack, stack.replicas[0])

    screen.print(Rule("5. The history is replayed from Kafka", align="left"))
    state = stack.replicas[0].state()
    replayed = replay_deltas(stack.settings)
    story.claim(
        "replay of deltas gives the same digest",
        replayed is not None
        and (replayed.digest.hex(), replayed.state_digest()) == (state["digest"], state["state_digest"]),
        f"{state['digest'][:16]}… after {state['seq']} deltas",
    )


def _ask(
    client: Client,
    script: Script,
    inputs: Sequence[Inputs],
    screen: Console,
    partition: int | None = None,
    min_seq: int = 0,
) -> dict[Inputs, Prediction]:
    """Send through `requests`, collect from `predictions`; by input."""
    token = secrets.token_hex(4)
    requests = {
        f"{token}-{number}": Request(
            v=VERSION,
            request_id=f"{token}-{number}",
            inputs=text,
            parameters=script.parameters,
            min_seq=min_seq or UNSET,
        )
        for number, text in enumerate(inputs)
    }
    with client.predictions() as replies, _bar(screen) as bar:
        task = bar.add_task("requests", total=len(requests))
        client.send(requests.values(), partition)
        came = replies.wait(requests, TIMEOUT, on_reply=lambda _: bar.advance(task))
    return {requests[request_id].inputs: prediction for request_id, prediction in came.items()}


def _correct(story: Story, client: Client, script: Script, wrong: Sequence[Case]) -> None:
    token = secrets.token_hex(4)
    corrections = [correction(f"{token}-{n}", case.inputs, case.target) for n, case in enumerate(wrong)]
    together, alone = corrections[:-ONE_BY_ONE], corrections[-ONE_BY_ONE:]
    with client.outcomes() as replies, client.predictions() as predictions, _bar(story.screen) as bar:
        task = bar.add_task("corrections", total=len(corrections))
        client.send(together)
        came = replies.wait([c.feedback_id for c in together], TIMEOUT, on_reply=lambda _: bar.advance(task))
        for one in alone:
            sent = time.monotonic()
            client.send([one])
            outcome = replies.wait([one.feedback_id], TIMEOUT, on_reply=lambda _: bar.advance(task))
            came |= outcome
            if one.feedback_id in outcome and outcome[one.feedback_id].seq is not UNSET:
                asked = Request(
                    v=VERSION,
                    request_id=f"{one.feedback_id}-live",
                    inputs=one.inputs,  # type: ignore[arg-type]
                    parameters=script.parameters,
                    min_seq=outcome[one.feedback_id].seq,
                )
                client.send([asked])
                if predictions.wait([asked.request_id], TIMEOUT):
                    story.lags.append(time.monotonic() - sent)
    story.outcomes += came.values()
    kinds = [outcome.status for outcome in came.values()]
    story.claim("every correction has an outcome", len(came) == len(corrections), f"{len(came)} of {len(corrections)}")
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    story.claim("none was rejected", "rejected" not in kinds, counts)


def _partitions_of_replicas(client: Client, script: Script) -> dict[str, int]:
    """One partition of `requests` for each replica, found by asking on every partition."""
    routes: dict[str, int] = {}
    with client.predictions() as replies:
        probes = {f"{secrets.token_hex(4)}-{partition}": partition for partition in range(PARTITIONS)}
        for request_id, partition in probes.items():
            text = script.controls[0]
            probe = Request(v=VERSION, request_id=request_id, inputs=text, parameters=script.parameters)
            client.send([probe], partition)
        for request_id, prediction in replies.wait(probes, TIMEOUT).items():
            routes.setdefault(prediction.replica, probes[request_id])
    return routes


def _crash(story: Story, stack: Stack, victim: Worker) -> None:
    before = victim.state()
    victim.child.kill()
    started = time.monotonic()
    victim.start()
    victim.wait_ready()
    after, other, editor = victim.state(), stack.replicas[1].state(), stack.editor.state()
    story.claim(
        f"{victim.child.name} has the same digest as before",
        (after["digest"], after["state_digest"]) == (before["digest"], before["state_digest"]),
        f"ready again after {time.monotonic() - started:.1f} s",
    )
    agree = {state["state_digest"] for state in (after, other, editor)}
    story.claim("and so have the other replica and the editor", len(agree) == 1, f"{after['entries']} entries")


def _conclude(story: Story, seconds: float, model: str) -> None:
    edits = [outcome for outcome in story.outcomes if outcome.seq is not UNSET]
    table = Table("what it cost", "", title=None)
    steps = [outcome.steps for outcome in edits if outcome.steps is not UNSET]
    times = [outcome.seconds for outcome in edits if outcome.seconds is not UNSET]
    table.add_row("corrections made", str(len(edits)))
    if times:
        table.add_row("seconds an edit, median (max)", f"{statistics.median(times):.2f} ({max(times):.2f})")
    if steps:
        table.add_row("optimisation steps an edit, mean (max)", f"{statistics.mean(steps):.1f} ({max(steps)})")
    if story.lags:
        table.add_row(
            "seconds from a correction to the corrected answer, median", f"{statistics.median(story.lags):.2f}"
        )
    table.add_row("seconds in all", f"{seconds:.0f}")
    held = sum(holds for _, holds, _ in story.claims)
    story.screen.print(
        Rule(f"{held} of {len(story.claims)} claims held", style="green" if held == len(story.claims) else "red")
    )
    story.screen.print(table)
    story.screen.print("What to try next:")
    other = "intent" if model == "smollm2" else "smollm2"
    for command, what in (
        (f"make demo MODEL={other}", "the same story, the other model"),
        (".venv/bin/gracestream up", "a stack for your own clients"),
        (".venv/bin/gracestream correct -h", "correct what you like"),
    ):
        story.screen.print(f"  {command:<34}{what}", highlight=False)


def _answers(title: str, cases: Sequence[Case], answers: Mapping[Inputs, str]) -> Table:
    table = Table("asked", title, "right is", show_lines=False)
    for case in cases:
        table.add_row(in_one_text(case.inputs), " ".join(answers.get(case.inputs, "-").split())[:48], case.target)
    return table


def _bar(screen: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=screen
    )
