"""Writes the JSON Schemas and the AsyncAPI document: `make schemas`.

Both follow from the message types, so the committed files are never edited by hand; a test says when they are stale.
The schemas keep to what draft-07 and later drafts read alike, since AsyncAPI tools know draft-07 for certain.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from gracestream.schemas import deltas, messages
from gracestream.schemas.deltas import DIGEST_BYTES, Delta
from gracestream.schemas.headers import MAX_COPIED_HEADER_BYTES, MAX_COPIED_HEADERS, RESERVED_HEADERS, UNANSWERED_HEADER
from gracestream.schemas.messages import (
    CHAT_ROLES,
    MAX_MESSAGES,
    MAX_REPHRASES,
    SCHEMA_VERSION,
    Feedback,
    Outcome,
    Prediction,
    Request,
    SnapshotManifest,
)

SCHEMAS_FOLDER = Path(__file__).parent
Json = dict[str, Any]

SCHEMA_TYPES: dict[str, type[Struct]] = {
    "request": Request,
    "prediction": Prediction,
    "feedback": Feedback,
    "edit": Outcome,
    "snapshot": SnapshotManifest,
    "delta": Delta,
}
"""The types that travel, under the names that the design gives them."""


def _constraints_by_type() -> dict[str, Json]:
    """What the decoders check in code, by type: keywords of the type, and under `properties` whole properties."""
    text = {"type": "string", "pattern": r"\S"}
    message = {"$ref": "#/definitions/ChatMessage"}
    inputs = {
        "description": "A text, a pair of texts for a classifier of pairs, or the messages of a chat; no text is blank."
        " Only the first message of a chat can be the system's; the last is the user's.",
        "anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 2, "maxItems": 2},
            {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES},
        ],
    }
    rephrases = {
        "description": "Other words for `inputs`, each of the same kinds, and each with other words than the rest.",
        "type": "array",
        "items": inputs,
        "maxItems": MAX_REPHRASES,
        "uniqueItems": True,
    }
    signature = {
        "description": "Ed25519, in base64, over `gracestream feedback` NUL codebook NUL and the record without it. "
        'What is signed are the bytes that travel: it stands last, as `,"signature":"…"}`, without white space.',
        "type": "string",
    }
    binary = {"type": "string", "contentEncoding": "base64"}
    return {
        "ChatMessage": {"properties": {"role": {"type": "string", "enum": list(CHAT_ROLES)}, "content": text}},
        "Request": {"properties": {"inputs": inputs}},
        "Feedback": {
            "properties": {"inputs": inputs, "target": text, "rephrases": rephrases, "signature": signature},
            "oneOf": [
                _feedback_kind("correction", "inputs", "target"),
                _feedback_kind("exception", "inputs", "except_from"),
                _feedback_kind("undo", "undo"),
                _feedback_kind("undo by author", "undo_author"),
            ],
            "if": _any_required("except_from", "undo", "undo_author"),
            "then": {"properties": {"rephrases": {"maxItems": 0}}},
        },
        "Delta": {
            "$comment": "The record is MessagePack, one map; the schema is of its JSON rendering, base64 for bytes.",
            "properties": {
                "digest": binary
                | {
                    "description": f"MessagePack bin of {DIGEST_BYTES} bytes, the record's last: "
                    "SHA-256(previous digest || all bytes of the record before these). Before the first: zeros.",
                    "minLength": 44,
                    "maxLength": 44,
                }
            },
        },
        "Tensor": {
            "properties": {
                "data": binary | {"description": "MessagePack bin: the numbers, 4 bytes each, little-endian, C order."}
            }
        },
    }


def _feedback_kind(title: str, *fields: str) -> Json:
    """One kind of feedback: it has these fields, and none of another kind."""
    others = [name for name in ("inputs", "target", "except_from", "undo", "undo_author") if name not in fields]
    return {"title": title, "required": list(fields), "not": _any_required(*others)}


def _any_required(*fields: str) -> Json:
    return {"anyOf": [{"required": [field]} for field in fields]}


def json_schema(kind: type[Struct]) -> Json:
    """The JSON Schema of one type, with the types that it holds under `definitions`."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/definitions/{name}")
    rules = _constraints_by_type()
    for name, component in components.items():
        doc = inspect.getdoc(getattr(deltas, name, None) or getattr(messages, name))
        component["description"] = doc
        component.setdefault("additionalProperties", True)
        if "v" in component["properties"]:
            component["properties"]["v"] |= {"description": "Version of the schema.", "maximum": SCHEMA_VERSION}
        rule = rules.get(name, {})
        component["properties"] |= rule.get("properties", {})
        component |= {keyword: value for keyword, value in rule.items() if keyword != "properties"}
    root = components.pop(kind.__name__)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **root}
    return schema | {"definitions": components} if components else schema


