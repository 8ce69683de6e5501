"""Texts that are being generated, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.core.errors import OutOfMemory, UsageError
from bottega.measurements import GIB
from bottega.models.decoder.config import TransformerShape

MIN_CHECKED_BYTES = 2**26
"""Size of a cache from which it is compared with the free memory."""
FEWER_TEXTS = "generate fewer texts at once (--count), or shorter ones (--max_tokens)"
NextTokens = list[int | None]
"""The new token of each prompt; None for a prompt that has stopped before."""


@dataclass
class TextRow:
    """One text being generated. `window` holds the tokens in the context; `is_cached` says whether the cache has them.

    The last token of the window is not in the cache yet: the next step reads it.
    """

    tokens: list[int]
    window: list[int]
    is_cached: bool = False
    has_stopped: bool = False

    @classmethod
    def start(cls, prompt: Sequence[int], shape: TransformerShape) -> TextRow:
        """Return the row of a prompt; with attention, its last `context` tokens are read."""
        return cls(list(prompt), list(prompt)[slice(-shape.context, None) if shape.has_attention else slice(None)])

    def append(self, token: int, stop_token: int | None) -> int | None:
        """Append a new token and return it; None if the text has stopped before."""
        if self.has_stopped:
            return None
        self.tokens.append(token)
        self.window.append(token)
        self.has_stopped = token == stop_token
        return token


def needs_reading(rows: Sequence[TextRow], shape: TransformerShape) -> bool:
    """Return whether a window must be read into the cache: that of a new prompt, or one that exceeds the context."""
    return any(not row.is_cached or (shape.has_attention and len(row.window) > shape.context) for row in rows)


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise a UsageError for the first invalid prompt."""
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {i} is empty; give at least one token, such as the end-of-text token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(
                f"prompt {i} has a token outside 0..{vocab_size - 1}; encode it with the tokenizer of this run"
            )
    if not prompts:
        raise UsageError("no prompts; give at least one")


def check_cache_memory(
    num_bytes: int, find_free: Callable[[], int], *, what: str, device: str, advice: str = FEWER_TEXTS
) -> None:
    """Raise OutOfMemory if a cache of `num_bytes` exceeds the free memory."""
    if num_bytes > MIN_CHECKED_BYTES and num_bytes > (free := find_free()):
        raise OutOfMemory(
            f"{what} need a cache of {num_bytes / GIB:.1f} GiB, and {device} has {free / GIB:.1f} GiB free; {advice}"
        )
