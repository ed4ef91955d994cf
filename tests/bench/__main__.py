"""Run one benchmark: `python -m tests.bench NAME [--quick] [--only MODEL] [--commit] [--device cuda]`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.search.key_search import set_threads
from tests.bench.device import gpu_unavailable_reason
from tests.bench.framework import (
    BENCHMARKS,
    COMMITTED,
    BenchError,
    Options,
    format_value,
    load_benchmark,
    load_plot,
    machine,
    read_results,
    write_results,
)
from tests.bench.page import write_pages
from tests.bench.table import print_tables
from tests.support.repository import DATA, ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 if the benchmark cannot run."""
    parser = argparse.ArgumentParser("python -m tests.bench", description="Run one benchmark on this machine.")
    parser.add_argument("name", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="measure fewer cases, for a first impression")
    parser.add_argument(
        "--commit", action="store_true", help=f"write the results and their pages to {COMMITTED.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--only", default="", help="measure one model or stream; the committed results of the others stay"
    )
    parser.add_argument(
        "--development", action="store_true", help="scope: use the rows on which settings may be chosen"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the device of the model")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and FAISS")
    args = parser.parse_args(arguments)
    stderr = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    started = time.monotonic()

    def report(line: str) -> None:
        stderr.print(f"{time.monotonic() - started:5.0f} s  {line}")

    try:
        run = load_benchmark(args.name)
        if args.quick and args.commit:
            raise BenchError("--quick measures too few cases for --commit; drop one of the two options")
        if args.device == "cuda" and (reason := gpu_unavailable_reason()):
            raise BenchError(reason)
        if args.development and args.commit:
            raise BenchError("rows of --development are not results; drop --commit")
        set_threads(args.threads)
        os.environ.setdefault("GRACESTREAM_DATA", str(DATA))
        rows = []
        options = Options(
            quick=args.quick, only=args.only, development=args.development, device=args.device, report=report
        )
        for row in run(options):
            rows.append(row)
            report(
                f"{row.name} {format_value(row)} {row.unit}"
            )  # printed at once, so that a later failure loses no row
    except UserError as error:
        stderr.print(str(error))
        return 2
    console = Console()
    print_tables(rows, Console(width=max(120, console.width)))
    folder = COMMITTED if args.commit else ROOT / "results"
    path = write_results(args.name, rows, machine(args.device), folder, keep_others=bool(args.only))
    if args.name in BENCHMARKS and (draw := load_plot(args.name)):
        draw(read_results(path), path.with_suffix(".svg"))
    if args.commit:
        write_pages(COMMITTED)
    report(f"done; the results are in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
