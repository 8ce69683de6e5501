"""Export of a personalised generator: the trained soft prompts as safetensors, and a configuration beside them.

    model.safetensors   image_tokens [L, H]; prefix [layers, 2 (keys, values), S, kv heads * head size], or with a projection
                        prefix_embedding [S, H], prefix_inner and prefix_outer in its place; mapping [W, H] with its bias
    config.json         the shape, the frozen models by name and hash, the prompts, the weights of the condition, and the
                        sampling options

L image tokens, S prefix tokens, H the width of the language model, W the width of the image generator's text embeddings.

The frozen models are not copied: they are large, and most have a licence of their own.
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
from bottega.tasks.personalize.frozen_models import CLIP, DESCRIPTIONS, GENERATOR, LANGUAGE, FrozenModel

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
KIND = "bottega-soft-prompts"


class PublishedModel(BaseModel):
    """A frozen model that the soft prompts need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    named: str
    """Hub name, or the last component of a path, so that an export does not reveal local folders."""
    contents: dict[str, str]
    """Component -> hash of all files that affect its output."""

    @classmethod
    def from_model(cls, model: FrozenModel) -> PublishedModel:
        """Describe a frozen model without local paths."""
        is_local = (
            model.named.startswith((dependencies.REFERENCE_PREFIX, "/", ".", "~"))
            or Path(model.named).expanduser().exists()
        )
        return cls(named=Path(model.named).name if is_local else model.named, contents=model.contents)


class ExportConfig(BaseModel):
    """The contents of config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = KIND
    shape: SoftPromptShape
    frozen: dict[str, PublishedModel]
    keywords: Keywords
    weights: ConditionWeights
    image_size: int
    sequence_length: int
    samples: PersonalizeSamples
    """Sampling options: weightings, guidance, steps, sampler and negative prompt."""


def export_personalize(workload: PersonalizeWorkload, models: Models, folder: Path) -> dict[str, Any]:
    """Write the export into `folder` and return the fields of its model card."""
    from safetensors.torch import save_file

    recipe, metadata = workload.recipe, workload.metadata
    frozen = {LANGUAGE: metadata.language_model, GENERATOR: metadata.diffusion, CLIP: metadata.clip}
    config = ExportConfig(
        shape=metadata.shape,
        frozen={
            key: PublishedModel.from_model(frozen_model)
            for key, frozen_model in frozen.items()
            if frozen_model is not None
        },
        keywords=recipe.model.keywords,
        weights=recipe.model.weights,
        image_size=recipe.data.image_size,
        sequence_length=recipe.data.sequence_length,
        samples=recipe.samples,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    needed_models = ", ".join(f"{DESCRIPTIONS[key]} `{model.named}`" for key, model in config.frozen.items())
    needed_models += f"; they are frozen and not part of this folder; `{CONFIG_FILE}` has their hashes"
    return {"library_name": "bottega", "pipeline_tag": "text-to-image", "needs": needed_models}
