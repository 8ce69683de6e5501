"""The frozen models that a personalised generator stands between: where they lie, what they are, and whether they are still
the same."""

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
from bottega.models.folders.resolve import INDEX
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
from bottega.tasks.personalize.keywords import hash_prompt_files

METADATA_FILE = "personal.json"
LANGUAGE, GENERATOR, JUDGE = "language_model", "diffusion", "clip"
"""Keys of the recipe's model."""
DESCRIPTIONS = {LANGUAGE: "language model", GENERATOR: "image generator", JUDGE: "CLIP"}


class FrozenModel(BaseModel):
    """One frozen model, as a run remembers it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    named: str
    """As the recipe has it: a folder, a hub name, or a part."""
    folder: str
    contents: dict[str, str]
    """Hashes of all that decides what it computes, by part."""

    @property
    def content(self) -> str:
        return hashlib.sha256(repr(sorted(self.contents.items())).encode()).hexdigest()


class PersonalizeMetadata(BaseModel):
    """What a run keeps beside its weights: enough to draw again where its data are not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: SoftPromptShape
    language_model: FrozenModel
    diffusion: FrozenModel
    clip: FrozenModel | None = None

    @property
    def frozen(self) -> dict[str, str]:
        """Name -> hash of what the trained tokens stand between, and of who judges them."""
        return {**self.language_model.contents, **self.diffusion.contents, **(self.clip.contents if self.clip else {})}

    def check_same_models(self, before: PersonalizeMetadata) -> bool:
        """A run goes on between the models it began with, or not at all."""
        for key in (LANGUAGE, GENERATOR, JUDGE):
            now, then = getattr(self, key), getattr(before, key)
            if now is None or then is None:  # a run may have no judge, or lose it
                continue
            for name in sorted({*now.contents, *then.contents}):
                contents = now.contents.get(name), then.contents.get(name)
                check_same_model(name, now=contents[0], before=contents[1], name=f"model.{key}", previous=then.folder)
        return self.shape == before.shape

    def relocate(self, recipe: PersonalizeRecipe, processor: Path) -> PersonalizeMetadata:
        """Of a finished run: each may lie where the recipe says, where it was, or beside a run that was moved."""
        changes: dict[str, FrozenModel | None] = {
            key: _again(getattr(self, key), key, recipe, processor) for key in (LANGUAGE, GENERATOR)
        }
        if self.clip is not None:
            changes[JUDGE] = _judge_again(self.clip, recipe, processor)
        return self.model_copy(update=changes)


def find_frozen_models(recipe: PersonalizeRecipe) -> PersonalizeMetadata:
    """Of a run that begins. All are read from their configurations alone, so that what does not fit costs no loading."""
    language, generator = (_base(recipe, key) for key in (LANGUAGE, GENERATOR))
    clip = _base(recipe, JUDGE) if recipe.model.clip is not None else None
    shape = _shape(recipe, Path(language.folder), read_pipeline_metadata(generator.folder))
    return PersonalizeMetadata(shape=shape, language_model=language, diffusion=generator, clip=clip)


def _shape(recipe: PersonalizeRecipe, folder: Path, image: PipelineMetadata) -> SoftPromptShape:
    model, facts = recipe.model, read_language_model_metadata(folder)
    facts.require_prefixes(model.num_prefix_tokens)
    image.check_side(recipe.data.image_size)
    return SoftPromptShape(
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        text_size=image.text_size,
        num_image_tokens=model.num_image_tokens,
        num_prefix_tokens=model.num_prefix_tokens,
        projection=model.prefix_projection,
    )


def _base(recipe: PersonalizeRecipe, key: str) -> FrozenModel:
    name: str = getattr(recipe.model, key)
    folder = resolve_model_folder(recipe, key)
    CHECKS[key](folder)  # what it is, before its gigabytes are hashed
    return FrozenModel(named=name, folder=str(folder), contents=CONTENTS[key](folder))


