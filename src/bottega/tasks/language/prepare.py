"""Text to tokens, for a language model: every document in order, each followed by the token that ends a text."""

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
from bottega.data.prepare.tokenizer_training import load_or_train_tokenizer as learn
from bottega.data.prepare.tokenizer_training import open_tokenizer, tokenizer_metadata
from bottega.data.records.fields import HAS_NEXT_PIECE
from bottega.data.records.record import BadRecord, Record
from bottega.data.tables.cache import default_cache
from bottega.data.tables.shards import TEXT, Column
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.tokens import BYTE_LENGTHS
from bottega.data.text.vocabulary import TokenizerSpec, build_tokenizer

# Characters encoded in one call.
CHARACTERS_PER_CALL = 4_000_000


def prepare_language(
    data: TextData, spec: TokenizerSpec, *, progress: ProgressCallback, cache: Path | None = None
) -> PreparedData:
    """The tokens of a recipe's texts, from the cache or made now; or from shards that were prepared elsewhere."""
    ready = open_if_prepared(data, task="language")
    if ready is not None:
        if spec.kind == "pretrained" and build_tokenizer(spec, ()).fingerprint != ready.metadata["tokenizer"]:
            raise DataError(
                f"{ready.folder} was prepared with another tokenizer than {spec.path}; prepare it with that"
            )
        return ready
    return prepare(plan_language_data(data, spec), cache=cache or default_cache(), progress=progress)


def plan_language_data(data: TextData, spec: TokenizerSpec) -> PreparationPlan:
    rules = Rules.for_text(data)
    inputs, shares = collect_inputs(data)
    check_medium(inputs, "text")

    given = load_pretrained_tokenizer(spec)
    if (given or spec).kind == "words":
        raise UsageError("data.tokenizer: words cannot be turned back into text, as a language model must; use bpe")

    def encoder(texts: PlannedTexts, folder: Path, progress: ProgressCallback) -> TokenEncoder:
        tokenizer = learn(spec, given, texts, folder / "tokenizer", progress)
        tokenizer.byte_lengths.astype("<i4").tofile(folder / BYTE_LENGTHS)
        ends = not (tokenizer.kind == "characters" and _is_one_text(inputs))
        return TokenEncoder(folder / "tokenizer", tokenizer.dtype.str, ends=ends)

    return PreparationPlan(
        task="language",
        inputs=inputs,
        shares=shares,
        data=data,
        rules=rules,
        encoder=encoder,
        options=tokenizer_cache_key(spec, given),
        deduplicate=data.deduplicate,
    )


def load_pretrained_tokenizer(spec: TokenizerSpec) -> Tokenizer | None:
    """The one that needs no texts to be made; a large vocabulary takes a tenth of a second to open, so once."""
    return build_tokenizer(spec, ()) if spec.kind == "pretrained" else None


def tokenizer_cache_key(spec: TokenizerSpec, given: Tokenizer | None) -> tuple[Any, ...]:
    """What of a tokenizer's description changes the tokens."""
    fingerprint = given.fingerprint if given is not None else None
    return (spec.kind, spec.vocab_size if spec.kind == "bpe" else None, fingerprint)


def _is_one_text(inputs: tuple[Input, ...]) -> bool:
    """One text by characters has no end within: its loss can then be compared with that of other character models."""
    train = [input.found for input in inputs if input.table.startswith("train")]
    return len(train) == 1 and train[0].kind == "text" and len(train[0].files) == 1


@dataclass(frozen=True)
class TokenEncoder(Encoder):
    """Rows of tokens. The tokenizer stays on disk, where each process opens it for itself."""

    folder: Path
    dtype: str
    ends: bool
    summed_entries: tuple[str, ...] = field(default=("documents", "bytes"), init=False)

    @property
    def columns(self) -> dict[str, Column]:
        return {"tokens": Column(self.dtype, varying=True), "key": TEXT}

    @property
    def metadata(self) -> dict[str, Any]:
        return tokenizer_metadata(self.folder)

    def rows(self, record: Record) -> Iterator[Row]:
        for _, row in self.encode([("", record)]):
            assert not isinstance(row, BadRecord)
            yield row

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        tokenizer = open_tokenizer(self.folder)
        end = np.array([tokenizer.eos_token_id], self.dtype)
        group: list[tuple[str, Record]] = []
        characters = 0
        for table, record in records:
            group.append((table, record))
            characters += len(record.fields["text"])
            if characters >= CHARACTERS_PER_CALL:
                yield from self._group(group, tokenizer, end)
                group, characters = [], 0
        yield from self._group(group, tokenizer, end)

    def _group(
        self, group: list[tuple[str, Record]], tokenizer: Tokenizer, end: np.ndarray
    ) -> Iterator[tuple[str, Row | BadRecord]]:
        texts = [record.fields["text"] for _, record in group]
        for (table, record), text, ids in zip(group, texts, tokenizer.encode_documents(texts), strict=True):
            is_last = not record.fields.get(HAS_NEXT_PIECE, False)
            tokens = np.concatenate((ids, end)) if is_last and self.ends else ids
            size = len(text) if text.isascii() else len(text.encode())
            yield table, {"tokens": tokens, "key": record.key, "documents": int(is_last), "bytes": size}
