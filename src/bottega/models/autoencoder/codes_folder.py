"""Reads and writes exported code autoencoders (tokenizers of images and audio): config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.autoencoder.config import CodesShape
from bottega.models.pipeline.component import CONFIG, read_config, write_safetensors

if TYPE_CHECKING:
    from bottega.models.autoencoder.codes import CodeAutoencoder

MODEL_TYPE = "bottega-codes"
WEIGHTS = "model.safetensors"


def write_codes(model: CodeAutoencoder, folder: Path, **settings: Any) -> None:
    """Write a model with `settings` for its users, such as how pixels are scaled."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": MODEL_TYPE, "shape": model.shape.model_dump(mode="json"), **settings}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / WEIGHTS, model.state_dict())


def read_codes_config(folder: Path) -> tuple[CodesShape, dict[str, Any]]:
    """Return the shape of an exported model and the settings that `write_codes` was given."""
    config = read_config(folder)
    if config.pop("model_type", None) != MODEL_TYPE:
        raise UsageError(f"{folder} is not an exported tokenizer of images or audio; train one with task image_tokens")
    try:
        return CodesShape.model_validate(config.pop("shape", None)), config
    except ValidationError as error:
        raise CheckpointError(
            f"{folder / CONFIG} is damaged ({str(error).splitlines()[0]}); export it again"
        ) from error


def load_codes(folder: Path | str) -> CodeAutoencoder:
    """Return the model of a folder that `write_codes` wrote, in float32 on the CPU."""
    import torch

    from bottega.models.autoencoder.codes import CodeAutoencoder
    from bottega.models.folders.pretrained import load_weights

    with torch.device("meta"):
        model = CodeAutoencoder(read_codes_config(Path(folder))[0])
    model.to_empty(device="cpu")
    load_weights(model, folder)
    return model
