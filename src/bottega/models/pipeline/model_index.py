"""The folders that a diffusers pipeline is made of, found by its index; nothing in them is run, and no pickle opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bottega.core.errors import UsageError
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import CONFIG, INDEX, ModelFolder, resolve_model
from bottega.models.folders.untrusted import read_config_without_code

KEY = "model.diffusion"
UNET, TRANSFORMER, VAE = "UNet2DConditionModel", "SD3Transformer2DModel", "AutoencoderKL"
CLIPS, T5 = ("CLIPTextModel", "CLIPTextModelWithProjection"), "T5EncoderModel"
LIBRARIES = ("diffusers", "transformers")
SUPPORTED = "supported: Stable Diffusion 1, 2, XL and 3"
DENOISERS = ("unet", "transformer")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
USED = (*DENOISERS, *ENCODERS, "tokenizer", "tokenizer_2", "tokenizer_3", "vae", "scheduler")
"""The rest of an index, such as a safety checker, is not looked at."""
CONFIGS = (CONFIG, "tokenizer_config.json", "scheduler_config.json")
STEMS = ("diffusion_pytorch_model", "model")
VARIANT = "fp16"
PICKLES = ("bin", "pt", "pth", "ckpt")
DESCRIPTIONS = [INDEX, "*/*.json", "*/*.txt", "*/*.model"]
SHARD = "-?????-of-?????"


class PipelineComponents(NamedTuple):
    folder: Path
    model_index: dict[str, Any]
    """The index itself."""
    denoiser: Path
    denoiser_class: str
    encoders: tuple[Path, ...]
    encoder_classes: tuple[str, ...]
    tokenizers: tuple[Path, ...]
    vae: Path


def resolve_pipeline(name: str, *, key: str = KEY, required_file: str = INDEX) -> ModelFolder:
    """As `resolve_model`, for a pipeline. Of the hub, files of half precision are fetched only where there are no others."""
    names = [*DENOISERS, *ENCODERS, "vae"]
    patterns = [*DESCRIPTIONS, *weight_patterns(names)]
    found = resolve_model(name, key=key, required_file=required_file, patterns=patterns)
    parts = [found.path / part for part in names]
    bare = [part.name for part in parts if (part / CONFIG).is_file() and not _weights(part)]
    if found.origin == "hub" and bare:
        return resolve_model(name, key=key, patterns=[*DESCRIPTIONS, *weight_patterns(bare, variant=VARIANT)])
    return found


def weight_patterns(parts: list[str], *, variant: str = "") -> list[str]:
    """Of weights whole or in pieces: many repositories hold each several times over, in other precisions and formats."""
    ends = [f".{variant}", f".{variant}{SHARD}", f"{SHARD}.{variant}"] if variant else ["", SHARD]
    return [f"{part}/{stem}{end}.safetensors" for part in parts for stem in STEMS for end in ends]


def weights_variant(folder: Path) -> str | None:
    """Which of the files in a part's folder to read: None are the usual ones."""
    return None if _weights(folder) else VARIANT


def read_pipeline_components(folder: Path) -> PipelineComponents:
    """Refused where a part is missing, of another class, or would run code of the folder's own."""
    file = folder / INDEX
    if not file.is_file():
        raise UsageError(f"{KEY}: {folder} has no {INDEX}; give the folder of a saved diffusers pipeline")
    index = read_json_object(file)
    named = {name: _entry(index, name, file) for name in USED}
    places = {name: folder / name for name, kind in named.items() if kind is not None}
    if not isinstance(index.get("_class_name"), str):
        raise UsageError(f"{KEY}: {file} is of a pipeline with code of its own, which is never run; {SUPPORTED}")
    for place in places.values():
        _check_no_code(place)
    encoders = [name for name in ENCODERS if name in places]
    denoiser = next((name for name in DENOISERS if name in places), None)
    wanted = {"unet": (UNET,), "transformer": (TRANSFORMER,), "vae": (VAE,), ENCODERS[2]: (T5,)}
    counts: dict[str | None, tuple[int, ...]] = {"unet": (1, 2), "transformer": (2, 3)}
    for name in (denoiser, *encoders, "vae"):
        if name is not None and named[name] not in wanted.get(name, CLIPS):
            raise UsageError(f"{KEY}: {file} has a {named[name]} as {name}, which is not supported; {SUPPORTED}")
    if encoders != list(ENCODERS[: len(encoders)]) or len(encoders) not in counts.get(denoiser, ()):
        said = " and ".join(encoders) or "no text encoder"
        raise UsageError(f"{KEY}: {file} has {said} for {denoiser or 'no denoiser'}, not supported; {SUPPORTED}")
    assert denoiser is not None
    if denoiser == "transformer" or len(encoders) > 1:
        _check_projects(named, encoders[1:2] if denoiser == "unet" else encoders[:2], file)
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
        str(named[denoiser]),
        tuple(folder / name for name in encoders),
        tuple(str(named[name]) for name in encoders),
        tuple(folder / name for name in tokenizers),
        folder / "vae",
    )


def require_component_weights(folder: Path) -> None:
    if _weights(folder) or _weights(folder, VARIANT):
        return
    pickles = sorted(file.name for ending in PICKLES for file in folder.glob(f"*.{ending}"))
    if pickles:
        raise UsageError(
            f"{KEY}: {folder / pickles[0]} is a pickle, which can run code and is never opened; convert the pipeline with "
            "diffusers: pipe.save_pretrained(folder, safe_serialization=True)"
        )
    raise UsageError(f"{KEY}: {folder} has no *.safetensors; save or download the pipeline again")


def _weights(folder: Path, variant: str = "") -> list[Path]:
    patterns = weight_patterns([folder.name], variant=variant)
    return sorted(file for pattern in patterns for file in folder.parent.glob(pattern))


def _entry(index: dict[str, Any], name: str, file: Path) -> str | None:
    """The class of a part; None where the pipeline has no such part."""
    said = index.get(name)
    if said is None or said == [None, None]:
        return None
    if not isinstance(said, list) or len(said) != 2:
        raise UsageError(
            f"{KEY}: {file} names no library and class for {name} ({said!r}); save or download the pipeline again"
        )
    library, kind = said
    if library not in LIBRARIES:
        raise UsageError(
            f"{KEY}: {file} takes {name} from {library!r}, code of its own, which is never run; {SUPPORTED}"
        )
    return str(kind)


def _check_no_code(place: Path) -> None:
    for name in CONFIGS:
        if (place / name).is_file():
            read_config_without_code(place / name, key=KEY)


def _check_projects(named: dict[str, str | None], encoders: list[str], file: Path) -> None:
    """What says something of a text as a whole needs the class that does."""
    for name in encoders:
        if named[name] != CLIPS[1]:
            raise UsageError(f"{KEY}: {file} has a {named[name]} as {name}, and needs a {CLIPS[1]}; {SUPPORTED}")
