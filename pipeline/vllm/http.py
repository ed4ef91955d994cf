"""The HTTP surface of a vLLM server with corrections.

- Headers of a response say what the codebook did: `x-gracestream-codebook` (term and delta, such as `3.17`),
  `x-gracestream-entry` (the entry that answered) and `x-gracestream-near-miss`. A response to several prompts has a
  list with one item for each, separated by commas; equal states of the codebook are one item. Ids are percent-encoded.
- A request with `x-gracestream-min-seq` is answered from that delta or a later one, or with 503.
- `POST /v1/gracestream/feedback` corrects an answer by its id.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from msgspec import UNSET, Struct, UnsetType

from gracestream.pipeline.client import build_feedback
from gracestream.pipeline.model import LastTurn
from gracestream.pipeline.vllm.generation import HttpRequest, current_request
from gracestream.schemas.messages import ChatMessage, Feedback, Inputs, InvalidMessage

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")

MIN_SEQ_HEADER = b"x-gracestream-min-seq"
"""The header of a request that needs a delta: the answer comes from this delta or a later one."""

MAX_REMEMBERED_ANSWERS = 10_000
"""Answers that can be corrected by their ids, the newest ones."""

FEEDBACK_PATH = "/v1/gracestream/feedback"


class _Body(Struct):
    """What the middleware reads of a request; vLLM checks it."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: Any = None
    use_beam_search: bool = False


class AnswerMemory:
    """The inputs of recent answers, by the id of the response. One event loop uses it."""

    def __init__(self) -> None:
        self._inputs: OrderedDict[str, Inputs | None] = OrderedDict()

    def remember(self, request_id: str, inputs: Inputs) -> None:
        """Remember an answer; the oldest one is forgotten if there are too many.

        Clients may choose ids. One that was used for different inputs belongs to none of them.
        """
        known = self._inputs.get(request_id, inputs)
        self._inputs[request_id] = inputs if known == inputs else None
        if len(self._inputs) > MAX_REMEMBERED_ANSWERS:
            self._inputs.popitem(last=False)

    def inputs(self, response_id: str) -> Inputs | None:
        """The inputs of an answer; None if it is not remembered.

        vLLM's id of a completion has the prompt's number after that of the response; without it, the first is meant.
        """
        return self._inputs.get(response_id) or self._inputs.get(f"{response_id}-0")


class CorrectionMiddleware:
    """Reads the messages of chats before vLLM renders them, and adds headers to responses (ASGI)."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], memory: AnswerMemory) -> None:
        self._app, self._memory = app, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with what it says in `current_request`."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in COMPLETION_PATHS:
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        request, inputs = _parse(path, body, _min_seq(scope))
        started: Message | None = None
        is_sent = False

        async def receive_again() -> Message:
            nonlocal is_sent
            if is_sent:
                return await receive()
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message  # a stream starts before the lookup, so the headers wait for its first part
                return
            if started is not None:
                self._remember(request, inputs)
                if request.failure:  # a stream has begun with 200
                    started["status"] = HTTPStatus.SERVICE_UNAVAILABLE
                started["headers"] = [*started.get("headers", []), *_headers(request)]
                await send(started)
                started = None
            await send(message)

        token = current_request.set(request)
        try:
            await self._app(scope, receive_again, send_with_headers)
        finally:
            current_request.reset(token)

    def _remember(self, request: HttpRequest, inputs: Sequence[Inputs]) -> None:
        """Remember what the prompts of a request were, by the id of the response and by the prompt's number in it."""
        for request_id, _, _ in request.lookups:
            # vLLM's id of a chat is that of the response; that of a completion has the prompt's number after it.
            number = "0" if request.last_turn is not None else request_id.rpartition("-")[2]
            if number.isdigit() and int(number) < len(inputs):
                self._memory.remember(request_id, inputs[int(number)])


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _parse(path: str, body: bytes, min_seq: int) -> tuple[HttpRequest, Sequence[Inputs]]:
    """What a body says about its prompts, and the inputs of each. vLLM reports a body that is wrong."""
    try:
        given = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return HttpRequest(min_seq, may_correct=False), []
    if given.use_beam_search:  # each token of each beam is a request to the engine
        return HttpRequest(min_seq, may_correct=False), []
    if path == COMPLETION_PATHS[0]:
        prompts = given.prompt if isinstance(given.prompt, list) else [given.prompt]
        return HttpRequest(min_seq), prompts if all(isinstance(prompt, str) for prompt in prompts) else []
    messages = [_chat_message(fields) for fields in given.messages]
    if not messages or (last := messages[-1]) is None or last.role != "user":
        return HttpRequest(min_seq, may_correct=False), []
    has_earlier_turns = any(message is None or message.role != "system" for message in messages[:-1])
    texts = [message for message in messages if message is not None]
    return (
        HttpRequest(min_seq, LastTurn(last.content, has_earlier_turns)),
        [tuple(texts)] if len(texts) == len(messages) else [],
    )


