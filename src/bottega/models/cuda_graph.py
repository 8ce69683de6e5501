"""A computation over static tensors as a CUDA graph: the host launches hundreds of kernels in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.core.errors import first_line
from bottega.terminal import print_notice


class CapturedGraph:
    """A CUDA graph of a function without arguments, which reads and writes tensors at fixed addresses.

    The function must not wait for the device. Call `release` at the end: a graph owns the memory of its intermediate results.
    """

    def __init__(
        self,
        function: Callable[[], object],
        *,
        state: Sequence[Tensor] = (),
        pool: CapturedGraph | None = None,
        is_warm: bool = False,
    ) -> None:
        """Capture `function`; with `pool`, in the memory of another graph, which never runs at the same time.

        It is called once before, which chooses and loads kernels: that is not possible during the capture. `state` are tensors
        that it updates rather than overwrites, which are restored. With `is_warm` it has been called with such tensors already.
        """
        with without_autocast_cache():
            if not is_warm:
                saved = [tensor.clone() for tensor in state]
                function()
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
            self._graph = torch.cuda.CUDAGraph()
            # Only calls of this thread are checked: loaders and watchdogs of a training run go on in theirs.
            with torch.cuda.graph(
                self._graph,
                pool=None if pool is None else pool._graph.pool(),
                capture_error_mode="thread_local",
            ):
                function()

    def replay(self) -> None:
        """Run the captured kernels; returns before they have finished."""
        self._graph.replay()

    def release(self) -> None:
        """Free the graph and its memory."""
        self._graph.reset()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Context without cached casts of weights, which are freed at the end of an autocast block while a graph still reads them."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def report_failed_capture(activity: str, error: Exception) -> None:
    """Print once per process that `activity` goes on without a CUDA graph."""
    _print_once(
        f"bottega: {activity} without a CUDA graph, which is slower: {type(error).__name__}: {first_line(error)}"
    )


@functools.cache
def _print_once(text: str) -> None:
    print_notice(text)