def _channel(topic: str, message: str, description: str, *, partitions: int | None = 1, **configuration: Any) -> Json:
    """One topic. Without `partitions` there are as many as the deployment gives it; by age is Kafka's own cleanup."""
    cleanup: Json = {"cleanup.policy": configuration.pop("cleanup", ["delete"])}
    if cleanup["cleanup.policy"] == ["delete"]:
        cleanup["message.timestamp.type"] = "LogAppendTime"
    kafka: Json = {} if partitions is None else {"partitions": partitions}
    return {
        "address": "{prefix}" + topic,
        "description": description,
        "parameters": {"prefix": {"$ref": "#/components/parameters/prefix"}},
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
        "bindings": {
            "kafka": {**kafka, "topicConfiguration": cleanup | configuration, "bindingVersion": "0.5.0"},
        },
        "x-partitions": "many" if partitions is None else partitions,
    }


def _channels() -> Json:
    forever, large = {"retention.ms": -1, "retention.bytes": -1}, {"max.message.bytes": 64 * 2**20}
    dead = "Records of `{}` that are no valid message, byte for byte, under their own key. Kept by age."
    unanswered = " Also requests whose answer no topic took. The request's own headers are not kept."
    return {
        "requests": _channel(
            "requests",
            "request",
            "What users ask. Inference workers share it as one consumer group. Key: any. Kept by age. The header "
            "`reply_to` names another topic of the deployment for the answer.",
            partitions=None,
        ),
        "predictions": _channel(
            "predictions",
            "prediction",
            "The answers, at least once each; consumers deduplicate by `request_id`. Key: `request_id`. Kept by age. "
            "A request's headers come back with its answer. An answer that a record cannot hold comes as an error, and "
            "an error that it cannot hold as a dead letter of the request.",
            partitions=None,
        ),
        "feedback": _channel(
            "feedback",
            "feedback",
            "Corrections, exceptions and undos, decided by the editor in this order. Key: any. Never deleted.",
            **forever,
        ),
        "edits": _channel(
            "edits",
            "edit",
            "What became of each feedback record: exactly one outcome each. Key: `feedback_id`. Never deleted.",
            **forever,
        ),
        "deltas": _channel(
            "deltas",
            "delta",
            "The history of the codebook, totally ordered; the codebook is a fold over it. Written by the one editor, "
            "in transactions; read committed, by every replica without a group. Never deleted, never compacted.",
            **forever,
            **large,
        ),
        "snapshots": _channel(
            "snapshots",
            "snapshot",
            "Manifests of codebook snapshots, for starting replicas. Compacted: the newest manifest of each key stays.",
            cleanup=["compact"],
        ),
        "requests.dlq": _channel("requests.dlq", "rejected", dead.format("requests") + unanswered, **large),
        "feedback.dlq": _channel("feedback.dlq", "rejected", dead.format("feedback"), **large),
    }


def _message(name: str, title: str, key: str, content: str = "application/json", **headers: Any) -> Json:
    return {
        "name": name,
        "title": title,
        "contentType": content,
        **headers,
        "payload": {
            "schemaFormat": "application/schema+json;version=draft-07",
            "schema": {"$ref": f"json/{name}.schema.json"},
        },
        "bindings": {"kafka": {"key": {"type": "string", "description": key}, "bindingVersion": "0.5.0"}},
    }


def _dead_letter_message() -> Json:
    """A dead letter; Kafka's header values are bytes, here UTF-8 text and decimal numbers."""
    number = r"^[0-9]+$"
    required = {
        "reason": {"type": "string", "description": "What is wrong with the record, in one line."},
        "source_topic": {"type": "string", "description": "The topic that it was read from, with the prefix."},
        "source_partition": {"type": "string", "pattern": number, "description": "Its partition there, in decimal."},
        "source_offset": {"type": "string", "pattern": number, "description": "Its offset there, in decimal."},
    }
    digest = r"^[0-9a-f]{64}$"
    cut = {
        f"{part}_{what}": {"type": "string", "pattern": pattern, "description": description.format(part)}
        for part in ("key", "value")
        for what, pattern, description in (
            ("bytes", number, "Only where the record was too large for the queue: bytes of its {}, which was cut."),
            ("sha256", digest, "Only where the record was too large for the queue: SHA-256 of its whole {}, in hex."),
        )
    }
    told = "Only of a request: no topic took an answer, an error included, so its sender got none."
    unanswered = {UNANSWERED_HEADER: {"type": "string", "const": "true", "description": told}}
    return {
        "name": "rejected",
        "title": "A record that could not be read",
        "contentType": "application/octet-stream",
        "headers": {"type": "object", "required": list(required), "properties": {**required, **cut, **unanswered}},
        "payload": {"description": "The value of the rejected record, byte for byte, unless it was cut."},
        "bindings": {"kafka": {"key": {"description": "The key of the rejected record."}, "bindingVersion": "0.5.0"}},
    }


