"""Where the answer to a request goes, and the headers that it takes along.

The header `reply_to` names a topic in place of `predictions`; its own name begins with the deployment's prefix, and it
is none of gracestream's. The request's other headers come back with the answer: the first that fit, of at most
`MOST_HEADERS` and `MAX_COPIED_HEADER_BYTES`; none with a name that gracestream itself uses.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gracestream.pipeline.kafka.topics import PREDICTIONS, TOPICS
from gracestream.pipeline.settings import Settings
from gracestream.schemas.headers import MAX_COPIED_HEADER_BYTES, MAX_COPIED_HEADERS, REPLY_TO_HEADER, RESERVED_HEADERS
from gracestream.schemas.messages import to_one_line

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

_OWN_TOPIC = re.compile(rf"(?:^|[._-])(?:{'|'.join(re.escape(known.name) for known in TOPICS)})$")
"""A name of gracestream's own topics, alone or behind some prefix that ends in a separator."""

Header = tuple[str, bytes | None]


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Of an answer: its headers; its topic, empty for `predictions`; what is wrong with `reply_to`."""

    headers: tuple[Header, ...] = ()
    topic: str = ""
    error: str = ""


DEFAULT_REPLY_ADDRESS = ReplyAddress()


def resolve_reply_address(headers: Iterable[Header], settings: Settings) -> ReplyAddress:
    """The address that the headers of a request ask for."""
    given = list(headers)
    if not given:
        return DEFAULT_REPLY_ADDRESS
    kept: list[Header] = []
    room = MAX_COPIED_HEADER_BYTES
    for name, value in given:
        size = len(name.encode()) + len(value or b"")
        if name not in RESERVED_HEADERS and size <= room and len(kept) < MAX_COPIED_HEADERS:
            kept.append((name, value))
            room -= size
    wanted = [value for name, value in given if name == REPLY_TO_HEADER]
    if not wanted:
        return ReplyAddress(tuple(kept))
    topic = (wanted[-1] or b"")[:1000].decode(errors="backslashreplace")
    fault = _check_reply_topic(topic, settings)
    ordinary = fault or topic == settings.topic(PREDICTIONS)
    return ReplyAddress(tuple(kept), "" if ordinary else topic, fault)


def _check_reply_topic(topic: str, settings: Settings) -> str:
    """Why there can be no answer on that topic; empty: there can."""
    shown = f"the header {REPLY_TO_HEADER} names {to_one_line(topic)!r}"
    if _TOPIC_NAME.fullmatch(topic) is None or topic in {".", ".."}:
        return f"{shown}, which is no name of a topic: send 1 to 249 of A-Z a-z 0-9 . _ -"
    if topic == settings.topic(PREDICTIONS):
        return ""
    if not topic.startswith(settings.prefix) or topic.startswith("__"):
        return f"{shown}; a reply topic's name must begin with the deployment's prefix, {settings.prefix!r}"
    if _OWN_TOPIC.search(topic.removeprefix(settings.prefix)):  # with a longer prefix: another deployment's
        return f"{shown}, which ends as one of gracestream's own topics does; choose another name"
    return ""
