"""The committed schemas are current, and the golden records of every version decode for ever."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import yaml

from gracestream import schemas
from gracestream.schemas.deltas import (
    GENESIS_DIGEST,
    Cause,
    DecisionContext,
    Delta,
    EditChange,
    EntryChange,
    ExceptionChange,
    RephraseKey,
    Standing,
    Tensor,
    chain_digest,
    decode_delta,
    seal_delta,
)
from gracestream.schemas.generate import SCHEMA_TYPES, render_documents, write_documents
from gracestream.schemas.messages import (
    AppliedEdit,
    ChatMessage,
    Feedback,
    InvalidMessage,
    Message,
    NearMiss,
    Outcome,
    Outputs,
    Parameters,
    Prediction,
    Request,
    SnapshotManifest,
    decode,
    encode,
)

SCHEMAS_FOLDER = Path(schemas.__file__).parent
GOLDEN = SCHEMAS_FOLDER / "golden"
V1 = GOLDEN / "v1"
JSON_RECORDS = sorted(GOLDEN.glob("*/*.json"))
DELTA_RECORDS = sorted(V1.glob("*.msgpack"))
MODEL = "5f9c1d0e" * 8
LAYER = "model.layers[25].mlp.gate_proj"

by_stem = pytest.mark.parametrize("path", JSON_RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
by_delta = pytest.mark.parametrize("path", DELTA_RECORDS, ids=lambda path: path.stem)


def kind_of(path: Path) -> type[Message]:
    kind = SCHEMA_TYPES[path.stem.split("-")[0]]
    assert issubclass(kind, Message)
    return kind


def validator(name: str) -> Any:
    schema = json.loads((SCHEMAS_FOLDER / "json" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def covers(found: Any, read: Any) -> bool:
    """Whether everything that was read stands so in what was found, which may hold more fields."""
    if isinstance(read, dict):
        return isinstance(found, dict) and all(name in found and covers(found[name], read[name]) for name in read)
    if isinstance(read, list):
        return len(found) == len(read) and all(map(covers, found, read))
    return bool(found == read)


def plain(record: msgspec.Struct) -> Any:
    """As JSON gives it: base64 for bytes, lists for tuples."""
    return json.loads(msgspec.json.encode(record))


def tensor(*numbers: float) -> Tensor:
    return Tensor.from_array(np.array(numbers, np.float32))


class TestGeneratedDocuments:
    def test_the_committed_files_are_what_the_messages_give(self, tmp_path: Path) -> None:
        write_documents(tmp_path)
        for path in sorted(tmp_path.rglob("*.*")):
            committed = SCHEMAS_FOLDER / path.relative_to(tmp_path)
            current = committed.is_file() and committed.read_bytes() == path.read_bytes()
            assert current, f"schemas/{path.relative_to(tmp_path)} is stale: run `make schemas` and commit it"

    def test_no_schema_is_left_over(self) -> None:
        committed = {f"json/{path.name}" for path in (SCHEMAS_FOLDER / "json").iterdir()}
        assert committed == set(render_documents()) - {"asyncapi.yaml"}, "remove what `make schemas` no longer writes"

    def test_generating_twice_gives_the_same_bytes(self) -> None:
        assert render_documents() == render_documents()

    @pytest.mark.parametrize("name", SCHEMA_TYPES)
    def test_every_schema_is_a_schema_with_descriptions_and_room_for_unknown_fields(self, name: str) -> None:
        schema = validator(name).schema
        assert schema["description"]
        assert schema["additionalProperties"] is True
        assert all(part["description"] for part in schema.get("definitions", {}).values())

    def test_only_parameters_and_messages_of_a_chat_reject_unknown_fields(self) -> None:
        closed = {
            part["title"]
            for name in SCHEMA_TYPES
            for part in validator(name).schema.get("definitions", {}).values()
            if not part["additionalProperties"]
        }
        assert closed == {"ChatMessage", "Parameters"}


class TestAsyncApi:
    @pytest.fixture
    def document(self) -> Any:
        return yaml.safe_load((SCHEMAS_FOLDER / "asyncapi.yaml").read_text(encoding="utf-8"))

    def test_it_has_every_topic_with_its_partitions_and_cleanup(self, document: Any) -> None:
        found = {
            name: (
                channel["x-partitions"],
                channel["bindings"]["kafka"]["topicConfiguration"]["cleanup.policy"],
                channel["bindings"]["kafka"]["topicConfiguration"].get("retention.ms"),
            )
            for name, channel in document["channels"].items()
        }
        assert found == {
            "requests": ("many", ["delete"], None),
            "predictions": ("many", ["delete"], None),
            "feedback": (1, ["delete"], -1),
            "edits": (1, ["delete"], -1),
            "deltas": (1, ["delete"], -1),
            "snapshots": (1, ["compact"], None),
            "requests.dlq": (1, ["delete"], None),
            "feedback.dlq": (1, ["delete"], None),
        }

    def test_every_address_takes_the_prefix(self, document: Any) -> None:
        assert {name: channel["address"] for name, channel in document["channels"].items()} == {
            name: "{prefix}" + name for name in document["channels"]
        }

    def test_every_reference_leads_somewhere(self, document: Any) -> None:
        def references(node: Any) -> list[str]:
            if isinstance(node, dict):
                own = [node["$ref"]] if "$ref" in node else []
                return own + [found for child in node.values() for found in references(child)]
            return [found for child in node for found in references(child)] if isinstance(node, list) else []

        assert references(document)
        for reference in references(document):
            file, _, pointer = reference.partition("#/")
            node = document
            for part in filter(None, pointer.split("/")):
                node = node[part]
            assert not file or (SCHEMAS_FOLDER / file).is_file()

    def test_every_message_type_travels_on_a_topic(self, document: Any) -> None:
        carried = {name for channel in document["channels"].values() for name in channel["messages"]}
        assert carried == {*SCHEMA_TYPES, "rejected"}

    def test_a_dead_letter_says_why_and_where_from(self, document: Any) -> None:
        headers = document["components"]["messages"]["rejected"]["headers"]
        assert headers["required"] == ["reason", "source_topic", "source_partition", "source_offset"]


class TestGoldenJson:
    def test_there_is_one_of_every_message_and_status(self) -> None:
        assert {kind_of(path) for path in JSON_RECORDS} == {Request, Prediction, Feedback, Outcome, SnapshotManifest}
        statuses = {json.loads(path.read_bytes())["status"] for path in V1.glob("outcome-*.json")}
        assert statuses == {"added", "expanded", "split", "replaced", "unchanged", "undone", "excepted", "rejected"}

    @by_stem
    def test_it_decodes_to_its_known_fields(self, path: Path) -> None:
        raw = path.read_bytes()
        message = decode(raw, kind_of(path))
        read = plain(message)
        assert covers(json.loads(raw), read)
        own = set(message.__struct_fields__)
        assert set(read) == set(json.loads(raw)) & own

    @by_stem
    def test_it_encodes_again_to_the_same(self, path: Path) -> None:
        message = decode(path.read_bytes(), kind_of(path))
        assert decode(encode(message), kind_of(path)) == message
        if not path.stem.endswith("unknown-fields"):
            assert encode(message) == path.read_bytes()

    @by_stem
    def test_it_fits_its_schema(self, path: Path) -> None:
        validator(path.stem.split("-")[0]).validate(json.loads(path.read_bytes()))

    def test_requests_are_these(self) -> None:
        assert decode((V1 / "request-text.json").read_bytes(), Request) == Request(
            v=1, request_id="req-1", inputs="What is the capital of Australia?"
        )
        assert decode((V1 / "request-pair.json").read_bytes(), Request) == Request(
            v=1, request_id="req-2", inputs=("It rains.", "The street is wet \u2013 naß, 濡れ, 💧.")
        )
        assert decode((V1 / "request-chat.json").read_bytes(), Request) == Request(
            v=1,
            request_id="req-4",
            inputs=(
                ChatMessage("system", "Answer briefly."),
                ChatMessage("user", "What is the capital of Australia?"),
            ),
        )
        parametrised = Request(
            v=1,
            request_id="req-3",
            inputs="Who wrote Faust?",
            parameters=Parameters(max_new_tokens=16, min_new_tokens=1, repetition_penalty=1.25, no_repeat_ngram_size=3),
            min_seq=2,
        )
        assert decode((V1 / "request-parameters.json").read_bytes(), Request) == parametrised
        assert decode((V1 / "request-unknown-fields.json").read_bytes(), Request) == parametrised

    def test_predictions_are_these(self) -> None:
        edited = Prediction(
            v=1,
            request_id="req-1",
            outputs=Outputs(text=" Canberra"),
            score=-0.125,
            edit=AppliedEdit(entry_id="fb-1", distance=0.25, radius=1.5),
            codebook_seq=3,
            term=1,
            model=MODEL,
            replica="replica-0",
            latency_ms=12.5,
        )
        assert decode((V1 / "prediction-generator.json").read_bytes(), Prediction) == edited
        assert decode((V1 / "prediction-unknown-fields.json").read_bytes(), Prediction) == edited
        missed = msgspec.structs.replace(
            edited,
            edit=msgspec.UNSET,
            near_miss=NearMiss(entry_id="fb-1", distance=0.25, radius=1.5, reason="answer"),
        )
        assert decode((V1 / "prediction-near-miss.json").read_bytes(), Prediction) == missed
        reason = NearMiss(entry_id="fb-1", distance=0.25, radius=1.5, reason="wording", detail="numbers: 2021 and 2023")
        other = msgspec.structs.replace(missed, near_miss=reason)
        assert decode((V1 / "prediction-near-miss-wording.json").read_bytes(), Prediction) == other

    def test_feedback_is_this(self) -> None:
        assert decode((V1 / "feedback-pair.json").read_bytes(), Feedback) == Feedback(
            v=1,
            feedback_id="fb-2",
            inputs=("It rains.", "The street is wet."),
            target="entailment",
            request_id="req-2",
            author="ada",
            note='seen in the "nightly" review\n',
        )
        assert decode((V1 / "feedback-chat.json").read_bytes(), Feedback) == Feedback(
            v=1,
            feedback_id="fb-5",
            inputs=(
                ChatMessage("user", "Tell me about Australia."),
                ChatMessage("assistant", "It is a country and a continent."),
                ChatMessage("user", "What is its capital?"),
            ),
            target=" Canberra",
        )
        assert decode((V1 / "feedback-rephrases.json").read_bytes(), Feedback) == Feedback(
            v=1,
            feedback_id="fb-6",
            inputs="What is the capital of Australia?",
            target=" Canberra",
            rephrases=(
                "Which city is the capital of Australia?",
                (ChatMessage("user", "Australia's capital?"),),
            ),
            author="ada",
        )
        assert decode((V1 / "feedback-undo.json").read_bytes(), Feedback) == Feedback(
            v=1, feedback_id="fb-3", undo="fb-2", author="ada"
        )
        assert decode((V1 / "feedback-undo-author.json").read_bytes(), Feedback) == Feedback(
            v=1, feedback_id="fb-11", undo_author="ada", author="grace"
        )
        assert decode((V1 / "feedback-except-from.json").read_bytes(), Feedback) == Feedback(
            v=1,
            feedback_id="fb-18",
            inputs="What is the late fee in 2021?",
            except_from="fb-17",
            request_id="req-5",
            author="ada",
        )


class TestGoldenDeltas:
    def test_there_is_one_of_every_op(self) -> None:
        ops = {decode_delta(path.read_bytes()).op for path in DELTA_RECORDS}
        assert ops == {"lead", "add", "expand", "split", "replace", "undo", "except"}

    def test_their_digests_link_from_genesis(self) -> None:
        digest = GENESIS_DIGEST
        for seq, path in enumerate(DELTA_RECORDS, start=1):
            record = path.read_bytes()
            delta = decode_delta(record)
            assert delta.seq == seq
            assert delta.digest == record[-32:] == chain_digest(digest, record)
            digest = delta.digest
        assert digest.hex() == "42b14a757d49814b47929e289b9705e6fd90bfa67595382707079e2abcc43bf5"

    def test_a_changed_byte_breaks_the_chain(self) -> None:
        record = bytearray((V1 / "delta-02-add.msgpack").read_bytes())
        previous = decode_delta((V1 / "delta-01-lead.msgpack").read_bytes()).digest
        record[record.index(b"gate_proj")] ^= 1
        assert chain_digest(previous, bytes(record)) != decode_delta(bytes(record)).digest

    @by_delta
    def test_it_decodes_to_its_known_fields(self, path: Path) -> None:
        record = path.read_bytes()
        raw = json.loads(msgspec.json.encode(msgspec.msgpack.decode(record)))
        assert covers(raw, plain(decode_delta(record)))

    @by_delta
    def test_sealing_it_again_gives_the_same_bytes(self, path: Path) -> None:
        delta = decode_delta(path.read_bytes())
        before = DELTA_RECORDS.index(path)
        previous = decode_delta(DELTA_RECORDS[before - 1].read_bytes()).digest if before else GENESIS_DIGEST
        record, sealed = seal_delta(delta, previous)
        assert decode_delta(record) == sealed
        if not path.stem.endswith("unknown-fields"):
            assert (record, sealed) == (path.read_bytes(), delta)

    @by_delta
    def test_it_fits_its_schema(self, path: Path) -> None:
        validator("delta").validate(plain(decode_delta(path.read_bytes())))

    @by_delta
    def test_its_tensors_can_be_read(self, path: Path) -> None:
        delta = decode_delta(path.read_bytes())
        for entry in delta.entries:
            assert isinstance(entry.key, msgspec.UnsetType) or entry.key.array().shape == (4,)
            assert isinstance(entry.value, msgspec.UnsetType) or entry.value.array().shape == (3,)

    def test_the_expand_and_the_split_are_these(self) -> None:
        expand, split = (
            decode_delta((V1 / f"delta-{name}.msgpack").read_bytes()) for name in ("03-expand", "04-split")
        )
        assert expand == Delta(
            v=1,
            codebook="default",
            model=MODEL,
            layer=LAYER,
            term=1,
            seq=3,
            op="expand",
            entries=(EntryChange(entry_id="fb-1", radius=1.5),),
            cause=Cause(feedback_id="fb-2", offset=1, entry_id="fb-1", query=tensor(1, 1.5, 0, 0)),
            digest=expand.digest,
        )
        assert split == Delta(
            v=1,
            codebook="default",
            model=MODEL,
            layer=LAYER,
            term=1,
            seq=4,
            op="split",
            entries=(
                EntryChange(entry_id="fb-1", radius=0.5),
                EntryChange(
                    entry_id="fb-3", key=tensor(1, 0, 1, 0), value=tensor(-1, 0.25, 8), radius=0.5, label=(31,)
                ),
            ),
            cause=Cause(feedback_id="fb-3", offset=2, entry_id="fb-3"),
            digest=split.digest,
        )

    def test_the_one_that_was_trained_with_others_is_this(self) -> None:
        delta = decode_delta((V1 / "delta-13-trained-together.msgpack").read_bytes())
        assert delta.cause == Cause(feedback_id="fb-14", offset=15, entry_id="fb-14", together=(13, 15, 16))

    def test_the_one_of_an_author_who_signed_is_this(self) -> None:
        delta = decode_delta((V1 / "delta-14-signed.msgpack").read_bytes())
        standing = Standing(roles=("propose", "undo_own"), signed=True)
        assert delta.cause == Cause(feedback_id="fb-15", offset=17, author="ada", entry_id="fb-15", standing=standing)

    def test_the_one_with_rephrases_is_this(self) -> None:
        delta = decode_delta((V1 / "delta-15-rephrases.msgpack").read_bytes())
        assert [entry.entry_id for entry in delta.entries] == ["fb-16", "fb-16#1"]
        assert delta.cause == Cause(
            feedback_id="fb-16",
            offset=18,
            entry_id="fb-16",
            rephrases=(
                RephraseKey(entry_id="fb-16#1", nearest="fb-7", distance=1.5),
                RephraseKey(entry_id="fb-16", query=tensor(0, 3, 0, 0)),
                RephraseKey(query=tensor(0, 0, 2, 0), left_out=True),
            ),
        )

    def test_the_one_with_wordings_is_this(self) -> None:
        delta = decode_delta((V1 / "delta-16-wording.msgpack").read_bytes())
        assert [entry.wording for entry in delta.entries] == ["What is the fee in 2021?"]
        assert delta.cause != msgspec.UNSET
        assert [one.wording for one in delta.cause.rephrases] == ["How much is the fee in 2021?"]

    def test_the_newer_writers_unknown_fields_are_ignored_but_digested(self) -> None:
        delta = decode_delta((V1 / "delta-09-unknown-fields.msgpack").read_bytes())
        assert delta == Delta(
            v=1,
            codebook="default",
            model=MODEL,
            layer=LAYER,
            term=2,
            seq=9,
            op="add",
            entries=(
                EntryChange(entry_id="fb-7", key=tensor(0, 0, 0, 1), value=tensor(2, 2, 2), radius=0.75, label=(5,)),
            ),
            cause=Cause(feedback_id="fb-7", offset=6, entry_id="fb-7", author="ada"),
            digest=delta.digest,
        )

    def test_the_undo_that_made_decisions_again_is_this(self) -> None:
        delta = decode_delta((V1 / "delta-12-undo-decides-again.msgpack").read_bytes())
        assert delta.edits == (
            EditChange(feedback_id="fb-7", removed=True),
            EditChange(feedback_id="fb-9", entry_id="fb-9"),
            EditChange(feedback_id="fb-4", query=tensor(1, 0, 0, 0)),
        )
        assert delta.decided == {"fb-9": DecisionContext(radius=0.75, clearance={"fb-9": 0.625, "fb-1": None})}
        assert delta.cause == Cause(feedback_id="fb-10", offset=9, author="ada", undoes=("fb-7",))

    def test_the_exception_and_its_end_are_these(self) -> None:
        made, ended = (
            decode_delta((V1 / f"delta-{name}.msgpack").read_bytes()) for name in ("17-except", "18-exception-ends")
        )
        wording = "What is the late fee in 2021?"
        assert made.exceptions == (
            ExceptionChange(
                feedback_id="fb-18",
                except_from="fb-17",
                entry_ids=("fb-17",),
                query=tensor(0, 0, 5, 0.375),
                radius=2.0**-10,
                wording=wording,
            ),
        )
        assert made.cause == Cause(
            feedback_id="fb-18", offset=20, author="ada", query=tensor(0, 0, 5, 0.375), wording=wording
        )
        assert ended.exceptions == (ExceptionChange(feedback_id="fb-18", removed=True),)
        assert ended.cause is not msgspec.UNSET
        assert ended.cause.supersedes == ("fb-18",)


REQUEST = {"v": 1, "request_id": "r", "inputs": "x"}
PREDICTION = {"v": 1, "request_id": "r", "codebook_seq": 0, "term": 0, "model": "m", "replica": "a", "latency_ms": 1.5}
CORRECTION = {"v": 1, "feedback_id": "f", "inputs": "x", "target": "y"}
OUTCOME = {"v": 1, "feedback_id": "f", "status": "added"}
BLANK = " \t\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("request", []),
        ("request", {}),
        ("request", REQUEST | {"v": 0}),
        ("request", REQUEST | {"v": 2}),
        ("request", REQUEST | {"v": "1"}),
        ("request", REQUEST | {"request_id": ""}),
        ("request", REQUEST | {"request_id": "r" * 257}),
        ("request", REQUEST | {"request_id": 7}),
        ("request", REQUEST | {"inputs": ""}),
        ("request", REQUEST | {"inputs": BLANK}),
        ("request", REQUEST | {"inputs": None}),
        ("request", REQUEST | {"inputs": ["x"]}),
        ("request", REQUEST | {"inputs": ["x", BLANK]}),
        ("request", REQUEST | {"inputs": ["x", "y", "z"]}),
        ("request", REQUEST | {"inputs": ["x", 1]}),
        ("request", REQUEST | {"min_seq": -1}),
        ("request", REQUEST | {"parameters": None}),
        ("request", REQUEST | {"parameters": {"max_new_tokens": 0}}),
        ("request", REQUEST | {"parameters": {"max_new_tokens": 2**31}}),
        ("request", REQUEST | {"parameters": {"repetition_penalty": 0}}),
        ("request", REQUEST | {"parameters": {"repetition_penalty": 10.5}}),
        ("request", REQUEST | {"parameters": {"temperature": 1.0}}),
        ("prediction", {name: value for name, value in PREDICTION.items() if name != "replica"}),
        ("prediction", PREDICTION | {"outputs": "Canberra"}),
        ("prediction", PREDICTION | {"outputs": {"probabilities": {"yes": None}}}),
        ("prediction", PREDICTION | {"edit": {"entry_id": "e", "distance": 0.5}}),
        ("feedback", {"v": 1, "feedback_id": "f"}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x"}),
        ("feedback", {"v": 1, "feedback_id": "f", "target": "y"}),
        ("feedback", CORRECTION | {"inputs": BLANK}),
        ("feedback", CORRECTION | {"target": BLANK}),
        ("feedback", CORRECTION | {"undo": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "target": "y", "undo": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x", "undo": "f0"}),
        ("feedback", CORRECTION | {"except_from": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "except_from": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x", "except_from": ""}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x", "except_from": "f0", "undo": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "except_from": "f0", "undo_author": "a"}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x", "except_from": "f0", "rephrases": ["z"]}),
        ("feedback", {"v": 1, "feedback_id": "f", "undo": ""}),
        ("feedback", {"v": 1, "feedback_id": "f", "undo": "f0", "rephrases": ["z"]}),
        ("feedback", CORRECTION | {"rephrases": "z"}),
        ("feedback", CORRECTION | {"rephrases": ["z", BLANK]}),
        ("feedback", CORRECTION | {"rephrases": ["z", "z"]}),
        ("feedback", CORRECTION | {"rephrases": [f"z{number}" for number in range(17)]}),
        ("outcome", OUTCOME | {"left_out": [{"rephrase": 0, "reason": "r"}]}),
        ("outcome", OUTCOME | {"status": "lost"}),
        ("outcome", OUTCOME | {"loss": None}),
        ("outcome", {"v": 1, "status": "added"}),
        ("snapshot", {"v": 1, "codebook": "default"}),
    ],
    ids=str,
)
def test_decoder_and_schema_reject_the_same(name: str, message: Any) -> None:
    kind = SCHEMA_TYPES[name]
    assert issubclass(kind, Message)
    with pytest.raises(InvalidMessage):
        decode(json.dumps(message).encode(), kind)
    assert not validator(name).is_valid(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("request", REQUEST),
        ("prediction", PREDICTION),
        ("feedback", CORRECTION),
        ("feedback", {"v": 1, "feedback_id": "f", "undo": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "inputs": "x", "except_from": "f0"}),
        ("feedback", {"v": 1, "feedback_id": "f", "undo": "f0", "rephrases": []}),
        ("feedback", CORRECTION | {"rephrases": [f"z{number}" for number in range(16)]}),
        ("outcome", OUTCOME),
    ],
    ids=str,
)
def test_decoder_and_schema_take_what_the_bad_ones_were_made_from(name: str, message: Any) -> None:
    kind = SCHEMA_TYPES[name]
    assert issubclass(kind, Message)
    decode(json.dumps(message).encode(), kind)
    assert validator(name).is_valid(message)
