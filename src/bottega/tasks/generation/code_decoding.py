"""Sampling of codes one after the other: step by step, or on a GPU as CUDA graphs.

b samples   n codes of a sample   R rows of the model: b, or 2 b with guidance   K codes in the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.models.decoder.step import DecodeStep
from bottega.models.decoder.torch import DecoderCache
from bottega.tasks.language.gumbel import GumbelNoise
from bottega.tasks.language.step_graphs import StepGraphs
from bottega.tasks.language.token_choice import TokenChoice

MAX_BLOCK_STEPS = 16
"""Codes that a GPU draws before progress is reported."""


@dataclass(frozen=True)
class CodeRequest:
    """What is to be drawn: n codes for each sample."""

    first_tokens: Tensor
    """The conditions (R); with guidance, the second half are those of the first without their condition."""
    length: int
    choice: TokenChoice
    noise: GumbelNoise | None
    """None if the choice is greedy."""
    num_codes: int
    guidance: float | None
    """None if the rows are not doubled."""
    progress: Callable[[int, int], None]

    def choose(self, logits: Tensor, gumbel: Tensor | None) -> Tensor:
        """Return the next code of each sample, (b), from logits (R, V); only codes are sampled, not condition tokens."""
        logits = logits[:, : self.num_codes]
        if self.guidance is not None:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + self.guidance * (conditional - unconditional)
        return self.choice.choose(logits, gumbel, None)

    def to_rows(self, codes: Tensor) -> Tensor:
        """Return the codes of the samples as tokens of all rows."""
        return codes if self.guidance is None else codes.repeat(2)


class CaptureFailed(Exception):
    """A step could not be captured as a CUDA graph, because of `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def draw_by_steps(request: CodeRequest, compute_logits: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return codes (b, n); `compute_logits(tokens (R), position)` returns logits (R, V) and extends the cache."""
    tokens, sampled = request.first_tokens, []
    for index in range(request.length):
        gumbel = None if request.noise is None else request.noise.take(index)
        sampled.append(request.choose(compute_logits(tokens, index), gumbel))
        tokens = request.to_rows(sampled[-1])
        request.progress(index + 1, request.length)
    return torch.stack(sampled, dim=1)


def draw_by_graphs(request: CodeRequest, decode: DecodeStep, cache: DecoderCache) -> Tensor:
    """Return the same codes from captured steps; `decode` must be one for graphs, over `cache`.

    Raises CaptureFailed.
    """
    length, num_samples = request.length, len(request.first_tokens) // (1 if request.guidance is None else 2)
    tokens, positions = request.first_tokens.clone(), torch.zeros_like(request.first_tokens)
    index = torch.zeros(1, dtype=torch.long, device=tokens.device)
    codes = torch.zeros(length, num_samples, dtype=torch.long, device=tokens.device)
    block_steps, gumbel = MAX_BLOCK_STEPS, None
    if request.noise is not None:
        block_steps = min(MAX_BLOCK_STEPS, request.noise.tokens_per_draw)
        gumbel = torch.empty(block_steps, num_samples, request.num_codes, device=tokens.device)

    def take_step(stop: int) -> None:
        noise = None if gumbel is None else gumbel.index_select(0, index % block_steps)[0]
        chosen = request.choose(decode(tokens, positions, stop), noise)
        codes.index_copy_(0, index, chosen[None])
        tokens.copy_(request.to_rows(chosen))
        positions.add_(1)
        index.add_(1)

    graphs = StepGraphs(take_step, cache, state=[tokens, positions, index, codes])
    try:
        for start in range(0, length, block_steps):
            stop = min(length, start + block_steps)
            if request.noise is not None and gumbel is not None:
                gumbel[: stop - start] = request.noise.draw(range(start, stop))
            try:
                graph = graphs.find(stop)
            except Exception as error:
                raise CaptureFailed(error) from error
            for _ in range(start, stop):
                graph.replay()
            if tokens.is_cuda:
                torch.cuda.current_stream().synchronize()
            request.progress(stop, length)
        return codes.t().contiguous()
    finally:
        graphs.release()
