"""Messages of a chat as the tokens of one prompt, by the chat template of the model's tokenizer.

1. No part of a content becomes a control token; those of the template stay.
2. A chat without the spelling of a control token has the tokens that `apply_chat_template` gives.
3. Equal chats have equal tokens on every day: a template has no clock here, and one that draws at random is refused.
4. No code of a checkpoint runs. transformers evaluates a template in Jinja's sandbox, here within a limit on its steps
   and on the length of its text.

Not promised: the memory of the process alone bounds a single expression that makes a huge text.
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
"""Lines of a template and calls that one chat may take; 256 messages take some 10,000."""

MAX_CHAT_CHARACTERS = 2**21
"""Characters of a rendered chat; a record has half as many at most."""

CONTENT_START, CONTENT_END = chr(0xFDD0), chr(0xFDD1)
"""Two of Unicode's noncharacters, which texts do not exchange: they mark a content while it is rendered."""

RANDOMNESS_PATTERN = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")
"""What a template draws at random with."""

MEMORY_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+>")
"""What Python prints of an object without a text of its own; every process has another."""

Span = tuple[int, int]


class ChatError(UserError):
    """Messages that have no tokens under this tokenizer's chat template; the text says why."""


class ChatTemplate:
    """The chat template of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Any, text_tokenizer: Any) -> None:
        """Wrap a tokenizer, and the one made of it for text (`pipeline.model.control_tokens`)."""
        self._tokenizer, self._text_tokenizer = tokenizer, text_tokenizer
        self._control_tokens = control_tokens(tokenizer)
        self._control_ids = {str(token): token_id for token_id, token in self._control_tokens.items()}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._backend: Any = None
        if tokenizer.is_fast and tokenizer.chat_template is not None:
            # Its own copy: how a backend reads control tokens is a flag that tokenizers which share it set in turn.
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.encode_special_tokens = False
            self._backend.no_truncation()
            self._backend.no_padding()

    def token_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The token ids of a chat, up to where the assistant's answer begins.

        Raises:
            ChatError: there is no template, it refuses these messages, or it changes a content beyond recognition.
        """
        text, contents = self._render_with_spans(messages)
        if self._backend is not None:
            whole = self._backend.encode(text, add_special_tokens=False)
            found = [
                span for token, span in zip(whole.ids, whole.offsets, strict=True) if token in self._control_tokens
            ]
            if not _spans_overlap(found, contents):
                return list(whole.ids)
        return self._encode_in_parts(text, contents)

    def ends_at_word_boundary(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether the answer starts a new word without a space: after white space, or after a control token."""
        text = self._render_with_spans(messages)[0]
        return text[-1:].isspace() or any(text.endswith(spelling) for spelling in self._control_ids)

    def _encode_in_parts(self, text: str, contents: Sequence[Span]) -> list[int]:
        """The template's control tokens, and what lies between them as text."""
        token_ids: list[int] = []
        end = 0
        for place, content in enumerate([*contents, (len(text), len(text))]):
            begin = contents[place - 1][1] if place else 0
            for found in self._control_pattern.finditer(text, begin, content[0]):
                token_ids += self._encode_text(text[end : found.start()])
                token_ids.append(self._control_ids[found[0]])
                end = found.end()
        return token_ids + self._encode_text(text[end:])

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        token_ids: list[int] = self._text_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    def _render_with_spans(self, messages: Sequence[ChatMessage]) -> tuple[str, list[Span]]:
        """The text of a chat, and the places of the contents in it.

        Marks around the contents show their places. They stand inside the white space that a template may strip.
        """
        template = self._checked_template()
        for place, message in enumerate(messages):
            if CONTENT_START in message.content or CONTENT_END in message.content:
                raise ChatError(f"`inputs[{place}].content` has a noncharacter, U+FDD0 or U+FDD1; remove it")
        with _step_limit():
            text = self._render(template, [(one.role, one.content) for one in messages])
            marked = self._render(template, [(one.role, _mark_content(one.content)) for one in messages])
        spans = _content_spans(marked)
        if spans is None or marked.replace(CONTENT_START, "").replace(CONTENT_END, "") != text:
            raise ChatError(
                "the model's chat template rewrites a content of `inputs`, so its text cannot be told from the"
                " template's; leave out markup such as </think>, or send one text"
            )
        if any(not _spans_overlap([found.span()], spans) for found in MEMORY_ADDRESS_PATTERN.finditer(text)):
            raise ChatError("the model's chat template prints an address of memory; send `inputs` as one text")
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
        given = [{"role": role, "content": content} for role, content in messages]
        # Without a clock: many templates then have a date of their own; the others fail, and the chat is refused.
        no_clock = Undefined(hint="the template asks for the date, which would change the prompt from day to day")
        try:
            text = self._tokenizer.apply_chat_template(
                given,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=no_clock,
            )
        except ChatError:
            raise
        except TemplateError as error:
            raise ChatError(f"the model's chat template refuses `inputs`: {to_one_line(error)}") from error
        except Exception as error:  # whatever a template does to these messages, other requests are answered
            raise ChatError(
                f"the model's chat template fails on `inputs`: {type(error).__name__}: {to_one_line(error)};"
                " send one text, or repair the template"
            ) from error
        if not isinstance(text, str) or not text:
            raise ChatError("the model's chat template makes no text of `inputs`; send one text")
        if len(text) > MAX_CHAT_CHARACTERS:
            raise ChatError(
                f"the model's chat template makes {len(text)} characters of `inputs`; the limit is"
                f" {MAX_CHAT_CHARACTERS}:"
                " send fewer or shorter messages"
            )
        return text


def _mark_content(content: str) -> str:
    core = content.strip()
    start = content.index(core)
    return f"{content[:start]}{CONTENT_START}{core}{CONTENT_END}{content[start + len(core) :]}"


def _content_spans(marked: str) -> list[Span] | None:
    """Where the marked contents stand once the marks are gone; None where a mark has lost its counterpart."""
    spans: list[Span] = []
    begun: int | None = None
    for gone, found in enumerate(re.finditer(f"[{CONTENT_START}{CONTENT_END}]", marked)):
        if (found[0] == CONTENT_START) is (begun is not None):
            return None
        place = found.start() - gone
        if begun is None:
            begun = place
        else:
            spans.append((begun, place))
            begun = None
    return spans if begun is None else None


def _spans_overlap(first: Sequence[Span], second: Sequence[Span]) -> bool:
    """Whether a span of one list has a character of the other's; both are in order."""
    place = 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        if place < len(second) and second[place][0] < end:
            return True
    return False


@contextmanager
def _step_limit() -> Iterator[None]:
    """Raises ChatError in this thread once a template has taken `MAX_TEMPLATE_STEPS` lines and calls.

    A count, not a time: every replica refuses the same chats. A tracer of this thread's own, as a debugger's, waits.
    """
    left = MAX_TEMPLATE_STEPS
    refused = f"the model's chat template takes more than {MAX_TEMPLATE_STEPS} steps; send fewer messages"

    def count(frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ChatError(refused)
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
    if left < 0:  # raised where Python ignores errors, as in a finaliser
        raise ChatError(refused)