def _min_seq(scope: Scope) -> int:
    """The delta that the answers must include, from a header; 0 without a number there."""
    value = dict(scope["headers"]).get(MIN_SEQ_HEADER, b"0")
    return int(value) if value.isdigit() and len(value) < 20 else 0


def _chat_message(fields: dict[str, Any]) -> ChatMessage | None:
    """A message of text; None for any other."""
    content = fields.get("content")
    if isinstance(content, list):  # parts, as OpenAI's clients may send them
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "\n".join(texts) if len(texts) == len(content) else None
    role = "system" if fields.get("role") == "developer" else fields.get("role")  # OpenAI's newer name
    return ChatMessage(role=role, content=content) if isinstance(role, str) and isinstance(content, str) else None


def _headers(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    """The headers of a response; none if its prompts were not looked up."""
    if not request.lookups:
        return []
    # Prompts of one request are looked up in any order; vLLM numbers them.
    lookups = sorted(request.lookups, key=lambda lookup: (len(lookup[0]), lookup[0]))
    found = [
        ("" if result.view.found is None else quote(result.view.found.entry_id, safe=""), done)
        for _, result, done in lookups
    ]
    versions = [result.version for _, result, _ in lookups]
    values = {
        "codebook": versions if len(set(versions)) > 1 else versions[:1],
        "entry": [entry_id if is_corrected else "" for entry_id, is_corrected in found],
        "near-miss": ["" if is_corrected else entry_id for entry_id, is_corrected in found],
    }
    return [
        (f"x-gracestream-{name}".encode(), ",".join(items).encode()) for name, items in values.items() if any(items)
    ]


class AnswerFeedback(Struct, forbid_unknown_fields=True):
    """A correction of an answer.

    Attributes:
        id: The id of the response.
        target: The right answer.
        author: Who corrects it.
        note: Why.
        feedback_id: The id of the feedback; by default a new one.
    """

    id: str
    target: str
    author: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    feedback_id: str | UnsetType = UNSET


def feedback_router(
    memory: AnswerMemory, send: Callable[[Feedback], object], is_enabled: Callable[[], bool]
) -> APIRouter:
    """The route that corrects an answer. `send` writes the feedback to Kafka, in a thread."""
    router = APIRouter()

    @router.post(FEEDBACK_PATH)  # type: ignore[untyped-decorator]
    async def correct(request: Request) -> Response:
        if not is_enabled():
            raise HTTPException(403, "this server takes no corrections: set GRACESTREAM_HTTP_FEEDBACK=true")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "send the correction as application/json")
        try:
            given = msgspec.json.decode(await request.body(), type=AnswerFeedback)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HTTPException(400, f"the body is not a correction: {error}") from error
        inputs = memory.inputs(given.id)
        if inputs is None:
            raise HTTPException(
                404, f"this server does not know the inputs of {given.id!r}; send the correction to the topic feedback"
            )
        fields = msgspec.to_builtins(given)
        try:
            feedback = build_feedback(fields | {"inputs": inputs, "request_id": fields.pop("id")})
        except InvalidMessage as error:
            raise HTTPException(400, str(error)) from error
        await asyncio.to_thread(send, feedback)
        return Response(msgspec.json.encode({"feedback_id": feedback.feedback_id}), 202, media_type="application/json")

    return router
