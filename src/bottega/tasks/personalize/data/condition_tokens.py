"""What is said about a person as tokens: a prompt for the language model, and keywords for the image generator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from bottega.data.sources.source import Source
from bottega.tasks.personalize.data.records import PersonalRows, Record


class Said(NamedTuple):
    """What a language model said of a record: of what the person likes, and of what the picture must show."""

    preference: tuple[str, ...]
    target: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, str]:
        """As an image generator reads them."""
        return ", ".join(self.preference), ", ".join(self.target)


class PromptTokenizer(Protocol):
    """Histories and wishes as the prompts of a language model."""

    @property
    def fingerprint(self) -> str: ...

    def ids(self, record: Record) -> np.ndarray:
        """int64 [t]"""


class TextTokenizer(Protocol):
    """Texts as the rows of tokens that an image generator's encoders read."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """int64 [n, K] for each encoder."""


@dataclass(frozen=True)
class ConditionTokenizer:
    """All that is said to both frozen models about people."""

    prompts: PromptTokenizer
    texts: TextTokenizer

    @property
    def fingerprint(self) -> str:
        return f"{self.prompts.fingerprint} {self.texts.fingerprint}"

    def encode(self, records: Sequence[Record], keywords: Sequence[Said]) -> dict[str, np.ndarray]:
        """ "prompt" and "prompt_mask" [n, T]; "preference_0", ... and "target_0", ... [n, K]; all int64."""
        preference, target = zip(*(one.texts for one in keywords), strict=True)
        return {
            **self.encode_prompts(records),
            **self.encode_texts("preference", preference),
            **self.encode_texts("target", target),
        }

    def encode_prompts(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Prompts, filled up on the right to the longest."""
        rows = [self.prompts.ids(record) for record in records]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        return {"prompt": ids, "prompt_mask": mask}

    def encode_texts(self, name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """ "name_0", ... for each text encoder of the generator."""
        return {f"{name}_{number}": rows for number, rows in enumerate(self.texts.encode(texts))}


@final
class PromptedRows(Source):
    """The samples of `PersonalRows` with what is said about each person.

    Tokens are made when they are asked for: those of a hundred thousand long histories would be 240 MB in each worker.
    """

    def __init__(self, people: PersonalRows, keywords: Sequence[Said], sayings: ConditionTokenizer) -> None:
        assert len(people) == len(keywords), "keywords of other people"
        self.people, self.keywords, self.tokenizer = people, tuple(keywords), sayings

    def __len__(self) -> int:
        return len(self.people)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        numbers = index.tolist()
        records = [self.people.record(number) for number in numbers]
        said = self.tokenizer.encode(records, [self.keywords[number] for number in numbers])
        return {**self.people.rows(index, epoch), **said}

    @property
    def padding_values(self) -> dict[str, int]:
        return {"prompt": 0, "prompt_mask": 0}

    def length_order(self, count: int) -> np.ndarray:
        """By letters, which tell nearly as much as tokens and are there already."""
        records = map(self.people.record, range(count))
        lengths = [
            sum(len(item.caption) for item in record.history) + len(record.wish_or_caption) for record in records
        ]
        return np.argsort(lengths, kind="stable")

    @cached_property
    def fingerprint(self) -> str:
        parts = (self.people.fingerprint, self.tokenizer.fingerprint, self.keywords)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        preference, target = self.keywords[index].texts
        count = len(self.tokenizer.prompts.ids(self.people.record(index)))
        return (
            f"{self.people.describe(index, epoch)}\n"
            f"keywords: likes {preference or 'nothing said'}; shows {target or 'nothing said'}\n"
            f"prompt of {count} tokens"
        )
