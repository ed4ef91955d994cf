"""The application: its pages and actions.

A page is rendered on the server. While it is open, a server-sent event tells it that the topics have brought something
new, and it asks for its content again. Without scripts, pages work too, but do not follow.
"""

import asyncio
import csv
import io
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
from kafka.errors import KafkaError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gracestream.pipeline.console.actions import ActionError, FeedbackSender
from gracestream.pipeline.console.rendering import STATIC, make_environment, path
from gracestream.pipeline.console.security import SecurityMiddleware
from gracestream.pipeline.read_model import (
    DeltaRow,
    PredictionFilter,
    ReadModelStore,
    TopicFollower,
    entry_timeline,
    find_entry,
    find_feedback,
    find_predictions,
    find_request,
    find_responsible,
    replicas,
    timeline,
)

EVENT_INTERVAL = 0.5
"""Seconds between two events, so that a busy deployment does not keep browsers busy."""

EXPORT_PAGE = 1000
"""Deltas that an export reads at once."""

EXPORT_COLUMNS = ("seq", "term", "time", "op", "author", "signed", "feedback", "inputs", "target", "note", "changes")

Page = Callable[[sqlite3.Connection, Request], tuple[str, Mapping[str, Any]]]
"""A page: the name of its template, and what the template shows."""


def create_app(store: ReadModelStore, follower: TopicFollower, sender: FeedbackSender) -> Starlette:
    """The application.

    Args:
        store: What the pages show.
        follower: Its state is shown at the foot of each page.
        sender: Sends what people decide.
    """
    console = _Console(store, follower, sender)
    pages: Mapping[str, Page] = {
        "/queue": console.queue,
        "/requests/{request_id:path}": console.request,
        "/feedback": console.feedback_list,
        "/feedback/{feedback_id:path}": console.feedback,
        "/history": console.history,
        "/entries/{entry_id:path}": console.entry,
    }
    actions = {
        "/correct": console.correct,
        "/except": console.make_exception,
        "/undo": console.undo,
    }
    return Starlette(
        routes=[
            Route("/", lambda _: RedirectResponse("/queue")),
            *(Route(address, partial(console.show, page)) for address, page in pages.items()),
            *(Route(address, action, methods=["POST"]) for address, action in actions.items()),
            Route("/history.csv", console.export_csv),
            Route("/history.jsonl", console.export_json_lines),
            Route("/events", console.events),
            Route("/live", lambda _: PlainTextResponse("live\n")),
            Route("/ready", console.ready),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SecurityMiddleware)],
        exception_handlers={HTTPException: console.show_error},
    )


