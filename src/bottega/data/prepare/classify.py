"""Texts with a class each: cleaned, copied with changes where asked for, tokenised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.data.cache import default_cache
from bottega.data.encoder import Encoder, Row
from bottega.data.fields import label_of
from bottega.data.prepare.inputs import check_medium, inputs_of
from bottega.data.prepare.jobs import Progress
from bottega.data.prepare.language import BYTE_LENGTHS, GROUP, given_tokenizer, tokenizer_options
from bottega.data.prepare.learn import opened_tokenizer, tokenizer_facts
from bottega.data.prepare.learn import tokenizer as learn
from bottega.data.prepare.prepared import Plan, Prepared, Texts, opened_where_prepared, prepare
from bottega.data.prepare.rules import Rules
from bottega.data.record import Bad, Record, Unreadable
from bottega.data.shards import TEXT, Column
from bottega.data.text import synonyms
from bottega.data.text.augment import copies
from bottega.data.tokenizer import Tokenizer
from bottega.data.vocabulary import TokenizerSpec
from bottega.schema.classify import ClassifyData, TextAugmentation


def prepare_classify(
    data: ClassifyData,
    spec: TokenizerSpec,
    *,
    seed: int,
    progress: Progress,
    num_classes: int | None = None,
    cache: Path | None = None,
) -> Prepared:
    """Tables of input_ids, text, label and key. `num_classes` are those of the recipe; None counts them in the data."""
    ready = opened_where_prepared(data, task="classify")
    if ready is not None:
        return ready
    inputs, shares = inputs_of(data)
    check_medium(inputs, "text")
    changes = data.augmentation if data.augmentation is not None and data.augmentation.enabled else None
    # Another thesaurus gives other copies.
    thesaurus = synonyms.source() if changes and "synonym_replacement" in changes.techniques else None

    given = given_tokenizer(spec)

    def encoder(texts: Texts, folder: Path, progress: Progress) -> LabelledEncoder:
        tokenizer = learn(spec, given, texts, folder / "tokenizer", progress)
        tokenizer.byte_lengths.astype("<i4").tofile(folder / BYTE_LENGTHS)
        return LabelledEncoder(folder / "tokenizer", tokenizer.dtype.str, data.label_field, changes, seed)

    plan = Plan(
        task="classify",
        inputs=inputs,
        shares=shares,
        data=data,
        rules=Rules.of_text(data, label=data.label_field),
        encoder=encoder,
        options=(*tokenizer_options(spec, given), changes, thesaurus, seed if changes else None),
        label_field=data.label_field,
        needs_classes=True,
        num_classes=num_classes,
        deduplicate=data.deduplicate,
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


@dataclass(frozen=True)
class LabelledEncoder(Encoder):
    """The text itself is kept beside its tokens, for those who look at what was predicted."""

    folder: Path
    dtype: str
    label_field: str
    changes: TextAugmentation | None
    seed: int

    @property
    def columns(self) -> dict[str, Column]:
        return {"input_ids": Column(self.dtype, varying=True), "text": TEXT, "label": TEXT, "key": TEXT}

    @property
    def facts(self) -> dict[str, Any]:
        return tokenizer_facts(self.folder)

    def rows(self, record: Record) -> Iterator[Row]:
        for _, row in self.encode([("", record)]):
            if isinstance(row, Bad):
                raise Unreadable(row.reason)
            yield row

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | Bad]]:
        tokenizer = opened_tokenizer(self.folder)
        group: list[tuple[str, Row | Bad]] = []
        characters = 0
        for table, record in records:
            for row in self._texts(record, is_training=table.startswith("train")):
                group.append((table, row))
                characters += len(row["text"]) if not isinstance(row, Bad) else 0
            if characters >= GROUP:
                yield from _tokenised(group, tokenizer)
                group, characters = [], 0
        yield from _tokenised(group, tokenizer)

    def _texts(self, record: Record, *, is_training: bool) -> Iterator[Row | Bad]:
        try:
            label = label_of(record, self.label_field)
            if not label:
                raise Unreadable("it has no label")
        except Unreadable as error:
            yield Bad(record.key, record.where, str(error))
            return
        text = record.fields["text"]
        yield {"text": text, "label": label, "key": record.key}
        if is_training and self.changes is not None:
            changed = copies(
                text,
                factor=self.changes.augmentation_factor,
                techniques=self.changes.techniques,
                probability=self.changes.probability,
                seed=self.seed,
                key=record.key,
            )
            for number, copy in enumerate(changed, start=1):
                yield {"text": copy, "label": label, "key": f"{record.key}~{number}"}


def _tokenised(group: list[tuple[str, Row | Bad]], tokenizer: Tokenizer) -> Iterator[tuple[str, Row | Bad]]:
    texts = [row["text"] for _, row in group if not isinstance(row, Bad)]
    ids = tokenizer.encode_documents(texts)
    for table, row in group:
        yield table, row if isinstance(row, Bad) else {**row, "input_ids": next(ids)}
