"""Generation with one `DecodeStep` per token: on a CPU step by step, on a GPU as CUDA graphs.

The tokens are those of `sampling.generate_tokens_plainly`.

B rows   V vocabulary   N steps of a block
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.models.decoder.step import DecodeStep
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.tasks.language.generated_text import TextRow, needs_reading
from bottega.tasks.language.gumbel import GumbelNoise
from bottega.tasks.language.step_graphs import StepGraphs
from bottega.tasks.language.text_rows import compute_next_logits
from bottega.tasks.language.token_choice import TokenChoice, find_repeated_tokens

MAX_BLOCK_STEPS = 32
"""Steps that a GPU takes before the host reads their tokens: few enough that printing seems continuous at 1,000 tokens/s."""


@dataclass(frozen=True)
class GenerationPlan:
    """What is to be generated, and its state: the texts, and the cache of their tokens."""

    model: Transformer
    rows: list[TextRow]
    cache: DecoderCache
    choice: TokenChoice
    seed: int
    max_new_tokens: int
    stop_token: int | None
    device: torch.device
    dtype: torch.dtype

    @property
    def is_finished(self) -> bool:
        """Whether all texts have stopped."""
        return all(row.has_stopped for row in self.rows)

    def append(self, next_tokens: list[int]) -> list[int | None]:
        """Append one token to each row; return them, None for rows that have stopped before."""
        return [row.append(token, self.stop_token) for row, token in zip(self.rows, next_tokens, strict=True)]

    def build_noise(self) -> GumbelNoise | None:
        """Return the noise of the choices; None if they are greedy."""
        if self.choice.is_greedy:
            return None
        vocab_size = self.model.shape.vocab_size
        return GumbelNoise(self.seed, rows=range(len(self.rows)), vocab_size=vocab_size, device=self.device)

    def find_repeated_tokens(self) -> Tensor | None:
        """Return the mask (B, V) of tokens that each row has; None without a penalty."""
        if self.choice.repetition_penalty == 1.0:
            return None
        like = torch.empty(len(self.rows), self.model.shape.vocab_size, device=self.device)
        return find_repeated_tokens([row.tokens for row in self.rows], like)


def generate_on_host(plan: GenerationPlan) -> Iterator[list[int | None]]:
    """Yield the new tokens of each step; each is known on the host before the next step."""
    rows, device = plan.rows, plan.device
    with torch.no_grad():
        decode = DecodeStep(plan.model, plan.cache, dtype=plan.dtype)
    noise, is_repeated = plan.build_noise(), plan.find_repeated_tokens()
    for index in range(plan.max_new_tokens):
        with torch.inference_mode():
            if needs_reading(rows, plan.model.shape):
                logits = compute_next_logits(plan.model, rows, plan.cache, device=device)
            else:
                positions = [len(row.window) - 1 for row in rows]
                is_even = positions.count(positions[0]) == len(positions)
                position = positions[0] if is_even else torch.tensor(positions, device=device)
                tokens = torch.tensor([row.window[-1] for row in rows], device=device)
                logits = decode(tokens, position, max(positions) + 1)
            chosen = plan.choice.choose(logits, None if noise is None else noise.take(index), is_repeated)
            if is_repeated is not None:
                is_repeated.scatter_(1, chosen[:, None], True)
            next_tokens = chosen.tolist()
        yield plan.append(next_tokens)
        if plan.is_finished:
            return


class GraphDecoder:
    """Generation on a GPU: blocks of steps as CUDA graphs, whose tokens the host reads while the next block runs.

    A step reads and writes tensors on the device only: the last tokens, their positions, the noise, and the tokens of the
    block. New prompts, and texts that exceed the context, are read by the model between blocks.
    """

    def __init__(self, plan: GenerationPlan) -> None:
        """Steps are captured when they are first used."""
        self.num_generated = 0
        self.failure: Exception | None = None
        """The error because of which `generate` has ended early."""
        self._plan = plan
        num_rows, vocab_size, device = len(plan.rows), plan.model.shape.vocab_size, plan.device
        self._noise, self._is_repeated = plan.build_noise(), plan.find_repeated_tokens()
        self._block_steps = MAX_BLOCK_STEPS
        self._gumbel: Tensor | None = None
        if self._noise is not None:
            self._block_steps = min(MAX_BLOCK_STEPS, self._noise.tokens_per_draw)
            self._gumbel = torch.empty(self._block_steps, num_rows, vocab_size, device=device)
        self._tokens, self._positions = (torch.zeros(num_rows, dtype=torch.long, device=device) for _ in range(2))
        self._has_stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._slot = torch.zeros(1, dtype=torch.long, device=device)
        self._chosen = torch.zeros(self._block_steps, num_rows, dtype=torch.long, device=device)
        self._decode: DecodeStep | None = None
        state = [self._tokens, self._positions, self._has_stopped, self._slot, self._chosen]
        state += [] if self._is_repeated is None else [self._is_repeated]
        self._graphs = StepGraphs(self._take_step, plan.cache, state=state)

    def generate(self) -> Iterator[list[int | None]]:
        """Yield the new tokens of each step. If a graph cannot be captured, end early and set `failure`."""
        num_steps = self._start_block()
        while num_steps:
            block = [self._plan.append(tokens) for tokens in self._chosen[:num_steps].tolist()]
            self.num_generated += num_steps
            is_last = self._plan.is_finished or self.num_generated >= self._plan.max_new_tokens
            num_steps = 0 if is_last else self._start_block()
            # After the last text has stopped, a block has only rows of None.
            yield from (tokens for tokens in block if any(token is not None for token in tokens))

    def release(self) -> None:
        """Free the graphs, and the copies of weights and noise without waiting for the garbage collector."""
        self._graphs.release()
        self._decode = self._gumbel = None

    @torch.no_grad()
    def _start_block(self) -> int:
        """Let the device compute the next tokens; return their number, 0 after a failure."""
        plan, shape = self._plan, self._plan.model.shape
        num_steps = min(self._block_steps, plan.max_new_tokens - self.num_generated)
        self._slot.zero_()
        if needs_reading(plan.rows, shape):
            self._draw_noise(1)
            logits = compute_next_logits(plan.model, plan.rows, plan.cache, device=plan.device)
            self._positions.copy_(torch.tensor([len(row.window) - 1 for row in plan.rows]))
            self._choose(logits)
            return 1
        length = max(len(row.window) for row in plan.rows if not row.has_stopped)
        if shape.has_attention:
            num_steps = min(num_steps, shape.context - length + 1)
        self._draw_noise(num_steps)
        try:
            if self._decode is None:
                self._decode = DecodeStep(plan.model, plan.cache, dtype=plan.dtype, for_graph=True)
            graph = self._graphs.find(length + num_steps - 1)
            for _ in range(num_steps):
                graph.replay()
        except Exception as error:
            self.failure = error
            return 0
        return num_steps

    def _draw_noise(self, num_steps: int) -> None:
        if self._noise is not None and self._gumbel is not None:
            indices = range(self.num_generated, self.num_generated + num_steps)
            self._gumbel[:num_steps] = self._noise.draw(indices)

    def _take_step(self, stop: int) -> None:
        assert self._decode is not None
        self._choose(self._decode(self._tokens, self._positions, stop))

    def _choose(self, logits: Tensor) -> None:
        """Choose the next tokens and advance the state on the device."""
        gumbel = None if self._gumbel is None else self._gumbel.index_select(0, self._slot)[0]
        chosen = self._plan.choice.choose(logits, gumbel, self._is_repeated)
        if self._is_repeated is not None:
            self._is_repeated.scatter_(1, chosen[:, None], True)
        self._chosen.index_copy_(0, self._slot, chosen[None])
        self._positions += ~self._has_stopped
        if self._plan.stop_token is not None:
            chosen = torch.where(self._has_stopped, self._plan.stop_token, chosen)
            self._has_stopped |= chosen == self._plan.stop_token
        self._tokens.copy_(chosen)
        self._slot += 1
