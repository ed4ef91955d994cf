"""A codebook as one safetensors file: keys, values, radii and labels, and in the header all the rest."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipeline.codebook import Codebook, DeltaFault
from pipeline.errors import UserError


class FileError(UserError):
    """A file that cannot be written."""


def save(codebook: Codebook, path: Path) -> None:
    """Write the whole codebook; a file that was there is replaced only once the new one is complete.

    Raises:
        FileError: it cannot be written there.
    """
    lengths = np.array([len(label) for label in codebook.labels], np.int64)
    tokens = np.array([token for label in codebook.labels for token in label], np.int64)
    header = {
        "codebook": codebook.name,
        "model": codebook.model,
        "layer": codebook.layer,
        "seq": codebook.seq,
        "term": codebook.term,
        "digest": codebook.digest.hex(),
        "entry_ids": codebook.entry_ids,
        "state_digest": codebook.state_digest(),
    }
    tensors = {
        "keys": np.ascontiguousarray(codebook.keys_ND),
        "values": np.ascontiguousarray(codebook.values_NV),
        "radii": np.ascontiguousarray(codebook.radii_N),
        "label_lengths": lengths,
        "label_tokens": tokens,
    }
    half = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, half, metadata={"gracestream": json.dumps(header)})
        half.replace(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"the codebook cannot be written to {path}: {error}") from error


def load(path: Path) -> Codebook:
    """Read a codebook back, bit for bit.

    Raises:
        DeltaFault: the file is none of a codebook, or its content is not what was written.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["gracestream"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DeltaFault(f"{path} is no codebook: {error}") from error
    ends = np.cumsum(tensors["label_lengths"])
    labels = [
        tuple(tensors["label_tokens"][end - length : end].tolist())
        for end, length in zip(ends.tolist(), tensors["label_lengths"].tolist(), strict=True)
    ]
    codebook = Codebook(header["codebook"], header["model"], header["layer"])
    codebook.restore(
        seq=header["seq"],
        term=header["term"],
        digest=bytes.fromhex(header["digest"]),
        entry_ids=header["entry_ids"],
        labels=labels,
        keys_ND=tensors["keys"],
        values_NV=tensors["values"],
        radii_N=tensors["radii"],
    )
    if codebook.state_digest() != header["state_digest"]:
        raise DeltaFault(f"{path} does not hold what was written to it: its state digest is another")
    return codebook
