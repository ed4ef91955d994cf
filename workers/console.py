"""The console's process: it follows the topics and serves the pages."""

import signal
import socket
from collections.abc import Callable
from contextlib import closing

import structlog
import uvicorn

from gracestream.pipeline.auth import read_key_file
from gracestream.pipeline.client import Client
from gracestream.pipeline.console.actions import FeedbackSender
from gracestream.pipeline.console.app import create_app
from gracestream.pipeline.console.security import require_loopback
from gracestream.pipeline.errors import UserError
from gracestream.pipeline.kafka import cluster_id
from gracestream.pipeline.read_model import ReadModelStore, TopicFollower
from gracestream.pipeline.settings import Settings

SHUTDOWN_SECONDS = 2
"""Seconds that open pages have to take their answers when the process ends."""

log = structlog.get_logger()


def run(settings: Settings, on_start: Callable[[str], object]) -> None:
    """Serve the console until SIGTERM or SIGINT. `on_start` gets its address.

    Raises:
        UserError: an address, a file or a topic cannot be used.
        KafkaError: Kafka does not answer.
    """
    chosen = settings.console
    require_loopback(chosen.host)
    key = None if chosen.key is None else read_key_file(chosen.key)
    listener = _listen(chosen.host, chosen.port)
    with (
        listener,
        ReadModelStore(
            chosen.file.expanduser(),
            cluster_id(settings.kafka),
            settings.kafka.topic_prefix,
            chosen.max_predictions,
        ) as store,
        closing(Client(settings)) as client,
    ):
        follower = TopicFollower(settings.kafka, store)
        sender = FeedbackSender(client, chosen.author, settings.model.codebook, key)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(store, follower, sender),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        for signum in (signal.SIGTERM, signal.SIGINT):
            # uvicorn handles both, and raises them again for these handlers once it has ended.
            signal.signal(signum, lambda *_: None)
        follower.start()
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("console_ready", address=address, author=chosen.author, signs=key is not None)
        on_start(address)
        try:
            server.run(sockets=[listener])
        finally:
            follower.stop()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UserError: it cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UserError(
            f"the console cannot listen on {host}:{port} ({error.strerror}); choose another GRACESTREAM_CONSOLE_PORT"
        ) from error
