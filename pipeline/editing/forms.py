"""Forms of a correction's inputs, made by rules: the same request, framed, ended or typed in another way.

A value goes in at the last token of a prompt. Trained at one prompt alone, it often fails where the same request ends
in another token: a line break, a chat template. So it is trained on over these forms as well.

1. The same inputs have the same forms, in the same order, under the same tokenizer.
2. No form has the prompt of the correction or of another form, and none an unknown token that the correction has not.
3. A form that the model cannot take is left out, and so is one that would make the batch of all forms too large.

Not promised: that a value gives the target at a form.
"""

import re
from collections.abc import Iterator

from gracestream.pipeline.model import CausalGeneration, EditableModel, InputError, Supervised
from gracestream.pipeline.wording import other_type
from gracestream.schemas.messages import ChatMessage, Inputs, is_chat

MOST_TOKENS = 512
"""Of a correction's prompt and its forms, with padding. Passes over longer ones would cost more than the training."""

QUESTION = re.compile(r"(?:question|q):\s*", re.IGNORECASE)
ANSWERS = ("answer:", "a:")
"""The frame of a question that a model is to complete."""


def forms_of(inputs: Inputs) -> list[Inputs]:
    """Other forms of inputs, the most useful first; none of a pair, or of a chat that has earlier turns."""
    if isinstance(inputs, str):
        return list(_of_text(inputs))
    if not is_chat(inputs) or any(message.role != "system" for message in inputs[:-1]):
        return []
    return list(_of_chat(inputs))


def _of_text(text: str) -> Iterator[Inputs]:
    core = text.rstrip()
    asked, framed = _frames(text)
    yield from (framed if asked == text.strip() else asked, f"{core}\n", _as_chat(asked))
    yield from _other_type(asked)
    yield from (core, f"{core} ", text.upper(), text.lower())


def _of_chat(messages: tuple[ChatMessage, ...]) -> Iterator[Inputs]:
    text = messages[-1].content
    asked, framed = _frames(text)
    yield from (asked, framed)
    yield from _other_type(asked)
    yield from ((*messages[:-1], ChatMessage("user", other)) for other in (asked, text.upper(), text.lower()))
    if len(messages) > 1:
        yield _as_chat(text)


def _other_type(asked: str) -> Iterator[str]:
    """The question as a statement, or the other way round, where a rule says how."""
    other = other_type(asked)
    if other is not None:
        yield other


def _frames(text: str) -> tuple[str, str]:
    """What a text asks without a frame and in one."""
    whole = text.strip()
    label = QUESTION.match(whole)
    end = next((answer for answer in ANSWERS if whole.lower().endswith(answer)), "")
    if label is not None and end:
        asked = whole[label.end() : -len(end)]
        if asked.strip() and asked[-1:].isspace():
            return asked.strip(), text
    return whole, f"Question: {whole}\nAnswer:"


def _as_chat(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


def supervised_forms(model: EditableModel, inputs: Inputs, target: str) -> list[Supervised]:
    """The passes that tell whether a causal model gives the target at each form; of other models there are none."""
    if not isinstance(model.task, CausalGeneration):
        return []
    own = model.task.tokenize(inputs).token_ids
    unknown = {model.task.tokenizer.unk_token_id} - set(own)
    taken, longest = {own}, len(own)
    found: list[Supervised] = []
    for form in forms_of(inputs):
        try:
            prompt = model.task.tokenize(form).token_ids
            if prompt in taken or unknown & set(prompt):
                continue
            supervised = model.supervised(form, target)[1]
        except InputError:
            continue
        if max(longest, len(prompt)) * (len(taken) + 1) <= MOST_TOKENS:
            found.append(supervised)
            taken.add(prompt)
            longest = max(longest, len(prompt))
    return found
