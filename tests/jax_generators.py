"""Small diffusion transformers of every medium and condition, with batches for them, for tests of their JAX twins."""

from __future__ import annotations

from typing import Any

import numpy as np

from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.task import Generation

NUM_WORDS, BATCH_SIZE = 5, 4
KEYS = {1: "mel", 2: "image", 3: "video"}


def build_shape(
    kind: Any, grid: tuple[int, ...], patch: tuple[int, ...], *, shared: Any = (), channels: int = 2, **options: Any
) -> GeneratorShape:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_layers": 2, "num_heads": 2}
    text: dict[str, Any] = {"vocab_size": 9, "text_size": 16, "text_layers": 1, "max_tokens": NUM_WORDS}
    is_text = kind == "text"
    backbone = DiTShape(
        grid=grid, patch=patch, channels=channels, context_size=16 if is_text else None, **{**sizes, **options}
    )
    size = {"class": 3, "vector": 3}.get(kind, 0)
    condition = ConditionShape(kind=kind, size=size, hidden_size=24, shared=shared, **(text if is_text else {}))
    return GeneratorShape(backbone=backbone, condition=condition)


SHAPES: dict[str, GeneratorShape] = {
    "image, class": build_shape("class", (4, 6), (2, 2)),
    "image, shared attributes": build_shape("class", (4, 4), (2, 2), shared=((0, 2), (1, 2), (1, 3))),
    "image, text": build_shape("text", (4, 4), (2, 2)),
    "audio of one axis, vector": build_shape("vector", (6,), (2,), channels=5),
    "audio of two axes, no condition": build_shape("none", (4, 6), (2, 2), channels=1),
    "video, factorised": build_shape("class", (4, 4, 6), (1, 2, 2), attention="factorised"),
    "video, full": build_shape("class", (2, 4, 4), (2, 2, 2), num_layers=1),
}


def build_task(shape: GeneratorShape, **options: Any) -> Generation:
    path = NoisePath(**{name: options.pop(name) for name in NoisePath.model_fields if name in options})
    fields = {"condition_dropout": 0.5, "empty_text": (8,) * NUM_WORDS, "empty_length": 2}
    return Generation(key=KEYS[len(shape.backbone.grid)], shape=shape, path=path, **{**fields, **options})


def draw_batch(task: Generation, *, count: int = BATCH_SIZE, has_weight: bool = False) -> dict[str, np.ndarray]:
    """Return samples with every kind of condition; with `has_weight`, the last row is padding."""
    rng = np.random.default_rng(1)
    lengths = 1 + np.arange(count)[:, None] % NUM_WORDS
    batch = {
        task.key: rng.standard_normal((count, *task.shape.sample), dtype=np.float32),
        "label": (np.arange(count) % 3).astype(np.int32),
        "condition": rng.standard_normal((count, 3), dtype=np.float32),
        "input_ids": rng.integers(0, 8, (count, NUM_WORDS)).astype(np.int32),
        "attention_mask": (np.arange(NUM_WORDS) < lengths).astype(np.int32),
    }
    if has_weight:
        batch["weight"] = (np.arange(count) < count - 1).astype(np.float32)
    return batch
