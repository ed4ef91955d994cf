"""Stores snapshot files in a local folder, or at any URL with an fsspec driver (s3://, gs://, memory://, …).

1. A file appears whole or not at all. In a local folder, it is written under a temporary name and renamed. Elsewhere,
   it is uploaded in one piece, and its size is checked.
2. A file is never replaced by other content, because its name has the delta and the first digits of its SHA-256.
3. Manifests, errors and logs contain no credentials of the URL. Drivers take further credentials from the environment.
4. The URL is trusted, but its files are not. A file is read by its plain name in the folder, never at an address from a
   record. At most one byte more than its manifest states is read.

A killed writer leaves a folder `.writing-…`. Another writer deletes it after `ABANDONED_SECONDS`.
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
"""Plain file names only: there is no slash, so a manifest cannot name a file outside the folder."""

_STAGING_PREFIX = ".writing-"
"""Prefix of the temporary folders of writers."""

ABANDONED_SECONDS = 3600.0
"""Age in seconds at which a temporary folder is deleted. No writer takes this long unless it was killed."""

_URL_CREDENTIALS = re.compile(r"(?<=://)(?:([^/@]*):(.*)|([^/@]*))@", re.DOTALL)
"""Matches user and password. The password may contain any character: secret keys of S3 contain slashes."""


def split_url_secrets(url: str) -> tuple[str, list[str]]:
    """The URL without user, password and options, for messages; and the removed parts, also decoded."""
    if "://" not in url or url.startswith("file://"):
        return url, []
    shown, _, options = _URL_CREDENTIALS.sub("", url).partition("?")
    secrets = [part for match in _URL_CREDENTIALS.finditer(url) for part in (match[0], *match.groups()) if part]
    return shown, [*secrets, *(unquote(part) for part in secrets), *([options] if options else [])]


class SnapshotError(UserError):
    """A snapshot cannot be written or used. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A snapshot file that was written: its address, SHA-256 in hex, and size in bytes."""

    uri: str
    sha256: str
    size: int


class SnapshotStore:
    """The folder of snapshots at a URL.

    Raises:
        SnapshotError: fsspec does not know the protocol, or its driver is not installed.
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
        """URL of the folder, without user, password and options."""
        self._local = isinstance(self._filesystem, LocalFileSystem)

    def put(self, codebook: Codebook, stem: str) -> StoredFile:
        """Write a codebook to a new file, whose name begins with `stem`.

        Raises:
            SnapshotError: the file cannot be written.
        """
        try:
            if self._local:
                Path(self._root).mkdir(parents=True, exist_ok=True)
                self._delete_abandoned()
            # The temporary folder of a local store is inside the store, because a rename must stay in one file system.
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
        """The content of a file in this folder, which must have `size` bytes.

        Raises:
            SnapshotError: `uri` is not in this folder, or the file is missing, cannot be read, or has another size.
        """
        path = self._path(uri)
        try:
            data: bytes = self._filesystem.cat_file(path, start=0, end=size + 1)  # one byte more shows a larger file
        except FileNotFoundError as error:
            raise SnapshotError("the file is not there") from self._cause(error)
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(f"the file cannot be read: {self._describe_error(error)}") from self._cause(error)
        if len(data) != size:
            raise SnapshotError(f"the file has {'more' if len(data) > size else len(data)} bytes; it must have {size}")
        return data

    def delete(self, uri: str) -> None:
        """Delete a file in this folder, if it still exists.

        Raises:
            SnapshotError: `uri` is not in this folder, or the file cannot be deleted.
        """
        path = self._path(uri)
        try:
            self._filesystem.rm_file(path)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001  (each driver fails in its own way)
            raise SnapshotError(f"{uri} cannot be deleted: {self._describe_error(error)}") from self._cause(error)

    def _describe_error(self, error: Exception) -> str:
        """The text of a driver's error; only its type if the text may contain a part of a secret."""
        parts = [part for secret in self._secrets for part in re.split(r"\W+", secret) if part]
        text = str(error)
        return type(error).__name__ if not text or any(part in text for part in parts) else text

    def _cause(self, error: Exception) -> Exception | None:
        """The error as the cause of another one; None if its traceback may show a secret."""
        return None if self._secrets else error

    def _delete_abandoned(self) -> None:
        """Delete the temporary folders of killed writers. Another writer may do so at the same time."""
        for folder in Path(self._root).glob(f"{_STAGING_PREFIX}*"):
            with suppress(OSError):
                if time.time() > folder.stat().st_mtime + ABANDONED_SECONDS:
                    shutil.rmtree(folder)

    def _move(self, staged: Path, name: str, size: int) -> None:
        """Put a complete file into the store under its name (guarantee 1)."""
        if self._local:
            staged.replace(Path(self._root) / name)
            return
        path = f"{self._root}/{name}"
        self._filesystem.put_file(str(staged), path)
        self._filesystem.invalidate_cache()
        if (stored := self._filesystem.info(path)["size"]) != size:
            raise SnapshotError(f"{self.url}/{name} has {stored} bytes after {size} were written to it")

    def _path(self, uri: str) -> str:
        """The path for the driver of a file in this folder.

        Raises:
            SnapshotError: `uri` is not in this folder, or not a plain name of a snapshot.
        """
        folder, _, name = uri.rpartition("/")
        if folder != self.url or _FILE_NAME.fullmatch(name) is None:
            raise SnapshotError(f"{split_url_secrets(uri)[0]} is not a file in GRACESTREAM_SNAPSHOT_URL={self.url}")
        return f"{self._root}/{name}"
