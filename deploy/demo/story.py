"""The demo's story on a real stack: wrong answers, corrections, right answers, a crash, a replay.

Each chapter makes claims and checks them; the exit status is 1 if a claim does not hold.
"""

import secrets
import shutil
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import UNSET
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from gracestream.deploy.demo.cases import DemoCase, DemoScript, is_wrong, load_script, prediction_text
from gracestream.deploy.local.stack import Stack, WorkerProcess, running_stack
from gracestream.pipeline.client import Client
from gracestream.pipeline.editing import make_correction
from gracestream.pipeline.replay import replay_deltas
from gracestream.schemas.messages import SCHEMA_VERSION, Inputs, Outcome, Prediction, Request, to_display_text

REPLY_TIMEOUT_SECONDS = 120.0
"""Seconds to wait for the next reply."""

DEMO_PARTITIONS = 8
"""Partitions of `requests`: enough for each replica to own some."""

NUM_TIMED_CORRECTIONS = 5
"""Corrections that are sent one by one, to measure the time from a correction to the corrected answer."""

NUM_SHOWN_ANSWERS = 6
"""Answers that a table shows."""

MAX_ANSWER_WIDTH = 40
"""Characters of an answer that a table shows."""

STATUS_MEANINGS = {
    "added": "a new entry",
    "expanded": "a larger radius of an entry with the same target",
    "split": "a new entry beside one with another target, whose radius may shrink",
    "replaced": "a new value for an entry with the same key",
}
"""The meanings of the outcomes of a correction."""


