"""Logs, Prometheus metrics and the HTTP endpoints of the workers."""

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
