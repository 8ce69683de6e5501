"""From texts to prepared tokens, once: read, split, learn the tokenizer, encode, and keep under the hash of it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import DataError
from bottega.data import corpus
from bottega.data.cache import cached
from bottega.data.corpus import Document, TextSource
from bottega.data.tokenizer import Tokenizer
from bottega.data.tokens import Split, TokenWindows
from bottega.data.vocabulary import TokenizerSpec, build_tokenizer

# Raised when the same inputs would give other files, so that old entries are left alone.
FORMAT = 1

Progress = Callable[[str, int, int], None]
"""What is being done, how many bytes of how many."""


@dataclass(frozen=True)
class Counts:
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Prepared:
    """A folder of tokens; the samples are made from it for any sequence length."""

    folder: Path
    fingerprint: str
    counts: dict[Split, Counts]

    def train(
        self, sequence_length: int, *, seed: int, documents: bool = False, with_bytes: bool = False
    ) -> TokenWindows:
        return self._windows("train", sequence_length, seed=seed, documents=documents, with_bytes=with_bytes)

    def validation(
        self, sequence_length: int, *, documents: bool = False, with_bytes: bool = False
    ) -> TokenWindows | None:
        if "validation" not in self.counts:
            return None
        return self._windows("validation", sequence_length, documents=documents, with_bytes=with_bytes)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "tokenizer")

    def _windows(self, split: Split, sequence_length: int, **options: Any) -> TokenWindows:
        return TokenWindows(self.folder, split, sequence_length=sequence_length, **options)


def prepare_text(
    train: TextSource,
    validation: TextSource | float | None,
    tokenizer: TokenizerSpec,
    *,
    cache: Path,
    progress: Progress = lambda stage, done, total: None,
) -> Prepared:
    """`validation` is a source of its own, or the share of train to keep back. Many processes may call at once."""
    key = _key(train, validation, tokenizer)

    def build(folder: Path) -> None:
        documents = _split(train, validation)
        _write(folder, documents, tokenizer, key=key, progress=progress)

    folder = cached(cache, key, build)
    meta = json.loads((folder / "meta.json").read_text())
    counts: dict[Split, Counts] = {split: Counts(**fields) for split, fields in meta["splits"].items()}
    return Prepared(folder, fingerprint=key, counts=counts)


def _key(train: TextSource, validation: TextSource | float | None, spec: TokenizerSpec) -> str:
    held_out = corpus.fingerprint(validation) if isinstance(validation, TextSource) else validation
    pretrained = build_tokenizer(spec, ()).fingerprint if spec.kind == "pretrained" else None
    vocab_size = spec.vocab_size if spec.kind == "bpe" else None
    parts = (FORMAT, corpus.fingerprint(train), held_out, spec.kind, vocab_size, pretrained)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


Documents = dict[Split, list[Document]]


def _split(train: TextSource, validation: TextSource | float | None) -> Documents:
    documents = list(corpus.read_documents(train))
    if isinstance(validation, TextSource):
        return {"train": documents, "validation": list(corpus.read_documents(validation))}
    if validation is None:
        return {"train": documents}
    if not 0 < validation < 1:
        raise DataError(f"data.validation.split is {validation}; it must lie between 0 and 1")
    if len(documents) == 1:
        return _split_text(documents[0], validation)
    return _split_documents(documents, validation)


def _split_text(document: Document, share: float) -> Documents:
    """One text: its end is kept back."""
    cut = int(len(document.text) * (1 - share))
    if not 0 < cut < len(document.text):
        raise DataError(f"{document.name} has {len(document.text)} characters, too few to keep {share:g} of it back")
    first, last = document.text[:cut], document.text[cut:]
    return {
        "train": [Document(document.name, first)],
        "validation": [Document(f"{document.name} from character {cut}", last)],
    }


def _split_documents(documents: list[Document], share: float) -> Documents:
    """Many texts: whole ones in the order of the hash of their names, as long as they fit; so a new text moves few."""
    sizes = [len(document.text) for document in documents]
    order = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i].name.encode()).digest())
    room = share * sum(sizes)
    kept_back = set()
    for i in order:
        if sizes[i] <= room:
            kept_back.add(i)
            room -= sizes[i]
    kept_back = kept_back or {min(order, key=lambda i: sizes[i])}
    return {
        "train": [document for i, document in enumerate(documents) if i not in kept_back],
        "validation": [document for i, document in enumerate(documents) if i in kept_back],
    }


def _write(folder: Path, documents: Documents, spec: TokenizerSpec, *, key: str, progress: Progress) -> None:
    total = sum(len(document.text.encode()) for part in documents.values() for document in part)
    progress("tokenizer", 0, total)
    # Characters are taken from both parts, so that validation has no unknown one; all else is learned from train alone.
    learned_from = documents.values() if spec.kind == "characters" else [documents["train"]]
    tokenizer = build_tokenizer(spec, (document.text for document in chain.from_iterable(learned_from)))
    tokenizer.save(folder / "tokenizer")
    tokenizer.byte_lengths.astype("<i4").tofile(folder / "byte_lengths.bin")
    # One text by characters has no end within: its loss can then be compared with that of other character models.
    ends = not (tokenizer.kind == "characters" and all(len(part) == 1 for part in documents.values()))
    splits: dict[Split, dict[str, int]] = {}
    for split, part in documents.items():
        before = sum(written["bytes"] for written in splits.values())
        report = partial(_report, progress, before, total)
        splits[split] = _encode(folder, split, part, tokenizer, ends=ends, report=report)
    meta = {
        "key": key,
        "dtype": tokenizer.dtype.str,
        "end_of_text": tokenizer.end_of_text,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def _report(progress: Progress, before: int, total: int, done: int) -> None:
    progress("encode", before + done, total)


def _encode(
    folder: Path,
    split: Split,
    documents: list[Document],
    tokenizer: Tokenizer,
    *,
    ends: bool,
    report: Callable[[int], None],
) -> dict[str, int]:
    starts: list[int] = []
    tokens = size = 0
    end = np.array([tokenizer.end_of_text] if ends else [], tokenizer.dtype).tobytes()
    texts = (document.text for document in documents)
    with (folder / f"{split}.bin").open("wb") as out:
        for document, ids in zip(documents, tokenizer.encode_documents(texts), strict=True):
            starts.append(tokens)
            out.write(ids.tobytes())
            out.write(end)
            tokens += len(ids) + ends
            size += len(document.text.encode())
            report(size)
    table = {"names": [document.name for document in documents], "starts": starts}
    (folder / f"{split}.documents.json").write_text(json.dumps(table))
    return {"documents": len(documents), "tokens": tokens, "bytes": size}