@dataclass
class DemoRun:
    """The claims and measurements of one run.

    Attributes:
        console: The console to print to.
        claims: The text of each claim, whether it holds, and a detail.
        outcomes: The outcomes of all corrections.
        latencies: Seconds from a correction to the corrected answer, for the corrections that are sent one by one.
    """

    console: Console
    claims: list[tuple[str, bool, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def check_claim(self, text: str, holds: bool, detail: str = "") -> None:
        """Record a claim, and print whether it holds."""
        self.claims.append((text, holds, detail))
        self.console.print(
            f"  {'[green]✔[/]' if holds else '[red]✘[/]'} {text}{f' [dim]({detail})[/]' if detail else ''}"
        )


def run_demo(model: str, data: Path, console: Console, *, complete: bool = False) -> int:
    """Run the story, with all prompts if it is to be complete; return the exit status."""
    script = load_script(model, complete=complete)
    started = time.monotonic()
    name = f"demo-{secrets.token_hex(3)}"
    folder = data / name
    story = DemoRun(console)
    console.print(Rule(f"gracestream: {script.title}"))

    def step(line: str) -> None:
        console.print(f"  [dim]{line}[/]")

    overrides: dict[str, Any] = {"model": model, "topic_prefix": f"{name}.", "codebook": "demo"}
    with running_stack(folder, replicas=2, partitions=DEMO_PARTITIONS, report=step, **overrides) as stack:
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
    """Run the five chapters; failed claims are recorded in `demo_run`."""
    console = demo_run.console
    console.print(Rule("1. The model answers", align="left"))
    inputs: list[Inputs] = [*(case.inputs for case in script.cases), *script.controls]
    before = {
        prompts: prediction_text(predictions)
        for prompts, predictions in _send_requests(client, script, inputs, console).items()
    }
    wrong_cases = [case for case in script.cases if is_wrong(before[case.inputs], case.target)]
    right_cases = [case for case in script.cases if case not in wrong_cases]
    for line in _describe_answers(script, wrong_cases):
        console.print(line)
    console.print(_answers_table("answer", wrong_cases, before))
    demo_run.check_claim("every request got an answer", len(before) == len(inputs), f"{len(before)} of {len(inputs)}")

    console.print(Rule("2. Corrections are sent, and the editor makes edits of them", align="left"))
    _send_corrections(demo_run, client, script, wrong_cases)
    last_seq = max((outcome.seq for outcome in demo_run.outcomes if outcome.seq is not UNSET), default=0)

    console.print(Rule("3. Both replicas answer right, and no other answer has changed", align="left"))
    routes = _find_replica_partitions(client, script)
    demo_run.check_claim("both replicas serve requests", len(routes) == len(stack.replicas), ", ".join(sorted(routes)))
    controls = list(dict.fromkeys([*script.controls, *(case.inputs for case in right_cases)]))
    after: dict[Inputs, str] = {}
    for replica, partition in sorted(routes.items()):
        prompts: list[Inputs] = [*(case.inputs for case in wrong_cases), *controls]
        predictions = _send_requests(client, script, prompts, console, partition=partition, min_seq=last_seq)
        after = {inputs: prediction_text(prediction) for inputs, prediction in predictions.items()}
        fixed = [case for case in wrong_cases if after.get(case.inputs) == case.target]
        unchanged = [inputs for inputs in controls if after.get(inputs) == before[inputs]]
        demo_run.check_claim(
            f"{replica} answers every corrected request with exactly its target",
            fixed == wrong_cases,
            f"{len(fixed)} of {len(wrong_cases)}",
        )
        demo_run.check_claim(
            f"{replica} gives the same answers as before to all other requests",
            unchanged == controls,
            f"{len(unchanged)} of {len(controls)}",
        )
        served_by = {prediction.replica for prediction in predictions.values()}
        demo_run.check_claim(f"the answers came from {replica}", served_by == {replica}, ", ".join(served_by))
    console.print(_answers_table("answer now", wrong_cases, after))
    for index, variant_name in enumerate(script.variant_names):
        variants = [case.variants[index] for case in wrong_cases]
        variant_predictions = _send_requests(client, script, variants, console, min_seq=last_seq)
        reached_count = sum(
            not is_wrong(prediction_text(variant_predictions[case.variants[index]]), case.target)
            for case in wrong_cases
        )
        console.print(
            f"  [dim]asked {variant_name}, {reached_count} of {len(wrong_cases)} are right, too, without an edit of"
            " their own[/]"
        )

    console.print(Rule("4. A replica is killed (SIGKILL) and comes back", align="left"))
    _check_crash_recovery(demo_run, stack, stack.replicas[0])

    console.print(Rule("5. The history is replayed from Kafka", align="left"))
    state = stack.replicas[0].state()
    replayed = replay_deltas(stack.settings.kafka)
    demo_run.check_claim(
        "a replay of deltas gives the same digest",
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
    """Send requests and collect their predictions, by input; a missing reply is left out."""
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
    with client.predictions() as replies, _progress_bar(console) as progress:
        task = progress.add_task("requests", total=len(requests))
        client.send(requests.values(), partition)
        received = replies.wait(requests, REPLY_TIMEOUT_SECONDS, on_reply=lambda _: progress.advance(task))
    return {requests[request_id].inputs: prediction for request_id, prediction in received.items()}


def _send_corrections(demo_run: DemoRun, client: Client, script: DemoScript, wrong_cases: Sequence[DemoCase]) -> None:
    """Send a correction of each case and wait for its outcome; most are sent together, the last ones one by one.

    After each of the last ones a request with `min_seq` measures the time until the corrected answer arrives.
    """
    token = secrets.token_hex(4)
    corrections = [make_correction(f"{token}-{n}", case.inputs, case.target) for n, case in enumerate(wrong_cases)]
    batch, timed = corrections[:-NUM_TIMED_CORRECTIONS], corrections[-NUM_TIMED_CORRECTIONS:]
    with client.outcomes() as replies, client.predictions() as predictions, _progress_bar(demo_run.console) as progress:
        task = progress.add_task("corrections", total=len(corrections))
        client.send(batch)
        received = replies.wait(
            [c.feedback_id for c in batch], REPLY_TIMEOUT_SECONDS, on_reply=lambda _: progress.advance(task)
        )
        for correction in timed:
            started = time.monotonic()
            client.send([correction])
            outcome = replies.wait(
                [correction.feedback_id], REPLY_TIMEOUT_SECONDS, on_reply=lambda _: progress.advance(task)
            )
            received |= outcome
            if correction.feedback_id in outcome and outcome[correction.feedback_id].seq is not UNSET:
                request = Request(
                    v=SCHEMA_VERSION,
                    request_id=f"{correction.feedback_id}-live",
                    inputs=correction.inputs,  # type: ignore[arg-type]
                    parameters=script.parameters,
                    min_seq=outcome[correction.feedback_id].seq,
                )
                client.send([request])
                if predictions.wait([request.request_id], REPLY_TIMEOUT_SECONDS):
                    demo_run.latencies.append(time.monotonic() - started)
    demo_run.outcomes += received.values()
    statuses = [outcome.status for outcome in received.values()]
    demo_run.check_claim(
        "every correction has an outcome", len(received) == len(corrections), f"{len(received)} of {len(corrections)}"
    )
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))
    demo_run.check_claim("none was rejected", "rejected" not in statuses, counts)
    for line in _explain_statuses(statuses):
        demo_run.console.print(f"  [dim]{line}[/]")


def _find_replica_partitions(client: Client, script: DemoScript) -> dict[str, int]:
    """A partition of `requests` for each replica, found by a request on every partition."""
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
    """Kill a replica, start it again, and compare its codebook with those of the other workers."""
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
    state_digests = {state["state_digest"] for state in (after, other, editor)}
    demo_run.check_claim(
        "the other replica and the editor have the same codebook",
        len(state_digests) == 1,
        f"{after['entries']} entries",
    )


def _print_summary(demo_run: DemoRun, seconds: float, model: str) -> None:
    """Print the number of claims that hold, the costs, and commands to try next."""
    edits = [outcome for outcome in demo_run.outcomes if outcome.seq is not UNSET]
    table = Table("cost", "", title=None)
    steps = [outcome.steps for outcome in edits if outcome.steps is not UNSET]
    times = [outcome.seconds for outcome in edits if outcome.seconds is not UNSET]
    table.add_row("corrections made", str(len(edits)))
    if times:
        table.add_row("seconds per correction, median (max)", f"{statistics.median(times):.2f} ({max(times):.2f})")
    if steps:
        table.add_row("optimisation steps per value, mean (max)", f"{statistics.mean(steps):.1f} ({max(steps)})")
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
    for command, description in (
        (f"make demo MODEL={other}", "the same story, the other model"),
        (".venv/bin/gracestream up", "a stack for your own clients"),
        (".venv/bin/gracestream correct -h", "send corrections of your own"),
    ):
        demo_run.console.print(f"  {command:<34}{description}", highlight=False)


def _describe_answers(script: DemoScript, wrong_cases: Sequence[DemoCase]) -> list[str]:
    """Lines for the wrong answers of the first chapter, and for the requests without a target."""
    case_count, control_count, name = len(script.cases), len(script.controls), script.case_name
    examples = ", for example" if len(wrong_cases) > NUM_SHOWN_ANSWERS else ""
    return [
        f"  {case_count} ask for {name}; {control_count} are a control: their answers must not change",
        f"  {len(wrong_cases)} of {case_count} {name} are wrong{examples}:",
    ]


def _explain_statuses(statuses: Collection[str]) -> list[str]:
    """A line for each status that occurs."""
    return [f"{status}: {meaning}" for status, meaning in STATUS_MEANINGS.items() if status in statuses]


def _answers_table(title: str, cases: Sequence[DemoCase], answers: Mapping[Inputs, str]) -> Table:
    """The answers to the first cases. An ellipsis ends a long answer."""
    answer = Column(title, max_width=MAX_ANSWER_WIDTH, no_wrap=True, overflow="ellipsis")
    table = Table("request", answer, "target", show_lines=False)
    for case in cases[:NUM_SHOWN_ANSWERS]:
        # `Text`, since an answer may hold brackets, which a plain string would give as markup.
        table.add_row(
            *(
                Text(" ".join(text.split()))
                for text in (to_display_text(case.inputs), answers.get(case.inputs, "-"), case.target)
            )
        )
    return table


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
