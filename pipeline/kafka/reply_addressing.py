"""Finds the topic and the headers of the answer to a request.

1. The header `reply_to` names a topic in place of `predictions`. Its name must begin with the deployment's prefix, and
   it must not be one of gracestream's own topics, so a request cannot write to them.
2. An answer has the headers of its request, in order, up to `MAX_COPIED_HEADERS` headers and
   `MAX_COPIED_HEADER_BYTES` bytes. A header that does not fit is skipped, and so is one of `RESERVED_HEADERS`.

Not promised: that the reply topic exists, or that replicas may write to it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gracestream.pipeline.kafka.topics import PREDICTIONS, TOPICS
from gracestream.pipeline.settings import KafkaSettings
from gracestream.schemas.headers import MAX_COPIED_HEADER_BYTES, MAX_COPIED_HEADERS, REPLY_TO_HEADER, RESERVED_HEADERS
from gracestream.schemas.messages import to_one_line

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

_OWN_TOPIC = re.compile(rf"(?:^|[._-])(?:{'|'.join(re.escape(known.name) for known in TOPICS)})$")
"""Matches the names of gracestream's topics, alone or after a prefix that ends in a separator.

So a request cannot write to the topics of a deployment with a longer prefix either.
"""

Header = tuple[str, bytes | None]


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where to send an answer.

    Attributes:
        headers: Headers of the answer.
        topic: Full name of the topic; empty for `predictions`.
        error: Fault of the header `reply_to`, for the sender; empty if there is none.
    """

    headers: tuple[Header, ...] = ()
    topic: str = ""
    error: str = ""


DEFAULT_REPLY_ADDRESS = ReplyAddress()


def resolve_reply_address(headers: Iterable[Header], settings: KafkaSettings) -> ReplyAddress:
    """The reply address that the headers of a request give. With a fault, the address is `predictions`."""
    request_headers = list(headers)
    if not request_headers:
        return DEFAULT_REPLY_ADDRESS
    copied: list[Header] = []
    room = MAX_COPIED_HEADER_BYTES
    for name, value in request_headers:
        size = len(name.encode()) + len(value or b"")
        if name not in RESERVED_HEADERS and size <= room and len(copied) < MAX_COPIED_HEADERS:
            copied.append((name, value))
            room -= size
    reply_topics = [value for name, value in request_headers if name == REPLY_TO_HEADER]
    if not reply_topics:
        return ReplyAddress(tuple(copied))
    topic = (reply_topics[-1] or b"")[:1000].decode(errors="backslashreplace")  # a name has 249 characters at most
    fault = _check_reply_topic(topic, settings)
    use_default = fault or topic == settings.topic(PREDICTIONS)
    return ReplyAddress(tuple(copied), "" if use_default else topic, fault)


def _check_reply_topic(topic: str, settings: KafkaSettings) -> str:
    """The fault of a reply topic, for the sender; empty if it is valid."""
    header = f"the header {REPLY_TO_HEADER} names {to_one_line(topic)!r}"
    if _TOPIC_NAME.fullmatch(topic) is None or topic in {".", ".."}:
        return f"{header}, which is not a valid topic name: use 1 to 249 of A-Z a-z 0-9 . _ -"
    if topic == settings.topic(PREDICTIONS):
        return ""
    if not topic.startswith(settings.topic_prefix) or topic.startswith("__"):
        return f"{header}; a reply topic's name must begin with the deployment's prefix, {settings.topic_prefix!r}"
    if _OWN_TOPIC.search(topic.removeprefix(settings.topic_prefix)):  # or a topic of a deployment with a longer prefix
        return f"{header}, which ends as one of gracestream's own topics does; choose another name"
    return ""
