"""Export of generators: a diffusers pipeline if a stock one can sample the model, else the documented layout alone.

`open_exported_generator` loads every exported folder. It holds:

- `config.json`: `format` "bottega-generator" and `version` 1; `medium`; `classes` by number; `samples` (steps, sampler,
  guidance) of the recipe; and `task`: the `shape` of the model, the `path` between data and noise, the `key`, which is
  the batch field that holds the samples, the condition dropout, the scale of `latents`, tokens of the empty caption.
- the weights, each once: `unet/` or `transformer/` where diffusers has that model (config.json and
  diffusion_pytorch_model.safetensors, which `from_pretrained` opens), and `model.safetensors` for all others, such as the
  class embedding, under the names of our model.
- `vae/` with an autoencoder, `text_encoder/` and `tokenizer/` with a frozen text encoder.
- `scheduler/`: the path as the configuration of a diffusers scheduler, for models that predict noise, v or velocity.
- `processor/`: the processor of the run, which turns values into pixels or audio.

A pipeline also has `model_index.json`, and opens with the `from_pretrained` of its class.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bottega.core.errors import CheckpointError
from bottega.core.types import Models
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.dit import layout
from bottega.models.generator.config import UNetShape
from bottega.models.generator.layout import CLASS_EMBEDDING, WEIGHTS
from bottega.models.pipeline.component import CONFIG, VERSION, read_config, write_component, write_safetensors
from bottega.tasks.generation.paths import NoisePath as NoisePath
from bottega.tasks.generation.task import Generation

if TYPE_CHECKING:
    from bottega.tasks.generation.workload import GenerationWorkload

FORMAT, FORMAT_VERSION = "bottega-generator", 1
MODEL_INDEX = "model_index.json"
SUBFOLDERS = ("unet", "transformer", "vae", "text_encoder", "tokenizer", "scheduler", "processor")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")


def export_generator(workload: GenerationWorkload, models: Models, folder: Path) -> dict[str, Any]:
    """Write an exported generator to `folder`; return the fields of its model card."""
    _delete_previous_export(folder)
    task, pipeline = workload.task, find_stock_pipeline(workload, models)
    _write_weights(models["model"], folder)
    if task.latents is not None:
        _write_vae(task, models["vae"], folder / "vae")
    if task.text is not None:
        _write_text_encoder(workload, models["text_encoder"], folder)
    _write_json(folder / "scheduler" / "scheduler_config.json", build_scheduler_config(task.path, pipeline))
    (folder / "processor").mkdir(exist_ok=True)
    workload.processor.write(folder / "processor")
    if pipeline is not None:
        _write_json(folder / MODEL_INDEX, _build_model_index(workload, pipeline))
    _write_json(folder / CONFIG, _build_config(workload))
    return _build_card(workload, is_stock=pipeline is not None)


def open_exported_generator(folder: Path) -> tuple[Generation, dict[str, Any]]:
    """Return the task and its models by name, in torch, read from an exported folder alone."""
    from bottega.models.build import build_model
    from bottega.models.generator.torch import Generator, load_generator

    config = read_config(folder)
    if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
        raise CheckpointError(f"{folder / CONFIG} is not a {FORMAT} of version {FORMAT_VERSION}; export the run again")
    try:
        task = Generation.model_validate(config["task"])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is damaged ({str(error).splitlines()[0]}); export the run again"
        ) from error
    folders = {"latents": folder / "vae", "text": folder / "text_encoder"}
    frozen_models = {field: getattr(task, field) for field in folders}
    update = {
        field: frozen_model.model_copy(update={"folder": str(folders[field])})
        for field, frozen_model in frozen_models.items()
        if frozen_model is not None
    }
    task = task.model_copy(update=update)
    model = Generator(task.shape)
    load_generator(model, folder, require_all=True)
    models: dict[str, Any] = {"model": model.eval().requires_grad_(False)}
    # These specs load weights, so the seed has no effect.
    if task.latents is not None:
        models["vae"] = build_model(task.latents.spec(), seed=0).eval()
    if task.text is not None:
        models["text_encoder"] = build_model(task.text.spec(), seed=0).eval()
    return task, models


def find_stock_pipeline(workload: GenerationWorkload, models: Models) -> str | None:
    """Return the class of the diffusers pipeline that samples this model correctly, or None."""
    task, backbone = workload.task, workload.task.shape.backbone
    # The pipelines expect pixels from -1 to 1.
    if workload.medium.name != "image" or getattr(workload.recipe.data, "normalise", None) != "symmetric":
        return None
    kind, is_unet = task.shape.condition.kind, isinstance(backbone, UNetShape)
    if is_unet and kind == "none" and task.latents is None:
        # Its loop only calls scheduler.step, so a flow scheduler works too; other pipelines call scale_model_input first.
        return "DDPMPipeline"
    # The pipelines over latents scale them and do not shift them.
    if not task.path.has_stock_pipeline or task.latents is None or task.latents.shift:
        return None
    if layout.is_diffusers_compatible(task.shape):
        return "DiTPipeline"
    is_clip = type(models.get("text_encoder")).__name__ == "CLIPTextModel"
    # The pipeline rejects images whose sides are not multiples of 8.
    sides_fit = all(side * models["vae"].shape.downsample % 8 == 0 for side in backbone.grid)
    return "StableDiffusionPipeline" if is_unet and kind == "text" and is_clip and sides_fit else None


def build_scheduler_config(path: NoisePath, pipeline: str | None = None) -> dict[str, Any]:
    """Return the configuration of the diffusers scheduler with the same path between data and noise."""
    name, config = path.scheduler(pipeline)
    return {"_class_name": name, "_diffusers_version": VERSION, **config}


def _delete_previous_export(folder: Path) -> None:
    """Delete an earlier export, which may have had other components; other files in the folder stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).is_file() or read_config(folder).get("format") != FORMAT:
        return
    for subfolder in SUBFOLDERS:
        shutil.rmtree(folder / subfolder, ignore_errors=True)
    for file in (MODEL_INDEX, WEIGHTS, CONFIG):
        (folder / file).unlink(missing_ok=True)