def resolve_model_folder(recipe: PersonalizeRecipe, key: str, *, beside: Path | None = None) -> Path:
    """Where a frozen model lies: a part of the recipe, a run's export, a folder, or what the hub has."""
    name: str = getattr(recipe.model, key)
    kind: dict[str, Any] = {"holds": INDEX, "find": resolve_pipeline} if key == GENERATOR else {}
    return dependencies.resolve_model_reference(recipe, name, key=f"model.{key}", beside=beside, **kind).path.absolute()


def _places(base: FrozenModel, key: str, recipe: PersonalizeRecipe, processor: Path) -> list[Callable[[], Path]]:
    runs = processor.absolute().parent.parent
    # Where it was comes before what the recipe says: of a name of the hub that would ask the network.
    return [
        lambda: _still_there(base),
        lambda: resolve_model_folder(recipe, key),
        lambda: resolve_model_folder(recipe, key, beside=runs),
    ]


def _still_there(base: FrozenModel) -> Path:
    folder = Path(base.folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not there any more")
    return folder


def _again(base: FrozenModel, key: str, recipe: PersonalizeRecipe, processor: Path) -> FrozenModel:
    part_of = processor.parent if getattr(recipe.model, key).startswith(dependencies.PREFIX) else None
    found = find_frozen_model(
        DESCRIPTIONS[key],
        base.content,
        _places(base, key, recipe, processor),
        recorded=base.folder,
        owner=part_of,
        hash_folder=lambda folder: base.model_copy(update={"contents": CONTENTS[key](folder)}).content,
    )
    return base.model_copy(update={"folder": str(found)})


def _judge_again(base: FrozenModel, recipe: PersonalizeRecipe, processor: Path) -> FrozenModel | None:
    """Another one would pick and measure otherwise, without a word; without any, nothing is picked, and that is said."""
    try:
        return _again(base, JUDGE, recipe, processor)
    except FrozenModelMissing:
        return None


# What decides what a model computes


def _language_contents(folder: Path) -> dict[str, str]:
    return {"language model": hash_model_folder(folder), "language model's tokenizer": hash_prompt_files(folder)}


def _generator_contents(folder: Path) -> dict[str, str]:
    """Each part by itself, so that a person is told which one changed. The tokenizers by their files."""
    facts = read_pipeline_metadata(folder)
    parts = [facts.denoiser, facts.vae, *facts.encoders]
    found = {Path(part).name: hash_model_folder(Path(part)) for part in parts}
    folders = [*map(Path, facts.tokenizers), folder / "scheduler"]
    files = [[file for file in sorted(one.glob("*")) if file.is_file()] for one in folders]
    hashes = [hash_named_files(several) for several in files]
    found["tokens and schedule"] = hashlib.sha256(repr(hashes).encode()).hexdigest()
    return {f"image generator's {name}": content for name, content in found.items()}


def _judge_contents(folder: Path) -> dict[str, str]:
    return {"CLIP": hash_model_folder(folder)}


CHECKS: dict[str, Callable[[Path], object]] = {
    LANGUAGE: read_language_model_metadata,
    GENERATOR: read_pipeline_metadata,
    JUDGE: check_clip,
}
CONTENTS: dict[str, Callable[[Path], dict[str, str]]] = {
    LANGUAGE: _language_contents,
    GENERATOR: _generator_contents,
    JUDGE: _judge_contents,
}


@final
@dataclass(frozen=True)
class GeneratorTokenizer:
    """Texts as a generator's own pipeline cuts and fills them up, for each of its text encoders."""

    facts: PipelineMetadata
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return tokenize(self.facts, texts)

    @cached_property
    def empty(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rows[0].tolist()) for rows in self.encode([""]))


def load_generator_tokenizer(base: FrozenModel) -> GeneratorTokenizer:
    facts: Any = read_pipeline_metadata(base.folder)
    return GeneratorTokenizer(facts, base.content)
