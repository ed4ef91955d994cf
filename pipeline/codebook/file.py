"""A codebook as one safetensors file.

The file holds only tensors: keys (N, D), values (N, V) and radii (N); labels, entry ids and wordings, concatenated,
with their lengths. Two tensors of bytes hold a JSON header (identity and place in the history) and the exceptions in
MessagePack. The tensor `sha256` covers all other tensors with their names and shapes.

Guarantees:

1. A loaded codebook equals the saved one bit for bit. Slots keep their order, so both continue alike.
2. A file from a hostile writer is safe to read. Shapes, dtypes and lengths must be consistent, numbers finite and ids
   distinct. No number in the file makes the reader allocate more than the file's size.

Not promised: that the file comes from a trusted writer. Everyone can compute a SHA-256.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save_file

from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.errors import UserError
from gracestream.schemas.deltas import DIGEST_BYTES, MAX_WORDING, ExceptionChange, PositiveInt

TENSOR_LAYOUT = {
    "header": (np.uint8, 1),
    "keys": (np.float32, 2),
    "values": (np.float32, 2),
    "radii": (np.float32, 1),
    "label_lengths": (np.int64, 1),
    "label_tokens": (np.int64, 1),
    "entry_id_lengths": (np.int64, 1),
    "entry_id_bytes": (np.uint8, 1),
    "wording_lengths": (np.int64, 1),
    "wording_bytes": (np.uint8, 1),
    "exceptions": (np.uint8, 1),
    "sha256": (np.uint8, 1),
}
"""Dtype and number of dimensions of each tensor in a file."""

Tensors = dict[str, np.ndarray]


class CodebookFileError(UserError):
    """A codebook file that cannot be written or read; the text names the file and the reason."""


class _Header(Struct, frozen=True, kw_only=True):
    codebook: str
    model: str
    layer: str
    seq: PositiveInt
    term: PositiveInt
    digest: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]


def save_codebook(codebook: Codebook, path: Path) -> None:
    """Write a codebook to a file. An existing file is replaced only once the new one is complete.

    Raises:
        CodebookFileError: the file cannot be written.
    """
    header = _Header(
        codebook=codebook.name,
        model=codebook.model,
        layer=codebook.layer,
        seq=codebook.seq,
        term=codebook.term,
        digest=codebook.digest.hex(),
    )
    encoded_ids = [entry_id.encode() for entry_id in codebook.entry_ids]
    encoded_wordings = [wording.encode() for wording in codebook.wordings]
    tensors = {
        "header": np.frombuffer(msgspec.json.encode(header), np.uint8),
        "keys": np.ascontiguousarray(codebook.keys_ND, "<f4"),
        "values": np.ascontiguousarray(codebook.values_NV, "<f4"),
        "radii": np.ascontiguousarray(codebook.radii_N, "<f4"),
        "label_lengths": np.array([len(label) for label in codebook.labels], "<i8"),
        "label_tokens": np.array([token for label in codebook.labels for token in label], "<i8"),
        "entry_id_lengths": np.array([len(encoded_id) for encoded_id in encoded_ids], "<i8"),
        "entry_id_bytes": np.frombuffer(b"".join(encoded_ids), np.uint8),
        "wording_lengths": np.array([len(wording) for wording in encoded_wordings], "<i8"),
        "wording_bytes": np.frombuffer(b"".join(encoded_wordings), np.uint8),
        "exceptions": np.frombuffer(msgspec.msgpack.encode(tuple(codebook.exceptions)), np.uint8),
    }
    tensors["sha256"] = np.frombuffer(_content_digest(tensors), np.uint8)
    partial_path = path.with_name(f"{path.name}.part")
    try:
        partial_path.touch()  # gives the mode that the umask asks for
        mode = partial_path.stat().st_mode
        save_file(tensors, partial_path)
        partial_path.chmod(mode)  # safetensors makes its files readable by the owner alone, whatever the umask
        partial_path.replace(path)
    except (OSError, SafetensorError) as error:
        partial_path.unlink(missing_ok=True)
        raise CodebookFileError(f"the codebook cannot be written to {path}: {error}") from error


def load_codebook(path: Path) -> Codebook:
    """Read a codebook from a file.

    Raises:
        CodebookFileError: the file cannot be read, holds no codebook, or is damaged.
    """
    try:
        return parse_codebook(path.read_bytes())
    except (OSError, CodebookFileError) as error:
        raise CodebookFileError(f"{path} is not a codebook file: {error}") from error


def parse_codebook(data: bytes) -> Codebook:
    """Read a codebook from the bytes of a file.

    Raises:
        CodebookFileError: the bytes hold no codebook, or are damaged.
    """
    try:
        tensors = load_tensors(data)
        return _build_codebook(tensors)
    except (SafetensorError, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise CodebookFileError(str(error)) from error


def _build_codebook(tensors: Tensors) -> Codebook:
    """Check the tensors of a file and build the codebook.

    Raises:
        ValueError: the tensors are inconsistent.
        msgspec.MsgspecError: the header or the exceptions cannot be decoded.
    """
    layout = {name: (array.dtype.type, array.ndim) for name, array in tensors.items()}
    if layout != TENSOR_LAYOUT:
        raise ValueError(f"its tensors are {', '.join(sorted(tensors))}, which is not the layout of a codebook")
    if tensors["sha256"].tobytes() != _content_digest(tensors):
        raise ValueError("its content does not match its SHA-256: the file is damaged")
    header = msgspec.json.decode(tensors["header"].tobytes(), type=_Header)
    keys_ND, values_NV, radii_N = tensors["keys"], tensors["values"], tensors["radii"]
    tokens = tensors["label_tokens"].tolist()
    labels = [tuple(tokens[start:end]) for start, end in _piece_bounds(tensors["label_lengths"], len(tokens))]
    entry_ids, wordings = _decode_texts(tensors, "entry_id"), _decode_texts(tensors, "wording")
    if len({len(keys_ND), len(values_NV), len(radii_N), len(labels), len(entry_ids), len(wordings)}) > 1:
        raise ValueError("its numbers of keys, values, radii, labels, entry ids and wordings differ")
    if any(len(wording) > MAX_WORDING for wording in wordings):
        raise ValueError(f"a wording has more than {MAX_WORDING} characters")
    if entry_ids and not (keys_ND.shape[1] and values_NV.shape[1]):
        raise ValueError("its keys or values have width 0")
    if len(set(entry_ids)) < len(entry_ids):
        raise ValueError("it names an entry twice")
    if not all(np.isfinite(array).all() for array in (keys_ND, values_NV, radii_N)) or (radii_N < 0).any():
        raise ValueError("it holds a number that is not finite, or a radius below 0")
    exceptions = msgspec.msgpack.decode(tensors["exceptions"].tobytes(), type=tuple[ExceptionChange, ...])
    query_shapes = {
        None if exception.query is UNSET else exception.query.array().shape
        for exception in exceptions
        if not exception.removed
    }
    if not query_shapes <= {keys_ND.shape[1:]} or any(exception.removed for exception in exceptions):
        raise ValueError("it holds a removed exception, or one whose query has another width than the keys")
    codebook = Codebook(header.codebook, header.model, header.layer)
    codebook.restore(
        seq=header.seq,
        term=header.term,
        digest=bytes.fromhex(header.digest),
        entry_ids=entry_ids,
        labels=labels,
        wordings=wordings,
        keys_ND=keys_ND,
        values_NV=values_NV,
        radii_N=radii_N,
        exceptions=exceptions,
    )
    return codebook


def _decode_texts(tensors: Tensors, name: str) -> list[str]:
    """The texts of the tensors `<name>_bytes` and `<name>_lengths`.

    Raises:
        ValueError: the lengths do not add up, or a text is not UTF-8.
    """
    joined = tensors[f"{name}_bytes"].tobytes()
    return [joined[start:end].decode() for start, end in _piece_bounds(tensors[f"{name}_lengths"], len(joined))]


def _piece_bounds(lengths: np.ndarray, total: int) -> list[tuple[int, int]]:
    """Start and end of each piece in the concatenation.

    Raises:
        ValueError: the pieces do not add up to `total`.
    """
    # No length may exceed the total, so `cumsum` could overflow int64 only in a file of over 17 GB.
    ends = np.cumsum(lengths).tolist() if len(lengths) else []
    if (lengths < 0).any() or (lengths > total).any() or (ends[-1] if ends else 0) != total:
        raise ValueError("its lengths do not add up to its labels, entry ids or wordings")
    return list(zip([0, *ends], ends, strict=False))


def _content_digest(tensors: Tensors) -> bytes:
    """SHA-256 over name, shape and bytes of every tensor but `sha256`, in the order of `TENSOR_LAYOUT`."""
    digest = hashlib.sha256()
    for name in TENSOR_LAYOUT:
        if name != "sha256":
            digest.update(f"{name} {tensors[name].shape}\n".encode())
            digest.update(tensors[name].reshape(-1).view(np.uint8).data)
    return digest.digest()