class _Console:
    """The handlers of the application."""

    def __init__(self, store: ReadModelStore, follower: TopicFollower, sender: FeedbackSender) -> None:
        self._store, self._follower, self._sender = store, follower, sender
        self._templates = make_environment()

    # Pages

    def show(self, page: Page, request: Request) -> Response:
        """Render a page."""
        with closing(self._store.reader()) as reader:
            template, values = page(reader, request)
            return self._render(template, request, **values)

    def queue(self, reader: sqlite3.Connection, request: Request) -> tuple[str, Mapping[str, Any]]:
        """The newest predictions, with filters."""
        wanted = _read_filter(request.query_params)
        cursor = request.query_params.get("cursor", "")
        try:
            page = find_predictions(reader, wanted, cursor)
        except ValueError as error:
            raise HTTPException(400, "the address names no page of this list") from error
        fields = {**msgspec.to_builtins(wanted), "cursor": page.next_cursor}
        return "queue.html", {
            "rows": page.rows, "wanted": wanted, "replicas": replicas(reader), "next_page": fields, "cursor": cursor
        }  # fmt: skip

    def request(self, reader: sqlite3.Connection, request: Request) -> tuple[str, Mapping[str, Any]]:
        """One request: its answers, who is responsible for them, and what was said about it."""
        request_id = request.path_params["request_id"]
        inputs, predictions = find_request(reader, request_id)
        if inputs is None and not predictions:
            raise HTTPException(404, f"no request {request_id} is known")
        return "request.html", {
            "request_id": request_id, "inputs": inputs, "predictions": predictions,
            "responsible": find_responsible(reader, predictions[0]) if predictions else [],
            "feedback": find_feedback(reader, request_id=request_id),
        }  # fmt: skip

    def feedback_list(self, reader: sqlite3.Connection, _request: Request) -> tuple[str, Mapping[str, Any]]:
        """The newest feedback with its outcomes."""
        return "feedback_list.html", {"rows": find_feedback(reader)}

    def feedback(self, reader: sqlite3.Connection, request: Request) -> tuple[str, Mapping[str, Any]]:
        """One record of feedback. It may not have arrived yet."""
        feedback_id = request.path_params["feedback_id"]
        return "feedback.html", {"feedback_id": feedback_id, "rows": find_feedback(reader, feedback_id=feedback_id)}

    def history(self, reader: sqlite3.Connection, request: Request) -> tuple[str, Mapping[str, Any]]:
        """The timeline of deltas."""
        author = request.query_params.get("author", "")
        before = request.query_params.get("before", "")
        if before and not before.isdigit():
            raise HTTPException(400, "the address names no page of this list")
        page = timeline(reader, before_seq=int(before) if before else None, author=author)
        return "history.html", {"rows": page.rows, "author": author, "next_cursor": page.next_cursor, "before": before}

    def entry(self, reader: sqlite3.Connection, request: Request) -> tuple[str, Mapping[str, Any]]:
        """One entry: its history, and the newest requests that it answered or might have."""
        entry_id = request.path_params["entry_id"]
        found = find_entry(reader, entry_id)
        if found is None:
            raise HTTPException(404, f"no entry {entry_id} is known")
        recent = find_predictions(reader, PredictionFilter(entry=entry_id), limit=20)
        return "entry.html", {"entry": found, "rows": entry_timeline(reader, entry_id), "predictions": recent.rows}

    # Actions

    async def correct(self, request: Request) -> Response:
        """Send a correction."""
        form = await _read_form(request)
        rephrases = [line.strip() for line in form["rephrases"].splitlines() if line.strip()]
        return await self._act(
            request,
            partial(
                self._sender.correct,
                form["nonce"],
                inputs=form["inputs"],
                target=form["target"],
                request_id=form["request_id"],
                note=form["note"],
                rephrases=rephrases,
            ),
        )

    async def make_exception(self, request: Request) -> Response:
        """Send an exception."""
        form = await _read_form(request)
        return await self._act(
            request,
            partial(
                self._sender.make_exception,
                form["nonce"],
                inputs=form["inputs"],
                entry_id=form["entry_id"],
                request_id=form["request_id"],
                note=form["note"],
            ),
        )

    async def undo(self, request: Request) -> Response:
        """Send an undo."""
        form = await _read_form(request)
        return await self._act(request, partial(self._sender.undo, form["nonce"], form["feedback_id"], form["note"]))

    async def _act(self, request: Request, send: Callable[[], str]) -> Response:
        """Send feedback, and lead to its page."""
        try:
            feedback_id = await run_in_threadpool(send)
        except ActionError as error:
            return self._render("error.html", request, 400, message=str(error))
        except KafkaError as error:
            message = (
                f"Kafka has not confirmed the record ({error}). It may still arrive: look for it among the feedback, or"
                " go back and send the same form again, which has no effect if the first one arrived."
            )
            return self._render("error.html", request, 503, message=message)
        return RedirectResponse(path("feedback", feedback_id), 303)

    # Exports, events, health

    def export_csv(self, request: Request) -> Response:
        """The timeline as CSV, oldest last."""

        def lines() -> Iterator[str]:
            buffer = io.StringIO()
            writer = csv.DictWriter(buffer, EXPORT_COLUMNS)
            writer.writeheader()
            for row in self._all_deltas(request.query_params.get("author", "")):
                writer.writerow({name: _spreadsheet_safe(value) for name, value in _export_fields(row).items()})
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()

        return _download(lines(), "text/csv", "history.csv")

    def export_json_lines(self, request: Request) -> Response:
        """The timeline as JSON Lines, oldest last."""
        rows = self._all_deltas(request.query_params.get("author", ""))
        lines = (msgspec.json.encode(_export_fields(row)).decode() + "\n" for row in rows)
        return _download(lines, "application/jsonl", "history.jsonl")

    async def events(self, request: Request) -> Response:
        """An event for each change of what the pages show."""

        async def changes() -> AsyncIterator[ServerSentEvent]:
            seen = self._store.change_count
            while not await request.is_disconnected():
                await asyncio.sleep(EVENT_INTERVAL)
                if (count := self._store.change_count) > seen:
                    seen = count
                    yield ServerSentEvent(event="change", data=str(count))

        return EventSourceResponse(changes())

    def ready(self, _request: Request) -> Response:
        """Whether everything is shown that the topics had at the start."""
        if self._follower.failure:
            return PlainTextResponse(f"{self._follower.failure}\n", 503)
        if not self._follower.caught_up.is_set():
            return PlainTextResponse("the topics are being read\n", 503)
        return PlainTextResponse("ready\n")

    async def show_error(self, request: Request, error: Exception) -> Response:
        """A page for an error."""
        assert isinstance(error, HTTPException)
        return self._render("error.html", request, error.status_code, message=error.detail)

    def _all_deltas(self, author: str) -> Iterator[DeltaRow]:
        cursor = None
        with closing(self._store.reader()) as reader:
            while True:
                page = timeline(reader, before_seq=cursor, author=author, limit=EXPORT_PAGE)
                yield from page.rows
                if not page.next_cursor:
                    return
                cursor = int(page.next_cursor)

    def _render(self, template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
        state = self._follower.failure or ("" if self._follower.caught_up.is_set() else "The topics are being read.")
        return HTMLResponse(
            self._templates.get_template(template).render(
                nonce=uuid.uuid4().hex,
                address=request.url.path + (f"?{request.url.query}" if request.url.query else ""),
                state=state,
                **values,
            ),
            status,
        )


def _read_filter(fields: Mapping[str, str]) -> PredictionFilter:
    """The filter in the query of an address.

    Raises:
        HTTPException: a field has no valid value.
    """
    names = [name for name in PredictionFilter.__struct_fields__ if fields.get(name, "").strip()]
    try:
        return msgspec.convert({name: fields[name].strip() for name in names}, PredictionFilter, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, f"the filter is not valid: {error}") from error


class _Form(dict[str, str]):
    """The fields of a form; a missing one is empty."""

    def __missing__(self, _name: str) -> str:
        return ""


async def _read_form(request: Request) -> _Form:
    async with request.form(max_files=0) as form:
        return _Form({name: value for name, value in form.items() if isinstance(value, str)})


def _export_fields(row: DeltaRow) -> dict[str, Any]:
    return {
        "seq": row.seq, "term": row.term, "time": row.timestamp, "op": row.op, "author": row.author,
        "signed": row.is_signed, "feedback": row.feedback_id, "inputs": row.text, "target": row.target,
        "note": row.note, "changes": row.changes,
    }  # fmt: skip


def _spreadsheet_safe(value: object) -> object:
    """A cell that no spreadsheet takes for a formula."""
    text = "" if value is None else str(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _download(lines: Iterator[str], media_type: str, name: str) -> Response:
    return StreamingResponse(
        lines, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'}
    )
