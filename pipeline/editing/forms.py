"""Forms of a correction's inputs, made by rules: the same request with another frame, ending or capitalisation.

A value is injected at the last token of a prompt. So a value trained on one prompt often fails if the request ends in
another token, such as a line break. Training therefore continues on these forms.

1. The same inputs have the same forms, in the same order, under the same tokenizer.
2. The prompts of the correction and its forms all differ. A form has no unknown token unless the correction has it too.
3. A form is left out if the model cannot take it, or if it would make the batch of all forms too large.

Not promised: that the value predicts the target at every form.
"""

import re
from collections.abc import Iterator

from gracestream.pipeline.model import CausalGeneration, EditableModel, InputError, TargetPass
from gracestream.pipeline.wording import convert_sentence_type
from gracestream.schemas.messages import ChatMessage, Inputs, is_chat

MAX_FORM_TOKENS = 512
"""Tokens of the batch of a correction and its forms, with padding. Larger batches would cost more than the training."""

QUESTION_LABEL = re.compile(r"(?:question|q):\s*", re.IGNORECASE)
ANSWER_LABELS = ("answer:", "a:")
"""Endings of the frame `Question: ... Answer:`, in which the model completes the answer."""


def make_forms(inputs: Inputs) -> list[Inputs]:
    """Forms of these inputs, the most useful first.

    A pair of texts has none, and neither has a chat with earlier turns.
    """
    if isinstance(inputs, str):
        return list(_forms_of_text(inputs))
    if not is_chat(inputs) or any(message.role != "system" for message in inputs[:-1]):
        return []
    return list(_forms_of_chat(inputs))


def _forms_of_text(text: str) -> Iterator[Inputs]:
    """Forms of a plain text, which include a chat with it as the only message."""
    stripped = text.rstrip()
    request, framed = _split_frame(text)
    yield from (framed if request == text.strip() else request, f"{stripped}\n", _as_chat(request))
    yield from _other_sentence_type(request)
    yield from (stripped, f"{stripped} ", text.upper(), text.lower())


def _forms_of_chat(messages: tuple[ChatMessage, ...]) -> Iterator[Inputs]:
    """Forms of a chat without earlier turns; some keep its system message and some are plain texts."""
    text = messages[-1].content
    request, framed = _split_frame(text)
    yield from (request, framed)
    yield from _other_sentence_type(request)
    yield from ((*messages[:-1], ChatMessage("user", form)) for form in (request, text.upper(), text.lower()))
    if len(messages) > 1:
        yield _as_chat(text)


def _other_sentence_type(question: str) -> Iterator[str]:
    """The question as a statement, or the statement as a question; nothing if no rule applies."""
    converted = convert_sentence_type(question)
    if converted is not None:
        yield converted


def _split_frame(text: str) -> tuple[str, str]:
    """The request of a text without a frame, and the request within a frame."""
    whole = text.strip()
    label = QUESTION_LABEL.match(whole)
    end = next((answer for answer in ANSWER_LABELS if whole.lower().endswith(answer)), "")
    if label is not None and end:
        request = whole[label.end() : -len(end)]
        if request.strip() and request[-1:].isspace():  # else it is the end of a word, as in "pizza:"
            return request.strip(), text
    return whole, f"Question: {whole}\nAnswer:"


def _as_chat(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


def supervised_forms(model: EditableModel, inputs: Inputs, target: str) -> list[TargetPass]:
    """Passes over the forms with the target, for checks and training; none for models that are not causal."""
    if not isinstance(model.task, CausalGeneration):
        return []
    own = model.task.tokenize(inputs).token_ids
    unknown = {model.task.tokenizer.unk_token_id} - set(own)
    seen_prompts, max_tokens = {own}, len(own)
    passes: list[TargetPass] = []
    for form in make_forms(inputs):
        try:
            prompt = model.task.tokenize(form).token_ids
            if prompt in seen_prompts or unknown & set(prompt):
                continue
            target_pass = model.prepare_correction(form, target)[1]
        except InputError:
            continue
        # The batch has a row for the correction, each form so far and this one, all padded to the longest of them.
        if max(max_tokens, len(prompt)) * (len(seen_prompts) + 1) <= MAX_FORM_TOKENS:
            passes.append(target_pass)
            seen_prompts.add(prompt)
            max_tokens = max(max_tokens, len(prompt))
    return passes