def _write_weights(model: Any, folder: Path) -> None:
    other_weights, shape = model.state_dict(), model.shape.backbone
    if isinstance(shape, UNetShape):
        from bottega.models.unet import build_unet_config  # imports torch

        prefix = "backbone.unet."
        unet = {
            name.removeprefix(prefix): other_weights.pop(name)
            for name in list(other_weights)
            if name.startswith(prefix)
        }
        write_component(folder / "unet", build_unet_config(shape), unet)
    elif layout.is_diffusers_compatible(model.shape):
        config = layout.diffusers_config(shape)
        other_weights |= {CLASS_EMBEDDING: model.condition.fold_shared()}
        write_component(folder / "transformer", config, layout.to_diffusers(other_weights, shape))
        other_weights = {}
    if other_weights:
        write_safetensors(folder / WEIGHTS, other_weights)


def _write_vae(task: Generation, vae: Any, folder: Path) -> None:
    assert task.latents is not None
    factors = {"scaling_factor": task.latents.scale, "shift_factor": task.latents.shift}
    side = task.shape.backbone.grid[0] * vae.shape.downsample
    export_autoencoder(vae.state_dict(), vae.shape.model_copy(update=factors), folder, sample_size=side)


def _write_text_encoder(workload: GenerationWorkload, encoder: Any, folder: Path) -> None:
    """Write the text encoder and the files of its tokenizer, which truncates captions as the run did."""
    from bottega.tasks.generation.text_condition import resolve_encoder_folders

    assert workload.text is not None
    assert workload.text.metadata.encoder is not None
    encoder.save_pretrained(folder / "text_encoder")
    source, target = resolve_encoder_folders(workload.text.metadata.encoder)[1], folder / "tokenizer"
    workload.text.caption_tokenizer.tokenizer.save(target)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    _write_json(path, {**config, "model_max_length": workload.text.caption_tokenizer.length})


def _build_config(workload: GenerationWorkload) -> dict[str, Any]:
    options, task = workload.recipe.samples, workload.task.model_dump(mode="json", exclude={"pretrained"})
    for field, subfolder in (("latents", "vae"), ("text", "text_encoder")):
        if task.get(field):
            task[field]["folder"] = subfolder
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "medium": workload.medium.name,
        "task": task,
        "classes": list(workload.metadata.classes),
        "samples": {"steps": options.steps, "sampler": options.sampler, "guidance": options.guidance},
    }


def _build_model_index(workload: GenerationWorkload, pipeline: str) -> dict[str, Any]:
    scheduler = build_scheduler_config(workload.task.path, pipeline)["_class_name"]
    index = {"_class_name": pipeline, "_diffusers_version": VERSION, "scheduler": ["diffusers", scheduler]}
    if pipeline == "DDPMPipeline":
        return index | {"unet": ["diffusers", "UNet2DModel"]}
    index["vae"] = ["diffusers", "AutoencoderKL"]
    if pipeline == "DiTPipeline":
        # DiTPipeline splits names at commas into several labels.
        names = {str(i): name.replace(",", " ") for i, name in enumerate(workload.metadata.classes)}
        return index | {"transformer": ["diffusers", layout.DIFFUSERS_CLASS], "id2label": names}
    return index | {
        "unet": ["diffusers", "UNet2DConditionModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
    }


def _build_card(workload: GenerationWorkload, *, is_stock: bool) -> dict[str, Any]:
    card = {"library_name": "diffusers" if is_stock else "bottega"}
    has_text = workload.task.shape.condition.kind == "text"
    tags = {"image": "text-to-image" if has_text else "unconditional-image-generation"}
    tags |= {"audio": "text-to-audio", "video": "text-to-video"} if has_text else {}
    return card | ({"pipeline_tag": tags[workload.medium.name]} if workload.medium.name in tags else {})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
