"""Preparation of labelled texts: cleaning, augmentation, tokenisation and checks of the labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bottega.config.data import Splitting
from bottega.core.errors import DataError, UsageError
from bottega.data.embedded import resolve_embedded_sources
from bottega.data.embedded.docstrings import find_docstrings_file
from bottega.data.prepare.encoder import Encoder, Row
from bottega.data.prepare.inputs import Input, check_medium, collect_inputs
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.labels import COPY, LABEL_FIELD_REMEDY, NUMBER, SKIP_REMEDY, STRIPPED_FLAG, WORD, LabelReader
from bottega.data.prepare.prepared import PlannedTexts, PreparationPlan, PreparedData, open_if_prepared, prepare
from bottega.data.prepare.rules import Rules
from bottega.data.prepare.tokenizer_training import get_tokenizer_metadata, load_or_train_tokenizer, open_tokenizer
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.classes import find_classes, read_text_column
from bottega.data.tables.shards import TEXT, Column, Table
from bottega.data.text import synonyms
from bottega.data.text.augment import make_augmented_copies
from bottega.data.text.config import TextAugmentation
from bottega.data.text.ngrams import NgramSpec, count_ngrams
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.vocabulary import TokenizerSpec, build_tokenizer
from bottega.storage.cache_folder import default_cache
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.language.prepare import (
    BYTE_LENGTHS,
    CHARACTERS_PER_CALL,
    build_tokenizer_cache_key,
    load_pretrained_tokenizer,
)

# Increase it when the same texts would give other tables.
FORMAT = 3


def prepare_classify(
    data: ClassifyData,
    spec: TokenizerSpec,
    *,
    seed: int,
    progress: ProgressCallback,
    num_classes: int | None = None,
    ngrams: NgramSpec | None = None,
    cache: Path | None = None,
) -> PreparedData:
    """Prepare tables with the columns input_ids, text, label, form and key, from the cache if they are there.

    `ngrams` adds the hashed n-grams of each text. `num_classes` is that of the recipe, None to count the classes in the data. With
    data.multi_label, `label` is a JSON list of class names; `form` says whether it was a number or a word, had extra spaces, or
    belongs to an augmented copy.
    """
    prepared = open_if_prepared(data, task="classify")
    if prepared is not None:
        _check_prepared(prepared, data, spec, ngrams)
        return prepared
    data = resolve_embedded_sources(data, "jsonl", find_docstrings_file)
    inputs, fractions = collect_inputs(data)
    check_medium(inputs, "text")
    inputs, notes = _read_as_lines(inputs)
    if data.multi_label and any(input.source_files.source.labels is not None for input in inputs):
        raise UsageError(
            "labels: texts with several classes cannot be filtered by class; remove it, or give separate files"
        )
    augmentation = data.augmentation if data.augmentation is not None and data.augmentation.enabled else None
    # The copies depend on the thesaurus, so it is part of the cache key.
    thesaurus = (
        synonyms.find_synonym_source() if augmentation and "synonym_replacement" in augmentation.techniques else None
    )
    reader = LabelReader(data.label_field, data.label_separator if data.multi_label else None)
    pretrained = load_pretrained_tokenizer(spec)
    _check_length(data, spec, pretrained)

    def build_encoder(texts: PlannedTexts, folder: Path, progress: ProgressCallback) -> LabelledEncoder:
        tokenizer = load_or_train_tokenizer(spec, pretrained, texts, folder / "tokenizer", progress)
        tokenizer.byte_lengths.astype("<i4").tofile(folder / BYTE_LENGTHS)
        checks = LabelChecks(texts.plan.tables, _count_stratified_folds(data.split), num_classes)
        dtype = tokenizer.dtype.str
        return LabelledEncoder(folder / "tokenizer", dtype, reader, augmentation, seed, checks, ngrams, notes)

    vocabulary = (spec.vocab_size, spec.min_frequency) if spec.kind == "words" else None
    # The maximum length belongs to the model, so the tokenizer's fingerprint does not cover it.
    max_length = pretrained.model_max_length if pretrained is not None else None
    options = (*build_tokenizer_cache_key(spec, pretrained), augmentation, thesaurus, seed if augmentation else None)
    plan = PreparationPlan(
        task="classify",
        inputs=inputs,
        split_fractions=fractions,
        data=data,
        rules=Rules.for_text(data, label=data.label_field, class_names=data.class_name_by_number),
        build_encoder=build_encoder,
        options=(*options, FORMAT, reader, vocabulary, max_length, *((ngrams,) if ngrams is not None else ())),
        label_field=data.label_field,
        # A label is then a list, so the encoder finds the classes.
        needs_classes=not data.multi_label,
        num_classes=None if data.multi_label else num_classes,
        deduplicate=data.deduplicate,
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


def _read_as_lines(inputs: tuple[Input, ...]) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    """Return the inputs with text files read line by line, each a label and a text, and notes on the detected layout."""
    from bottega.data.formats.lines import detect_line_layout

    changed, notes = [], []
    for input in inputs:
        files = input.source_files
        if files.kind not in ("text", "lines"):
            changed.append(input)
            continue
        source = files.source
        if files.kind == "text" or source.delimiter is None:
            layout = detect_line_layout(files.paths)
            source = source.model_copy(update={"delimiter": layout.delimiter, "columns": layout.columns})
            names = {"\t": "a tab", " ": "a space"}
            column_order = "a label, then a text" if layout.is_label_first else "a text, then a label"
            notes.append(
                f"{files.root}: each line is read as {column_order}, separated by {names.get(layout.delimiter, layout.delimiter)}"
            )
        changed.append(replace(input, source_files=replace(files, kind="lines", source=source)))
    return tuple(changed), tuple(dict.fromkeys(notes))


def _check_prepared(prepared: PreparedData, data: ClassifyData, spec: TokenizerSpec, ngrams: NgramSpec | None) -> None:
    if ngrams is not None and prepared.metadata.get("ngrams") != ngrams.model_dump(mode="json"):
        problem = "with other n-grams than" if prepared.metadata.get("ngrams") else "without the n-grams that"
        raise DataError(f"{prepared.folder} was prepared {problem} this model needs; prepare it again with this recipe")
    if prepared.metadata.get("multi_label", False) != data.multi_label:
        prepared_with = "one class" if data.multi_label else "several classes"
        raise DataError(
            f"{prepared.folder} was prepared with {prepared_with} per text, but data.multi_label is {str(data.multi_label).lower()}; "
            "prepare it again"
        )
    if spec.kind == "pretrained" and build_tokenizer(spec, ()).fingerprint != prepared.metadata["tokenizer"]:
        raise DataError(
            f"{prepared.folder} was prepared with another tokenizer than {spec.path}; prepare it again with {spec.path}"
        )


def _check_length(data: ClassifyData, spec: TokenizerSpec, pretrained: Tokenizer | None) -> None:
    max_length = pretrained.model_max_length if pretrained is not None else None
    if max_length is not None and data.sequence_length is not None and data.sequence_length > max_length:
        raise UsageError(
            f"data.sequence_length: {data.sequence_length} exceeds the {max_length} tokens that {spec.path} can read; lower it"
        )


def _count_stratified_folds(split: Splitting | None) -> int | None:
    return split.folds if split is not None and split.by == "stratified" else None


@dataclass(frozen=True)
class LabelChecks:
    """Checks that need the labels of all texts."""

    tables: tuple[str, ...]
    folds: int | None
    """Number of folds of a stratified split."""
    num_classes: int | None

    def check_label_types(self, folder: Path) -> None:
        """Raise a DataError if some labels are numbers and others words, which usually means a wrong column."""
        first_labels: dict[int, str] = {}
        for table in (Table(folder / name) for name in self.tables):
            for form in {NUMBER, WORD} - first_labels.keys():
                rows = np.flatnonzero(table.values("form") & ~np.uint8(STRIPPED_FLAG) == form)
                if len(rows):
                    first_labels[form] = f"{table.row('label', int(rows[0]))} at {table.row('key', int(rows[0]))}"
        if len(first_labels) == 2:
            raise DataError(
                f"some labels are numbers and others words: {first_labels[NUMBER]}, {first_labels[WORD]}; use one form for all labels"
            )

    def describe_stripped_labels(self, folder: Path) -> list[str]:
        """Return a note if labels were stripped of extra spaces."""
        count, example = 0, None
        for table in (Table(folder / name) for name in self.tables):
            forms = table.values("form")
            rows = np.flatnonzero((forms != COPY) & (forms & STRIPPED_FLAG > 0))
            count += len(rows)
            if len(rows) and example is None:
                example = f"that of {table.row('key', int(rows[0]))}, now {table.row('label', int(rows[0]))!r}"
        if not count:
            return []
        labels = "1 label" if count == 1 else f"{count:,} labels"
        return [
            f"extra spaces were removed from {labels} (first: {example}); labels that differ only by spaces are one class"
        ]

    def check_fold_sizes(self, folder: Path) -> None:
        """Raise a DataError if a class has fewer texts than a stratified split has folds."""
        if self.folds is None:
            return
        counts: Counter[str] = Counter()
        for name in self.tables:
            if name.startswith("train") or name == "validation":
                table = Table(folder / name)
                labels, forms = read_text_column(table, "label"), table.values("form").tolist()
                counts.update(label for label, form in zip(labels, forms, strict=True) if form != COPY)
        rarest = min(counts, key=lambda name: (counts[name], name))
        if counts[rarest] < self.folds:
            raise DataError(
                f"class {rarest!r} has {counts[rarest]} texts, fewer than data.split.folds={self.folds}; lower folds, "
                "or set data.split.by=fraction"
            )

    def find_label_names(self, folder: Path) -> list[str]:
        """Return the class names of multi-label texts."""
        first_keys: dict[str, str] = {}
        for name in self.tables:
            table = Table(folder / name)
            for row, text in enumerate(read_text_column(table, "label")):
                for label in json.loads(text):
                    first_keys.setdefault(label, table.row("key", row))
        classes = find_classes(first_keys, num_classes=self.num_classes)
        classes.ids(list(first_keys), keys=list(first_keys.values()))
        return list(classes.names)


@dataclass(frozen=True)
class LabelledEncoder(Encoder):
    """Encodes a labelled text, and augmented copies of a training text, as rows; the text is stored beside its tokens."""

    folder: Path
    dtype: str
    reader: LabelReader
    augmentation: TextAugmentation | None
    seed: int
    checks: LabelChecks
    ngrams: NgramSpec | None = None
    notes: tuple[str, ...] = ()
    """Notes on how the files were read."""

    @property
    def columns(self) -> dict[str, Column]:
        ids = Column(self.dtype, varying=True)
        columns = {"input_ids": ids, "text": TEXT, "label": TEXT, "form": Column(), "key": TEXT}
        if self.ngrams is None:
            return columns
        return {**columns, "ngrams": Column("<u4", varying=True), "ngram_counts": Column("<u2", varying=True)}

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the prepared data; computing it, after the tables are written, runs the checks of all labels."""
        tables, tokenizer = self.folder.parent, open_tokenizer(self.folder)
        self.checks.check_label_types(tables)
        self.checks.check_fold_sizes(tables)
        multi_label = self.reader.separator is not None
        return {
            **get_tokenizer_metadata(self.folder),
            "frame": tokenizer.special_tokens_around,
            "padding": tokenizer.pad_token_id,
            "unknown": tokenizer.unk_token_id,
            "longest": tokenizer.model_max_length,
            "multi_label": multi_label,
            **({"ngrams": self.ngrams.model_dump(mode="json")} if self.ngrams is not None else {}),
            **({"classes": self.checks.find_label_names(tables)} if multi_label else {}),
            "notes": [*self.notes, *self.checks.describe_stripped_labels(tables)],
        }

    def rows(self, record: Record) -> Iterator[Row]:
        for _, row in self.encode([("", record)]):
            if isinstance(row, BadRecord):
                raise Unreadable(row.reason)
            yield row

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        tokenizer = open_tokenizer(self.folder)
        group: list[tuple[str, Row | BadRecord]] = []
        characters, has_labels = 0, False
        for table, record in records:
            for row in self._build_rows(record, is_training=table.startswith("train")):
                if not isinstance(row, BadRecord):
                    has_labels = True
                elif has_labels and row.reason.endswith(LABEL_FIELD_REMEDY):
                    row = row._replace(reason=row.reason + SKIP_REMEDY)
                group.append((table, row))
                characters += len(row["text"]) if not isinstance(row, BadRecord) else 0
            if characters >= CHARACTERS_PER_CALL:
                yield from self._encode_group(group, tokenizer)
                group, characters = [], 0
        yield from self._encode_group(group, tokenizer)

    def _build_rows(self, record: Record, *, is_training: bool) -> Iterator[Row | BadRecord]:
        try:
            label, form = self.reader.read(record)
        except Unreadable as error:
            yield BadRecord(record.key, record.where, str(error))
            return
        text = record.fields["text"]
        yield {"text": text, "label": label, "form": form, "key": record.key}
        if is_training and self.augmentation is not None:
            copies = make_augmented_copies(
                text,
                factor=self.augmentation.augmentation_factor,
                techniques=self.augmentation.techniques,
                probability=self.augmentation.probability,
                seed=self.seed,
                key=record.key,
            )
            for number, copy in enumerate(copies, start=1):
                yield {"text": copy, "label": label, "form": COPY, "key": f"{record.key}~{number}"}

    def _encode_group(
        self, group: list[tuple[str, Row | BadRecord]], tokenizer: Tokenizer
    ) -> Iterator[tuple[str, Row | BadRecord]]:
        """Add the tokens and, if the model needs them, the n-grams of each text."""
        texts = [row["text"] for _, row in group if not isinstance(row, BadRecord)]
        ids = tokenizer.encode_documents(texts)
        ngrams = iter(_iter_ngrams(texts, self.ngrams))
        for table, row in group:
            yield table, row if isinstance(row, BadRecord) else {**row, "input_ids": next(ids), **next(ngrams)}


def _iter_ngrams(texts: list[str], spec: NgramSpec | None) -> Iterator[Row]:
    """Yield the n-gram columns of each text."""
    if spec is None:
        yield from ({} for _ in texts)
        return
    ngrams = count_ngrams(texts, spec)
    for start, end in zip([0, *ngrams.ends[:-1].tolist()], ngrams.ends.tolist(), strict=False):
        yield {"ngrams": ngrams.buckets[start:end], "ngram_counts": ngrams.counts[start:end]}