def _outcome_headers() -> Json:
    """Headers of an outcome, as UTF-8 text."""
    number = {"type": "string", "pattern": r"^[0-9]+$"}
    decided = "Only of feedback that was decided on and changed nothing: "
    properties = {
        "feedback_offset": number | {"description": "Offset of the feedback record, in decimal."},
        "author": {"type": "string", "description": "Whose rate it counts towards, where it was let in."},
        "admitted": number | {"description": "Milliseconds since 1970 at which it was let in."},
        "spends": {
            "type": "string",
            "pattern": r"^[0-9a-f]{32}$",
            "description": "Only of signed feedback that is no copy: the mark by which a copy is known.",
        },
        "term": number | {"description": f"{decided}the term of the codebook that it was decided on."},
        "codebook_seq": number | {"description": f"{decided}the newest delta of that codebook."},
        "standing": {
            "description": f"{decided}what the sender was allowed, as `standing` in a delta's `cause`, in JSON."
        },
        "seen": {"description": f"{decided}what it saw of the traffic, in JSON."},
    }
    return {"type": "object", "required": ["feedback_offset"], "properties": properties}


def _request_headers() -> Json:
    """Headers of a request, which may be a dead letter that was sent again."""
    described = (
        "Whole name of the topic for the answer, in place of `predictions`; of several the last. It begins with the "
        "prefix, exists, is none of gracestream's own, and replicas may write to it; else the answer is an error on "
        "`predictions`."
    )
    headers = _replayed_headers()
    headers["properties"]["reply_to"] = {"type": "string", "maxLength": 249, "description": described}
    return headers


def _prediction_headers() -> Json:
    """Headers of an answer."""
    return {
        "type": "object",
        "additionalProperties": True,
        "description": f"Those of the request, in their order: the first {MAX_COPIED_HEADERS} that fit into "
        f"{MAX_COPIED_HEADER_BYTES} bytes of names and values, and none named {', '.join(sorted(RESERVED_HEADERS))}.",
    }


def _replayed_headers() -> Json:
    """Headers of a record that may be a dead letter which was sent again."""
    told = "Only of a dead letter that was sent again: its queue and its offset there, as `feedback.dlq/17`."
    return {"type": "object", "properties": {"replayed_from": {"type": "string", "description": told}}}


def _operation(action: str, channel: str, summary: str) -> Json:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def asyncapi_document() -> Json:
    """The topics, who writes and reads them, and what they hold (design, section 1)."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "gracestream",
            "version": f"{SCHEMA_VERSION}.0.0",
            "description": "Corrects deployed transformer models while they serve. Fields that a reader does not know "
            "are ignored; `v` is the version of a message's schema. Record timestamps are Kafka's. "
            "Operations are those of gracestream; users do the counterpart.",
        },
        "defaultContentType": "application/json",
        "servers": {
            "kafka": {
                "host": "{kafka}",
                "protocol": "kafka",
                "variables": {
                    "kafka": {"default": "localhost:9092", "description": "Bootstrap servers: GRACESTREAM_KAFKA."}
                },
            }
        },
        "channels": _channels(),
        "operations": {
            "receiveRequest": _operation("receive", "requests", "An inference worker takes a request."),
            "sendPrediction": _operation("send", "predictions", "An inference worker answers."),
            "receiveFeedback": _operation(
                "receive", "feedback", "The editor takes a correction, an exception or an undo."
            ),
            "sendEdit": _operation("send", "edits", "The editor says what became of a feedback record."),
            "sendDelta": _operation("send", "deltas", "The editor changes the codebook."),
            "receiveDelta": _operation("receive", "deltas", "Every replica applies the change."),
            "sendSnapshot": _operation("send", "snapshots", "The editor says where a snapshot lies."),
            "receiveSnapshot": _operation("receive", "snapshots", "A starting replica looks for the newest snapshot."),
            "rejectRequest": _operation("send", "requests.dlq", "An inference worker could not read a request."),
            "rejectFeedback": _operation("send", "feedback.dlq", "The editor could not read a feedback record."),
        },
        "components": {
            "parameters": {
                "prefix": {"default": "", "description": "GRACESTREAM_PREFIX, so that deployments can share a cluster."}
            },
            "messages": {
                "request": _message("request", "A question to the model", "Any.", headers=_request_headers()),
                "prediction": _message(
                    "prediction", "The answer to one request", "`request_id`.", headers=_prediction_headers()
                ),
                "feedback": _message(
                    "feedback", "A correction, an exception from one, or an undo", "Any.", headers=_replayed_headers()
                ),
                "edit": _message(
                    "edit", "What became of one feedback record", "`feedback_id`.", headers=_outcome_headers()
                ),
                "delta": _message("delta", "One step of a codebook's history", "Any.", "application/msgpack"),
                "snapshot": _message(
                    "snapshot", "Where a snapshot of a codebook lies", "What compaction keeps one of."
                ),
                "rejected": _dead_letter_message(),
            },
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes every value out where it stands, without anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def render_documents() -> Mapping[str, str]:
    """The text of every generated file, by its path below `schemas/`."""
    texts = {
        f"json/{name}.schema.json": json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n"
        for name, kind in SCHEMA_TYPES.items()
    }
    head = "# Written by `make schemas` from the message types.\n"
    body = yaml.dump(asyncapi_document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return texts | {"asyncapi.yaml": head + body}


def write_documents(folder: Path = SCHEMAS_FOLDER) -> None:
    """Write every document below `folder`."""
    for path, text in render_documents().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_documents()
