"""A stand-in for CUDA graphs, for tests of captured steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class EagerGraph:
    """Stand-in for a captured graph: the same warm-up and restored state, and replays that call the function."""

    captured = 0

    def __init__(
        self,
        function: Callable[[], object],
        *,
        state: Sequence[torch.Tensor] = (),
        pool: Any = None,
        is_warm: bool = False,
    ) -> None:
        if not is_warm:
            saved = [tensor.clone() for tensor in state]
            function()
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
        self.replay = function
        EagerGraph.captured += 1

    def release(self) -> None:
        del self.replay
