"""Prepared texts with one or several labels, in batches padded to their longest text.

T: the length of a batch in tokens   K: the number of classes
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.prepare.labels import COPY
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, read_text_column
from bottega.data.tables.shards import Table
from bottega.data.text.ngrams import NgramWeighting
from bottega.data.text.tokenizer import Tokenizer
from bottega.similar_names import find_similar_names

# Batch lengths are multiples of this, so that few lengths have to be compiled. With 8, a batch of sentences was a tenth longer
# than necessary.
LENGTH_MULTIPLE = 4
RARE_CLASS_SAMPLES = 2
"""At most this many training samples make a class rare."""


@final
@dataclass(frozen=True)
class TextCollator:
    """Collates token ids into batches: adds special tokens, truncates and pads."""

    pad_token_id: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    max_length: int | None = None
    """Largest number of ids, including prefix and suffix; None never truncates."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, *, sequence_length: int | None = None) -> TextCollator:
        """Return the collator of a tokenizer."""
        return cls._from_limits(
            tokenizer.pad_token_id, tokenizer.special_tokens_around, tokenizer.model_max_length, sequence_length
        )

    @classmethod
    def from_metadata(cls, meta: Mapping[str, Any], *, sequence_length: int | None = None) -> TextCollator:
        """Return the collator that meta.json of prepared texts describes."""
        pad_token_id = meta.get("padding", meta["end_of_text"])
        return cls._from_limits(pad_token_id, meta.get("frame", ((), ())), meta.get("longest"), sequence_length)

    @classmethod
    def _from_limits(
        cls,
        pad_token_id: int,
        special_tokens: tuple[Sequence[int], Sequence[int]],
        model_max_length: int | None,
        sequence_length: int | None,
    ) -> TextCollator:
        limits = [limit for limit in (model_max_length, sequence_length) if limit is not None]
        return cls(pad_token_id, tuple(special_tokens[0]), tuple(special_tokens[1]), min(limits, default=None))

    def compute_lengths(self, text_lengths: np.ndarray) -> np.ndarray:
        """Return the lengths of collated texts; an empty text becomes one padding token, so that the mean over its tokens is
        defined."""
        lengths = np.maximum(text_lengths + len(self.prefix) + len(self.suffix), 1)
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)

    def count_truncated(self, text_lengths: np.ndarray) -> int:
        """Return how many texts of these lengths are truncated."""
        lengths = text_lengths + len(self.prefix) + len(self.suffix)
        return 0 if self.max_length is None else int((lengths > self.max_length).sum())

    def collate(self, ids: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask`, int32 `(batch, T)`, of texts encoded without special tokens."""
        ends = np.cumsum([len(text_ids) for text_ids in ids])
        return self.gather(np.concatenate([*ids, np.zeros(0, np.int32)]), np.r_[0, ends[:-1]], ends)

    def gather(
        self, values: np.ndarray, starts: np.ndarray, ends: np.ndarray, *, length_limit: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask`, int32 `(batch, T)` with T up to `length_limit`, of the texts values[start:end]."""
        lengths = self.compute_lengths(ends - starts)
        T = -(-int(lengths.max(initial=1)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        T = min([T, *(limit for limit in (length_limit, self.max_length) if limit is not None)])
        num_prefix, num_suffix = len(self.prefix), len(self.suffix)
        # Truncate the text, never its special tokens.
        text_lengths = np.clip(lengths - num_prefix - num_suffix, 0, ends - starts)
        positions = np.arange(T) - num_prefix
        is_text = (positions >= 0) & (positions < text_lengths[:, None])
        token_indices = np.where(is_text, starts[:, None] + positions, 0)
        tokens = values[token_indices] if len(values) else np.zeros_like(token_indices)
        input_ids = np.where(is_text, tokens.astype(np.int32), np.int32(self.pad_token_id))
        input_ids[:, :num_prefix] = self.prefix
        suffix_positions = num_prefix + text_lengths[:, None] + np.arange(num_suffix)
        np.put_along_axis(
            input_ids,
            suffix_positions,
            np.broadcast_to(np.array(self.suffix, np.int32), suffix_positions.shape),
            axis=1,
        )
        return {"input_ids": input_ids, "attention_mask": (np.arange(T) < lengths[:, None]).astype(np.int32)}


@final
class LabelledTexts(Source):
    """Source of texts: input_ids and attention_mask int32 `(batch, T)`, and label int32 `(batch,)` or labels float32 `(batch, K)`."""

    def __init__(
        self,
        folder: Path,
        table: str,
        *,
        labels: np.ndarray,
        sequence_length: int | None = None,
        ngrams: NgramWeighting | None = None,
    ) -> None:
        """`labels` are class indices `(rows,)` or multi-hot `(rows, K)`; `ngrams` adds weighted n-grams to each batch.

        Texts are truncated at `sequence_length` and at the maximum length of a pretrained tokenizer's model.
        """
        self.folder, self.table_name = Path(folder), table
        self.labels = labels.astype(np.int32 if labels.ndim == 1 else np.float32)
        self.table = Table(self.folder / table)
        self.ngrams = ngrams
        self.collator = TextCollator.from_metadata(self.meta, sequence_length=sequence_length)
        num_special_tokens = len(self.collator.prefix) + len(self.collator.suffix)
        if self.collator.max_length is not None and self.collator.max_length <= num_special_tokens:
            raise DataError(
                f"data.sequence_length={self.collator.max_length} leaves no room for text with {num_special_tokens} special "
                "tokens; raise it"
            )
        self.sequence_length = int(self.lengths().max(initial=1))

    def __len__(self) -> int:
        return len(self.table)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each text as the model reads it."""
        return self.collator.compute_lengths(self.table.lengths("input_ids"))

    def length_order(self, count: int) -> np.ndarray:
        lengths = self.lengths() if self.ngrams is None else self.table.lengths("ngrams")
        return np.argsort(lengths[:count], kind="stable")

    def scores(self, name: str) -> np.ndarray:
        """Return the difficulty of each text, from the field `name`."""
        if self.meta.get("score_field") != name:
            raise DataError(f"data.curriculum.by: the data was prepared without the field {name!r}; prepare it again")
        return self.table.values("score")

    @property
    def padding_values(self) -> dict[str, int]:
        """Values that pad a batch when it is joined with one of another length."""
        ngrams = {} if self.ngrams is None else {"ngram_ids": 0, "ngram_weights": 0}
        return {"input_ids": self.collator.pad_token_id, "attention_mask": 0, **ngrams}

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        starts, ends = self._locate("input_ids", index)
        values = self.table.values("input_ids")
        batch = self.collator.gather(values, starts, ends, length_limit=self.sequence_length)
        if self.ngrams is not None:
            starts, ends = self._locate("ngrams", index)
            buckets, counts = self.table.values("ngrams"), self.table.values("ngram_counts")
            batch |= self.ngrams.collate(buckets, counts, starts, ends)
        return {**batch, "label" if self.labels.ndim == 1 else "labels": self.labels[index]}

    def _locate(self, column: str, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the end of each row in a column."""
        ends = self.table.ends(column)
        return np.where(index > 0, ends[index - 1], 0), ends[index]

    @property
    def fingerprint(self) -> str:
        parts = (self.meta["key"], self.table_name, self.sequence_length)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        key, label, text = (self.table.row(name, index) for name in ("key", "label", "text"))
        return f"{self.table_name} text {key}, class {label}\n{text}"

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The preparation's meta.json."""
        return json.loads((self.folder / "meta.json").read_text())


def open_labelled_texts(
    prepared: PreparedData,
    table: str,
    *,
    classes: Classes | None = None,
    sequence_length: int | None = None,
    ngrams: NgramWeighting | None = None,
) -> LabelledTexts:
    """Open the texts of one table; `classes`, such as those of a trained model, replace those of the data."""
    label_classes = prepared.classes if classes is None else classes
    labels = encode_labels(
        prepared.table(table), label_classes, multi_label=prepared.metadata.get("multi_label", False)
    )
    return LabelledTexts(prepared.folder, table, labels=labels, sequence_length=sequence_length, ngrams=ngrams)


def encode_labels(table: Table, classes: Classes, *, multi_label: bool = False) -> np.ndarray:
    """Return the class of each row, int32 `(rows,)`, or multi-hot labels, float32 `(rows, classes)`."""
    class_indices = {name: number for number, name in enumerate(classes.names)}
    texts = read_text_column(table, "label")
    labels_by_text = {text: json.loads(text) if multi_label else [text] for text in set(texts)}
    unknown = {text for text, names in labels_by_text.items() if not class_indices.keys() >= set(names)}
    if unknown:
        row = next(row for row, text in enumerate(texts) if text in unknown)
        name = next(name for name in labels_by_text[texts[row]] if name not in class_indices)
        raise DataError(f"{table.row('key', row)}: {_describe_unknown_label(name, classes)}")
    if not multi_label:
        return np.array([class_indices[text] for text in texts], np.int32)
    multi_hot = np.zeros((len(texts), len(classes)), np.float32)
    for row, text in enumerate(texts):
        multi_hot[row, [class_indices[name] for name in labels_by_text[text]]] = 1
    return multi_hot


def _describe_unknown_label(name: str, classes: Classes) -> str:
    near = find_similar_names(name, classes.names)
    listed = ", ".join(classes.names[:5]) + (", ..." if len(classes) > 5 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {listed}"
    return f"label {name!r} is not one of the {len(classes)} classes of the training data; {hint}"


def find_training_classes(
    prepared: PreparedData,
    *,
    include_held_out: bool = False,
    remedy: str = "set data.label_field to another field, or add samples",
) -> Classes:
    """Return the classes of the training data; `include_held_out` adds the classes that only held-out samples have.

    Raises `DataError` if there are fewer than two, or if a held-out sample has a class without training samples, which is
    usually a typo.
    """
    class_names = set(count_classes(prepared))
    if len(class_names) < (1 if _is_multi_label(prepared) else 2):
        first_key = prepared.table(prepared.training_tables[0]).row("key", 0)
        problem = f"are of the class {class_names.pop()!r}" if class_names else "have no class"
        raise DataError(
            f"data.train: all samples (the first is {first_key}) {problem}, but a classifier needs several classes; {remedy}"
        )
    if include_held_out:
        return prepared.classes
    classes = Classes(tuple(name for name in prepared.classes.names if name in class_names))
    for name in prepared.tables:
        if not _is_training_table(name):
            _check_labels(prepared, name, classes)
    return classes


def _check_labels(prepared: PreparedData, name: str, classes: Classes) -> None:
    table, class_names = prepared.table(name), set(classes.names)
    for row, text in enumerate(read_text_column(table, "label")):
        unknown = next((label for label in _parse_class_names(prepared, text) if label not in class_names), None)
        if unknown is not None:
            raise DataError(
                f"{table.row('key', row)}: in {name}, {_describe_unknown_label(unknown, classes)} (to count it as a class, set "
                f"model.num_labels={len(prepared.classes)})"
            )


def count_classes(prepared: PreparedData) -> Counter[str]:
    """Return the number of training samples of each class, without augmented copies."""
    counts: Counter[str] = Counter()
    for name in filter(_is_training_table, prepared.tables):
        table = prepared.table(name)
        is_original = table.values("form") != COPY if "form" in table.columns else np.ones(len(table), bool)
        for text, is_counted in zip(read_text_column(table, "label"), is_original.tolist(), strict=True):
            counts.update(_parse_class_names(prepared, text) if is_counted else ())
    return counts


def describe_rare_classes(prepared: PreparedData, classes: Classes) -> list[str]:
    """Return a warning if some classes have hardly any training samples, which may be typos in labels."""
    counts = count_classes(prepared)
    rare = [name for name in classes.names if counts[name] <= RARE_CLASS_SAMPLES]
    if not rare:
        return []
    listed = ", ".join(f"{name!r} ({counts[name]})" for name in rare[:3]) + (", ..." if len(rare) > 3 else "")
    return [
        f"{len(rare):,} of {len(classes):,} classes have at most {RARE_CLASS_SAMPLES} training samples: {listed}; check that they are not typos"
    ]


def _is_training_table(table: str) -> bool:
    return table.startswith("train") or table == "replay"


def _is_multi_label(prepared: PreparedData) -> bool:
    return bool(prepared.metadata.get("multi_label", False))


def _parse_class_names(prepared: PreparedData, label: str) -> list[str]:
    return json.loads(label) if _is_multi_label(prepared) else [label] if label else []


def compute_balanced_weights(labels: np.ndarray, num_classes: int) -> tuple[float, ...]:
    """Return class weights n / (classes * samples of the class), and 1 for a class without samples."""
    counts = labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=num_classes)
    return tuple(np.where(counts > 0, counts.sum() / (num_classes * np.maximum(counts, 1)), 1.0).tolist())
