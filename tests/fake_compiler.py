"""A backend of torch.compile that runs graphs as they are, counts them, and may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bottega.engines.torch.noise import forget_compiled_draws
from bottega.models import attention


class FakeCompiler:
    """Results are those of the eager model, bit for bit. It fails to compile, or in the call number `failing_call` of a graph."""

    def __init__(self, *, fails_to_compile: bool = False, failing_call: int | None = None) -> None:
        self.fails_to_compile, self.failing_call = fails_to_compile, failing_call
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        if self.fails_to_compile:
            raise RuntimeError("Failed to find C compiler\nand more")
        self.num_graphs += 1

        def call(*values: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.failing_call:
                raise RuntimeError("Triton Error [CUDA]: an illegal instruction")
            return graph(*values)

        return call


@contextmanager
def use_compiler(compiler: FakeCompiler) -> Iterator[FakeCompiler]:
    """Make torch.compile use a backend in this block."""
    original = torch.compile
    _forget_compiled_functions()
    torch.compile = lambda f, **options: original(f, **{**options, "mode": None, "backend": compiler})  # type: ignore[assignment]
    try:
        yield compiler
    finally:
        torch.compile = original
        _forget_compiled_functions()


def _forget_compiled_functions() -> None:
    torch.compiler.reset()
    forget_compiled_draws()
    attention._compile_flex_attention.cache_clear()
    attention._compile_create_block_mask.cache_clear()
