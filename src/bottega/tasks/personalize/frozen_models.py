"""The frozen models of a personalised generator: their folders, dimensions and content hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.core.errors import CheckpointError
from bottega.models.folders.resolve import MODEL_INDEX
from bottega.models.frozen.config import SoftPromptShape
from bottega.models.frozen.language import read_language_model_metadata
from bottega.models.pipeline.metadata import PipelineMetadata, read_pipeline_metadata
from bottega.models.pipeline.model_index import resolve_pipeline
from bottega.models.pipeline.tokenization import tokenize
from bottega.tasks import dependencies
from bottega.tasks.align.clip_folder import check_clip
from bottega.tasks.frozen_models import (
    FrozenModelMissing,
    check_same_model,
    find_frozen_model,
    hash_model_folder,
    hash_named_files,
)
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.personalize.language_tokenizer import hash_prompt_files

METADATA_FILE = "personal.json"
LANGUAGE, GENERATOR, CLIP = "language_model", "diffusion", "clip"
"""Keys of the recipe's model section."""
DESCRIPTIONS = {LANGUAGE: "language model", GENERATOR: "image generator", CLIP: "CLIP"}


class FrozenModel(BaseModel):
    """One frozen model in the metadata of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    named: str
    """The value in the recipe: a folder, a hub name, or needs.<part>."""
    folder: str
    contents: dict[str, str]
    """Component -> hash of all files that affect its output."""

    @property
    def content(self) -> str:
        """One hash of all components."""
        return hashlib.sha256(repr(sorted(self.contents.items())).encode()).hexdigest()


class PersonalizeMetadata(BaseModel):
    """Metadata in the processor folder: what is needed to generate images without the data of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: SoftPromptShape
    language_model: FrozenModel
    diffusion: FrozenModel
    clip: FrozenModel | None = None

    @property
    def component_hashes(self) -> dict[str, str]:
        """Component -> hash, over all frozen models."""
        return {**self.language_model.contents, **self.diffusion.contents, **(self.clip.contents if self.clip else {})}

    def check_same_models(self, recorded_metadata: PersonalizeMetadata) -> bool:
        """Raise a CheckpointError if a model differs from the recorded one; return whether the shapes are equal."""
        for key in (LANGUAGE, GENERATOR, CLIP):
            current, recorded_model = getattr(self, key), getattr(recorded_metadata, key)
            if current is None or recorded_model is None:  # CLIP is optional
                continue
            for name in sorted({*current.contents, *recorded_model.contents}):
                hashes = current.contents.get(name), recorded_model.contents.get(name)
                check_same_model(
                    name,
                    current_hash=hashes[0],
                    recorded_hash=hashes[1],
                    name=f"model.{key}",
                    recorded=recorded_model.folder,
                )
        return self.shape == recorded_metadata.shape

    def relocate(self, recipe: PersonalizeRecipe, processor: Path) -> PersonalizeMetadata:
        """Return the metadata of a finished run with the current folders of its models.

        A model may be at its recorded path, where the recipe names it, or beside a run that was moved.
        """
        models: dict[str, FrozenModel | None] = {
            key: _relocate(getattr(self, key), key, recipe, processor) for key in (LANGUAGE, GENERATOR)
        }
        if self.clip is not None:
            models[CLIP] = _relocate_clip(self.clip, recipe, processor)
        return self.model_copy(update=models)


def find_frozen_models(recipe: PersonalizeRecipe) -> PersonalizeMetadata:
    """Find the frozen models of a new run; only their configurations are read, so that a mismatch is found early."""
    language, generator = (_find_model(recipe, key) for key in (LANGUAGE, GENERATOR))
    clip = _find_model(recipe, CLIP) if recipe.model.clip is not None else None
    shape = _build_shape(recipe, Path(language.folder), read_pipeline_metadata(generator.folder))
    return PersonalizeMetadata(shape=shape, language_model=language, diffusion=generator, clip=clip)


def _build_shape(recipe: PersonalizeRecipe, folder: Path, pipeline: PipelineMetadata) -> SoftPromptShape:
    model, language = recipe.model, read_language_model_metadata(folder)
    language.require_prefixes(model.num_prefix_tokens)
    pipeline.check_side(recipe.data.image_size)
    return SoftPromptShape(
        hidden_size=language.hidden_size,
        num_layers=language.num_layers,
        num_kv_heads=language.num_kv_heads,
        head_size=language.head_size,
        text_size=pipeline.text_size,
        num_image_tokens=model.num_image_tokens,
        num_prefix_tokens=model.num_prefix_tokens,
        projection=model.prefix_projection,
    )


