"""Where snapshot files lie: a local folder, or any URL that fsspec has a driver for (s3://, gs://, memory://, …).

The URL is configuration and is trusted. Its credentials come from the environment, as the driver documents; those that
the URL itself has are in no manifest, error or log. What is read under it is not trusted: a file is asked for by its
plain name, never by an address that a record gives, and no more of it is read than its manifest says.

A file appears whole or not at all: in a folder under a temporary name that is then renamed (what a writer that was
killed leaves in its folder `.writing-…`, another one deletes an hour later); elsewhere it is put under its name in one
piece and its size is compared. A name bears the delta and the beginning of the file's own SHA-256, so no content ever
replaces another.
"""

import hashlib
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from gracestream.pipeline.codebook import Codebook, save_codebook
from gracestream.pipeline.errors import UserError

_FILE_NAME = re.compile(r"[A-Za-z0-9._%~-]+\.safetensors")
_STAGING_PREFIX = ".writing-"

ABANDONED_SECONDS = 3600.0
"""No writer is at one file for so long, unless it was killed."""

_URL_CREDENTIALS = re.compile(r"(?<=://)(?:([^/@]*):(.*)|([^/@]*))@", re.DOTALL)
"""User and password, which may hold any character, since secret keys of S3 have slashes."""


def split_url_secrets(url: str) -> tuple[str, list[str]]:
    """A URL of snapshots as it may be shown, without user, password and options; and what was left out of it."""
    if "://" not in url or url.startswith("file://"):
        return url, []
    shown, _, options = _URL_CREDENTIALS.sub("", url).partition("?")
    found = [part for match in _URL_CREDENTIALS.finditer(url) for part in (match[0], *match.groups()) if part]
    return shown, [*found, *(unquote(part) for part in found), *([options] if options else [])]


class SnapshotError(UserError):
    """A snapshot that cannot be written or used; the text says why."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was written."""

    uri: str
    sha256: str
    size: int


class SnapshotStore:
    """One folder of snapshots.

    Raises:
        SnapshotError: fsspec has no such store, or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        shown, self._secrets = split_url_secrets(url)
        try:
            self._filesystem, self._root = url_to_fs(url)
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(
                f"GRACESTREAM_SNAPSHOT_URL={shown} cannot be used: {self._describe_error(error)}"
            ) from self._cause(error)
        self._root = self._root.rstrip("/")
        self.url: str = shown.rstrip("/") if self._secrets else self._filesystem.unstrip_protocol(self._root)
        """Without user and password."""
        self._local = isinstance(self._filesystem, LocalFileSystem)

    def put(self, codebook: Codebook, stem: str) -> StoredFile:
        """Write a codebook to a file of its own, whose name begins with `stem`.

        Raises:
            SnapshotError: it cannot be written there.
        """
        try:
            if self._local:
                Path(self._root).mkdir(parents=True, exist_ok=True)
                self._delete_abandoned()
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=self._root if self._local else None) as folder:
                staged = Path(folder) / "codebook"
                save_codebook(codebook, staged)
                with staged.open("rb") as content:
                    sha256 = hashlib.file_digest(content, "sha256").hexdigest()
                size = staged.stat().st_size
                name = f"{stem}-{codebook.seq}-{sha256[:16]}.safetensors"
                self._move(staged, name, size)
        except SnapshotError:
            raise
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(
                f"no snapshot can be written to {self.url}: {self._describe_error(error)}"
            ) from self._cause(error)
        return StoredFile(f"{self.url}/{name}", sha256, size)

    def read(self, uri: str, size: int) -> bytes:
        """The content of a file of this folder, which must have `size` bytes.

        Raises:
            SnapshotError: it is no file of this folder, is missing, or has another size.
        """
        path = self._path(uri)
        try:
            data: bytes = self._filesystem.cat_file(path, start=0, end=size + 1)
        except FileNotFoundError as error:
            raise SnapshotError("the file is not there") from self._cause(error)
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(f"the file cannot be read: {self._describe_error(error)}") from self._cause(error)
        if len(data) != size:
            raise SnapshotError(f"the file has {'more' if len(data) > size else len(data)} bytes; it must have {size}")
        return data

    def delete(self, uri: str) -> None:
        """Delete a file of this folder; one that is gone already is none.

        Raises:
            SnapshotError: it is no file of this folder, or cannot be deleted.
        """
        path = self._path(uri)
        try:
            self._filesystem.rm_file(path)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(f"{uri} cannot be deleted: {self._describe_error(error)}") from self._cause(error)

    def _describe_error(self, error: Exception) -> str:
        """What a driver says; only the type of its error where the text may hold a part of a secret."""
        parts = [part for secret in self._secrets for part in re.split(r"\W+", secret) if part]
        text = str(error)
        return type(error).__name__ if not text or any(part in text for part in parts) else text

    def _cause(self, error: Exception) -> Exception | None:
        """The error itself, unless a traceback of it may show a secret."""
        return None if self._secrets else error

    def _delete_abandoned(self) -> None:
        """Delete what writers that were killed have left; another one may be at it as well."""
        for folder in Path(self._root).glob(f"{_STAGING_PREFIX}*"):
            with suppress(OSError):
                if time.time() > folder.stat().st_mtime + ABANDONED_SECONDS:
                    shutil.rmtree(folder)

    def _move(self, staged: Path, name: str, size: int) -> None:
        if self._local:
            staged.replace(Path(self._root) / name)
            return
        path = f"{self._root}/{name}"
        self._filesystem.put_file(str(staged), path)
        self._filesystem.invalidate_cache()
        if (stored := self._filesystem.info(path)["size"]) != size:
            raise SnapshotError(f"{self.url}/{name} has {stored} bytes after {size} were written to it")

    def _path(self, uri: str) -> str:
        folder, _, name = uri.rpartition("/")
        if folder != self.url or _FILE_NAME.fullmatch(name) is None:
            raise SnapshotError(f"{split_url_secrets(uri)[0]} is no file of GRACESTREAM_SNAPSHOT_URL={self.url}")
        return f"{self._root}/{name}"
