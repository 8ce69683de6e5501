"""Preparation of text for a language model: the tokens of every document in order, each with an end-of-text token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bottega.config.data import TextData
from bottega.core.errors import DataError, UsageError
from bottega.data.prepare.encoder import Encoder, Row
from bottega.data.prepare.inputs import Input, check_medium, collect_inputs
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PlannedTexts, PreparationPlan, PreparedData, open_if_prepared, prepare
from bottega.data.prepare.rules import Rules
from bottega.data.prepare.tokenizer_training import get_tokenizer_metadata, load_or_train_tokenizer, open_tokenizer
from bottega.data.records.fields import HAS_NEXT_PIECE
from bottega.data.records.record import BadRecord, Record
from bottega.data.tables.shards import TEXT, Column
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.tokens import BYTE_LENGTHS
from bottega.data.text.vocabulary import TokenizerSpec, build_tokenizer
from bottega.storage.cache_folder import default_cache

# Characters that the tokenizer encodes in one call.
CHARACTERS_PER_CALL = 4_000_000


def prepare_language(
    data: TextData, spec: TokenizerSpec, *, progress: ProgressCallback, cache: Path | None = None
) -> PreparedData:
    """Return the tokens of a recipe's texts: from shards that were prepared elsewhere, from the cache, or computed now."""
    prepared = open_if_prepared(data, task="language")
    if prepared is not None:
        if spec.kind == "pretrained" and build_tokenizer(spec, ()).fingerprint != prepared.metadata["tokenizer"]:
            raise DataError(
                f"{prepared.folder} was prepared with another tokenizer than {spec.path}; prepare it again with {spec.path}"
            )
        return prepared
    return prepare(plan_language_data(data, spec), cache=cache or default_cache(), progress=progress)


def plan_language_data(data: TextData, spec: TokenizerSpec) -> PreparationPlan:
    """Describe the preparation of a recipe's texts: its inputs, rules and tokenizer."""
    rules = Rules.for_text(data)
    inputs, fractions = collect_inputs(data)
    check_medium(inputs, "text")

    pretrained = load_pretrained_tokenizer(spec)
    if (pretrained or spec).kind == "words":
        raise UsageError("data.tokenizer: words cannot be decoded to text, which a language model needs; use bpe")

    def build_encoder(texts: PlannedTexts, folder: Path, progress: ProgressCallback) -> TokenEncoder:
        tokenizer = load_or_train_tokenizer(spec, pretrained, texts, folder / "tokenizer", progress)
        tokenizer.byte_lengths.astype("<i4").tofile(folder / BYTE_LENGTHS)
        has_end_token = not (tokenizer.kind == "characters" and _is_one_text(inputs))
        return TokenEncoder(folder / "tokenizer", tokenizer.dtype.str, has_end_token=has_end_token)

    return PreparationPlan(
        task="language",
        inputs=inputs,
        split_fractions=fractions,
        data=data,
        rules=rules,
        build_encoder=build_encoder,
        options=build_tokenizer_cache_key(spec, pretrained),
        deduplicate=data.deduplicate,
    )


def load_pretrained_tokenizer(spec: TokenizerSpec) -> Tokenizer | None:
    """Return the tokenizer of `spec` if it is pretrained, else None: the others are trained on the texts."""
    return build_tokenizer(spec, ()) if spec.kind == "pretrained" else None


def build_tokenizer_cache_key(spec: TokenizerSpec, pretrained: Tokenizer | None) -> tuple[Any, ...]:
    """Return the options of a tokenizer that change the tokens, for the cache key of the prepared data."""
    fingerprint = pretrained.fingerprint if pretrained is not None else None
    return (spec.kind, spec.vocab_size if spec.kind == "bpe" else None, fingerprint)


def _is_one_text(inputs: tuple[Input, ...]) -> bool:
    """Return whether the training data is a single text file.

    A character model of one text gets no end-of-text token, so that its loss can be compared with published ones.
    """
    train = [input.source_files for input in inputs if input.table.startswith("train")]
    return len(train) == 1 and train[0].kind == "text" and len(train[0].paths) == 1


@dataclass(frozen=True)
class TokenEncoder(Encoder):
    """Encodes records as rows of tokens. Each worker process loads the tokenizer from `folder`."""

    folder: Path
    dtype: str
    has_end_token: bool
    """Whether a document ends with an end-of-text token."""
    summed_entries: tuple[str, ...] = field(default=("documents", "bytes"), init=False)

    @property
    def columns(self) -> dict[str, Column]:
        return {"tokens": Column(self.dtype, varying=True), "key": TEXT}

    @property
    def metadata(self) -> dict[str, Any]:
        return get_tokenizer_metadata(self.folder)

    def rows(self, record: Record) -> Iterator[Row]:
        for _, row in self.encode([("", record)]):
            assert not isinstance(row, BadRecord)
            yield row

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        tokenizer = open_tokenizer(self.folder)
        end_token = np.array([tokenizer.eos_token_id], self.dtype)
        group: list[tuple[str, Record]] = []
        characters = 0
        for table, record in records:
            group.append((table, record))
            characters += len(record.fields["text"])
            if characters >= CHARACTERS_PER_CALL:
                yield from self._encode_group(group, tokenizer, end_token)
                group, characters = [], 0
        yield from self._encode_group(group, tokenizer, end_token)

    def _encode_group(
        self, group: list[tuple[str, Record]], tokenizer: Tokenizer, end_token: np.ndarray
    ) -> Iterator[tuple[str, Row | BadRecord]]:
        texts = [record.fields["text"] for _, record in group]
        for (table, record), text, ids in zip(group, texts, tokenizer.encode_documents(texts), strict=True):
            is_last = not record.fields.get(HAS_NEXT_PIECE, False)
            tokens = np.concatenate((ids, end_token)) if is_last and self.has_end_token else ids
            size = len(text) if text.isascii() else len(text.encode())
            yield table, {"tokens": tokens, "key": record.key, "documents": int(is_last), "bytes": size}
