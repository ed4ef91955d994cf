"""The list of authors: their keys, roles and rate limits (docs/explanation/security-model.md).

It is a TOML file with one entry per author. An author may have several keys, and so change keys without a gap.

    ann = { keys = ["qMZ9…="] }
    "review-bot@example.org" = { keys = ["1rT0…=", "Zk3v…="], roles = ["propose"], per_minute = 120 }

An author without `roles` has `propose` and `undo_own`. With an empty list, an author may do nothing.
`pipeline.editing.roles` defines the roles.

1. The file is read again for each feedback record. After an author is removed, their next record is rejected.
2. If the file becomes unreadable, the last valid list stays in force, and the log has an error.

Not promised: that a change applies to records already accepted, such as those whose values are being trained.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import UNSET, Meta, Struct, UnsetType

from gracestream.pipeline.auth.signing import decode_public_key
from gracestream.pipeline.errors import UserError
from gracestream.schemas.deltas import AUTHOR_ROLES, DEFAULT_ROLES, Role
from gracestream.schemas.messages import Id, check_field_names

log = structlog.get_logger()


AUTHORS_FILE_REMEDY = "correct the file that GRACESTREAM_AUTHORS_FILE names"
"""The remedy in every error about the content of the file."""


class AuthorsError(UserError):
    """The list of authors cannot be used. The text names the file, and the line or the author."""


@dataclass(frozen=True, slots=True)
class Author:
    """An author on the list.

    Attributes:
        keys: Public keys that may sign for the author.
        per_minute: Limit of accepted records per minute. None: the limit in the settings. 0: no limit.
        roles: Roles of the author.
    """

    name: str
    keys: tuple[Ed25519PublicKey, ...]
    per_minute: int | None = None
    roles: tuple[Role, ...] = DEFAULT_ROLES


AuthorsByName = dict[str, Author]
"""The list of authors, by name."""


class _AuthorEntry(Struct, frozen=True):
    """The entry of an author in the file."""

    keys: Annotated[tuple[str, ...], Meta(min_length=1)]
    per_minute: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    roles: tuple[str, ...] | UnsetType = UNSET


class AuthorsFile:
    """The file with the list of authors.

    Raises:
        AuthorsError: the file is not valid when this object is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = _read_file(path)
        self._authors = parse_authors(self._raw, path)
        self._last_error = ""

    def load(self) -> AuthorsByName:
        """The current list; if the file is not valid now, the last valid list."""
        try:
            raw = _read_file(self._path)
            if raw != self._raw:
                self._authors, self._raw = parse_authors(raw, self._path), raw
                log.info("authors_reloaded", authors=len(self._authors))
            self._last_error = ""
        except AuthorsError as error:
            if str(error) != self._last_error:  # the file is read for each record; log each error once
                log.error(  # noqa: TRY400  (no defect)
                    "authors_reload_failed",
                    reason=str(error),
                    kept=len(self._authors),
                    consequence="the last valid list of authors stays in force",
                )
            self._last_error = str(error)
        return self._authors


def parse_authors(raw: bytes, path: Path) -> AuthorsByName:
    """The authors in a TOML file that was read from `path`.

    Raises:
        AuthorsError: the text is not TOML, or the entry of an author is not valid.
    """
    try:
        entries = msgspec.toml.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AuthorsError(f"{path} is not a valid list of authors: {error}; {AUTHORS_FILE_REMEDY}") from error
    authors = {}
    for name, fields in entries.items():
        try:
            msgspec.convert(name, Id)
            check_field_names(fields, _AuthorEntry)
            entry = msgspec.convert(fields, _AuthorEntry)
            keys = tuple(decode_public_key(key) for key in entry.keys)
            roles = DEFAULT_ROLES if entry.roles is UNSET else _parse_roles(entry.roles)
        except ValueError as error:
            raise AuthorsError(f"{path}, author {name!r}: {error}; {AUTHORS_FILE_REMEDY}") from error
        authors[name] = Author(name, keys, None if entry.per_minute is UNSET else entry.per_minute, roles)
    return authors


def _parse_roles(names: Collection[str]) -> tuple[Role, ...]:
    """These roles, in the order of `AUTHOR_ROLES`.

    Raises:
        ValueError: a role is unknown.
    """
    for name in names:
        if name not in AUTHOR_ROLES:
            raise ValueError(f"{name!r} is not a role; the roles are {', '.join(AUTHOR_ROLES)}")
    return tuple(role for role in AUTHOR_ROLES if role in names)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AuthorsError(
            f"the list of authors {path} cannot be read: {error.strerror}; is GRACESTREAM_AUTHORS_FILE right?"
        ) from error
