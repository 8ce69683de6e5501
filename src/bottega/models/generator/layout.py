"""Weights of generators in folders: runs' exports and pipelines of diffusers, as tensors of torch or arrays of numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bottega.core.errors import UsageError
from bottega.core.types import Array
from bottega.models.dit import layout
from bottega.models.pipeline.component import read_class_name, read_component, read_safetensors

WEIGHTS = "model.safetensors"
"""The file of an export with the tensors that are not in a diffusers component."""
CLASS_EMBEDDING, SHARED_EMBEDDING = "condition.embedding.weight", "condition.shared.weight"
UNET_CLASSES = ("UNet2DModel", "UNet2DConditionModel")
"""Class of diffusers' UNet without and with text."""


def read_generator(folder: Path, *, framework: str = "torch") -> dict[str, Array]:
    """Return the tensors of a folder under our names, whichever component holds them; in JAX as arrays of numpy."""
    tensors: dict[str, Array] = {}
    unet = find_unet_folder(folder)
    if unet is not None:
        component = read_component(unet, framework=framework)
        tensors |= {f"backbone.unet.{name}": tensor for name, tensor in component.items()}
    for path in (folder, folder / "transformer"):
        if read_class_name(path) == layout.DIFFUSERS_CLASS:
            tensors |= layout.from_diffusers(read_component(path, framework=framework))
    file = folder / WEIGHTS
    return tensors | read_safetensors(file, framework=framework) if file.is_file() else tensors


def find_unet_folder(folder: Path) -> Path | None:
    """Return the folder of a diffusers UNet: `folder` itself or its `unet/`; None if neither is one."""
    candidates = (folder, folder / "unet")
    return next((path for path in candidates if read_class_name(path) in UNET_CLASSES), None)


def match_weights(
    loaded: dict[str, Array], shapes: Mapping[str, tuple[int, ...]], folder: Path | str, *, require_all: bool = False
) -> dict[str, Array]:
    """Return the tensors of a folder that a model with these shapes takes; raise UsageError if they do not fit.

    Unless `require_all`, a folder with only a backbone is accepted, and the condition keeps its initial values.
    """
    if SHARED_EMBEDDING in shapes and SHARED_EMBEDDING not in loaded and CLASS_EMBEDDING in loaded:
        # A layout with one table has the shared embeddings added to it.
        zeros = np.zeros(shapes[SHARED_EMBEDDING], np.float32)
        is_numpy = isinstance(loaded[CLASS_EMBEDDING], np.ndarray)
        loaded = {**loaded, SHARED_EMBEDDING: zeros if is_numpy else loaded[CLASS_EMBEDDING].new_tensor(zeros)}
    if not loaded:
        raise UsageError(f"model.from: {folder} has no weights; use a run's export or a diffusers UNet folder")
    has_new_condition = not require_all and not any(name.startswith("condition.") for name in loaded)
    required = {
        name: shape for name, shape in shapes.items() if not (has_new_condition and name.startswith("condition."))
    }
    unexpected = next((name for name in loaded if name not in shapes), None)
    for name, shape in required.items():
        if name not in loaded:
            unexpected_note = (
                f", but contains {unexpected} {list(loaded[unexpected].shape)}" if unexpected is not None else ""
            )
            raise UsageError(
                f"model.from: {folder} lacks {name} {list(shape)} of the recipe's model{unexpected_note}; "
                "set the model's sizes as in that folder, or give another one"
            )
        if tuple(loaded[name].shape) != tuple(shape):
            raise UsageError(
                f"model.from: {folder} has {name} of shape {list(loaded[name].shape)}, "
                f"but the recipe's model needs {list(shape)}; set the model's sizes as in that folder, or give another one"
            )
    if unexpected is not None:
        raise UsageError(
            f"model.from: {folder} contains {unexpected} {list(loaded[unexpected].shape)}, which the recipe's model does "
            "not have; set the model's sizes as in that folder, or give another one"
        )
    return loaded
