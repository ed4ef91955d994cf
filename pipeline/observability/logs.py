"""Sets up the log output of workers: structured events on standard error, one fact per event. Commands have none."""

import logging
import os
import sys
from typing import Any

import structlog

REPEAT_INTERVAL_SECONDS = 10.0
"""Seconds in which an equal warning of a library is not repeated.

A Kafka client without a connection logs about ten warnings a second.
"""


def configure_logs(log_format: str, **fields: Any) -> None:
    """Set up the log output of structlog and of warnings from libraries.

    Args:
        log_format: "json" or "text".
        fields: Added to every event. Events of libraries also have the name of the logger, as `logger`.
    """

    def add_fields(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, **fields}

    shared: list[Any] = [
        add_fields,
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
    final_processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    handler.addFilter(_is_relevant)
    handler.addFilter(_RepeatFilter())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=final_processors, foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]  # replaces handlers that libraries added when they were imported
    root.setLevel(logging.WARNING)


def silence_libraries() -> None:
    """Keep log records of libraries from the standard error of a command. The command reports errors itself.

    Without a handler, Python prints warnings. aiokafka logs several for each failed connection to a broker.
    """
    logging.getLogger().addHandler(logging.NullHandler())
    # The client of the model hub has its own handler. It takes its level from this variable when it is imported.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether a record is worth logging. kafka-python warns of each step over 0.1 s, which is common on a busy core."""
    return not (record.name == "kafka.net.selector" and "blocking the event loop" in record.getMessage())


class _RepeatFilter(logging.Filter):
    """Drops a record if an equal text was logged in the last `REPEAT_INTERVAL_SECONDS`."""

    def __init__(self) -> None:
        super().__init__()
        self._last_logged: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = (record.name, record.getMessage())
        self._last_logged = {
            logged: at for logged, at in self._last_logged.items() if record.created < at + REPEAT_INTERVAL_SECONDS
        }
        # A new text gets this record's time. A repeated one keeps the earlier time, and so differs.
        return self._last_logged.setdefault(text, record.created) == record.created
