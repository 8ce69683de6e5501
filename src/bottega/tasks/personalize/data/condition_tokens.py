"""Keywords and token ids that describe a user to the two frozen models: a prompt for the language model, and keyword texts
for the text encoders of the image generator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from bottega.data.sources.source import Source
from bottega.tasks.personalize.data.records import PersonalRows, Record


class RecordKeywords(NamedTuple):
    """Keywords that a language model generated for a record: of what the user likes, and of what the image must show."""

    preference: tuple[str, ...]
    target: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, str]:
        """Both as comma-separated text, as an image generator reads them."""
        return ", ".join(self.preference), ", ".join(self.target)

    def __repr__(self) -> str:
        # Fingerprints of existing runs are hashes of this text.
        return f"Said(preference={self.preference!r}, target={self.target!r})"


class PromptTokenizer(Protocol):
    """Turns histories and wishes into prompts of a language model."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects the tokens of a prompt."""

    def encode_prompt(self, record: Record) -> np.ndarray:
        """Return the token ids of the prompt, int64 (length,)."""


class TextTokenizer(Protocol):
    """Turns texts into the token ids that the text encoders of an image generator read."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects the tokens of a text."""

    def encode(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """Return token ids, int64 (texts, length), for each encoder."""


@dataclass(frozen=True)
class ConditionTokenizer:
    """Tokenizes all inputs of both frozen models."""

    prompt_tokenizer: PromptTokenizer
    text_tokenizer: TextTokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects the tokens of a condition."""
        return f"{self.prompt_tokenizer.fingerprint} {self.text_tokenizer.fingerprint}"

    def encode(self, records: Sequence[Record], keywords: Sequence[RecordKeywords]) -> dict[str, np.ndarray]:
        """Return `prompt` and `prompt_mask` (records, length), and for each text encoder `preference_0`, ... and
        `target_0`, ... (records, length); all int64."""
        preference, target = zip(*(words.texts for words in keywords), strict=True)
        texts = {**self.encode_texts("preference", preference), **self.encode_texts("target", target)}
        return {**self.encode_prompts(records), **texts}

    def encode_prompts(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Return `prompt` and `prompt_mask`, padded on the right to the longest."""
        rows = [self.prompt_tokenizer.encode_prompt(record) for record in records]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        return {"prompt": ids, "prompt_mask": mask}

    def encode_texts(self, name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return `NAME_0`, ..., the token ids of the texts for each text encoder."""
        return {f"{name}_{number}": rows for number, rows in enumerate(self.text_tokenizer.encode(texts))}


@final
class PromptedRows(Source):
    """The samples of `PersonalRows` with the tokens that describe each user.

    Tokens are computed on access: those of a hundred thousand long histories would take 240 MB in each worker.
    """

    def __init__(self, rows: PersonalRows, keywords: Sequence[RecordKeywords], tokenizer: ConditionTokenizer) -> None:
        assert len(rows) == len(keywords), "one set of keywords for each record"
        self.personal_rows, self.keywords, self.tokenizer = rows, tuple(keywords), tokenizer

    def __len__(self) -> int:
        return len(self.personal_rows)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        numbers = index.tolist()
        records = [self.personal_rows.record(number) for number in numbers]
        tokens = self.tokenizer.encode(records, [self.keywords[number] for number in numbers])
        return {**self.personal_rows.rows(index, epoch), **tokens}

    @property
    def padding_values(self) -> dict[str, int]:
        return {"prompt": 0, "prompt_mask": 0}

    def length_order(self, count: int) -> np.ndarray:
        """Sort by characters, which approximate the number of tokens and need no tokenizer."""
        records = map(self.personal_rows.record, range(count))
        lengths = [
            sum(len(item.caption) for item in record.history) + len(record.wish_or_caption) for record in records
        ]
        return np.argsort(lengths, kind="stable")

    @cached_property
    def fingerprint(self) -> str:
        parts = (self.personal_rows.fingerprint, self.tokenizer.fingerprint, self.keywords)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        preference, target = self.keywords[index].texts
        count = len(self.tokenizer.prompt_tokenizer.encode_prompt(self.personal_rows.record(index)))
        return (
            f"{self.personal_rows.describe(index, epoch)}\n"
            f"keywords: likes {preference or '(none)'}; shows {target or '(none)'}\n"
            f"prompt of {count} tokens"
        )
