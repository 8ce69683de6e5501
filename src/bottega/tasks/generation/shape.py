"""The model and the task of a generation recipe, once the sizes of its data are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.config.error_messages import format_shape_error
from bottega.core.errors import UsageError
from bottega.models.generator.config import CodeGeneratorShape, ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.tasks.generation.code_tokenizer import CodeTokenizer
from bottega.tasks.generation.metadata import GeneratorMetadata
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.text_condition import TextCondition
from bottega.tasks.metrics.attributes import index_attribute_values


def build_shape(
    model: Any,
    sides: tuple[tuple[int, ...], int],
    patch: tuple[int, ...],
    classes: tuple[str, ...],
    *,
    condition_size: int,
    code_tokenizer: CodeTokenizer | None,
    text: TextCondition | None,
    base_folder: Path | None,
) -> GeneratorShape | CodeGeneratorShape:
    """Return the shape of the model; `sides` are (grid, channels) of the samples or latents, `patch` the sides of a patch."""
    grid, channels = sides
    common: dict[str, Any] = {
        "grid": grid,
        "channels": channels,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
    }
    size = {"class": len(classes), "vector": condition_size}.get(model.condition, 0)
    shared = index_attribute_values(classes) if model.condition == "class" else ()
    condition = ConditionShape(kind=model.condition, size=size, hidden_size=model.hidden_size, shared=shared)
    if code_tokenizer is not None:
        return code_tokenizer.build_shape(model, grid=grid, channels=channels, condition=condition)
    if text is not None:
        condition = text.build_shape(model.hidden_size)
        common["context_size"] = condition.text_size
    try:
        if model.backbone == "unet":
            from bottega.models.unet import condition_vector_size, resolve_unet_shape  # imports torch

            if model.dropout:
                raise UsageError(f"model.dropout: {model.dropout:g} has no effect: a unet has no dropout; remove it")
            has_vector = model.condition in ("class", "vector")
            unet = resolve_unet_shape(base_folder, **common, stages=model.stages, has_vector=has_vector)
            backbone: DiTShape | UNetShape = unet
            if has_vector:
                condition = condition.model_copy(update={"hidden_size": condition_vector_size(unet)})
        else:
            attention: Any = getattr(model, "attention", "full")
            backbone = DiTShape(**common, patch=patch, attention=attention, dropout=model.dropout or 0.0)
    except ValidationError as error:
        raise UsageError(format_shape_error(error)) from None
    return GeneratorShape(backbone=backbone, condition=condition)


def build_task(
    model: Any,
    key: str,
    metadata: GeneratorMetadata,
    *,
    code_tokenizer: CodeTokenizer | None,
    text: TextCondition | None,
    base_folder: Path | None,
) -> Any:
    """Return the task: `Generation`, or `CodeLanguage` over the codes of a tokenizer. `key` is the batch field."""
    shape, dropout = metadata.shape, model.condition_dropout if model.condition != "none" else 0.0
    if isinstance(shape, CodeGeneratorShape):
        assert code_tokenizer is not None
        return code_tokenizer.build_task(key, shape, condition_dropout=dropout, base_folder=base_folder)
    return Generation(
        key=key,
        shape=shape,
        path=NoisePath(
            objective=model.objective,
            times=model.times,
            schedule=model.noise_schedule,
            min_snr=model.min_snr,
            shift=model.time_shift or 1.0,
        ),
        condition_dropout=dropout,
        pretrained=str(base_folder) if base_folder is not None else None,
        latents=metadata.latents.build_latents() if metadata.latents is not None else None,
        **(text.task_fields if text is not None else {}),
    )
