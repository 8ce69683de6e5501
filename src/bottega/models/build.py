"""Builds torch modules from model specs, with initial or pretrained weights or on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bottega.core.errors import UsageError, first_line
from bottega.core.model_spec import ModelSpec, resolve_reference
from bottega.core.task import Task

MAX_FROZEN_BYTES = 1 << 30
"""Size of the folders of frozen models, such as an autoencoder, that are read because they cannot be built without data."""


def build_models(task: Task, seed: int) -> dict[str, Any]:
    """Return the models of a task by name, on the CPU. Initial values depend on the seed and parameter names only."""
    specs = task.specs()
    models = {name: build_model(spec, seed) for name, spec in specs.items()}
    for name, spec in specs.items():
        for change in spec.changes:
            change({**models, "model": models[name]}, seed)
    return models


def build_model(spec: ModelSpec, seed: int) -> Any:
    """Return one model, without the changes that its spec lists."""
    config, options = spec.config, dict(spec.options)
    if spec.parts:
        config = {name: _build_with_changes(part, seed) for name, part in spec.parts.items()}
    if spec.is_seeded:
        options["seed"] = seed
    if spec.load is None:
        options["folder"] = spec.pretrained
    architecture = resolve_reference(spec.architecture)
    if spec.is_filled:
        with torch.device("meta"):
            model = architecture(config, **options)
        model.to_empty(device="cpu")
    else:
        # torch draws the values that no rule sets; with this seed they are the same on every rank and at every start.
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = architecture(config, **options)
    if spec.initial is not None and (spec.pretrained is None or spec.starts_initial):
        resolve_reference(spec.initial.rule)(model, seed, **spec.initial.options)
    if spec.pretrained is not None and spec.load is not None:
        resolve_reference(spec.load)(model, spec.pretrained)
    return model


def _build_with_changes(spec: ModelSpec, seed: int) -> Any:
    model = build_model(spec, seed)
    for change in spec.changes:
        change({"model": model}, seed)
    return model


class MetaBuildFailed(Exception):
    """A model cannot be built on the meta device; the message is the error of its constructor."""


@contextmanager
def _meta_device() -> Iterator[None]:
    """Create every tensor on the meta device; raise MetaBuildFailed where a model cannot be built there.

    transformers and diffusers cannot load weights there, and other models may need values, such as the largest of an index.
    """
    try:
        with torch.device("meta"), MetaDeviceMode():
            yield
    except UsageError:
        raise
    except Exception as error:
        raise MetaBuildFailed(f"{type(error).__name__}: {first_line(error)}") from error


def build_meta_model(task: Task, seed: int) -> nn.Module | None:
    """Return the trained model of a task on the meta device, without reading pretrained weights.

    None if the model can only be built from its folder.
    """
    spec = replace(task.specs()["model"], pretrained=None)
    try:
        with _meta_device():
            model: nn.Module = _build_with_changes(spec, seed)
            return model
    except MetaBuildFailed:
        return None


def build_meta_models(task: Task, seed: int) -> Mapping[str, nn.Module] | None:
    """Return the models of a task on the meta device; None if one of them can only be built from its folder."""
    try:
        with _meta_device():
            return build_models(task, seed)
    except MetaBuildFailed:
        return None


def build_meta_models_with_frozen(
    task: Task, seed: int, *, max_bytes: int = MAX_FROZEN_BYTES
) -> Mapping[str, nn.Module]:
    """Return the models of a task on the meta device; frozen ones that cannot be built there are loaded from their folders.

    Raises MetaBuildFailed if the trained model cannot be built on the meta device, or if these folders have more than `max_bytes`.
    """
    try:
        with _meta_device():
            return build_models(task, seed)
    except MetaBuildFailed:
        specs = task.specs()
        frozen = {name: spec for name, spec in specs.items() if name != "model"}
        folders = [spec.config for spec in frozen.values()]
        if not frozen or not all(isinstance(folder, Path) and folder.is_dir() for folder in folders):
            raise
        if sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()) > max_bytes:
            raise
    loaded = {name: _build_with_changes(spec, seed) for name, spec in frozen.items()}
    with _meta_device():
        model = build_model(specs["model"], seed)
        for change in specs["model"].changes:
            change({**loaded, "model": model}, seed)
    return {"model": model, **loaded}


class MetaDeviceMode(TorchFunctionMode):
    """Create every tensor on the meta device, whatever device the caller names."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORY_FUNCTIONS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


FACTORY_FUNCTIONS = frozenset(
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
