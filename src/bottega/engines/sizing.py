"""How much memory a model takes to train, known from its shape before any of it is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bottega.core.errors import UsageError
from bottega.core.task import Task


class WithoutMemory(TorchFunctionMode):
    """Everything that torch creates lies on the meta device, whatever device the caller names."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "empty",
        "empty_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "randn",
        "rand",
    )
)


def build_without_memory(task: Task, seed: int) -> Mapping[str, nn.Module] | None:
    """The models of a task with shapes and without memory; None where one can only be built from its files."""
    try:
        with torch.device("meta"), WithoutMemory():
            return task.build(seed)
    except UsageError:
        raise
    except Exception:  # transformers and diffusers refuse to read weights into a model without memory, each in its way
        return None
