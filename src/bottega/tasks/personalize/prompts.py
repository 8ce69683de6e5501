"""What the two frozen models are told of people: prompts, keywords and their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import UsageError
from bottega.models.frozen.config import FrozenPrecision
from bottega.tasks.personalize.config import Keywords, PersonalizeRecipe
from bottega.tasks.personalize.data.condition_tokens import ConditionTokenizer, Said
from bottega.tasks.personalize.data.records import Record
from bottega.tasks.personalize.frozen_models import GeneratorTokenizer, PersonalizeMetadata, load_generator_tokenizer
from bottega.tasks.personalize.keywords import KeywordGenerator, Say


@final
@dataclass(frozen=True)
class LanguagePrompts:
    """Prompts that image tokens follow. The tokenizer is opened by each process for itself."""

    folder: str
    options: Keywords
    length: int
    room: int
    """Positions of the language model that learned tokens take."""
    content: str
    precision: FrozenPrecision = "fp32"
    """In which keywords are decoded; prompts are the same in any."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "keyworder"}

    @cached_property
    def keyworder(self) -> KeywordGenerator:
        return KeywordGenerator(self.folder, self.options, length=self.length, room=self.room, precision=self.precision)

    @property
    def fingerprint(self) -> str:
        said = (self.content, self.options.model_dump_json(), self.length, self.room)
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def ids(self, record: Record) -> np.ndarray:
        return self.keyworder.prompt_for_images(record)

    def encode_words(self, words: Sequence[str]) -> tuple[int, ...]:
        """Each by itself, without what a tokenizer puts around a text."""
        found = [self.keyworder.tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        if not all(found):
            word = words[found.index([])]
            raise UsageError(f"model.start_words: {word!r} is no token of the language model; give such as ':'")
        return tuple(number for tokens in found for number in tokens)


@final
class Teller:
    """Of a run, all that is said to its frozen models."""

    def __init__(
        self,
        recipe: PersonalizeRecipe,
        facts: PersonalizeMetadata,
        *,
        precision: FrozenPrecision,
        remembered: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.prompts = LanguagePrompts(
            folder=facts.language_model.folder,
            options=recipe.model.keywords,
            length=recipe.data.sequence_length,
            room=facts.shape.num_image_tokens + facts.shape.num_prefix_tokens,
            content=facts.language_model.content,
            precision=precision,
        )
        self.prompts.keyworder.remembered = remembered
        self.texts: GeneratorTokenizer = load_generator_tokenizer(facts.diffusion)
        self.sayings = ConditionTokenizer(self.prompts, self.texts)

    def keywords(self, records: Sequence[Record], model: Any, device: Any, say: Say) -> list[Said]:
        """Of each record. `model` is the language model, or what loads it where an answer is not known yet."""
        by = self.prompts.keyworder
        preferences = by.preferences(records, model, device, say)
        targets = by.targets([record.wish_or_caption for record in records], model, device, say)
        return [Said(*both) for both in zip(preferences, targets, strict=True)]
