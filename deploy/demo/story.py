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

from gracestream.deploy.demo.cases import DemoCase, DemoScript, is_wrong, load_script, prediction_text
from gracestream.deploy.local.stack import Stack, WorkerProcess, running_stack
from gracestream.pipeline.client import Client
from gracestream.pipeline.editing import make_correction
from gracestream.pipeline.history import replay_deltas
from gracestream.schemas.messages import SCHEMA_VERSION, Inputs, Outcome, Prediction, Request, to_display_text

REPLY_TIMEOUT_SECONDS = 120.0
DEMO_PARTITIONS = 8
NUM_TIMED_CORRECTIONS = 5
"""Corrections that are sent alone, to measure the way from a correction to the corrected answer."""


@dataclass
class DemoRun:
    """What has been claimed, and whether it held; what was measured on the way."""

    console: Console
    claims: list[tuple[str, bool, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def check_claim(self, text: str, holds: bool, detail: str = "") -> None:
        """Say what should be so, and whether it is."""
        self.claims.append((text, holds, detail))
        self.console.print(
            f"  {'[green]✔[/]' if holds else '[red]✘[/]'} {text}{f' [dim]({detail})[/]' if detail else ''}"
        )


def run_demo(model: str, data: Path, console: Console) -> int:
    """Tell the whole story; the exit status."""
    script = load_script(model)
    started = time.monotonic()
    name = f"demo-{secrets.token_hex(3)}"
    folder = data / name
    story = DemoRun(console)
    console.print(Rule(f"gracestream: {script.title}"))

    def step(line: str) -> None:
        console.print(f"  [dim]{line}[/]")

    chosen: dict[str, Any] = {"model": model, "prefix": f"{name}.", "codebook": "demo"}
    with running_stack(folder, replicas=2, partitions=DEMO_PARTITIONS, report=step, **chosen) as stack:
        console.print(f"  an editor and two replicas are ready after {time.monotonic() - started:.0f} s")
        client = Client(stack.settings)
        try:
            _run_chapters(story, stack, client, script)
        finally:
            client.close()
    _print_summary(story, time.monotonic() - started, model)
    if all(holds for _, holds, _ in story.claims):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    console.print(f"  the logs are in {folder / 'logs'}")
    return 1


def _run_chapters(demo_run: DemoRun, stack: Stack, client: Client, script: DemoScript) -> None:
    screen = demo_run.console
    screen.print(Rule("1. The model answers", align="left"))
    inputs: list[Inputs] = [*(case.inputs for case in script.cases), *script.controls]
    before = {asked: prediction_text(found) for asked, found in _send_requests(client, script, inputs, screen).items()}
    wrong = [case for case in script.cases if is_wrong(before[case.inputs], case.target)]
    right = [case for case in script.cases if case not in wrong]
    screen.print(f"  {len(wrong)} of {len(script.cases)} are wrong, for example:")
    screen.print(_answers_table("it said", wrong[:6], before))
    demo_run.check_claim("every request got an answer", len(before) == len(inputs), f"{len(before)} of {len(inputs)}")

    screen.print(Rule("2. Someone flags what is wrong, and the editor learns it", align="left"))
    _send_corrections(demo_run, client, script, wrong)
    live = max((outcome.seq for outcome in demo_run.outcomes if outcome.seq is not UNSET), default=0)

    screen.print(Rule("3. Both replicas answer right, and nothing else changed", align="left"))
    routes = _find_replica_partitions(client, script)
    demo_run.check_claim("both replicas serve requests", len(routes) == len(stack.replicas), ", ".join(sorted(routes)))
    controls = list(dict.fromkeys([*script.controls, *(case.inputs for case in right)]))
    after: dict[Inputs, str] = {}
    for replica, partition in sorted(routes.items()):
        asked: list[Inputs] = [*(case.inputs for case in wrong), *controls]
        found = _send_requests(client, script, asked, screen, partition=partition, min_seq=live)
        after = {inputs: prediction_text(prediction) for inputs, prediction in found.items()}
        fixed = [case for case in wrong if after.get(case.inputs) == case.target]
        same = [inputs for inputs in controls if after.get(inputs) == before[inputs]]
        demo_run.check_claim(
            f"{replica} gives the exact target for every wrong one", fixed == wrong, f"{len(fixed)} of {len(wrong)}"
        )
        demo_run.check_claim(
            f"{replica} answers the rest as before, to the letter", same == controls, f"{len(same)} of {len(controls)}"
        )
        served_by = {prediction.replica for prediction in found.values()}
        demo_run.check_claim(f"{replica} it was", served_by == {replica}, ", ".join(served_by))
    screen.print(_answers_table("now it says", wrong[:6], after))
    for place, way in enumerate(script.variant_names):
        others = [case.variants[place] for case in wrong]
        said = _send_requests(client, script, others, screen, min_seq=live)
        reached = sum(not is_wrong(prediction_text(said[case.variants[place]]), case.target) for case in wrong)
        screen.print(f"  [dim]asked {way}, {reached} of {len(wrong)} come out right too, with no edit of their own[/]")

    screen.print(Rule("4. A replica is killed (SIGKILL) and comes back", align="left"))
    _check_crash_recovery(demo_run, stack, stack.replicas[0])

    screen.print(Rule("5. The history is replayed from Kafka", align="left"))
    state = stack.replicas[0].state()
    replayed = replay_deltas(stack.settings)
    demo_run.check_claim(
        "replay of deltas gives the same digest",
        replayed is not None
        and (replayed.digest.hex(), replayed.state_digest()) == (state["digest"], state["state_digest"]),
        f"{state['digest'][:16]}… after {state['seq']} deltas",
    )


def _send_requests(
    client: Client,
    script: DemoScript,
    inputs: Sequence[Inputs],
    console: Console,
    partition: int | None = None,
    min_seq: int = 0,
) -> dict[Inputs, Prediction]:
    """Send through `requests`, collect from `predictions`; by input."""
    token = secrets.token_hex(4)
    requests = {
        f"{token}-{number}": Request(
            v=SCHEMA_VERSION,
            request_id=f"{token}-{number}",
            inputs=text,
            parameters=script.parameters,
            min_seq=min_seq or UNSET,
        )
        for number, text in enumerate(inputs)
    }
    with client.predictions() as replies, _progress_bar(console) as bar:
        task = bar.add_task("requests", total=len(requests))
        client.send(requests.values(), partition)
        came = replies.wait(requests, REPLY_TIMEOUT_SECONDS, on_reply=lambda _: bar.advance(task))
    return {requests[request_id].inputs: prediction for request_id, prediction in came.items()}


def _send_corrections(demo_run: DemoRun, client: Client, script: DemoScript, wrong_cases: Sequence[DemoCase]) -> None:
    token = secrets.token_hex(4)
    corrections = [make_correction(f"{token}-{n}", case.inputs, case.target) for n, case in enumerate(wrong_cases)]
    together, alone = corrections[:-NUM_TIMED_CORRECTIONS], corrections[-NUM_TIMED_CORRECTIONS:]
    with client.outcomes() as replies, client.predictions() as predictions, _progress_bar(demo_run.console) as bar:
        task = bar.add_task("corrections", total=len(corrections))
        client.send(together)
        came = replies.wait(
            [c.feedback_id for c in together], REPLY_TIMEOUT_SECONDS, on_reply=lambda _: bar.advance(task)
        )
        for one in alone:
            sent = time.monotonic()
            client.send([one])
            outcome = replies.wait([one.feedback_id], REPLY_TIMEOUT_SECONDS, on_reply=lambda _: bar.advance(task))
            came |= outcome
            if one.feedback_id in outcome and outcome[one.feedback_id].seq is not UNSET:
                asked = Request(
                    v=SCHEMA_VERSION,
                    request_id=f"{one.feedback_id}-live",
                    inputs=one.inputs,  # type: ignore[arg-type]
                    parameters=script.parameters,
                    min_seq=outcome[one.feedback_id].seq,
                )
                client.send([asked])
                if predictions.wait([asked.request_id], REPLY_TIMEOUT_SECONDS):
                    demo_run.latencies.append(time.monotonic() - sent)
    demo_run.outcomes += came.values()
    kinds = [outcome.status for outcome in came.values()]
    demo_run.check_claim(
        "every correction has an outcome", len(came) == len(corrections), f"{len(came)} of {len(corrections)}"
    )
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    demo_run.check_claim("none was rejected", "rejected" not in kinds, counts)


def _find_replica_partitions(client: Client, script: DemoScript) -> dict[str, int]:
    """One partition of `requests` for each replica, found by asking on every partition."""
    routes: dict[str, int] = {}
    with client.predictions() as replies:
        probes = {f"{secrets.token_hex(4)}-{partition}": partition for partition in range(DEMO_PARTITIONS)}
        for request_id, partition in probes.items():
            text = script.controls[0]
            probe = Request(v=SCHEMA_VERSION, request_id=request_id, inputs=text, parameters=script.parameters)
            client.send([probe], partition)
        for request_id, prediction in replies.wait(probes, REPLY_TIMEOUT_SECONDS).items():
            routes.setdefault(prediction.replica, probes[request_id])
    return routes


def _check_crash_recovery(demo_run: DemoRun, stack: Stack, replica: WorkerProcess) -> None:
    before = replica.state()
    replica.child.kill()
    started = time.monotonic()
    replica.start()
    replica.wait_ready()
    after, other, editor = replica.state(), stack.replicas[1].state(), stack.editor.state()
    demo_run.check_claim(
        f"{replica.child.name} has the same digest as before",
        (after["digest"], after["state_digest"]) == (before["digest"], before["state_digest"]),
        f"ready again after {time.monotonic() - started:.1f} s",
    )
    agree = {state["state_digest"] for state in (after, other, editor)}
    demo_run.check_claim("and so have the other replica and the editor", len(agree) == 1, f"{after['entries']} entries")


def _print_summary(demo_run: DemoRun, seconds: float, model: str) -> None:
    edits = [outcome for outcome in demo_run.outcomes if outcome.seq is not UNSET]
    table = Table("what it cost", "", title=None)
    steps = [outcome.steps for outcome in edits if outcome.steps is not UNSET]
    times = [outcome.seconds for outcome in edits if outcome.seconds is not UNSET]
    table.add_row("corrections made", str(len(edits)))
    if times:
        table.add_row("seconds an edit, median (max)", f"{statistics.median(times):.2f} ({max(times):.2f})")
    if steps:
        table.add_row("optimisation steps an edit, mean (max)", f"{statistics.mean(steps):.1f} ({max(steps)})")
    if demo_run.latencies:
        table.add_row(
            "seconds from a correction to the corrected answer, median", f"{statistics.median(demo_run.latencies):.2f}"
        )
    table.add_row("seconds in all", f"{seconds:.0f}")
    held = sum(holds for _, holds, _ in demo_run.claims)
    demo_run.console.print(
        Rule(f"{held} of {len(demo_run.claims)} claims held", style="green" if held == len(demo_run.claims) else "red")
    )
    demo_run.console.print(table)
    demo_run.console.print("What to try next:")
    other = "intent" if model == "smollm2" else "smollm2"
    for command, what in (
        (f"make demo MODEL={other}", "the same story, the other model"),
        (".venv/bin/gracestream up", "a stack for your own clients"),
        (".venv/bin/gracestream correct -h", "correct what you like"),
    ):
        demo_run.console.print(f"  {command:<34}{what}", highlight=False)


def _answers_table(title: str, cases: Sequence[DemoCase], answers: Mapping[Inputs, str]) -> Table:
    table = Table("asked", title, "right is", show_lines=False)
    for case in cases:
        table.add_row(to_display_text(case.inputs), " ".join(answers.get(case.inputs, "-").split())[:48], case.target)
    return table


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
