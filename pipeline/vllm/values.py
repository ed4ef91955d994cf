"""Values on their way to vLLM's workers: each request carries the value of the entry that serves it.

Shapes: V width of a value.
"""

import hashlib

import numpy as np
from vllm.sampling_params import SamplingParams

from gracestream.pipeline.codebook import CodebookLookup, FoundEntry

EXTRA_ARGUMENT = "gracestream"
"""The key of a value among a request's extra arguments. Only bytes count: a client of the HTTP API cannot send any."""


def value_bytes(lookup: CodebookLookup, found: FoundEntry) -> bytes:
    """The value (V) of a found entry, as little-endian float32."""
    value_V: np.ndarray = lookup.codebook.values_NV[found.slot]
    return value_V.astype("<f4").tobytes()


def value_array(data: bytes) -> np.ndarray:
    """The value (V), float32, from its bytes."""
    return np.frombuffer(data, "<f4").astype(np.float32)


def carry_value(parameters: SamplingParams, value: bytes | None) -> SamplingParams:
    """A copy of the parameters with a value; None removes what a client may have sent."""
    extra = {name: item for name, item in (parameters.extra_args or {}).items() if name != EXTRA_ARGUMENT}
    if value is not None:
        extra[EXTRA_ARGUMENT] = value
    copied = parameters.clone()
    copied.extra_args = extra or None
    return copied


def carried_value(parameters: SamplingParams | None) -> bytes | None:
    """The value that parameters carry; None without one."""
    extra = None if parameters is None else parameters.extra_args
    value = (extra or {}).get(EXTRA_ARGUMENT)
    return value if isinstance(value, bytes) else None


def edited_salt(num_tokens: int, value: bytes, salt: str | None = None) -> str:
    """The cache salt of a prompt whose last token gets a value.

    The value changes the keys and values of that token and of all later ones. vLLM shares blocks of equal tokens among
    requests with an equal salt. So the salt of an edited prompt names the value and where it is injected.

    Args:
        num_tokens: Of the prompt.
        value: To inject at the last token.
        salt: The salt that the client asks for.
    """
    return hashlib.sha256(f"{num_tokens} {salt or ''} ".encode() + value).hexdigest()
