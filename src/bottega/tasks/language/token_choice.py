"""The choice of the next token from its logits: repetition penalty, temperature, top-k, top-p and Gumbel noise.

B rows   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenChoice:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is used."""
        return self.temperature == 0.0

    def check(self) -> None:
        """Raise a UsageError for the first invalid option."""
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(
                f"temperature {self.temperature}: expected a finite number of 0 or more; 0 is greedy, 1 is the model's own distribution"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k {self.top_k}: expected 1 or more; remove it to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}: expected a number above 0 and at most 1")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise UsageError(
                f"repetition_penalty {self.repetition_penalty}: expected a finite number above 0; 1 is off, 1.1 is mild"
            )

    def choose(self, logits: Tensor, gumbel: Tensor | None, is_repeated: Tensor | None) -> Tensor:
        """Return one token for each row, (B), from logits (B, V).

        `gumbel` (B, V) is the noise, None if greedy; `is_repeated` (B, V) marks tokens that a row already has, None without
        a penalty.
        """
        if is_repeated is not None:
            logits = penalise_repetition(logits, is_repeated, penalty=self.repetition_penalty)
        if self.is_greedy:
            return logits.argmax(dim=-1)
        assert gumbel is not None
        logits = filter_logits(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return (logits + gumbel).argmax(dim=-1)


def to_gumbel(uniform: Tensor) -> Tensor:
    """Turn uniform numbers into Gumbel noise, in place: the largest of logits plus this noise is a draw from their softmax."""
    return uniform.log_().neg_().log_().neg_()


def find_repeated_tokens(previous_tokens: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Return a mask (B, V), of the shape and device of `like`, of the tokens that each row already has."""
    import torch  # not at the top, because JAX shares the options

    is_repeated = torch.zeros_like(like, dtype=torch.bool)
    for row, tokens in zip(is_repeated, previous_tokens, strict=True):
        row[torch.tensor(sorted(set(tokens)), device=like.device)] = True
    return is_repeated


def penalise_repetition(logits: Tensor, is_repeated: Tensor, *, penalty: float) -> Tensor:
    """Lower the logits of repeated tokens (Keskar et al., 2019)."""
    penalised = (logits / penalty).where(logits > 0, logits * penalty)
    return penalised.where(is_repeated, logits)


def filter_logits(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return logits divided by the temperature, with -inf for tokens that top-k or top-p leave out."""
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        min_logit = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < min_logit, -math.inf)
    if top_p is not None and top_p < 1.0:
        sorted_logits, order = logits.sort(dim=-1, descending=True)
        probabilities = sorted_logits.softmax(dim=-1)
        # A token stays while the tokens before it sum to less than top_p, so the first one always stays.
        is_dropped = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits = logits.masked_fill(is_dropped.new_zeros(is_dropped.shape).scatter(1, order, is_dropped), -math.inf)
    return logits
