"""A codebook's file restores the codebook bit for bit; any other file is rejected."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from gracestream.pipeline.codebook import file as codebook_file
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.codebook.file import CodebookFileError, load_codebook, parse_codebook, save_codebook
from gracestream.pipeline.errors import HistoryError
from gracestream.schemas.deltas import EntryChange, Tensor
from tests.support.examples import examples
from tests.support.tiny_models import CODEBOOK, LAYER, MODEL, added, filled, new_codebook, sealed
from tests.support.written_history import same

KEYS = np.arange(12, dtype=np.float32).reshape(4, 3)
NAMES = [f"ä{number}" for number in range(8)]

number = st.floats(-1e6, 1e6, width=32)
key = st.lists(number, min_size=3, max_size=3)
label = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple)
step = st.tuples(
    st.sampled_from(["add", "expand", "split", "replace", "remove", "lead"]),
    st.sampled_from(NAMES),
    key,
    st.floats(0, 1e3, width=32),
    label,
)


def record(codebook: Codebook, chosen: tuple[str, str, list[float], float, tuple[int, ...]]) -> bytes:
    """The delta of one step; where the step does not fit what is there, an entry is added in its place."""
    op, name, key_D, radius, tokens = chosen
    known = name in codebook
    if op == "lead" or (op == "remove" and not known):
        return sealed(codebook, op="lead")
    if op == "remove":
        return sealed(codebook, EntryChange(entry_id=name, removed=True), op="undo")
    if op == "expand" and known:
        return sealed(codebook, EntryChange(entry_id=name, radius=radius), op="expand")
    if op == "replace" and known:
        change = EntryChange(entry_id=name, value=Tensor.from_array(np.array(key_D)), label=tokens)
        return sealed(codebook, change, op="replace")
    if op == "split" and codebook.entry_ids:
        shrunk = EntryChange(entry_id=codebook.entry_ids[0], radius=radius / 2)
        if shrunk.entry_id != name:
            return sealed(codebook, shrunk, added(name, key_D, radius, tokens), op="split")
    return sealed(codebook, added(name, key_D, radius, tokens))


@examples(1.5)
@given(steps=st.lists(step, max_size=30), data=st.data())
def test_a_file_at_any_cut_and_the_tail_give_the_whole_fold(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], data: st.DataObject
) -> None:
    whole = new_codebook()
    records = []
    for chosen in steps:
        records.append(record(whole, chosen))
        whole.apply(records[-1])
    cut = data.draw(st.integers(0, len(records)))
    before = new_codebook()
    for delta in records[:cut]:
        before.apply(delta)
    path = tmp_path_factory.mktemp("cut") / "codebook"
    save_codebook(before, path)
    resumed = load_codebook(path)
    assert same(resumed, before)
    for delta in records[cut:]:
        resumed.apply(delta)
    assert same(resumed, whole)


def test_one_whose_entries_are_all_gone_still_knows_their_width(tmp_path: Path) -> None:
    codebook = filled(KEYS)
    codebook.apply(sealed(codebook, *(EntryChange(entry_id=f"e{row}", removed=True) for row in range(4)), op="undo"))
    save_codebook(codebook, tmp_path / "codebook")
    for one in (codebook, load_codebook(tmp_path / "codebook")):
        with pytest.raises(HistoryError, match=r"a key of shape \(2,\), not \(3,\)"):
            one.apply(sealed(one, added("new", [1, 2], 1.0)))
        assert one.apply(sealed(one, added("new", [1, 2, 3], 1.0))) is not None


def test_any_bit_that_is_another_is_rejected(tmp_path: Path) -> None:
    save_codebook(filled(KEYS), tmp_path / "codebook")
    whole = (tmp_path / "codebook").read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(CodebookFileError):
                parse_codebook(bytes(flipped))


NUMBERS: dict[str, Any] = {
    "a key that is not a number": ("keys", lambda keys_ND: keys_ND + np.float32("nan")),
    "an infinite value": ("values", lambda values_NV: values_NV + np.float32("inf")),
    "a radius below 0": ("radii", lambda radii_N: -radii_N),
    "a key too few": ("keys", lambda keys_ND: keys_ND[1:]),
    "keys of no numbers": ("keys", lambda keys_ND: keys_ND[:, :0]),
    "a radius too many": ("radii", lambda radii_N: np.append(radii_N, radii_N[:1])),
    "keys of float64": ("keys", lambda keys_ND: keys_ND.astype(np.float64)),
    "flat keys": ("keys", lambda keys_ND: keys_ND.reshape(-1)),
    "a label of negative length": ("label_lengths", lambda lengths: lengths + np.array([1, -2, 1, 0])),
    "labels beyond the end": ("label_lengths", lambda lengths: lengths + 1),
    "lengths whose sum overflows": ("label_lengths", lambda lengths: lengths + 2**62),
    "labels that end too early": ("label_lengths", lambda lengths: lengths - lengths),
    "an id twice": ("entry_id_bytes", lambda names: np.concatenate([names[:2], names[:2], names[4:]])),
    "an id that is not UTF-8": ("entry_id_bytes", lambda names: names + np.uint8(128)),
    "a header that is no JSON": ("header", lambda header: header[1:]),
    "a header without fields": ("header", lambda header: header[[0, -1]]),
    "a digest that is none": ("header", lambda header: header[:-3]),
}


@pytest.mark.parametrize("fault", NUMBERS)
def test_content_that_does_not_fit_is_rejected_even_under_a_digest_of_its_own(tmp_path: Path, fault: str) -> None:
    save_codebook(filled(KEYS), tmp_path / "codebook")
    tensors = load_tensors((tmp_path / "codebook").read_bytes())
    assert same(parse_codebook(resealed(tensors)), filled(KEYS))
    name, change = NUMBERS[fault]
    with pytest.raises(CodebookFileError):
        parse_codebook(resealed({**tensors, name: np.ascontiguousarray(change(tensors[name]))}))


def test_a_tensor_that_is_missing_or_one_too_many_is_rejected(tmp_path: Path) -> None:
    save_codebook(filled(KEYS), tmp_path / "codebook")
    tensors = load_tensors((tmp_path / "codebook").read_bytes())
    for name in tensors:
        with pytest.raises(CodebookFileError, match="not the layout of a codebook"):
            parse_codebook(save_tensors({other: array for other, array in tensors.items() if other != name}))
    with pytest.raises(CodebookFileError, match="not the layout of a codebook"):
        parse_codebook(save_tensors({**tensors, "more": np.zeros(1)}))


def test_others_may_read_it_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    for umask, rights in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            save_codebook(new_codebook(), tmp_path / f"{umask}")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{umask}").stat().st_mode) == rights


def test_a_place_that_cannot_be_written_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CodebookFileError, match="the codebook cannot be written to"):
        save_codebook(Codebook(CODEBOOK, MODEL, LAYER), tmp_path / "nowhere" / "codebook")
    assert list(tmp_path.iterdir()) == []


def resealed(tensors: dict[str, np.ndarray]) -> bytes:
    """The file of these tensors, as someone who knows the format would write it."""
    digest = np.frombuffer(codebook_file._content_digest(tensors), np.uint8)
    return bytes(save_tensors({**tensors, "sha256": digest}))
