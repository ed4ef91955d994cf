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

from gracestream.pipeline.model import CausalGeneration, EditableModel, InputError, TargetPass
from gracestream.pipeline.wording import convert_sentence_type
from gracestream.schemas.messages import ChatMessage, Inputs, is_chat

MAX_FORM_TOKENS = 512
"""Of a correction's prompt and its forms, with padding. Passes over longer ones would cost more than the training."""

QUESTION_LABEL = re.compile(r"(?:question|q):\s*", re.IGNORECASE)
ANSWER_LABELS = ("answer:", "a:")
"""The frame of a question that a model is to complete."""


def make_forms(inputs: Inputs) -> list[Inputs]:
    """Other forms of inputs, the most useful first; none of a pair, or of a chat that has earlier turns."""
    if isinstance(inputs, str):
        return list(_forms_of_text(inputs))
    if not is_chat(inputs) or any(message.role != "system" for message in inputs[:-1]):
        return []
    return list(_forms_of_chat(inputs))


def _forms_of_text(text: str) -> Iterator[Inputs]:
    core = text.rstrip()
    asked, framed = _split_frame(text)
    yield from (framed if asked == text.strip() else asked, f"{core}\n", _as_chat(asked))
    yield from _other_sentence_type(asked)
    yield from (core, f"{core} ", text.upper(), text.lower())


def _forms_of_chat(messages: tuple[ChatMessage, ...]) -> Iterator[Inputs]:
    text = messages[-1].content
    asked, framed = _split_frame(text)
    yield from (asked, framed)
    yield from _other_sentence_type(asked)
    yield from ((*messages[:-1], ChatMessage("user", other)) for other in (asked, text.upper(), text.lower()))
    if len(messages) > 1:
        yield _as_chat(text)


def _other_sentence_type(question: str) -> Iterator[str]:
    """The question as a statement, or the other way round, where a rule says how."""
    other = convert_sentence_type(question)
    if other is not None:
        yield other


def _split_frame(text: str) -> tuple[str, str]:
    """What a text asks without a frame and in one."""
    whole = text.strip()
    label = QUESTION_LABEL.match(whole)
    end = next((answer for answer in ANSWER_LABELS if whole.lower().endswith(answer)), "")
    if label is not None and end:
        asked = whole[label.end() : -len(end)]
        if asked.strip() and asked[-1:].isspace():
            return asked.strip(), text
    return whole, f"Question: {whole}\nAnswer:"


def _as_chat(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


def supervised_forms(model: EditableModel, inputs: Inputs, target: str) -> list[TargetPass]:
    """The passes that tell whether a causal model gives the target at each form; of other models there are none."""
    if not isinstance(model.task, CausalGeneration):
        return []
    own = model.task.tokenize(inputs).token_ids
    unknown = {model.task.tokenizer.unk_token_id} - set(own)
    taken, longest = {own}, len(own)
    found: list[TargetPass] = []
    for form in make_forms(inputs):
        try:
            prompt = model.task.tokenize(form).token_ids
            if prompt in taken or unknown & set(prompt):
                continue
            supervised = model.prepare_correction(form, target)[1]
        except InputError:
            continue
        if max(longest, len(prompt)) * (len(taken) + 1) <= MAX_FORM_TOKENS:
            found.append(supervised)
            taken.add(prompt)
            longest = max(longest, len(prompt))
    return found
