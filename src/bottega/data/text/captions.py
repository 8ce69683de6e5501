"""Tokenise the captions of images, audio and video, for text-conditioned generators."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
from tokenizers import processors

from bottega.core.errors import DataError, UsageError
from bottega.data.sources.source import Source
from bottega.data.tables.cache import get_or_build
from bottega.data.tables.classes import read_text_column
from bottega.data.tables.shards import Table
from bottega.data.text.tokenizer import END_OF_TEXT, Tokenizer
from bottega.data.text.vocabulary import train_bpe
from bottega.storage.cache_folder import default_cache

# Part of the cache key. Increase it when the same captions would give a different tokenizer.
FORMAT = 1
# Largest training text, sampled evenly: more text hardly changes the merges.
MAX_TRAINING_CHARACTERS = 64 << 20


@final
class CaptionTokenizer:
    """Encodes texts as `length` tokens with the tokenizer's special tokens; longer texts are truncated.

    Only the folder is pickled; each process opens the tokenizer itself.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = Path(folder), length
        num_special_tokens = self.tokenizer.backend.num_special_tokens_to_add(False)
        if length <= num_special_tokens:
            raise UsageError(
                f"model.text.max_tokens: {length} leaves no room for text with {num_special_tokens} special tokens; raise it"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "length": self.length}

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask`, int32 `(texts, length)`."""
        encodings = self._padded_backend.encode_batch_fast(list(texts))
        ids = np.array([encoding.ids for encoding in encodings], np.int32).reshape(len(encodings), self.length)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int32).reshape(
            len(encodings), self.length
        )
        # Some tokenizers add no special tokens to an empty text, and a softmax over nothing is NaN.
        mask[:, 0] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def save(self, folder: Path) -> None:
        """Save so that transformers gives the same tokens with padding="max_length"."""
        tokenizer = self.tokenizer
        Tokenizer(
            tokenizer.backend, kind=tokenizer.kind, config={**tokenizer.config, "pad_token": self._pad_token[1]}
        ).save(folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the padding token and the length."""
        return hashlib.sha256(repr((self.tokenizer.fingerprint, self._pad_token, self.length)).encode()).hexdigest()

    @cached_property
    def _padded_backend(self) -> Any:
        """The `tokenizers` object with truncation and padding, as transformers configures it."""
        backend = Tokenizer.load(self.folder).backend
        token_id, token = self._pad_token
        backend.enable_truncation(self.length)
        backend.enable_padding(length=self.length, pad_id=token_id, pad_token=token)
        return backend

    @cached_property
    def _pad_token(self) -> tuple[int, str]:
        """Id and text of the padding token. It matters to CLIP only, which attends to padding."""
        configured = self.tokenizer.config.get("pad_token") or _read_special_tokens(self.folder).get("pad_token")
        token = configured.get("content") if isinstance(configured, dict) else configured
        token_id = self.tokenizer.backend.token_to_id(token) if token else None
        if token_id is None:
            token_id = self.tokenizer.eos_token_id
        return token_id, self.tokenizer.backend.id_to_token(token_id) or ""


@final
class CaptionRows(Source):
    """Samples of a medium with `input_ids` and `attention_mask` `(batch, length)` of their captions.

    Captions are tokenised for each batch, at about 50 microseconds each: caching a million would take 250 MB per worker.
    """

    def __init__(self, source: Source, table: Table, caption_tokenizer: CaptionTokenizer) -> None:
        """`table` holds the rows of the samples."""
        assert len(source) == len(table), f"{len(source)} samples, but {len(table)} table rows"
        self.source, self.table, self.caption_tokenizer = source, table, caption_tokenizer
        missing = [number for number, text in enumerate(read_captions(table)) if not text]
        if missing:
            raise DataError(
                f"{table.row('key', missing[0])}: has neither caption nor label ({len(missing):,} of "
                f"{len(table):,} records have none), but model.condition is text; add captions, such as a row of metadata.jsonl with "
                "file_name and text, or set model.condition=none"
            )

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        texts = [read_caption(self.table, number) for number in index.tolist()]
        return {**self.source.rows(index, epoch), **self.caption_tokenizer.encode(texts)}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint} {self.caption_tokenizer.fingerprint}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        num_tokens = int(self.caption_tokenizer.encode([read_caption(self.table, index)])["attention_mask"].sum())
        return f"{self.source.describe(index, epoch)}\ncaption of {num_tokens} tokens, at most {self.caption_tokenizer.length}"


def read_caption(table: Table, index: int) -> str:
    """Return the caption of a sample, or its label if it has none, without surrounding white space.

    Text files end in a line break, which no prompt has.
    """
    return table.row("caption", index).strip() or table.row("label", index).strip()


def read_captions(table: Table) -> list[str]:
    """Return the captions (or labels) of all rows; a row that has neither gives an empty text."""
    pairs = zip(read_text_column(table, "caption"), read_text_column(table, "label"), strict=True)
    return [caption.strip() or label.strip() for caption, label in pairs]


def find_distinct_captions(tables: Sequence[Table], count: int, *, rows_per_table: int = 1000) -> tuple[str, ...]:
    """Return the first `count` distinct captions among the first `rows_per_table` rows of each table."""
    captions = (read_caption(table, number) for table in tables for number in range(min(rows_per_table, len(table))))
    return tuple(islice(dict.fromkeys(captions), count))


def train_caption_tokenizer(
    tables: Sequence[Table], *, content: str, vocab_size: int, cache: Path | None = None
) -> Path:
    """Train a BPE tokenizer on the captions of tables, cached by their hash `content`, and return its folder.

    Its `tokenizer.json` appends the end-of-text token, so that transformers gives the same tokens.
    """
    names = [table.folder.name for table in tables]
    key = hashlib.sha256(repr(("captions", FORMAT, content, names, vocab_size)).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        texts = [text for table in tables for text in read_captions(table)]
        step = -(-sum(map(len, texts)) // MAX_TRAINING_CHARACTERS) or 1
        tokenizer = train_bpe(texts[::step], vocab_size=vocab_size)
        special_tokens = [(END_OF_TEXT, tokenizer.eos_token_id)]
        tokenizer.backend.post_processor = processors.TemplateProcessing(
            single=f"$A {END_OF_TEXT}", special_tokens=special_tokens
        )
        tokenizer.save(folder)

    return get_or_build(cache or default_cache(), key, build)


def _read_special_tokens(folder: Path) -> dict[str, Any]:
    """Return special_tokens_map.json, which transformers before version 5 also wrote."""
    try:
        tokens = json.loads((folder / "special_tokens_map.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return tokens if isinstance(tokens, dict) else {}
