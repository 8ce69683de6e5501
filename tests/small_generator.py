"""A small diffusion transformer of every condition with random weights, for tests of its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bottega.core.noise import Noise, numpy_generator
from bottega.models.build import build_models
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.task import Generation

CONDITIONS = ("none", "class", "vector", "text")
NUM_WORDS = 5


def build_generation(kind: Any, *, objective: Any = "flow") -> Generation:
    text: dict[str, Any] = {"vocab_size": 7, "text_size": 16, "text_layers": 1, "max_tokens": NUM_WORDS}
    is_text = kind == "text"
    backbone = DiTShape(
        grid=(4, 4),
        patch=(2, 2),
        channels=1,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        context_size=16 if is_text else None,
    )
    condition = ConditionShape(kind=kind, size=0 if is_text else 3, hidden_size=32, **(text if is_text else {}))
    shape = GeneratorShape(backbone=backbone, condition=condition)
    return Generation(key="image", shape=shape, path=NoisePath(objective=objective), empty_text=(0,) * NUM_WORDS)


def build_random_models(generation: Generation, device: str = "cpu") -> dict[str, Any]:
    """Build models with random parameters, since several are initialised to zero."""
    models = build_models(generation, 0)
    with torch.no_grad():
        for name, p in models["model"].named_parameters():
            p.copy_(torch.from_numpy(0.2 * numpy_generator(7, name).standard_normal(p.shape, dtype=np.float32)))
    models["model"].eval().to(device)
    return dict(models)


def build_conditions(count: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    label = torch.arange(count) % 3
    batch = {
        "label": label,
        "condition": torch.randn(count, 3, generator=torch.Generator().manual_seed(0)),
        "input_ids": 1 + label[:, None].expand(-1, NUM_WORDS),
        "attention_mask": (torch.arange(NUM_WORDS) < 1 + label[:, None]).int(),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def draw_samples(generation: Generation, models: Any, count: int = 6, **options: Any) -> torch.Tensor:
    device = str(next(models["model"].parameters()).device)
    noise = Noise(3, 0, torch.arange(count, device=device), torch)
    return generation.draw(models, build_conditions(count, device), noise, **{"steps": 6, **options})
