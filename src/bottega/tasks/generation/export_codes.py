"""Export of generators over codes, as a folder that `open_exported_code_generator` loads. It holds:

- `config.json`: `format` "bottega-code-generator" and `version` 1; `medium`; `classes` by number; `samples`
  (temperature, top_k, top_p, guidance) of the recipe; and `task`: the `shape` of the model, the `key`, which is the
  batch field that holds the samples, and the condition dropout.
- `transformer/`: the language model in the layout of transformers; its vocabulary is the codes, the classes, and one token
  for no class.
- `tokenizer/`: the tokenizer, which decodes codes to values; `bottega.models.autoencoder.codes_folder.load_codes` opens it.
- `processor/`: the processor of the run, which turns values into pixels or audio.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bottega.core.errors import CheckpointError
from bottega.core.types import Models
from bottega.models.autoencoder.codes_folder import WEIGHTS
from bottega.models.build import build_model
from bottega.models.decoder.torch import Transformer
from bottega.models.folders.pretrained import export_transformers, load_weights
from bottega.models.pipeline.component import CONFIG, read_config
from bottega.tasks.frozen_models import CONFIG_FILES
from bottega.tasks.generation.code_language import CodeLanguage
from bottega.tasks.generation.code_tokenizer import TRANSFORMER_FOLDER
from bottega.tasks.generation.sampling_options import list_sampling_options

if TYPE_CHECKING:
    from bottega.tasks.generation.workload import GenerationWorkload

FORMAT, FORMAT_VERSION = "bottega-code-generator", 1
TOKENIZER_FOLDER, PROCESSOR_FOLDER = "tokenizer", "processor"


def export_code_generator(workload: GenerationWorkload, models: Models, folder: Path) -> dict[str, Any]:
    """Write an exported generator over codes to `folder`; return the fields of its model card."""
    task, options = workload.task, workload.recipe.samples
    assert isinstance(task, CodeLanguage)
    _delete_previous_export(folder)
    export_transformers(models["model"].state_dict(), task.backbone.transformer, folder / TRANSFORMER_FOLDER)
    for subfolder in (TOKENIZER_FOLDER, PROCESSOR_FOLDER):
        (folder / subfolder).mkdir(exist_ok=True)
    tokenizer_folder = Path(task.latents.folder)
    for name in (*CONFIG_FILES, WEIGHTS):
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / TOKENIZER_FOLDER / name)
    workload.processor.write(folder / PROCESSOR_FOLDER)
    config = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "medium": workload.medium.name,
        "task": task.model_dump(mode="json", exclude={"pretrained", "latents"}),
        "classes": list(workload.metadata.classes),
        "samples": {name: getattr(options, name) for name in list_sampling_options(workload.recipe.model)},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tag = {"pipeline_tag": "unconditional-image-generation"} if workload.medium.name == "image" else {}
    return {"library_name": "bottega", **tag}


def open_exported_code_generator(folder: Path) -> tuple[CodeLanguage, dict[str, Any]]:
    """Return the task and its models by name, read from an exported folder alone."""
    config = read_config(folder)
    if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
        raise CheckpointError(f"{folder / CONFIG} is not a {FORMAT} of version {FORMAT_VERSION}; export the run again")
    try:
        task = CodeLanguage.model_validate({**config["task"], "latents": {"folder": str(folder / TOKENIZER_FOLDER)}})
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is damaged ({str(error).splitlines()[0]}); export the run again"
        ) from error
    model = Transformer(task.backbone.transformer)
    load_weights(model, folder / TRANSFORMER_FOLDER)
    # The spec loads the tokenizer's weights, so the seed has no effect.
    models = {"model": model, "tokenizer": build_model(task.latents.spec(), seed=0)}
    return task, {name: network.eval().requires_grad_(False) for name, network in models.items()}


def _delete_previous_export(folder: Path) -> None:
    """Delete an earlier export; other files in the folder stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG).is_file() and read_config(folder).get("format") == FORMAT:
        for subfolder in (TRANSFORMER_FOLDER, TOKENIZER_FOLDER, PROCESSOR_FOLDER):
            shutil.rmtree(folder / subfolder, ignore_errors=True)
        (folder / CONFIG).unlink()
