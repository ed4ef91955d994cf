"""Logs, metrics and health of a worker."""

from gracestream.pipeline.observability.health import Health, HealthServer
from gracestream.pipeline.observability.logs import configure_logs, silence_libraries
from gracestream.pipeline.observability.metrics import DEGRADED

__all__ = [
    "DEGRADED",
    "Health",
    "HealthServer",
    "configure_logs",
    "silence_libraries",
]
