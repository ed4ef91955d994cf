"""The feedback that the console sends for a person."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gracestream.pipeline.auth import sign
from gracestream.pipeline.client import (
    Client,
    SignedFeedback,
    build_feedback,
    feedback_to_sign,
    parse_signed_feedback,
)
from gracestream.schemas.messages import Feedback, InvalidMessage

ID_DIGITS = 32
"""Hexadecimal digits of an id."""


class ActionError(Exception):
    """A form that cannot become feedback. The text is for the person who filled it in."""


class FeedbackSender:
    """Sends feedback in the name of one author.

    A form that is sent twice becomes the same record: its id is made of the form's `nonce` and its fields. The editor
    answers the second one with `unchanged`.

    Args:
        client: The connection to Kafka; threads may share it.
        author: The author that each record names.
        codebook: The codebook for which records are signed.
        key: The author's private key; None: records are not signed.
    """

    def __init__(self, client: Client, author: str, codebook: str, key: Ed25519PrivateKey | None) -> None:
        self._client, self._author, self._codebook, self._key = client, author, codebook, key

    def correct(
        self, nonce: str, *, inputs: str, target: str, request_id: str, note: str, rephrases: Sequence[str]
    ) -> str:
        """Send a correction of a request; `inputs` is JSON. Returns the id of the feedback.

        Raises:
            ActionError: the fields are no valid correction.
        """
        fields = {"inputs": _decode(inputs), "target": target, "request_id": request_id}
        return self._send(nonce, fields | ({"rephrases": list(rephrases)} if rephrases else {}), note)

    def make_exception(self, nonce: str, *, inputs: str, entry_id: str, request_id: str, note: str) -> str:
        """Send an exception of a request from an entry; `inputs` is JSON. Returns the id of the feedback.

        Raises:
            ActionError: the fields are no valid exception.
        """
        fields = {"inputs": _decode(inputs), "except_from": entry_id, "request_id": request_id}
        return self._send(nonce, fields, note)

    def undo(self, nonce: str, feedback_id: str, note: str) -> str:
        """Send an undo. Returns its id.

        Raises:
            ActionError: the id is not valid.
        """
        return self._send(nonce, {"undo": feedback_id}, note)

    def _send(self, nonce: str, fields: Mapping[str, Any], note: str) -> str:
        fields = {**fields, "author": self._author, **({"note": note} if note else {})}
        content = msgspec.json.encode([nonce, fields], order="sorted")
        fields["feedback_id"] = f"console-{hashlib.sha256(content).hexdigest()[:ID_DIGITS]}"
        feedback: Feedback | SignedFeedback
        try:
            if self._key is None:
                feedback = build_feedback(fields)
            else:
                text = feedback_to_sign(fields, self._author)
                feedback = parse_signed_feedback(sign(text, self._key, self._codebook))
        except InvalidMessage as error:
            raise ActionError(str(error)) from error
        self._client.send([feedback])
        return feedback.feedback_id


def _decode(inputs: str) -> object:
    """The inputs that a page holds as JSON; whether they are valid is checked with the record."""
    try:
        return msgspec.json.decode(inputs)
    except msgspec.DecodeError as error:
        raise ActionError("the form does not hold the inputs of a request; open the request again") from error
