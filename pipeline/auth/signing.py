"""Signatures of feedback: Ed25519 over the bytes on the wire (docs/explanation/security-model.md).

A signed record is a JSON object. Its last member is `signature`, in exactly this form, with nothing after it:

    text      {"v":1,"feedback_id":"f-1","inputs":"…","target":"…","author":"ann"}
    signed    gracestream feedback NUL codebook NUL text                       (codebook and text in UTF-8)
    record    {"v":1,"feedback_id":"f-1","inputs":"…","target":"…","author":"ann","signature":"<base64>"}

There is no canonical form of JSON. The author signs any JSON text, and the verifier cuts the signature off the record.

1. The signature covers every byte: unknown fields, the order of fields, white space, and the form of numbers and
   characters. A program that decodes a record and encodes it again breaks the signature.
2. A signature has exactly one form: standard base64 with padding and with unused bits of zero.
3. A signature for one codebook is not valid for another. A signature that the same key made for another purpose is not
   valid either. The two NULs separate the three parts, because neither the first part nor JSON contains a NUL.
4. A record with a field that occurs twice is rejected, because JSON libraries differ in the value that they return.

Not promised: that a record is new. Anyone who may write to `feedback` can send a signed record again.
`pipeline.auth.spent_signatures` ensures that the copy has no effect.
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
"""First part of the signed bytes. It keeps signatures made for another purpose from being valid here."""

PUBLIC_KEY_BYTES = 32
"""Bytes of an Ed25519 public key."""

_SIGNATURE_SUFFIX = re.compile(rb',"signature":"([A-Za-z0-9+/]{86}==)"\}')
_SIGNATURE_SUFFIX_BYTES = len(b',"signature":""}') + 88


class KeyFileError(UserError):
    """A key file cannot be read or created. The text names it."""


def sign(text: bytes, key: Ed25519PrivateKey, codebook: str) -> bytes:
    """The signed record. `text` is a JSON object with at least one member; the signature becomes its last member."""
    signature = base64.b64encode(key.sign(_signed_bytes(text, codebook)))
    return text[:-1] + b',"signature":"' + signature + b'"}'


def has_signature(record: bytes) -> bool:
    """Whether a record ends with a signature. The signature is not verified."""
    return _match_signature(record) is not None


def verify(record: bytes, keys: Iterable[Ed25519PublicKey], codebook: str) -> bool:
    """Whether a record, a JSON object, has a valid signature by one of these keys for this codebook."""
    suffix = _match_signature(record)
    if suffix is None:
        return False
    signature = base64.b64decode(suffix[1])
    if base64.b64encode(signature) != suffix[1]:  # unused bits are not zero (guarantee 2)
        return False
    signed = _signed_bytes(record[: suffix.start()] + b"}", codebook)
    return _has_unique_fields(record) and any(_is_signed_by(key, signature, signed) for key in keys)


def decode_public_key(text: str) -> Ed25519PublicKey:
    """Decode a key as `encode_public_key` encodes it.

    Raises:
        ValueError: the text is not the base64 of 32 bytes.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) != PUBLIC_KEY_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, and an Ed25519 key has {PUBLIC_KEY_BYTES}")
    return Ed25519PublicKey.from_public_bytes(raw)


def encode_public_key(key: Ed25519PublicKey) -> str:
    """A public key in the form of the list of authors: the base64 of its 32 bytes."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def create_key_file(path: Path) -> Ed25519PrivateKey:
    """Create a private key, and write it as PEM (PKCS #8) to a new file that only its owner may read.

    Raises:
        KeyFileError: the file exists or cannot be written.
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
        KeyFileError: the file cannot be read, is encrypted, or has no Ed25519 key.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise KeyFileError(f"{path} is encrypted; write the key without a passphrase first") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path} is not a private key in PEM; `gracestream keys new` makes one") from error
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
