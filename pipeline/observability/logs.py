"""The workers' log: structured events on standard error, one fact an event. Commands have none."""

import logging
import os
import sys
from typing import Any

import structlog

REPEAT_INTERVAL_SECONDS = 10.0
"""Seconds within which a library's warning is not said again: a client that lost Kafka says so ten times a second."""


def configure_logs(log_format: str, **fields: Any) -> None:
    """Set up structlog, and send the warnings of libraries the same way. `fields` stand in every event.

    What a library says has its logger's name beside it, as `logger`.
    """

    def name(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, **fields}

    shared: list[Any] = [
        name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if log_format == "text":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    last = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    handler.addFilter(_is_relevant)
    handler.addFilter(_RepeatFilter())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=last, foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def silence_libraries() -> None:
    """Keep what libraries log from the standard error of a command, which says itself what went wrong.

    Python prints their warnings where no log is set up: aiokafka's have several for each attempt to reach a broker.
    """
    logging.getLogger().addHandler(logging.NullHandler())
    # The client of the model hub has a handler of its own, and takes its level from here when it is imported.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether a warning says something: kafka-python's event loop reports each step over 0.1 s, as on a busy core."""
    return not (record.name == "kafka.net.selector" and "blocking the event loop" in record.getMessage())


class _RepeatFilter(logging.Filter):
    """Passes what was not said, word for word, in the last `REPEAT_INTERVAL_SECONDS` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._last_logged: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = (record.name, record.getMessage())
        self._last_logged = {
            said: at for said, at in self._last_logged.items() if record.created < at + REPEAT_INTERVAL_SECONDS
        }
        return self._last_logged.setdefault(text, record.created) == record.created
