"""Gumbel noise of many tokens at once: the same numbers as `Noise` draws for one, in a tenth of the time per token.

The cipher of `core.noise` on 32-bit integers in place: half the memory, no masks after additions, and no new arrays. At a
vocabulary of 1,024 a token's noise takes 12 us on a CPU, where `Noise` takes 270 us, most of it the host's time for 140
operations. N tokens   B rows   V vocabulary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bottega.core.errors import first_line
from bottega.core.noise import ROTATIONS, derive_key
from bottega.tasks.language.token_choice import to_gumbel
from bottega.terminal import print_notice

MAX_CPU_NUMBERS, MAX_CUDA_NUMBERS = 2**16, 2**24
"""Numbers drawn at once: on a CPU, so that the arrays of the cipher stay in its cache; on a GPU 64 MiB."""
MAX_TOKENS = 64
"""Tokens whose noise is drawn at once; more save no time, and would be lost when a text ends early."""


class GumbelNoise:
    """The noise of the new tokens of each row, drawn ahead: a function of seed, index of the token, and row."""

    def __init__(self, seed: int, *, rows: Sequence[int] | Tensor, vocab_size: int, device: torch.device | str) -> None:
        self.seed = seed
        self._rows = torch.as_tensor(rows, device=device).to(torch.int32)
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._draw_uniform = find_uniform_kernel() if self._device.type == "cuda" else draw_uniform
        self._first, self._ahead = 0, torch.empty(0, len(rows), vocab_size, device=device)

    @property
    def tokens_per_draw(self) -> int:
        """Number of tokens whose noise is drawn at once."""
        limit = MAX_CPU_NUMBERS if self._device.type == "cpu" else MAX_CUDA_NUMBERS
        return max(1, min(MAX_TOKENS, limit // (len(self._rows) * self._vocab_size)))

    def take(self, index: int) -> Tensor:
        """Return the noise (B, V) of the new token `index`; it is drawn together with that of the next ones."""
        if not self._first <= index < self._first + len(self._ahead):
            self._first, self._ahead = index, self.draw(range(index, index + self.tokens_per_draw))
        return self._ahead[index - self._first]

    def draw(self, indices: Sequence[int]) -> Tensor:
        """Return the noise (N, B, V) of the new tokens `indices`."""
        keys = [derive_key(self.seed, index, "gumbel") for index in indices]
        words = torch.tensor([[_to_signed(word) for word in key] for key in keys], dtype=torch.int32)
        return to_gumbel(self._draw_uniform(words.to(self._device), self._rows, self._vocab_size))


@functools.cache
def find_uniform_kernel() -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return the fastest `draw_uniform` for the current GPU: the kernel, if there is one and it draws the same numbers."""
    keys = torch.tensor([[1, -2], [-(2**31), 2**31 - 1]], dtype=torch.int32, device="cuda")
    rows = torch.tensor([0, 7, -3], dtype=torch.int32, device="cuda")
    try:
        from bottega.models import uniform_kernel

        if torch.equal(uniform_kernel.draw_uniform(keys, rows, 1500), draw_uniform(keys, rows, 1500)):
            return uniform_kernel.draw_uniform
        reason = "its numbers are wrong on this GPU"
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    print_notice(f"bottega: noise is drawn without its kernel, which is slower: {reason}")
    return draw_uniform


def _to_signed(word: int) -> int:
    """Return the 32-bit signed integer with the bits of `word`."""
    return word - (1 << 32) if word >> 31 else word


def draw_uniform(keys: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return `Noise.uniform` (N, B, V) for key words (N, 2) and rows (B), both int32.

    Additions of int32 wrap around; a right shift keeps the sign, whose bits are cut off by a mask.
    """
    first, second = keys[..., None, None].unbind(1)
    words = (first, second, first ^ second ^ 0x1BD11BDA)
    draws = torch.arange(count, dtype=torch.int32, device=keys.device)
    shape = (len(keys), len(rows), count)
    x, y = (rows[:, None] + words[0]).expand(shape).clone(), (draws + words[1]).expand(shape).clone()
    high_bits = torch.empty_like(y)
    for i in range(20):
        rotation = ROTATIONS[i % 8]
        x += y
        torch.bitwise_right_shift(y, 32 - rotation, out=high_bits)
        high_bits &= (1 << rotation) - 1
        y <<= rotation
        y |= high_bits
        y ^= x
        if i % 4 == 3:
            j = i // 4 + 1
            x += words[j % 3]
            y += words[(j + 1) % 3] + j
    x >>= 9
    x &= (1 << 23) - 1
    return x.to(torch.float32).add_(0.5).mul_(1.0 / (1 << 23))