def _find_model(recipe: PersonalizeRecipe, key: str) -> FrozenModel:
    name: str = getattr(recipe.model, key)
    folder = resolve_model_folder(recipe, key)
    CHECK_FUNCTIONS[key](folder)  # before gigabytes are hashed
    return FrozenModel(named=name, folder=str(folder), contents=HASH_FUNCTIONS[key](folder))


def resolve_model_folder(recipe: PersonalizeRecipe, key: str, *, runs_folder: Path | None = None) -> Path:
    """Return the folder of a frozen model: the export of a dependency or of a run, a local folder, or one from the hub."""
    name: str = getattr(recipe.model, key)
    options: dict[str, Any] = {"required_file": MODEL_INDEX, "find": resolve_pipeline} if key == GENERATOR else {}
    return dependencies.resolve_model_reference(
        recipe, name, key=f"model.{key}", runs_folder=runs_folder, **options
    ).path.absolute()


def _list_candidate_folders(
    model: FrozenModel, key: str, recipe: PersonalizeRecipe, processor: Path
) -> list[Callable[[], Path]]:
    runs_folder = processor.absolute().parent.parent  # of RUNS/RUN/processor
    # The recorded folder first: resolving a hub name would use the network.
    return [
        lambda: _get_recorded_folder(model),
        lambda: resolve_model_folder(recipe, key),
        lambda: resolve_model_folder(recipe, key, runs_folder=runs_folder),
    ]


def _get_recorded_folder(model: FrozenModel) -> Path:
    folder = Path(model.folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} no longer exists")
    return folder


def _relocate(model: FrozenModel, key: str, recipe: PersonalizeRecipe, processor: Path) -> FrozenModel:
    is_dependency = getattr(recipe.model, key).startswith(dependencies.REFERENCE_PREFIX)
    folder = find_frozen_model(
        DESCRIPTIONS[key],
        model.content,
        _list_candidate_folders(model, key, recipe, processor),
        recorded_folder=model.folder,
        owner=processor.parent if is_dependency else None,
        hash_folder=lambda folder: model.model_copy(update={"contents": HASH_FUNCTIONS[key](folder)}).content,
    )
    return model.model_copy(update={"folder": str(folder)})


def _relocate_clip(model: FrozenModel, recipe: PersonalizeRecipe, processor: Path) -> FrozenModel | None:
    """Return None if CLIP is missing: then only the first weighting is sampled. Raise CheckpointError if CLIP differs."""
    try:
        return _relocate(model, CLIP, recipe, processor)
    except FrozenModelMissing:
        return None


# Hashes of all files that affect the output of a model, by component


def _hash_language_model(folder: Path) -> dict[str, str]:
    return {"language model": hash_model_folder(folder), "language model's tokenizer": hash_prompt_files(folder)}


def _hash_generator(folder: Path) -> dict[str, str]:
    """Hash each component by itself, so that a message can name the one that changed."""
    pipeline = read_pipeline_metadata(folder)
    components = [pipeline.denoiser, pipeline.vae, *pipeline.encoders]
    hashes = {Path(component).name: hash_model_folder(Path(component)) for component in components}
    folders = [*map(Path, pipeline.tokenizers), folder / "scheduler"]
    files = [[file for file in sorted(path.glob("*")) if file.is_file()] for path in folders]
    hashes["tokens and schedule"] = hashlib.sha256(repr(list(map(hash_named_files, files))).encode()).hexdigest()
    return {f"image generator's {name}": component_hash for name, component_hash in hashes.items()}


def _hash_clip(folder: Path) -> dict[str, str]:
    return {"CLIP": hash_model_folder(folder)}


CHECK_FUNCTIONS: dict[str, Callable[[Path], object]] = {
    LANGUAGE: read_language_model_metadata,
    GENERATOR: read_pipeline_metadata,
    CLIP: check_clip,
}
HASH_FUNCTIONS: dict[str, Callable[[Path], dict[str, str]]] = {
    LANGUAGE: _hash_language_model,
    GENERATOR: _hash_generator,
    CLIP: _hash_clip,
}


@final
@dataclass(frozen=True)
class GeneratorTokenizer:
    """Tokenizes texts as the generator's pipeline does, for each of its text encoders."""

    metadata: PipelineMetadata
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return token ids, int64 (texts, length), for each encoder; texts are truncated and padded."""
        return tokenize(self.metadata, texts)

    @cached_property
    def empty_text_ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the empty text, for each encoder."""
        return tuple(tuple(rows[0].tolist()) for rows in self.encode([""]))


def load_generator_tokenizer(model: FrozenModel) -> GeneratorTokenizer:
    """Return the tokenizer of a frozen image generator."""
    return GeneratorTokenizer(read_pipeline_metadata(model.folder), model.content)
