"""Which parts are put into a model that stays as it is (LoRA, adapters), in training and in reloading alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.task import Task
from bottega.techniques.adapter.config import AdapterOptions
from bottega.techniques.inject import Injected
from bottega.techniques.lora.config import LoraOptions


def injected(task: Task, options: LoraOptions | AdapterOptions, *, of: Task) -> Injected:
    """The task with parts put into its model. `of` is the branch's own."""
    from bottega.techniques.adapter.torch import Adapter
    from bottega.techniques.lora.torch import Lora

    shared: dict[str, Any] = {"train": options.train} if options.train is not None else {"fresh": fresh_parts(of)}
    shared["start"] = options.start
    if isinstance(options, AdapterOptions):
        return Adapter(inner=task, size=options.size, targets=options.targets, **shared)
    return Lora(
        inner=task,
        rank=options.rank,
        alpha=options.alpha if options.alpha is not None else 2.0 * options.rank,
        dropout=options.dropout,
        targets=options.targets,
        **shared,
    )


def fresh_parts(task: Task) -> tuple[str, ...]:
    """What learns in full beside, because it begins at random, or at 0 and would pass no gradient on."""
    from bottega.models.generator.config import UNetShape
    from bottega.models.generator.torch import read_generator
    from bottega.tasks.classify.task import Classification
    from bottega.tasks.generation.task import Generation

    if isinstance(task, Classification):
        # An encoder that was trained to fill in words has nothing before the head either.
        return ("head", "pooling", *(("backbone.pooler",) if _lacks_pooler(task.pretrained) else ()))
    if not isinstance(task, Generation):
        return ()
    if task.pretrained is None:
        is_unet = isinstance(task.shape.backbone, UNetShape)
        last = ("backbone.unet.conv_out",) if is_unet else ("backbone.out", "backbone.modulation_out")
        return (*last, "condition")
    has_condition = any(name.startswith("condition.") for name in read_generator(Path(task.pretrained)))
    return () if has_condition else ("condition",)


def _lacks_pooler(folder: str | None) -> bool:
    if folder is None:
        return False
    from safetensors import safe_open

    from bottega.models.folders.resolve import resolve_model

    for file in resolve_model(folder, key="model.from").path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if any("pooler." in name for name in tensors.keys()):  # noqa: SIM118 (it has no other way)
                return False
    return True
