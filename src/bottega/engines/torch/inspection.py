"""Inspection of the model with one batch: gradient norms by module, and the first non-finite value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bottega.core.batch import batch_length
from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.engines.out_of_memory import build_out_of_memory_error
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.wrapping import COMPILED_ATTRIBUTES

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine


def inspect_modules(engine: TorchEngine, batch: Batch) -> dict[str, Any]:
    """Return the loss of a batch and a row for each module with its gradient norm; the weights do not change."""
    engine.model.train()
    counts = engine.task.counts(batch)
    rng = Noise(engine.seed, 0, torch.arange(batch_length(batch), device=engine.device), torch)
    with engine.autocast():
        out = engine.task.loss(engine.eager_models, move_batch(batch, engine.device), rng)
        loss = sum(weight * total / counts[name] for name, (total, weight) in out.terms.items())
    loss.backward()
    rows = [
        _describe_module(name, module)
        for name, module in engine.model.named_modules()
        if any(True for _ in module.parameters())
    ]
    return {"loss": float(loss.detach()), "modules": rows}


def _describe_module(name: str, module: torch.nn.Module) -> dict[str, Any]:
    parameters = list(module.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))) if grads else None
    return {
        "name": name or type(module).__name__,
        "kind": type(module).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "devices": sorted({str(p.device) for p in parameters}),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "gradient_norm": norm,
    }


def find_nonfinite_module(engine: TorchEngine, step: int, batch: Batch) -> str | None:
    """Run the step's forward and backward again, eagerly; return the first module with a non-finite output or gradient."""
    try:
        return _find_nonfinite_module(engine, step, batch)
    except torch.OutOfMemoryError as error:
        memory, advice = engine.memory_use(at_peak=False), "lower training.batch_size"
        raise build_out_of_memory_error(memory, "while repeating the step in one pass", advice=advice) from error


def _find_nonfinite_module(engine: TorchEngine, step: int, batch: Batch) -> str | None:
    nonfinite: list[str] = []

    def make_hook(name: str) -> Callable[..., None]:
        @torch.no_grad()  # a hook that saves tensors would upset gradient checkpointing, which computes modules again
        def check_output(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not nonfinite and any(not torch.isfinite(t).all() for t in list_floating_tensors(output)):
                nonfinite.append(name or "the model")

        return check_output

    handles = [m.register_forward_hook(make_hook(name)) for name, m in engine.model.named_modules()]
    compiled = [
        (m, attribute, forward)
        for m in engine.model.modules()
        for attribute in COMPILED_ATTRIBUTES
        if (forward := getattr(m, attribute, None)) is not None
    ]
    for m, attribute, _ in compiled:
        setattr(m, attribute, None)  # hooks inside a compiled block would not fire
    try:
        device_batch = move_batch(batch, engine.device)
        size = batch_length(batch)
        positions = torch.arange(engine.data_rank * size, (engine.data_rank + 1) * size, device=engine.device)
        rng = Noise(engine.seed, step, positions, torch)
        with engine.autocast():
            out = engine.task.loss(engine.eager_models, device_batch, rng)
        sum(total for total, _ in out.terms.values()).backward()
        if not nonfinite:
            nonfinite_gradients = (
                n for n, p in engine.model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()
            )
            nonfinite += [f"the gradient of {name}" for name in [next(nonfinite_gradients, None)] if name]
    finally:
        for handle in handles:
            handle.remove()
        for m, attribute, forward in compiled:
            setattr(m, attribute, forward)
        engine.model.zero_grad(set_to_none=True)
    return nonfinite[0] if nonfinite else None


def list_floating_tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a tensor or in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [t for item in value for t in list_floating_tensors(item)] if isinstance(value, tuple | list) else []
