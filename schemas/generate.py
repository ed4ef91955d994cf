"""Generates the JSON Schemas and the AsyncAPI document from the message types: `make schemas`.

Never edit the generated files by hand. A test fails if a committed file is stale. The schemas use only keywords with
the same meaning in draft-07 and later drafts, because every AsyncAPI tool supports draft-07.
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
    "outcome": Outcome,
    "snapshot": SnapshotManifest,
    "delta": Delta,
}
"""The message types on the wire, by the name of their schema file."""


def _constraints_by_type() -> dict[str, Json]:
    """Rules that the decoders check in code, by type: keywords of the type, and whole schemas under `properties`."""
    text = {"type": "string", "pattern": r"\S"}
    message = {"$ref": "#/definitions/ChatMessage"}
    inputs = {
        "description": "A text, a pair of texts for a classifier of pairs, or the messages of a chat; no text is blank."
        " In a chat, only the first message can have the role system, and the last has the role user.",
        "anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 2, "maxItems": 2},
            {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES},
        ],
    }
    rephrases = {
        "description": "The request of `inputs` in other words. Each item is valid as `inputs`, and no two are equal.",
        "type": "array",
        "items": inputs,
        "maxItems": MAX_REPHRASES,
        "uniqueItems": True,
    }
    signature = {
        "description": "Ed25519, in base64, over `gracestream feedback` NUL codebook NUL and the record without it. "
        'The bytes on the wire are signed: it is the last member, as `,"signature":"…"}`, without white space.',
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
            "$comment": "The record is one MessagePack map; the schema describes it as JSON, with bytes in base64.",
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
    """Rule of one kind of feedback: all of these fields are present, and no field of another kind."""
    others = [name for name in ("inputs", "target", "except_from", "undo", "undo_author") if name not in fields]
    return {"title": title, "required": list(fields), "not": _any_required(*others)}


def _any_required(*fields: str) -> Json:
    return {"anyOf": [{"required": [field]} for field in fields]}


def json_schema(kind: type[Struct]) -> Json:
    """The JSON Schema of one type. The types of its fields are under `definitions`."""
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
    """The AsyncAPI channel of one topic.

    Args:
        topic: Name without the prefix.
        message: Name of its message.
        description: What the topic holds.
        partitions: Number of partitions; None if the deployment chooses it.
        configuration: `cleanup` for `cleanup.policy`, and further options of the topic.
    """
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
    dead = "Records of `{}` that are not valid messages, byte for byte, with their own key. Deleted by age."
    unanswered = " Also requests whose answer no topic accepted. The headers of the request are not kept."
    return {
        "requests": _channel(
            "requests",
            "request",
            "Requests of users. Inference workers share it as one consumer group. Key: any. Deleted by age. The header "
            "`reply_to` names another topic of the deployment for the answer.",
            partitions=None,
        ),
        "predictions": _channel(
            "predictions",
            "prediction",
            "Answers, delivered at least once; consumers deduplicate by `request_id`. Key: `request_id`. Deleted by "
            "age. An answer has the headers of its request. If an answer is too large for a record, an error is sent; "
            "if the error is too large, the request is dead-lettered.",
            partitions=None,
        ),
        "feedback": _channel(
            "feedback",
            "feedback",
            "Corrections, exceptions and undos. The editor decides on them in this order. Key: any. Never deleted.",
            **forever,
        ),
        "edits": _channel(
            "edits",
            "outcome",
            "The result of each feedback record: exactly one outcome each. Key: `feedback_id`. Never deleted.",
            **forever,
        ),
        "deltas": _channel(
            "deltas",
            "delta",
            "The history of the codebook, in total order; applying all deltas gives the codebook. The editor writes it "
            "in transactions. Every replica reads committed records, without a group. Never deleted, never compacted.",
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
    """The message of a dead letter. The values of its headers are UTF-8 text; numbers are decimal."""
    number = r"^[0-9]+$"
    required = {
        "reason": {"type": "string", "description": "The fault of the record, in one line."},
        "source_topic": {"type": "string", "description": "The topic that the record was read from, with the prefix."},
        "source_partition": {"type": "string", "pattern": number, "description": "Its partition there, in decimal."},
        "source_offset": {"type": "string", "pattern": number, "description": "Its offset there, in decimal."},
    }
    digest = r"^[0-9a-f]{64}$"
    truncation = {
        f"{part}_{measure}": {"type": "string", "pattern": pattern, "description": description.format(part)}
        for part in ("key", "value")
        for measure, pattern, description in (
            ("bytes", number, "Only if the record was too large for the queue: bytes of its {}, which was truncated."),
            ("sha256", digest, "Only if the record was too large for the queue: SHA-256 of its whole {}, in hex."),
        )
    }
    description = "Only for a request: no topic accepted its answer, not even an error, so the sender got none."
    unanswered = {UNANSWERED_HEADER: {"type": "string", "const": "true", "description": description}}
    return {
        "name": "rejected",
        "title": "A record that could not be read",
        "contentType": "application/octet-stream",
        "headers": {
            "type": "object",
            "required": list(required),
            "properties": {**required, **truncation, **unanswered},
        },
        "payload": {"description": "The value of the rejected record, byte for byte, unless it was truncated."},
        "bindings": {"kafka": {"key": {"description": "The key of the rejected record."}, "bindingVersion": "0.5.0"}},
    }


def _outcome_headers() -> Json:
    """The headers of an outcome, as UTF-8 text."""
    number = {"type": "string", "pattern": r"^[0-9]+$"}
    no_change = "Only if the decision changed nothing: "
    properties = {
        "feedback_offset": number | {"description": "Offset of the feedback record, in decimal."},
        "author": {
            "type": "string",
            "description": "If the feedback was accepted: the author whose rate limit it counts towards.",
        },
        "admitted": number | {"description": "Time in milliseconds since 1970 at which the feedback was accepted."},
        "spends": {
            "type": "string",
            "pattern": r"^[0-9a-f]{32}$",
            "description": "Only for signed feedback that is not a copy: the mark by which a copy is recognised.",
        },
        "term": number | {"description": f"{no_change}the term of the codebook that it was based on."},
        "codebook_seq": number | {"description": f"{no_change}the newest delta of that codebook."},
        "standing": {
            "description": f"{no_change}the roles of the sender, as `standing` in the `cause` of a delta, in JSON."
        },
        "seen": {
            "description": f"{no_change}the part of its decision context that can change its status, in JSON: `radius`,"
            " and `clearance` of the nearest entry, as in `seen` in the `cause` of a delta."
        },
    }
    return {"type": "object", "required": ["feedback_offset"], "properties": properties}


def _request_headers() -> Json:
    """The headers of a request, which may be a resent dead letter."""
    description = (
        "Full name of the topic for the answer, in place of `predictions`; if there are several, the last counts. It "
        "begins with the prefix, exists, is not one of gracestream's topics, and replicas may write to it; otherwise "
        "the answer is an error on `predictions`."
    )
    headers = _resent_headers()
    headers["properties"]["reply_to"] = {"type": "string", "maxLength": 249, "description": description}
    return headers


def _prediction_headers() -> Json:
    """The headers of an answer."""
    return {
        "type": "object",
        "additionalProperties": True,
        "description": f"The headers of the request, in order: the first {MAX_COPIED_HEADERS} that fit into "
        f"{MAX_COPIED_HEADER_BYTES} bytes of names and values, except {', '.join(sorted(RESERVED_HEADERS))}.",
    }


def _resent_headers() -> Json:
    """The headers of a record that may be a resent dead letter."""
    description = "Only for a resent dead letter: its queue and its offset there, as `feedback.dlq/17`."
    return {"type": "object", "properties": {"replayed_from": {"type": "string", "description": description}}}


def _operation(action: str, channel: str, summary: str) -> Json:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def asyncapi_document() -> Json:
    """The AsyncAPI document: the topics, their writers and readers, and their messages."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "gracestream",
            "version": f"{SCHEMA_VERSION}.0.0",
            "description": "Corrects deployed transformer models live. Readers ignore unknown fields; `v` is the "
            "version of the schema. Timestamps are those of the Kafka records. The operations are those of gracestream;"
            " users do the counterpart.",
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
            "sendEdit": _operation("send", "edits", "The editor reports the outcome of a feedback record."),
            "sendDelta": _operation("send", "deltas", "The editor changes the codebook."),
            "receiveDelta": _operation("receive", "deltas", "Every replica applies the change."),
            "sendSnapshot": _operation("send", "snapshots", "The editor reports the location of a snapshot."),
            "receiveSnapshot": _operation("receive", "snapshots", "A starting replica looks for the newest snapshot."),
            "rejectRequest": _operation("send", "requests.dlq", "An inference worker could not read a request."),
            "rejectFeedback": _operation("send", "feedback.dlq", "The editor could not read a feedback record."),
        },
        "components": {
            "parameters": {
                "prefix": {
                    "default": "",
                    "description": "GRACESTREAM_TOPIC_PREFIX, so that deployments can share a cluster.",
                }
            },
            "messages": {
                "request": _message("request", "A request to the model", "Any.", headers=_request_headers()),
                "prediction": _message(
                    "prediction", "The answer to one request", "`request_id`.", headers=_prediction_headers()
                ),
                "feedback": _message(
                    "feedback", "A correction, an exception from one, or an undo", "Any.", headers=_resent_headers()
                ),
                "outcome": _message(
                    "outcome", "The outcome of one feedback record", "`feedback_id`.", headers=_outcome_headers()
                ),
                "delta": _message("delta", "One step of a codebook's history", "Any.", "application/msgpack"),
                "snapshot": _message(
                    "snapshot",
                    "The location of a snapshot of a codebook",
                    "`codebook/seq`; compaction keeps one.",
                ),
                "rejected": _dead_letter_message(),
            },
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes every value in place, without anchors and aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def render_documents() -> Mapping[str, str]:
    """The text of each generated file, by its path relative to `schemas/`."""
    texts = {
        f"json/{name}.schema.json": json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n"
        for name, kind in SCHEMA_TYPES.items()
    }
    comment = "# Written by `make schemas` from the message types.\n"
    body = yaml.dump(asyncapi_document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return texts | {"asyncapi.yaml": comment + body}


def write_documents(folder: Path = SCHEMAS_FOLDER) -> None:
    """Write each generated file below `folder`."""
    for path, text in render_documents().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_documents()
