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
from bottega.models.frozen.language import language_facts
from bottega.models.pipeline.folder import ImageFacts, image_facts
from bottega.models.pipeline.parts import find_pipeline
from bottega.models.pipeline.tokens import tokenize
from bottega.tasks import needs
from bottega.tasks.align.clip_folder import check_clip
from bottega.tasks.frozen import Gone, check_same, content_of, found_again, hash_of_files
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.personalize.keywords import tokenizer_content

FACTS = "personal.json"
LANGUAGE, GENERATOR, JUDGE = "language_model", "diffusion", "clip"
"""Keys of the recipe's model."""
WHAT = {LANGUAGE: "language model", GENERATOR: "image generator", JUDGE: "CLIP"}


class Base(BaseModel):
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


class PersonalFacts(BaseModel):
    """What a run keeps beside its weights: enough to draw again where its data are not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: SoftPromptShape
    language_model: Base
    diffusion: Base
    clip: Base | None = None

    @property
    def frozen(self) -> dict[str, str]:
        """Name -> hash of what the trained tokens stand between, and of who judges them."""
        return {**self.language_model.contents, **self.diffusion.contents, **(self.clip.contents if self.clip else {})}

    def check(self, before: PersonalFacts) -> bool:
        """A run goes on between the models it began with, or not at all."""
        for key in (LANGUAGE, GENERATOR, JUDGE):
            now, then = getattr(self, key), getattr(before, key)
            if now is None or then is None:  # a run may have no judge, or lose it
                continue
            for name in sorted({*now.contents, *then.contents}):
                contents = now.contents.get(name), then.contents.get(name)
                check_same(name, now=contents[0], before=contents[1], named=f"model.{key}", was=then.folder)
        return self.shape == before.shape

    def again(self, recipe: PersonalizeRecipe, codec: Path) -> PersonalFacts:
        """Of a finished run: each may lie where the recipe says, where it was, or beside a run that was moved."""
        changes: dict[str, Base | None] = {
            key: _again(getattr(self, key), key, recipe, codec) for key in (LANGUAGE, GENERATOR)
        }
        if self.clip is not None:
            changes[JUDGE] = _judge_again(self.clip, recipe, codec)
        return self.model_copy(update=changes)


def find_parts(recipe: PersonalizeRecipe) -> PersonalFacts:
    """Of a run that begins. All are read from their configurations alone, so that what does not fit costs no loading."""
    language, generator = (_base(recipe, key) for key in (LANGUAGE, GENERATOR))
    clip = _base(recipe, JUDGE) if recipe.model.clip is not None else None
    shape = _shape(recipe, Path(language.folder), image_facts(generator.folder))
    return PersonalFacts(shape=shape, language_model=language, diffusion=generator, clip=clip)


def _shape(recipe: PersonalizeRecipe, folder: Path, image: ImageFacts) -> SoftPromptShape:
    model, facts = recipe.model, language_facts(folder)
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


def _base(recipe: PersonalizeRecipe, key: str) -> Base:
    name: str = getattr(recipe.model, key)
    folder = folder_of(recipe, key)
    CHECKS[key](folder)  # what it is, before its gigabytes are hashed
    return Base(named=name, folder=str(folder), contents=CONTENTS[key](folder))


def folder_of(recipe: PersonalizeRecipe, key: str, *, beside: Path | None = None) -> Path:
    """Where a frozen model lies: a part of the recipe, a run's export, a folder, or what the hub has."""
    name: str = getattr(recipe.model, key)
    kind: dict[str, Any] = {"holds": INDEX, "find": find_pipeline} if key == GENERATOR else {}
    return needs.resolve_named(recipe, name, key=f"model.{key}", beside=beside, **kind).path.absolute()


def _places(base: Base, key: str, recipe: PersonalizeRecipe, codec: Path) -> list[Callable[[], Path]]:
    runs = codec.absolute().parent.parent
    # Where it was comes before what the recipe says: of a name of the hub that would ask the network.
    return [
        lambda: _still_there(base),
        lambda: folder_of(recipe, key),
        lambda: folder_of(recipe, key, beside=runs),
    ]


def _still_there(base: Base) -> Path:
    folder = Path(base.folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not there any more")
    return folder


def _again(base: Base, key: str, recipe: PersonalizeRecipe, codec: Path) -> Base:
    part_of = codec.parent if getattr(recipe.model, key).startswith(needs.PREFIX) else None
    found = found_again(
        WHAT[key],
        base.content,
        _places(base, key, recipe, codec),
        known=base.folder,
        part_of=part_of,
        look=lambda folder: base.model_copy(update={"contents": CONTENTS[key](folder)}).content,
    )
    return base.model_copy(update={"folder": str(found)})


def _judge_again(base: Base, recipe: PersonalizeRecipe, codec: Path) -> Base | None:
    """Another one would pick and measure otherwise, without a word; without any, nothing is picked, and that is said."""
    try:
        return _again(base, JUDGE, recipe, codec)
    except Gone:
        return None


# What decides what a model computes


def _language_contents(folder: Path) -> dict[str, str]:
    return {"language model": content_of(folder), "language model's tokenizer": tokenizer_content(folder)}


def _generator_contents(folder: Path) -> dict[str, str]:
    """Each part by itself, so that a person is told which one changed. The tokenizers by their files."""
    facts = image_facts(folder)
    parts = [facts.denoiser, facts.vae, *facts.encoders]
    found = {Path(part).name: content_of(Path(part)) for part in parts}
    folders = [*map(Path, facts.tokenizers), folder / "scheduler"]
    files = [[file for file in sorted(one.glob("*")) if file.is_file()] for one in folders]
    hashes = [hash_of_files(several) for several in files]
    found["tokens and schedule"] = hashlib.sha256(repr(hashes).encode()).hexdigest()
    return {f"image generator's {name}": content for name, content in found.items()}


def _judge_contents(folder: Path) -> dict[str, str]:
    return {"CLIP": content_of(folder)}


CHECKS: dict[str, Callable[[Path], object]] = {LANGUAGE: language_facts, GENERATOR: image_facts, JUDGE: check_clip}
CONTENTS: dict[str, Callable[[Path], dict[str, str]]] = {
    LANGUAGE: _language_contents,
    GENERATOR: _generator_contents,
    JUDGE: _judge_contents,
}


@final
@dataclass(frozen=True)
class GeneratorTokens:
    """Texts as a generator's own pipeline cuts and fills them up, for each of its text encoders."""

    facts: ImageFacts
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return tokenize(self.facts, texts)

    @cached_property
    def empty(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rows[0].tolist()) for rows in self.encode([""]))


def generator_tokens(base: Base) -> GeneratorTokens:
    facts: Any = image_facts(base.folder)
    return GeneratorTokens(facts, base.content)
