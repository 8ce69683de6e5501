"""What is done to a model before it trains: compiled, or replicated over ranks. Its names stay as they were."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from bottega.core.errors import UsageError
from bottega.engines.torch.ranks import data_group


def wrap_in_ddp(model: Any, device: torch.device) -> Any:
    """The model with gradients averaged over the shares of a batch. Nothing of ours changes a buffer in a forward, so none travels."""
    kind = torch.nn.parallel.DistributedDataParallel
    newer = "forward_sync_buffers" in inspect.signature(kind.__init__).parameters  # its name since torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    return kind(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=data_group(),
        gradient_as_bucket_view=True,
        **buffers,
    )


def compile_model(model: torch.nn.Module, *, graphs: bool) -> Any:
    """As the model offers it: one graph for all equal blocks, so that a cold start costs one layer, or one for all of it,
    whose kernels `graphs` lets the device replay by itself."""
    if hasattr(model, "compile_whole"):
        model.compile_whole(graphs=graphs)  # type: ignore[operator]
        return model
    if hasattr(model, "compile_blocks"):
        model.compile_blocks()  # type: ignore[operator]
        return model
    return torch.compile(model)


def compile_frozen_models(models: Mapping[str, Any], *, always: bool) -> None:
    """Those that gradients pass through take most of the time, and offer it."""
    for model in models.values():
        if hasattr(model, "compile_parts"):
            model.compile_parts(always=always)


def require_attribute(model: torch.nn.Module, attribute: str, key: str) -> None:
    if not hasattr(model, attribute):
        raise UsageError(f"{key}: {type(model).__name__} does not offer it")
