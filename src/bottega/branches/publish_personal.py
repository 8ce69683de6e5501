"""A personalised generator for others: the trained part as safetensors, and beside it what it was trained between.

    model.safetensors   image_tokens [L, H]; prefix [layers, 2 (keys, values), S, kv heads * head size], or where a projection
                        makes it: prefix_embedding [S, H], prefix_inner and prefix_outer; mapping [W, H] with its bias
    config.json         the shape, the frozen models by name and hash, the prompts, and how much each condition weighs

The frozen models are not copied: they are large, and most come with a licence of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from bottega.branches.personal_parts import GENERATOR, JUDGE, LANGUAGE, Base
from bottega.core.errors import CheckpointError
from bottega.core.types import Models
from bottega.engines.tensors import compare, read_tensors
from bottega.models.soft_prompts import SoftPrompts
from bottega.schema.personalize import ConditionWeights, Keywords, SoftPromptShape

if TYPE_CHECKING:
    from bottega.branches.personalize import PersonalizeBranch

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KIND = "bottega-soft-prompts"


class Published(BaseModel):
    """config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = KIND
    shape: SoftPromptShape
    frozen: dict[str, Base]
    keywords: Keywords
    weights: ConditionWeights
    weightings: tuple[ConditionWeights, ...]
    preference_weight: float
    guidance: float
    image_size: int
    sequence_length: int


def publish_personal(branch: PersonalizeBranch, models: Models, folder: Path) -> dict[str, Any]:
    """Writes it; gives what the card says."""
    from safetensors.torch import save_file

    recipe, facts = branch.recipe, branch.facts
    frozen = {LANGUAGE: facts.language_model, GENERATOR: facts.diffusion, JUDGE: facts.clip}
    config = Published(
        shape=facts.shape,
        frozen={key: base for key, base in frozen.items() if base is not None},
        keywords=recipe.model.keywords,
        weights=recipe.model.weights,
        weightings=recipe.samples.weightings,
        preference_weight=recipe.samples.preference_weight,
        guidance=recipe.samples.guidance,
        image_size=recipe.data.image_size,
        sequence_length=recipe.data.sequence_length,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    return {"library_name": "bottega", "pipeline_tag": "text-to-image"}


def read_published(folder: Path | str) -> tuple[SoftPrompts, Published]:
    """The trained part of an export, and what it was trained between."""
    folder = Path(folder)
    try:
        config = Published.model_validate_json((folder / CONFIG).read_bytes())
    except (OSError, ValidationError):
        raise CheckpointError(
            f"{folder / CONFIG}: is no export of a personalised generator; export the run again"
        ) from None
    if config.kind != KIND:
        raise CheckpointError(f"{folder / CONFIG}: is a {config.kind}, not a {KIND}")
    soft = SoftPrompts(config.shape)
    tensors = read_tensors(folder / WEIGHTS)
    compare(tensors, soft.state_dict(), folder / WEIGHTS)
    soft.load_state_dict(tensors)
    return soft, config
