"""Recipe sections of text data: tokenizer and augmentation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.section import Positive, Probability, Section


class TextAugmentation(Section):
    """Augmentation of training texts."""

    enabled: bool = Field(True, description="whether augmentation is on")
    techniques: tuple[Literal["synonym_replacement", "random_insertion", "random_swap", "random_deletion"], ...] = (
        Field(("random_swap", "random_deletion"), description="augmentations to apply")
    )
    probability: Probability = Field(0.1, description="fraction of words changed")
    augmentation_factor: Positive = Field(1, description="augmented copies of each training text")


class Tokenizer(Section):
    """The tokenizer of a language model."""

    kind: Literal["bpe", "bytes", "characters", "pretrained"] = Field("bpe", description="tokenizer of the text")
    vocab_size: Positive | None = Field(None, description="bpe: size of the vocabulary; null is 4096")
    path: str | None = Field(None, description="pretrained: a tokenizer file, a folder or a hub name")


def find_tokenizer_problems(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return (key, problem) of each invalid setting."""
    if tokenizer.kind == "pretrained" and tokenizer.path is None:
        return [("data.tokenizer.path", "missing; kind pretrained needs a file, a folder or a hub name")]
    if tokenizer.kind != "pretrained" and tokenizer.path is not None:
        return [("data.tokenizer.path", "applies to kind pretrained only; set data.tokenizer.kind")]
    return []
