"""Tokenizers for text of users: what looks like a control token (`</s>`, `[SEP]`, `<|im_end|>`) is text like any other.

1. No part of a text becomes a control token; those that the tokenizer's template adds around a text stay.
2. A text without the spelling of a control token has the same tokens as under the tokenizer that was given.
3. The tokenizer that was given stays as it is: it decodes, and its bytes are part of the model's fingerprint.

Control tokens are the special ones, and added ones that are spelled as markup, such as `<think>` or `<|User|>`, which
some checkpoints do not call special.
"""

import copy
import re
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers

PROBE_CONTEXTS = ("{}", " {} ", "a{}a", "a {} a")
"""Surroundings in which a control token's spelling is tried."""


def text_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer that reads control tokens in a text as text, with the vocabulary of this one."""
    control = control_tokens(tokenizer)
    made = copy.copy(tokenizer)
    made.split_special_tokens = True
    if not tokenizer.is_fast:
        return made
    spellings = {str(token) for token in control.values()}
    unmarked = [token for token in control.values() if not token.special]
    if unmarked or any(_encodes_control_token(made, spelling, set(control)) for spelling in spellings):
        made = copy.deepcopy(tokenizer)  # the backend is shared by a shallow copy
        made.split_special_tokens = True
        made.add_tokens([AddedToken(str(token), special=True, normalized=False) for token in unmarked], True)
        _split_spellings(made, [one for one in spellings if _encodes_control_token(made, one, set(control))])
    return made


def control_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """The control tokens of a tokenizer, by their ids; not that of unknown words, which any text may have."""
    added: dict[int, AddedToken] = dict(tokenizer.added_tokens_decoder)
    for token_id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
        added.setdefault(token_id, AddedToken(token, special=True))
    return {
        token_id: token
        for token_id, token in added.items()
        if (token.special or _is_markup(str(token.content))) and token_id != _unknown_token_id(tokenizer)
    }


def _is_markup(spelling: str) -> bool:
    """Whether an added token is spelled as one to steer a model, and is neither a word nor white space."""
    ends = spelling[:1] + spelling[-1:]
    return any(one.isalpha() for one in spelling) and not any(one.isalnum() or one.isspace() for one in ends)


def _unknown_token_id(tokenizer: Any) -> int | None:
    """The id of what the vocabulary has no word for."""
    model: Any = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
    if not hasattr(model, "unk_token"):  # as of Unigram, which has it under a name that Python cannot read
        return None if tokenizer.unk_token_id is None else int(tokenizer.unk_token_id)
    return None if model.unk_token is None else int(model.token_to_id(model.unk_token))


def _encodes_control_token(tokenizer: Any, spelling: str, control: set[int]) -> bool:
    """Whether a text with this spelling has a control token: a vocabulary may hold it as a word of its own."""
    texts = [context.format(spelling) for context in PROBE_CONTEXTS]
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return any(token in control for tokens in found for token in tokens)


def _split_spellings(tokenizer: Any, spellings: list[str]) -> None:
    """Split these spellings after their first character, so that the vocabulary has no word for the whole."""
    if not spellings:
        return
    backend = tokenizer.backend_tokenizer
    steps = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    # After the other steps: what they do to the start of a text, such as a space before it, they do once.
    for spelling in sorted(spellings):
        inside = f"{re.escape(spelling[:1])}(?={re.escape(spelling[1:])})"
        steps.append(pre_tokenizers.Split(Regex(inside), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
