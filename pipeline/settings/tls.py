"""The files of TLS, which the settings of Kafka and of Redis have alike."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gracestream.pipeline.settings.group import SettingsGroup

CaFile = Annotated[
    str | None,
    Field(
        min_length=1,
        description="File (PEM) of the authorities that may sign the server's certificate; by default the system's.",
    ),
]
CertificateFile = Annotated[
    str | None, Field(min_length=1, description="File (PEM) of the client certificate shown to the server.")
]
KeyFile = Annotated[
    str | None, Field(min_length=1, description="File (PEM) of its key; by default in the file of the certificate.")
]

TLS_FILES = ("ca", "certificate", "key")
"""The fields of these types."""


def tls_contradictions(group: SettingsGroup, without_tls: str | None) -> Iterator[str]:
    """Files of TLS without TLS, a key or its password without a certificate, and files that cannot be read.

    `without_tls` is the reason why the connections have no TLS; None if they have it.
    """
    values = group.model_dump()
    for field in TLS_FILES:
        if values[field] and without_tls:
            yield f"{group.variable(field)} is set, and {without_tls}"
    for field in ("key", "key_password"):
        if values.get(field) and not values["certificate"]:
            yield f"{group.variable(field)} is set without {group.variable('certificate')}"
    for field in TLS_FILES:
        path = values[field]
        if path and not (Path(path).is_file() and os.access(path, os.R_OK)):
            yield f"{group.variable(field)}: {path!r} is not a readable file"
