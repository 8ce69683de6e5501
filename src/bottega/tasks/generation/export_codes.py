"""A generator over codes as a folder, which holds, and `open_codes` reads:

- `config.json`: `format` "bottega-code-generator" and `version` 1; `medium`; `classes` by number; `samples` as the recipe
  has them; and `task`: the `shape` of the model, which `key` of a batch is generated, the share trained without condition.
- `transformer/`: the language model as transformers opens it. Its vocabulary is the codes, the classes, and one for none.
- `tokenizer/`: the tokenizer, which turns codes into values; `bottega.models.autoencoder.codes_folder.load_codes` opens it.
- `codec/`: how those become pixels or sound again, as the run keeps it.
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
from bottega.tasks.frozen import SETTINGS
from bottega.tasks.generation.code_language import CodeLanguage
from bottega.tasks.generation.codes import TRANSFORMER
from bottega.tasks.generation.drawing import options_of

if TYPE_CHECKING:
    from bottega.tasks.generation.branch import GenerationBranch

FORMAT, FORMAT_VERSION = "bottega-code-generator", 1
TOKENIZER, CODEC = "tokenizer", "codec"


def publish_codes(branch: GenerationBranch, models: Models, folder: Path) -> dict[str, Any]:
    """Write all of it. Gives what the card says."""
    task, options = branch.task, branch.recipe.samples
    assert isinstance(task, CodeLanguage)
    _clear(folder)
    export_transformers(models["model"].state_dict(), task.backbone.transformer, folder / TRANSFORMER)
    for part in (TOKENIZER, CODEC):
        (folder / part).mkdir(exist_ok=True)
    source = Path(task.latents.folder)
    for name in (*SETTINGS, WEIGHTS):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / TOKENIZER / name)
    branch.write_codec(folder / CODEC)
    config = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "medium": branch.medium,
        "task": task.model_dump(mode="json", exclude={"pretrained", "latents"}),
        "classes": list(branch.facts.classes),
        "samples": {name: getattr(options, name) for name in options_of(branch.recipe.model)},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tag = {"pipeline_tag": "unconditional-image-generation"} if branch.medium == "image" else {}
    return {"library_name": "bottega", **tag}


def open_codes(folder: Path) -> tuple[CodeLanguage, dict[str, Any]]:
    """The task and its models as they were exported; nothing but the folder is needed."""
    config = read_config(folder)
    if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
        raise CheckpointError(f"{folder / CONFIG}: is no {FORMAT} of version {FORMAT_VERSION}; export the run again")
    try:
        task = CodeLanguage.model_validate({**config["task"], "latents": {"folder": str(folder / TOKENIZER)}})
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / CONFIG}: is damaged ({str(error).splitlines()[0]})") from error
    model = Transformer(task.backbone.transformer)
    load_weights(model, folder / TRANSFORMER)
    models = {"model": model, "tokenizer": build_model(task.latents.spec(), 0)}
    return task, {name: one.eval().requires_grad_(False) for name, one in models.items()}


def _clear(folder: Path) -> None:
    """An earlier export; never what somebody else keeps there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG).is_file() and read_config(folder).get("format") == FORMAT:
        for part in (TRANSFORMER, TOKENIZER, CODEC):
            shutil.rmtree(folder / part, ignore_errors=True)
        (folder / CONFIG).unlink()
