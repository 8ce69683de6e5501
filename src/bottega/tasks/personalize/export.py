"""A personalised generator for others: the trained part as safetensors, and beside it what it was trained between.

    model.safetensors   image_tokens [L, H]; prefix [layers, 2 (keys, values), S, kv heads * head size], or where a projection
                        makes it: prefix_embedding [S, H], prefix_inner and prefix_outer; mapping [W, H] with its bias
    config.json         the shape, the frozen models by name and hash, the prompts, how much each condition weighs, and how
                        pictures are drawn

The frozen models are not copied: they are large, and most come with a licence of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from bottega.core.types import Models
from bottega.models.frozen.config import SoftPromptShape
from bottega.tasks import dependencies
from bottega.tasks.personalize.config import ConditionWeights, Keywords, PersonalizeSamples
from bottega.tasks.personalize.frozen_models import DESCRIPTIONS, GENERATOR, JUDGE, LANGUAGE, FrozenModel

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KIND = "bottega-soft-prompts"


class PublishedModel(BaseModel):
    """A model that it was trained between."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    named: str
    """A name of the hub, or the last part of a path: where things lie on a computer is nobody else's business."""
    contents: dict[str, str]
    """Hashes of all that decides what it computes, by part."""

    @classmethod
    def from_model(cls, base: FrozenModel) -> PublishedModel:
        is_hub = not Path(base.named).expanduser().exists() and not base.named.startswith(
            (dependencies.PREFIX, "/", ".", "~")
        )
        return cls(named=base.named if is_hub else Path(base.named).name, contents=base.contents)


class ExportConfig(BaseModel):
    """config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = KIND
    shape: SoftPromptShape
    frozen: dict[str, PublishedModel]
    keywords: Keywords
    weights: ConditionWeights
    image_size: int
    sequence_length: int
    samples: PersonalizeSamples
    """How it draws: weightings, which of them is picked, guidance, steps, sampler, what to avoid."""


def export_personalize(workload: PersonalizeWorkload, models: Models, folder: Path) -> dict[str, Any]:
    """Writes it; gives what the card says."""
    from safetensors.torch import save_file

    recipe, facts = workload.recipe, workload.metadata
    frozen = {LANGUAGE: facts.language_model, GENERATOR: facts.diffusion, JUDGE: facts.clip}
    config = ExportConfig(
        shape=facts.shape,
        frozen={key: PublishedModel.from_model(base) for key, base in frozen.items() if base is not None},
        keywords=recipe.model.keywords,
        weights=recipe.model.weights,
        image_size=recipe.data.image_size,
        sequence_length=recipe.data.sequence_length,
        samples=recipe.samples,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    needed = ", ".join(f"{DESCRIPTIONS[key]} `{one.named}`" for key, one in config.frozen.items())
    needed += f"; they are frozen and not in this folder, `{CONFIG}` has their hashes"
    return {"library_name": "bottega", "pipeline_tag": "text-to-image", "needs": needed}
