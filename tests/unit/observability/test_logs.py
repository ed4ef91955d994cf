"""The workers' log."""

import json
import logging
import time
from collections.abc import Iterator

import pytest
import structlog
from kafka.net.selector import NetworkSelector

from gracestream.pipeline.observability.logs import REPEAT_INTERVAL_SECONDS, configure_logs


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def warned(text: str, at: float) -> None:
    """A library warns."""
    record = logging.LogRecord("library", logging.WARNING, __file__, 1, text, None, None)
    record.created = at
    for handler in logging.getLogger().handlers:
        handler.handle(record)


def test_a_slow_step_of_the_event_loop_of_kafka_python_is_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    async def step() -> None:
        time.sleep(2 * NetworkSelector.DEFAULT_CONFIG["slow_task_threshold_secs"])  # noqa: ASYNC251
        logging.getLogger("kafka.net.selector").warning("another one")

    configure_logs("json", worker="editor")
    loop = NetworkSelector()
    loop.run(step)
    loop.close()
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["logger"]) for line in said] == [("another one", "kafka.net.selector")]


def test_what_a_library_repeats_is_said_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", worker="editor")
    for tenth in range(int(10 * REPEAT_INTERVAL_SECONDS) + 1):
        warned("no Kafka", 1000 + tenth / 10)
        if tenth in (3, 4):
            warned(f"broker {tenth} left", 1000 + tenth / 10)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in said] == ["no Kafka", "broker 3 left", "broker 4 left", "no Kafka"]
    assert all(line["worker"] == "editor" and line["logger"] == "library" for line in said)
