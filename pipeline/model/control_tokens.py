"""Tokenizers for users' text, in which the spelling of a control token (`</s>`, `[SEP]`, `<|im_end|>`) is plain text.

1. No part of a text becomes a control token. Control tokens that the tokenizer's template adds around a text stay.
2. A text without the spelling of a control token has the same tokens as under the original tokenizer.
3. The original tokenizer is not changed. It decodes, and its bytes are part of the model's fingerprint.

Control tokens are the special tokens, and added tokens spelled as markup, such as `<think>` or `<|User|>`: some
checkpoints do not mark these as special.
"""

import copy
import re
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers

PROBE_CONTEXTS = ("{}", " {} ", "a{}a", "a {} a")
"""Contexts in which the spelling of a control token is tried: alone, between spaces, in a word, and between words."""


def text_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer with the same vocabulary that reads control tokens in a text as plain text."""
    control_ids = control_tokens(tokenizer)
    copied = copy.copy(tokenizer)
    copied.split_special_tokens = True  # for slow tokenizers, this suffices
    if not tokenizer.is_fast:
        return copied
    spellings = {str(token) for token in control_ids.values()}
    not_special = [token for token in control_ids.values() if not token.special]
    if not_special or any(_encodes_control_token(copied, spelling, set(control_ids)) for spelling in spellings):
        copied = copy.deepcopy(tokenizer)  # a shallow copy shares the backend, which is changed below
        copied.split_special_tokens = True
        copied.add_tokens([AddedToken(str(token), special=True, normalized=False) for token in not_special], True)
        _split_spellings(
            copied, [spelling for spelling in spellings if _encodes_control_token(copied, spelling, set(control_ids))]
        )
    return copied


def control_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """The control tokens of a tokenizer by id, without the token for unknown words: any text may contain it."""
    added: dict[int, AddedToken] = dict(tokenizer.added_tokens_decoder)
    for token_id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
        added.setdefault(token_id, AddedToken(token, special=True))
    return {
        token_id: token
        for token_id, token in added.items()
        if (token.special or _is_markup(str(token.content))) and token_id != _unknown_token_id(tokenizer)
    }


def _is_markup(spelling: str) -> bool:
    """True for the spelling of markup: it has a letter, but no letter, digit or space at its ends."""
    ends = spelling[:1] + spelling[-1:]
    return any(character.isalpha() for character in spelling) and not any(
        character.isalnum() or character.isspace() for character in ends
    )


def _unknown_token_id(tokenizer: Any) -> int | None:
    """The id of the token for unknown words, or None."""
    model: Any = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
    if not hasattr(model, "unk_token"):  # a Unigram model does not expose its unknown token to Python
        return None if tokenizer.unk_token_id is None else int(tokenizer.unk_token_id)
    return None if model.unk_token is None else int(model.token_to_id(model.unk_token))


def _encodes_control_token(tokenizer: Any, spelling: str, control: set[int]) -> bool:
    """True if a text with this spelling gets a control token, as when the vocabulary also has it as a word."""
    texts = [context.format(spelling) for context in PROBE_CONTEXTS]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return any(token_id in control for token_ids in encoded for token_id in token_ids)


def _split_spellings(tokenizer: Any, spellings: list[str]) -> None:
    """Split these spellings after their first character, so that no vocabulary word matches the whole."""
    if not spellings:
        return
    backend = tokenizer.backend_tokenizer
    steps = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    # The splits come last: earlier steps that change the start of a text, such as a space before it, run only once.
    for spelling in sorted(spellings):
        first_character = f"{re.escape(spelling[:1])}(?={re.escape(spelling[1:])})"
        steps.append(pre_tokenizers.Split(Regex(first_character), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
