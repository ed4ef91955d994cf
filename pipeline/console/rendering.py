"""Templates, and the text that they show.

Texts come from people and models. Jinja escapes markup. `visible` shows characters that would be invisible or would
reorder the text around them, and each text is isolated from the direction of its surroundings (`bdi`).
"""

import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec

from gracestream.schemas.messages import Inputs, is_chat

TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"

SHORT_LENGTH = 280
"""Characters of a text in a list."""

KEPT = "\n\t\u200c\u200d"
"""Characters without a shape that stay: line ends, tabs, and the joiners of emoji and of several scripts."""

INVISIBLE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(text: str | None) -> str:
    """The text with invisible characters escaped, such as right-to-left marks."""
    return "".join(
        f"\\u{ord(one):04x}" if one not in KEPT and unicodedata.category(one) in INVISIBLE_CATEGORIES else one
        for one in text or ""
    )


def short(text: str | None) -> str:
    """The beginning of a text in one line."""
    line = " ".join((text or "")[: 2 * SHORT_LENGTH].split())
    return visible(line if len(line) <= SHORT_LENGTH else f"{line[:SHORT_LENGTH]}…")


def when(milliseconds: int | None) -> str:
    """A time in UTC, to the second."""
    return "" if milliseconds is None else f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def number(value: float | None) -> str:
    """A number with four digits."""
    return "" if value is None else f"{value:.4g}"


def parts(inputs: str) -> list[tuple[str, str]]:
    """The parts of inputs in JSON: the role of each message of a chat, or the place of each text, and its text."""
    decoded = msgspec.json.decode(inputs, type=Inputs)
    if isinstance(decoded, str):
        return [("", decoded)]
    if is_chat(decoded):
        return [(message.role, message.content) for message in decoded]
    return [(f"text {place}", str(text)) for place, text in enumerate(decoded, start=1)]


def path(*segments: str) -> str:
    """An address of the console from its segments, escaped."""
    return "/" + "/".join(quote(segment, safe="") for segment in segments)


def query(fields: dict[str, Any]) -> str:
    """The query of an address, without empty fields."""
    return urlencode({name: value for name, value in fields.items() if value not in ("", None)})


def make_environment() -> jinja2.Environment:
    """The environment of the templates. A name that a template does not know is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "short": short, "when": when, "number": number}
    environment.globals |= {"parts": parts, "path": path, "query": query}
    return environment
