"""Signatures of feedback: Ed25519 over the very bytes that travel (design, section 6).

A signed record is a JSON object whose last member is `signature`, spelled as here, with nothing after it:

    text      {"v":1,"feedback_id":"f-1","inputs":"…","target":"…","author":"ann"}
    signed    gracestream feedback NUL codebook NUL text                       (codebook and text in UTF-8)
    record    {"v":1,"feedback_id":"f-1","inputs":"…","target":"…","author":"ann","signature":"<base64>"}

There is no canonical form to agree on: the text is whatever JSON its author's library wrote, and whoever verifies cuts
the signature off the record again. What follows from that:

1. Every byte is covered: fields that this code does not know, their order, white space, `v`, and how a number or a
   character is spelled. Who reads a record and writes it anew, however faithfully, breaks its signature.
2. The signature itself has one spelling: standard base64 with its padding, whose unused bits are zero.
3. A signature for one codebook is worth nothing for another, nor is any other signature of the same key worth anything
   here. Two NULs tell the three parts apart, since JSON texts hold none.
4. A record that names a field twice is not accepted, because JSON libraries differ in which of the two they take.

Not promised: that a record is new. Whoever may write to `feedback` can send a signed record again; that a copy has no
effect is the work of `pipeline.auth.spent_signatures`.
"""

import base64
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from gracestream.pipeline.errors import UserError

SIGNATURE_DOMAIN = b"gracestream feedback"
PUBLIC_KEY_BYTES = 32

_SIGNATURE_SUFFIX = re.compile(rb',"signature":"([A-Za-z0-9+/]{86}==)"\}')
_SIGNATURE_SUFFIX_BYTES = len(b',"signature":""}') + 88


class KeyFileError(UserError):
    """A file that is no private key, or may not become one; the text names it."""


def sign(text: bytes, key: Ed25519PrivateKey, codebook: str) -> bytes:
    """The record: a JSON object of at least one member, with its signature as the last."""
    signature = base64.b64encode(key.sign(_signed_bytes(text, codebook)))
    return text[:-1] + b',"signature":"' + signature + b'"}'


def has_signature(record: bytes) -> bool:
    """Whether a record ends as a signed one does. It does not verify the signature."""
    return _match_signature(record) is not None


def verify(record: bytes, keys: Iterable[Ed25519PublicKey], codebook: str) -> bool:
    """Whether a record, which is a JSON object, bears a signature by one of these keys for this codebook."""
    tail = _match_signature(record)
    if tail is None:
        return False
    signature = base64.b64decode(tail[1])
    if base64.b64encode(signature) != tail[1]:
        return False
    signed = _signed_bytes(record[: tail.start()] + b"}", codebook)
    return _has_unique_fields(record) and any(_is_signed_by(key, signature, signed) for key in keys)


def decode_public_key(text: str) -> Ed25519PublicKey:
    """The key that `encode_public_key` wrote; ValueError where it is none."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) != PUBLIC_KEY_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, and an Ed25519 key has {PUBLIC_KEY_BYTES}")
    return Ed25519PublicKey.from_public_bytes(raw)


def encode_public_key(key: Ed25519PublicKey) -> str:
    """A public key as the list of authors has it: the base64 of its 32 bytes."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def create_key_file(path: Path) -> Ed25519PrivateKey:
    """Make a private key and write it as PEM (PKCS #8) to a new file that its owner alone may read.

    Raises:
        KeyFileError: the file exists, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
    except FileExistsError as error:
        raise KeyFileError(f"{path} exists, and a key is never overwritten; choose another file") from error
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error
    return key


def read_key_file(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file.

    Raises:
        KeyFileError: it cannot be read, is encrypted, or holds no Ed25519 key.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise KeyFileError(f"{path} is encrypted; write the key without a passphrase first") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path} is no private key in PEM; `gracestream keys new` makes one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path} holds a key of another kind than Ed25519; `gracestream keys new` makes one")
    return key


def _match_signature(record: bytes) -> re.Match[bytes] | None:
    return _SIGNATURE_SUFFIX.fullmatch(record, max(0, len(record) - _SIGNATURE_SUFFIX_BYTES))


def _signed_bytes(text: bytes, codebook: str) -> bytes:
    return b"\0".join((SIGNATURE_DOMAIN, codebook.encode(), text))


def _is_signed_by(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _has_unique_fields(record: bytes) -> bool:
    def check(members: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(members)
        if len(fields) < len(members):
            raise ValueError("a field stands twice")
        return fields

    try:
        json.loads(record.decode(), object_pairs_hook=check)
    except (ValueError, RecursionError):
        return False
    return True
