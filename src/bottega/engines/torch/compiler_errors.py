"""Errors of the compiler, which an engine answers by continuing without it."""

from __future__ import annotations

from bottega.core.errors import BottegaError, first_line
from bottega.engines.torch.micro_batches import is_out_of_memory
from bottega.engines.torch.ranks import is_lost_peer


def may_be_compiler_error(error: BaseException) -> bool:
    """Return whether the same step may succeed without the compiler.

    The compiler, its backends and Triton raise errors of many types, also plain RuntimeErrors, so only those are excluded
    that are surely of another cause. If the eager step fails too, its own error is raised.
    """
    return not (isinstance(error, BottegaError) or is_out_of_memory(error) or is_lost_peer(error))


def describe_compiler_error(error: BaseException) -> str:
    """Return the type and the first line of the error inside the one that the compiler raises."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException) and inner is not error:
        error = inner
    return f"{type(error).__name__}: {first_line(error)}"
