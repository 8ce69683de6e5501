"""Reads model_index.json of a diffusers pipeline and checks its component folders; runs no code and opens no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bottega.core.errors import UsageError
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import CONFIG, MODEL_INDEX, ModelFolder, resolve_model
from bottega.models.folders.untrusted import read_config_without_code

KEY = "model.diffusion"
UNET, TRANSFORMER, VAE = "UNet2DConditionModel", "SD3Transformer2DModel", "AutoencoderKL"
CLIP_CLASSES, T5 = ("CLIPTextModel", "CLIPTextModelWithProjection"), "T5EncoderModel"
LIBRARIES = ("diffusers", "transformers")
SUPPORTED_HINT = "supported: Stable Diffusion 1, 2, XL and 3"
DENOISERS = ("unet", "transformer")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
USED_COMPONENTS = (*DENOISERS, *ENCODERS, "tokenizer", "tokenizer_2", "tokenizer_3", "vae", "scheduler")
"""Components that are read; others, such as a safety checker, are ignored."""
CONFIGS = (CONFIG, "tokenizer_config.json", "scheduler_config.json")
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
VARIANT = "fp16"
PICKLE_EXTENSIONS = ("bin", "pt", "pth", "ckpt")
DESCRIPTION_PATTERNS = [MODEL_INDEX, "*/*.json", "*/*.txt", "*/*.model"]
SHARD_PATTERN = "-?????-of-?????"


class PipelineComponents(NamedTuple):
    """The folders and classes of a pipeline's components."""

    folder: Path
    model_index: dict[str, Any]
    """The content of model_index.json."""
    denoiser: Path
    denoiser_class: str
    encoders: tuple[Path, ...]
    encoder_classes: tuple[str, ...]
    tokenizers: tuple[Path, ...]
    vae: Path


def resolve_pipeline(name: str, *, key: str = KEY, required_file: str = MODEL_INDEX) -> ModelFolder:
    """Resolve a pipeline like `resolve_model`; from the hub, download half-precision files only if there are no others."""
    names = [*DENOISERS, *ENCODERS, "vae"]
    patterns = [*DESCRIPTION_PATTERNS, *list_weight_patterns(names)]
    pipeline = resolve_model(name, key=key, required_file=required_file, patterns=patterns)
    folders = [pipeline.path / component for component in names]
    incomplete = [path.name for path in folders if (path / CONFIG).is_file() and not _list_weight_files(path)]
    if pipeline.origin == "hub" and incomplete:
        return resolve_model(
            name, key=key, patterns=[*DESCRIPTION_PATTERNS, *list_weight_patterns(incomplete, variant=VARIANT)]
        )
    return pipeline


def list_weight_patterns(components: list[str], *, variant: str = "") -> list[str]:
    """Return glob patterns of weight files, whole or sharded.

    The patterns are exact, because many repositories have each file several times, in several precisions and formats.
    """
    suffixes = (
        [f".{variant}", f".{variant}{SHARD_PATTERN}", f"{SHARD_PATTERN}.{variant}"] if variant else ["", SHARD_PATTERN]
    )
    return [
        f"{component}/{stem}{suffix}.safetensors"
        for component in components
        for stem in WEIGHT_STEMS
        for suffix in suffixes
    ]


def find_weights_variant(folder: Path) -> str | None:
    """Return the `variant` of `from_pretrained` for a component's folder: None, or fp16 if there is nothing else."""
    return None if _list_weight_files(folder) else VARIANT


