"""A decoding step as CUDA graphs, one for each number of positions that it attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bottega.models.cuda_graph import CapturedGraph
from bottega.models.decoder.torch import DecoderCache
from bottega.models.ssm.torch import SSMState

MIN_ATTENDED_POSITIONS = 128
"""Positions in the cache that the shortest captured step attends to; each longer one attends to twice as many."""


class StepGraphs:
    """The graphs of `step(stop)`, which reads and writes tensors at fixed addresses and attends to positions before `stop`."""

    def __init__(self, step: Callable[[int], None], cache: DecoderCache, *, state: Sequence[Tensor]) -> None:
        """`state` are the tensors that a step advances, besides those of the cache."""
        self._step, self._cache = step, cache
        # Keys and values are overwritten by the same ones; the state of a state space would take a token twice.
        self._state = [*state, *(t for layer in cache.layers if isinstance(layer, SSMState) for t in layer)]
        self._graphs: dict[int, CapturedGraph] = {}

    def find(self, length: int) -> CapturedGraph:
        """Return the graph of a step that attends to at least `length` positions; it is captured when first used."""
        stop = MIN_ATTENDED_POSITIONS
        while stop < length:
            stop *= 2
        stop = min(stop, self._cache.length)  # 0 without attention
        if stop not in self._graphs:
            pool = next(iter(self._graphs.values()), None)
            self._graphs[stop] = CapturedGraph(lambda: self._step(stop), state=self._state, pool=pool)
        return self._graphs[stop]

    def release(self) -> None:
        """Free the graphs."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
