"""Wrapping of the model before training: torch.compile and DDP. Parameter names do not change."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bottega.core.errors import UsageError
from bottega.engines.torch.ranks import get_data_group


def wrap_in_ddp(model: Any, device: torch.device) -> Any:
    """Wrap the model in DDP, which averages gradients over ranks. No forward changes buffers, so they are not broadcast."""
    ddp = torch.nn.parallel.DistributedDataParallel
    has_new_name = "forward_sync_buffers" in inspect.signature(ddp.__init__).parameters  # since torch 2.13
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    return ddp(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=get_data_group(),
        gradient_as_bucket_view=True,
        **no_broadcast,
    )


def compile_model(model: torch.nn.Module, *, graphs: bool) -> Any:
    """Compile the model in the way that it supports: as a whole (with CUDA graphs if `graphs`), or one graph for all equal blocks.

    One graph for all blocks makes a cold start as fast as compiling one layer.
    """
    if hasattr(model, "compile_whole"):
        model.compile_whole(use_cuda_graphs=graphs)  # type: ignore[operator]
        return model
    if hasattr(model, "compile_blocks"):
        model.compile_blocks()  # type: ignore[operator]
        return model
    return torch.compile(model)


COMPILED_ATTRIBUTES = ("compiled", "compiled_block")
"""Attributes in which a module keeps the compiled form of its forward, or of a part of it."""


def compile_frozen_models(models: Mapping[str, Any], *, always: bool) -> None:
    """Compile the frozen models that support it, unless one is small and not `always`.

    Gradients pass through these models, so they may take most of the time of a step.
    """
    for model in models.values():
        if hasattr(model, "compile_parts"):
            model.compile_parts(always=always)


def uncompile_models(models: Iterable[Any]) -> None:
    """Undo `compile_model` and `compile_frozen_models`: the next forward is eager."""
    for model in models:
        if hasattr(model, "uncompile_parts"):
            model.uncompile_parts()
        for module in model.modules():
            for name in COMPILED_ATTRIBUTES:
                if getattr(module, name, None) is not None:
                    setattr(module, name, None)


def require_attribute(model: torch.nn.Module, attribute: str, key: str) -> None:
    """Raise UsageError, naming the recipe key, if the model lacks the attribute that the key sets."""
    if not hasattr(model, attribute):
        raise UsageError(f"{key}: {type(model).__name__} does not support it; remove it")
