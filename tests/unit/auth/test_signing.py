"""A signature covers every byte of the record, names its codebook, and can be made by any JSON library."""

import base64
import json
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from gracestream import schemas
from gracestream.pipeline.auth.signing import (
    KeyFileError,
    create_key_file,
    decode_public_key,
    encode_public_key,
    read_key_file,
    sign,
    verify,
)
from gracestream.pipeline.client import feedback_to_sign
from gracestream.schemas.messages import Feedback, InvalidMessage, decode, encode
from tests.support.examples import examples

GOLDEN = Path(schemas.__file__).parent / "golden" / "v1" / "feedback-signed.json"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
CODEBOOK = "default"
TEXT = '{"v":1,"feedback_id":"f","inputs":"caf\u00e9","target":"th\u00e9","author":"ann"}'.encode()
MANY = examples(3)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text().filter(lambda name: name != "signature"), values, min_size=1, max_size=6)
layouts: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "indent": st.none() | st.integers(0, 2),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,", "\t:\r\n")]),
        "ensure_ascii": st.booleans(),
        "sort_keys": st.booleans(),
    }
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Any object, in the JSON of any library."""
    return json.dumps(draw(objects), **draw(layouts)).encode()


def good(record: bytes, key: Ed25519PrivateKey = KEY, codebook: str = CODEBOOK) -> bool:
    return verify(record, [key.public_key()], codebook)


class TestWhatIsSigned:
    @MANY
    @given(texts(), st.text())
    def test_whatever_an_author_writes_is_verified_as_it_is(self, text: bytes, codebook: str) -> None:
        record = sign(text, KEY, codebook)
        assert good(record, codebook=codebook)
        signature = json.loads(record)["signature"]
        assert json.loads(record) == {**json.loads(text), "signature": signature}

    @MANY
    @given(texts(), st.data())
    def test_no_byte_can_be_changed(self, text: bytes, data: st.DataObject) -> None:
        record = bytearray(sign(text, KEY, CODEBOOK))
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] ^= data.draw(st.integers(1, 255))
        assert not good(bytes(record))

    def test_rephrases_are_covered(self) -> None:
        text = TEXT.replace(b',"author"', b',"rephrases":["z"],"author"')
        record = sign(text, KEY, CODEBOOK)
        assert good(record)
        assert decode(record, Feedback).rephrases == ("z",)
        assert not good(record.replace(b'["z"]', b'["y"]'))
        assert not good(record.replace(b'"rephrases":["z"],', b""))

    def test_no_bit_of_the_signature_and_what_stands_around_it_can_be_changed(self) -> None:
        record = sign(TEXT, KEY, CODEBOOK)
        for place in range(len(TEXT) - 1, len(record)):
            for bit in range(8):
                changed = bytearray(record)
                changed[place] ^= 1 << bit
                assert not good(bytes(changed)), (place, bit)

    @MANY
    @given(texts(), st.data(), st.binary(min_size=1, max_size=4))
    def test_no_byte_can_be_put_in_or_left_out(self, text: bytes, data: st.DataObject, more: bytes) -> None:
        record = sign(text, KEY, CODEBOOK)
        start = data.draw(st.integers(0, len(record)))
        end = data.draw(st.integers(start, len(record)))
        assert start == end or not good(record[:start] + record[end:])
        assert not good(record[:start] + more + record[start:])

    @MANY
    @given(st.text(), st.text(), texts())
    def test_a_signature_is_good_for_one_codebook(self, one: str, other: str, text: bytes) -> None:
        assert good(sign(text, KEY, one), codebook=other) == (one == other)

    def test_a_signature_is_good_for_feedback_alone(self) -> None:
        signature = base64.b64encode(KEY.sign(TEXT)).decode()
        assert not good(TEXT[:-1] + f',"signature":"{signature}"}}'.encode())

    def test_one_of_several_keys_is_enough_and_none_is_not(self) -> None:
        record = sign(TEXT, KEY, CODEBOOK)
        assert verify(record, [OTHER.public_key(), KEY.public_key()], CODEBOOK)
        assert not verify(record, [OTHER.public_key()], CODEBOOK)
        assert not verify(record, [], CODEBOOK)

    def test_the_same_character_spelled_otherwise_is_another_text(self) -> None:
        record = sign(TEXT, KEY, CODEBOOK)
        for form in ("NFD", "NFKD"):
            assert not good(unicodedata.normalize(form, record.decode()).encode())
        assert not good(record.replace("\u00e9".encode(), rb"\u00e9"))

    def test_a_record_read_and_written_anew_is_another_text(self) -> None:
        record = sign(TEXT, KEY, CODEBOOK)
        assert good(json.dumps(json.loads(record), separators=(",", ":"), ensure_ascii=False).encode())
        assert not good(json.dumps(json.loads(record)).encode())
        assert not good(json.dumps(json.loads(record), sort_keys=True, separators=(",", ":")).encode())
        assert not good(record + b"\n")

    @pytest.mark.parametrize(
        "text",
        [
            b'{"target":"good","target":"evil"}',
            b'{"target":"good","tar\\u0067et":"evil"}',
            b'{"signature":"","signature":""}',
            b'{"later":[{"a":1,"a":2}]}',
            b'{"inputs":"' + b"[" * 3 + b'","later":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"later":' + b"9" * 100_000 + b"}",
        ],
        ids=lambda text: text[:40],
    )
    def test_a_text_that_readers_may_take_differently_is_not_accepted(self, text: bytes) -> None:
        assert not good(sign(text, KEY, CODEBOOK))

    def test_a_second_signature_is_not_accepted(self) -> None:
        assert not good(sign(sign(TEXT, OTHER, CODEBOOK), KEY, CODEBOOK))

    @given(st.binary(max_size=300))
    def test_any_bytes_are_judged(self, record: bytes) -> None:
        assert not good(record)


class TestOtherPrograms:
    def test_four_lines_of_any_language_make_a_record(self) -> None:
        text = json.dumps({"v": 1, "feedback_id": "f", "inputs": "naß", "target": "wet", "author": "ann"}, indent=1)
        signature = KEY.sign(b"gracestream feedback\0" + CODEBOOK.encode() + b"\0" + text.encode())
        record = text[:-1] + ',"signature":"' + base64.b64encode(signature).decode() + '"}'
        assert good(record.encode())

    def test_openssl_makes_the_same_signature(self, tmp_path: Path) -> None:
        key = tmp_path / "key.pem"
        key.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (tmp_path / "signed").write_bytes(b"gracestream feedback\0" + CODEBOOK.encode() + b"\0" + TEXT)
        command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(key), "-in", str(tmp_path / "signed")]
        try:
            signature = subprocess.run(command, check=True, capture_output=True).stdout
        except FileNotFoundError:
            pytest.skip("there is no openssl on this machine")
        assert sign(TEXT, KEY, CODEBOOK).endswith(base64.b64encode(signature) + b'"}')

    def test_the_golden_record_is_good_for_ever(self) -> None:
        record = GOLDEN.read_bytes()
        assert good(record)
        assert encode(decode(record, Feedback)) == record
        assert encode_public_key(KEY.public_key()) == "A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="


class TestTextsToSign:
    @MANY
    @given(st.text(st.characters(exclude_categories=["Cs"])), st.text(min_size=1, max_size=20))
    def test_all_that_was_given_is_in_them(self, note: str, author: str) -> None:
        given = {"note": note, "v": 1, "feedback_id": "f", "inputs": "x", "target": "y", "author": author}
        text = feedback_to_sign(given, author)
        assert json.loads(text) == given
        assert text.isascii()
        assert good(sign(text, KEY, CODEBOOK))

    def test_version_id_and_author_are_put_in(self) -> None:
        one, other = (json.loads(feedback_to_sign({"inputs": "x", "target": "y"}, "ann")) for _ in range(2))
        assert (one["v"], one["author"]) == (1, "ann")
        assert one["feedback_id"] != other["feedback_id"]

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"inputs": "x"}, "needs `inputs` and `target`"),
            ({"inputs": "x", "target": "\ud800"}, "not a valid feedback"),
            ({"inputs": "x", "target": "y", "note": float("nan")}, "not a valid feedback"),
            ({"inputs": "x", "target": "y", "id": "mine"}, "unknown field `id`; did you mean `feedback_id`"),
            ({"inputs": "x", "target": "y", "signature": "s"}, "signed already"),
            ({"inputs": "x", "target": "y", "author": "bob"}, "another author, 'bob'"),
            ({"inputs": "x", "target": "y", "v": 2}, "newer"),
            (["x"], "neither a text nor an object"),
            ("a text alone", "needs `inputs` and `target`"),
        ],
        ids=str,
    )
    def test_what_is_no_feedback_is_not_signed(self, fields: Any, reason: str) -> None:
        with pytest.raises(InvalidMessage, match=reason):
            feedback_to_sign(fields, "ann")


class TestKeys:
    def test_a_key_file_is_its_owners_alone_and_is_never_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "key.pem"
        key = create_key_file(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert good(sign(TEXT, read_key_file(path), CODEBOOK), key)
        before = path.read_bytes()
        with pytest.raises(KeyFileError, match=r"key\.pem exists, and a key is never overwritten"):
            create_key_file(path)
        assert path.read_bytes() == before

    def test_a_link_to_nowhere_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "key.pem").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(KeyFileError, match="exists"):
            create_key_file(tmp_path / "key.pem")
        assert not (tmp_path / "elsewhere").exists()

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileError, match=r"no-folder/key\.pem cannot be written: No such file"):
            create_key_file(tmp_path / "no-folder" / "key.pem")

    def test_a_file_that_is_no_ed25519_key_is_told_from_one(self, tmp_path: Path) -> None:
        path = tmp_path / "key.pem"
        with pytest.raises(KeyFileError, match="cannot be read: No such file"):
            read_key_file(path)
        pem, pkcs8 = Encoding.PEM, PrivateFormat.PKCS8
        for content, reason in (
            (b"", "is not a private key in PEM"),
            (b"\xff\xfe", "is not a private key in PEM"),
            (KEY.private_bytes(pem, pkcs8, BestAvailableEncryption(b"secret")), "is encrypted"),
            (generate_private_key(65537, 2048).private_bytes(pem, pkcs8, NoEncryption()), "another kind than Ed25519"),
        ):
            path.write_bytes(content)
            with pytest.raises(KeyFileError, match=reason):
                read_key_file(path)

    def test_a_public_key_is_read_as_it_was_spelled(self) -> None:
        assert decode_public_key(encode_public_key(KEY.public_key())) == KEY.public_key()

    @pytest.mark.parametrize("text", ["", "ed25519", "AAAA", "A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg", "é" * 44])
    def test_what_is_no_public_key_is_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            decode_public_key(text)
