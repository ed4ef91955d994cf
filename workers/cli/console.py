"""`console`: pages in which people see answers, correct them, and follow and undo corrections."""

from importlib.util import find_spec
from typing import Annotated

import typer

from gracestream.pipeline.errors import UserError
from gracestream.workers.cli.common import CodebookOption, KafkaOption, PrefixOption, connect, stdout_console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Deployment")(console)


def console(
    port: Annotated[int | None, typer.Option(help="Port; default: GRACESTREAM_CONSOLE_PORT.")] = None,
    kafka: KafkaOption = None,
    prefix: PrefixOption = None,
    codebook: CodebookOption = None,
) -> None:
    """Serve the console, a web page, on this machine until it is stopped.

    It shows answers, feedback and the history of the codebook, and sends corrections, exceptions and undos. Everything
    that it shows comes from the topics, and everything that it does is a record on `feedback`. It listens on a loopback
    address only, since it has no users or passwords.
    Example: gracestream console --port 8090
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UserError('the console needs more packages: pip install "gracestream[console]"')
    from gracestream.workers.console import run

    settings = connect(kafka=kafka, topic_prefix=prefix, codebook=codebook, console_port=port)
    run(settings, lambda address: stdout_console.print(f"the console is at {address}", soft_wrap=True))
