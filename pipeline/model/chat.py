"""Renders the messages of a chat as the tokens of one prompt, with the chat template of the model's tokenizer.

1. No part of a message's content becomes a control token; the template's control tokens stay.
2. A chat without the spelling of a control token has the same tokens as `apply_chat_template` gives.
3. Equal chats have equal tokens on every day. Templates have no clock here, and templates with randomness are rejected.
4. No code of a checkpoint runs. transformers evaluates templates in Jinja's sandbox; this module also limits their
   steps and the length of their text.

Not promised: a bound on memory within one expression. Such an expression can use all memory of the process.
"""

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, Undefined

from gracestream.pipeline.errors import UserError
from gracestream.pipeline.model.control_tokens import control_tokens
from gracestream.schemas.messages import ChatMessage, to_one_line

MAX_TEMPLATE_STEPS = 200_000
"""Executed lines and calls of a template per chat. A chat of 256 messages takes about 10,000."""

MAX_CHAT_CHARACTERS = 2**21
"""Characters of a rendered chat: twice as many as a record can hold."""

CONTENT_START, CONTENT_END = chr(0xFDD0), chr(0xFDD1)
"""Marks around a message's content while it is rendered. Both are Unicode noncharacters, which regular text never
uses."""

RANDOMNESS_PATTERN = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")
"""The ways in which a Jinja template can use randomness: the filter `random`, also by name, and `lipsum`."""

MEMORY_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+>")
"""A memory address in Python's default text for an object; it differs between processes."""

Span = tuple[int, int]
"""Start and end of a part of a text, in characters; the end is exclusive."""


class ChatError(UserError):
    """Messages that this tokenizer's chat template cannot render. The message gives the reason."""


class ChatTemplate:
    """The chat template of one tokenizer. Several threads may share it."""

    def __init__(self, tokenizer: Any, text_tokenizer: Any) -> None:
        """Wrap a tokenizer, and the tokenizer that `control_tokens.text_tokenizer` made from it."""
        self._tokenizer, self._text_tokenizer = tokenizer, text_tokenizer
        self._control_tokens = control_tokens(tokenizer)
        self._control_ids = {str(token): token_id for token_id, token in self._control_tokens.items()}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._backend: Any = None
        if tokenizer.is_fast and tokenizer.chat_template is not None:
            # A copy, because tokenizers with a shared backend overwrite each other's `encode_special_tokens` flag.
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.encode_special_tokens = False
            self._backend.no_truncation()
            self._backend.no_padding()

    def token_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The token ids of a chat, up to the start of the assistant's answer.

        Raises:
            ChatError: the tokenizer has no template, or the template rejects the messages or rewrites a content.
        """
        text, contents = self._render_with_spans(messages)
        # 1. Encode the whole text, as `apply_chat_template` does.
        # 2. If a control token overlaps a message's content, encode that text again in parts.
        if self._backend is not None:
            encoding = self._backend.encode(text, add_special_tokens=False)
            control_spans = [
                span
                for token, span in zip(encoding.ids, encoding.offsets, strict=True)
                if token in self._control_tokens
            ]
            if not _spans_overlap(control_spans, contents):
                return list(encoding.ids)
        return self._encode_in_parts(text, contents)

    def ends_at_word_boundary(self, messages: Sequence[ChatMessage]) -> bool:
        """True if the answer starts a new word without a space: after white space, or after a control token."""
        text = self._render_with_spans(messages)[0]
        return text[-1:].isspace() or any(text.endswith(spelling) for spelling in self._control_ids)

    def _encode_in_parts(self, text: str, contents: Sequence[Span]) -> list[int]:
        """The template's control tokens, with everything between them encoded as plain text, contents included."""
        token_ids: list[int] = []
        end = 0
        for index, content in enumerate([*contents, (len(text), len(text))]):
            start = contents[index - 1][1] if index else 0
            # Control tokens are searched for between contents only; the last "content" is the end of the text.
            for match in self._control_pattern.finditer(text, start, content[0]):
                token_ids += self._encode_text(text[end : match.start()])
                token_ids.append(self._control_ids[match[0]])
                end = match.end()
        return token_ids + self._encode_text(text[end:])

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        token_ids: list[int] = self._text_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    def _render_with_spans(self, messages: Sequence[ChatMessage]) -> tuple[str, list[Span]]:
        """The text of a chat, and the spans of the contents in it.

        A second rendering with marks around the contents shows the spans. The marks go inside leading and trailing
        white space, because templates may strip that.
        """
        template = self._checked_template()
        for index, message in enumerate(messages):
            if CONTENT_START in message.content or CONTENT_END in message.content:
                raise ChatError(f"`inputs[{index}].content` has a noncharacter, U+FDD0 or U+FDD1; remove it")
        with _step_limit():
            text = self._render(template, [(message.role, message.content) for message in messages])
            marked = self._render(template, [(message.role, _mark_content(message.content)) for message in messages])
        spans = _content_spans(marked)
        if spans is None or marked.replace(CONTENT_START, "").replace(CONTENT_END, "") != text:
            raise ChatError(
                "the model's chat template rewrites a content of `inputs`, so its text cannot be distinguished"
                " from the template's; leave out markup such as </think>, or send one text"
            )
        if any(not _spans_overlap([match.span()], spans) for match in MEMORY_ADDRESS_PATTERN.finditer(text)):
            raise ChatError("the model's chat template prints a memory address; send `inputs` as one text")
        return text, spans

    def _checked_template(self) -> str:
        if self._tokenizer.chat_template is None:
            raise ChatError("the model's tokenizer has no chat template; send `inputs` as one text")
        try:
            template = str(self._tokenizer.get_chat_template())
        except ValueError as error:
            raise ChatError(f"the model has no default chat template; send `inputs` as one text ({error})") from error
        if RANDOMNESS_PATTERN.search(template):
            raise ChatError("the model's chat template draws at random; send `inputs` as one text")
        return template

    def _render(self, template: str, messages: Sequence[tuple[str, str]]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        # Without a clock, many templates use a fixed date; others fail, and the chat is rejected.
        no_clock = Undefined(hint="the template asks for the date, which would change the prompt from day to day")
        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=no_clock,
            )
        except ChatError:
            raise
        except TemplateError as error:
            raise ChatError(f"the model's chat template rejects `inputs`: {to_one_line(error)}") from error
        except Exception as error:  # a faulty template must not stop other requests
            raise ChatError(
                f"the model's chat template fails on `inputs`: {type(error).__name__}: {to_one_line(error)};"
                " send one text, or repair the template"
            ) from error
        if not isinstance(text, str) or not text:
            raise ChatError("the model's chat template makes no text of `inputs`; send one text")
        if len(text) > MAX_CHAT_CHARACTERS:
            raise ChatError(
                f"the model's chat template makes {len(text)} characters of `inputs`; the limit is"
                f" {MAX_CHAT_CHARACTERS}: send fewer or shorter messages"
            )
        return text


