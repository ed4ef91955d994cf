"""A codebook as one safetensors file, and back again bit for bit.

Everything is a tensor: keys (N, D), values (N, V), radii (N), the labels, entry ids and wordings one after the other
with their lengths, and as bytes a JSON header that says where in the history this is, and the exceptions in
MessagePack. The tensor `sha256` covers all
the others with their names and shapes. Slots keep their order, so the codebook goes on as the one that was saved would.

What is read is judged as if someone hostile had written it: shapes, dtypes and lengths must fit each other, numbers
must be finite, ids must differ. No part of the file says how much memory to take beyond its own size.
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
"""The tensors of a file, each with its dtype and number of dimensions."""

Tensors = dict[str, np.ndarray]


class CodebookFileError(UserError):
    """A file that cannot be written, or that holds no codebook."""


class _Header(Struct, frozen=True, kw_only=True):
    codebook: str
    model: str
    layer: str
    seq: PositiveInt
    term: PositiveInt
    digest: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]


def save_codebook(codebook: Codebook, path: Path) -> None:
    """Write the whole codebook; a file that was there is replaced only once the new one is complete.

    Raises:
        CodebookFileError: it cannot be written there.
    """
    header = _Header(
        codebook=codebook.name,
        model=codebook.model,
        layer=codebook.layer,
        seq=codebook.seq,
        term=codebook.term,
        digest=codebook.digest.hex(),
    )
    names = [entry_id.encode() for entry_id in codebook.entry_ids]
    wordings = [wording.encode() for wording in codebook.wordings]
    tensors = {
        "header": np.frombuffer(msgspec.json.encode(header), np.uint8),
        "keys": np.ascontiguousarray(codebook.keys_ND, "<f4"),
        "values": np.ascontiguousarray(codebook.values_NV, "<f4"),
        "radii": np.ascontiguousarray(codebook.radii_N, "<f4"),
        "label_lengths": np.array([len(label) for label in codebook.labels], "<i8"),
        "label_tokens": np.array([token for label in codebook.labels for token in label], "<i8"),
        "entry_id_lengths": np.array([len(name) for name in names], "<i8"),
        "entry_id_bytes": np.frombuffer(b"".join(names), np.uint8),
        "wording_lengths": np.array([len(wording) for wording in wordings], "<i8"),
        "wording_bytes": np.frombuffer(b"".join(wordings), np.uint8),
        "exceptions": np.frombuffer(msgspec.msgpack.encode(tuple(codebook.exceptions)), np.uint8),
    }
    tensors["sha256"] = np.frombuffer(_content_digest(tensors), np.uint8)
    half = path.with_name(f"{path.name}.part")
    try:
        half.touch()
        rights = half.stat().st_mode
        save_file(tensors, half)
        half.chmod(rights)  # safetensors lets only the owner read its files, whatever the umask says
        half.replace(path)
    except (OSError, SafetensorError) as error:
        half.unlink(missing_ok=True)
        raise CodebookFileError(f"the codebook cannot be written to {path}: {error}") from error


def load_codebook(path: Path) -> Codebook:
    """Read a codebook back, bit for bit.

    Raises:
        CodebookFileError: the file is none of a codebook, or its content is not what was written.
    """
    try:
        return parse_codebook(path.read_bytes())
    except (OSError, CodebookFileError) as error:
        raise CodebookFileError(f"{path} is no codebook: {error}") from error


def parse_codebook(data: bytes) -> Codebook:
    """The codebook that the bytes of a file hold.

    Raises:
        CodebookFileError: they hold none, or are not what was written.
    """
    try:
        tensors = load_tensors(data)
        return _build_codebook(tensors)
    except (SafetensorError, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise CodebookFileError(str(error)) from error


def _build_codebook(tensors: Tensors) -> Codebook:
    """Raises ValueError, or msgspec's ValidationError, where something does not fit."""
    layout = {name: (array.dtype.type, array.ndim) for name, array in tensors.items()}
    if layout != TENSOR_LAYOUT:
        raise ValueError(f"its tensors are {', '.join(sorted(tensors))}, which is not the layout of a codebook")
    if tensors["sha256"].tobytes() != _content_digest(tensors):
        raise ValueError("its content is not what was written: the SHA-256 is another")
    header = msgspec.json.decode(tensors["header"].tobytes(), type=_Header)
    keys_ND, values_NV, radii_N = tensors["keys"], tensors["values"], tensors["radii"]
    tokens = tensors["label_tokens"].tolist()
    labels = [tuple(tokens[start:end]) for start, end in _piece_bounds(tensors["label_lengths"], len(tokens))]
    entry_ids, wordings = _decode_texts(tensors, "entry_id"), _decode_texts(tensors, "wording")
    if len({len(keys_ND), len(values_NV), len(radii_N), len(labels), len(entry_ids), len(wordings)}) > 1:
        raise ValueError("it has not as many keys as values, radii, labels, entry ids and wordings")
    if any(len(wording) > MAX_WORDING for wording in wordings):
        raise ValueError(f"a wording has more than {MAX_WORDING} characters")
    if entry_ids and not (keys_ND.shape[1] and values_NV.shape[1]):
        raise ValueError("its keys or values are of no numbers")
    if len(set(entry_ids)) < len(entry_ids):
        raise ValueError("it names an entry twice")
    if not all(np.isfinite(array).all() for array in (keys_ND, values_NV, radii_N)) or (radii_N < 0).any():
        raise ValueError("it holds a number that is not finite, or a radius below 0")
    exceptions = msgspec.msgpack.decode(tensors["exceptions"].tobytes(), type=tuple[ExceptionChange, ...])
    widths = {None if one.query is UNSET else one.query.array().shape for one in exceptions if not one.removed}
    if not widths <= {keys_ND.shape[1:]} or any(one.removed for one in exceptions):
        raise ValueError("it holds an exception whose query is no key's")
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
    joined = tensors[f"{name}_bytes"].tobytes()
    return [joined[start:end].decode() for start, end in _piece_bounds(tensors[f"{name}_lengths"], len(joined))]


def _piece_bounds(lengths: np.ndarray, total: int) -> list[tuple[int, int]]:
    """Start and end of each piece; ValueError unless they fill `total` exactly."""
    ends = np.cumsum(lengths).tolist() if len(lengths) else []
    if (lengths < 0).any() or (lengths > total).any() or (ends[-1] if ends else 0) != total:
        raise ValueError("its lengths do not add up to its labels or entry ids")
    return list(zip([0, *ends], ends, strict=False))


def _content_digest(tensors: Tensors) -> bytes:
    """SHA-256 over all but itself: name, shape and bytes of each, in the order of `TENSOR_LAYOUT`."""
    digest = hashlib.sha256()
    for name in TENSOR_LAYOUT:
        if name != "sha256":
            digest.update(f"{name} {tensors[name].shape}\n".encode())
            digest.update(tensors[name].reshape(-1).view(np.uint8).data)
    return digest.digest()
