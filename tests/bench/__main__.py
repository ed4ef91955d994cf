"""Run one benchmark: `python -m tests.bench NAME [--quick] [--only MODEL] [--commit] [--device cuda]`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.search.key_search import set_threads
from tests.bench.device import why_no_gpu
from tests.bench.framework import BENCHES, KEPT, BenchError, Options, bench, machine, plot_of, read, shown, write
from tests.bench.page import write_pages
from tests.bench.table import show
from tests.support.repository import DATA, ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 where the benchmark cannot be run."""
    parser = argparse.ArgumentParser("python -m tests.bench", description="Measure one thing, on this machine.")
    parser.add_argument("name", help=f"one of {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="fewer cases, for a first look")
    parser.add_argument(
        "--commit", action="store_true", help=f"write them, and their pages, to {KEPT.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--only", default="", help="one model or stream, where several are measured; what was committed stays"
    )
    parser.add_argument(
        "--development", action="store_true", help="the rows on which settings may be chosen, for scope"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and FAISS")
    given = parser.parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    started = time.monotonic()

    def tell(line: str) -> None:
        errors.print(f"{time.monotonic() - started:5.0f} s  {line}")

    try:
        run = bench(given.name)
        if given.quick and given.commit:
            raise BenchError("--quick measures too little for --commit; leave one of them out")
        if given.device == "cuda" and (reason := why_no_gpu()):
            raise BenchError(reason)
        if given.development and given.commit:
            raise BenchError("--development rows are no result; leave --commit out")
        set_threads(given.threads)
        os.environ.setdefault("GRACESTREAM_DATA", str(DATA))
        rows = []
        options = Options(
            quick=given.quick, only=given.only, development=given.development, device=given.device, tell=tell
        )
        for row in run(options):
            rows.append(row)
            tell(f"{row.name} {shown(row)} {row.unit}")  # so that none is lost where a later one fails
    except UserError as error:
        errors.print(str(error))
        return 2
    console = Console()
    show(rows, Console(width=max(120, console.width)))
    folder = KEPT if given.commit else ROOT / "results"
    path = write(given.name, rows, machine(given.device), folder, keep=bool(given.only))
    if given.name in BENCHES and (draw := plot_of(given.name)):
        draw(read(path), path.with_suffix(".svg"))
    if given.commit:
        write_pages(KEPT)
    tell(f"done; the numbers are in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