def _mark_content(content: str) -> str:
    stripped = content.strip()
    start = content.index(stripped)
    return f"{content[:start]}{CONTENT_START}{stripped}{CONTENT_END}{content[start + len(stripped) :]}"


def _content_spans(marked: str) -> list[Span] | None:
    """The spans of the marked contents in the text without marks; None if a mark lacks its counterpart."""
    spans: list[Span] = []
    open_start: int | None = None
    for marks_before, match in enumerate(re.finditer(f"[{CONTENT_START}{CONTENT_END}]", marked)):
        if (match[0] == CONTENT_START) is (open_start is not None):
            return None
        position = match.start() - marks_before
        if open_start is None:
            open_start = position
        else:
            spans.append((open_start, position))
            open_start = None
    return spans if open_start is None else None


def _spans_overlap(first: Sequence[Span], second: Sequence[Span]) -> bool:
    """True if a span of one list overlaps a span of the other; both lists are sorted and free of overlaps."""
    index = 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        if index < len(second) and second[index][0] < end:
            return True
    return False


@contextmanager
def _step_limit() -> Iterator[None]:
    """Raise `ChatError` in this thread once a template has executed `MAX_TEMPLATE_STEPS` lines and calls.

    Steps are counted instead of time, so that every replica rejects the same chats. Another tracer of this thread, such
    as a debugger's, is suspended meanwhile.
    """
    steps_left = MAX_TEMPLATE_STEPS
    message = f"the model's chat template takes more than {MAX_TEMPLATE_STEPS} steps; send fewer messages"

    def count(frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal steps_left
        steps_left -= 1
        if steps_left < 0:
            raise ChatError(message)
        return count if frame.f_code.co_filename == "<template>" else None

    previous_tracer = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(previous_tracer)
    if steps_left < 0:  # the exception may have been raised in a finaliser, where Python ignores it
        raise ChatError(message)