def read_pipeline_components(folder: Path) -> PipelineComponents:
    """Return the components of a pipeline; refuse a component that is missing, of another class, or would run code."""
    file = folder / MODEL_INDEX
    if not file.is_file():
        raise UsageError(f"{KEY}: {folder} has no {MODEL_INDEX}; use the folder of a saved diffusers pipeline")
    index = read_json_object(file)
    classes = {name: _read_component_class(index, name, file) for name in USED_COMPONENTS}
    folders = {name: folder / name for name, class_name in classes.items() if class_name is not None}
    if not isinstance(index.get("_class_name"), str):
        raise UsageError(f"{KEY}: {file} is a pipeline with custom code, which is never run; {SUPPORTED_HINT}")
    for path in folders.values():
        _check_no_code(path)
    encoders = [name for name in ENCODERS if name in folders]
    denoiser = next((name for name in DENOISERS if name in folders), None)
    supported = {"unet": (UNET,), "transformer": (TRANSFORMER,), "vae": (VAE,), ENCODERS[2]: (T5,)}
    counts: dict[str | None, tuple[int, ...]] = {"unet": (1, 2), "transformer": (2, 3)}
    for name in (denoiser, *encoders, "vae"):
        if name is not None and classes[name] not in supported.get(name, CLIP_CLASSES):
            raise UsageError(f"{KEY}: {file} has a {classes[name]} as {name}, which is not supported; {SUPPORTED_HINT}")
    if encoders != list(ENCODERS[: len(encoders)]) or len(encoders) not in counts.get(denoiser, ()):
        encoder_names = " and ".join(encoders) or "no text encoder"
        raise UsageError(
            f"{KEY}: {file} has {encoder_names} for {denoiser or 'no denoiser'}, which is not supported; {SUPPORTED_HINT}"
        )
    assert denoiser is not None
    if denoiser == "transformer" or len(encoders) > 1:
        _check_projection(classes, encoders[1:2] if denoiser == "unet" else encoders[:2], file)
    tokenizers = [name.replace("text_encoder", "tokenizer") for name in encoders]
    missing = [name for name in (denoiser, *encoders, *tokenizers, "vae", "scheduler") if not (folder / name).is_dir()]
    if missing:
        raise UsageError(f"{KEY}: {folder} has no folder {missing[0]}; save or download the pipeline again")
    for name in (denoiser, *encoders, "vae"):
        require_component_weights(folder / name)
    return PipelineComponents(
        folder,
        index,
        folder / denoiser,
        str(classes[denoiser]),
        tuple(folder / name for name in encoders),
        tuple(str(classes[name]) for name in encoders),
        tuple(folder / name for name in tokenizers),
        folder / "vae",
    )


def require_component_weights(folder: Path) -> None:
    """Refuse a component's folder without safetensors."""
    if _list_weight_files(folder) or _list_weight_files(folder, VARIANT):
        return
    pickles = sorted(file.name for ending in PICKLE_EXTENSIONS for file in folder.glob(f"*.{ending}"))
    if pickles:
        raise UsageError(
            f"{KEY}: {folder / pickles[0]} is a pickle, which can run code and is never opened; convert the pipeline with "
            "diffusers: pipe.save_pretrained(folder, safe_serialization=True)"
        )
    raise UsageError(f"{KEY}: {folder} has no *.safetensors; save or download the pipeline again")


def _list_weight_files(folder: Path, variant: str = "") -> list[Path]:
    patterns = list_weight_patterns([folder.name], variant=variant)
    return sorted(file for pattern in patterns for file in folder.parent.glob(pattern))


def _read_component_class(index: dict[str, Any], name: str, file: Path) -> str | None:
    """Return the class of a component; None if the pipeline does not have it."""
    entry = index.get(name)
    if entry is None or entry == [None, None]:
        return None
    if not isinstance(entry, list) or len(entry) != 2:
        raise UsageError(
            f"{KEY}: {file} has no library and class for {name} ({entry!r}); save or download the pipeline again"
        )
    library, class_name = entry
    if library not in LIBRARIES:
        raise UsageError(
            f"{KEY}: {file} takes {name} from {library!r}, custom code, which is never run; {SUPPORTED_HINT}"
        )
    return str(class_name)


def _check_no_code(folder: Path) -> None:
    for name in CONFIGS:
        if (folder / name).is_file():
            read_config_without_code(folder / name, key=KEY)


def _check_projection(classes: dict[str, str | None], encoders: list[str], file: Path) -> None:
    """Refuse text encoders without the projection that a pooled text embedding needs."""
    for name in encoders:
        if classes[name] != CLIP_CLASSES[1]:
            raise UsageError(
                f"{KEY}: {file} has a {classes[name]} as {name}, but needs a {CLIP_CLASSES[1]}; {SUPPORTED_HINT}"
            )
