"""Certificates for tests, issued by a test authority."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import trustme
from cryptography.hazmat.primitives import serialization


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority and its certificates, as files."""

    folder: Path
    authority: trustme.CA

    @classmethod
    def create(cls, folder: Path) -> Self:
        """A new authority, which no client trusts yet."""
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        return cls(folder, authority)

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    def issue(self, name: str, *hosts: str, password: str = "") -> tuple[Path, Path]:
        """A certificate for hosts or for a client `name`, and its key in PKCS 8, the format that Java reads."""
        issued = self.authority.issue_cert(*(hosts or (f"{name}.test",)), common_name=name)
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        stem = self.folder / (f"{name}-locked" if password else name)
        paths = stem.with_suffix(".pem"), stem.with_suffix(".key")
        paths[0].write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        paths[1].write_bytes(pem)
        return paths
