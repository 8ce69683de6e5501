"""Which hashed n-grams of a text are features; apart from ngrams.py, so that recipes load without a tokenizer library."""

from __future__ import annotations

from typing import final

from pydantic import BaseModel, ConfigDict, Field, model_validator


@final
class NgramSpec(BaseModel):
    """Which n-grams are features, and how many buckets they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    words: int = Field(2, ge=0)
    """Longest n-gram of words; 0 is none."""
    characters: tuple[int, int] | None = (3, 5)
    """Shortest and longest n-gram of characters; None is none."""
    buckets: int = Field(1 << 18, ge=2)

    @model_validator(mode="after")
    def _check_lengths(self) -> NgramSpec:
        if self.words == 0 and self.characters is None:
            raise ValueError("there are no n-grams: both words and characters are off")
        if self.characters is not None and not 1 <= self.characters[0] <= self.characters[1]:
            raise ValueError(f"characters {list(self.characters)} is not a shortest and a longest length")
        return self

    @property
    def num_word_buckets(self) -> int:
        """Number of buckets for n-grams of words; the others are for those of characters."""
        return self.buckets if self.characters is None else self.buckets // 2 if self.words else 0
