"""A tokenizer from the texts that are about to be encoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import DataError
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PlannedTexts
from bottega.data.prepare.rules import read_records
from bottega.data.records.record import Record
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.vocabulary import TokenizerSpec, build_tokenizer

# Merges are learned from so many bytes at most, evenly spread: more text hardly changes them, and 1 GB takes minutes.
ENOUGH = 64 << 20


_OPEN: dict[Path, Tokenizer] = {}
"""The last one used in this process: a large vocabulary takes a tenth of a second to open, and a process does many jobs."""


def load_or_train_tokenizer(
    spec: TokenizerSpec, existing: Tokenizer | None, texts: PlannedTexts, folder: Path, progress: ProgressCallback
) -> Tokenizer:
    """The one a killed process had finished, the given one, or one that is learned now; saved in `folder`."""
    if (folder / "tokenizer_config.json").is_file():  # written last
        return open_tokenizer(folder)
    # Characters are taken from all parts, so that validation has no unknown one; all else is learned from train alone.
    everything = spec.kind == "characters"
    learned = existing or build_tokenizer(spec, _texts(texts, progress, everything=everything))
    learned.save(folder)
    _OPEN.clear()
    _OPEN[folder] = learned
    return learned


def open_tokenizer(folder: Path) -> Tokenizer:
    """From the folder, or as it was saved there."""
    if folder not in _OPEN:
        _OPEN.clear()
        _OPEN[folder] = Tokenizer.load(folder)
    return _OPEN[folder]


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """What a reader of its tokens must know."""
    tokenizer = open_tokenizer(folder)
    return {
        "dtype": tokenizer.dtype.str,
        "end_of_text": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
    }


def _texts(texts: PlannedTexts, progress: ProgressCallback, *, everything: bool) -> Iterator[str]:
    plan = texts.plan
    sizes = [sum(item.bytes for item in job) for job in texts.jobs]
    # A job is of one input, and a held-out one has nothing to learn from.
    tables = [plan.inputs[job[0].input].table for job in texts.jobs]
    chosen = np.array([n for n, table in enumerate(tables) if everything or table.startswith("train")])
    total = sum(sizes[n] for n in chosen)
    if not everything and total > ENOUGH:
        few = max(1, len(chosen) * ENOUGH // total)
        chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, few).astype(int))]
        total = sum(sizes[n] for n in chosen)
    done, seen = 0, 0
    progress("tokenizer", 0, total)
    for number in map(int, chosen):
        decided = texts.decisions.for_job(number) if texts.decisions is not None else None
        position = -1
        for item in texts.jobs[number]:
            for record in read_records(plan.inputs, item, plan.rules):
                position += 1
                seen += 1
                if not isinstance(record, Record):
                    continue
                table = item.table or plan.inputs[item.input].table
                if decided is not None and item.table is None:
                    if decided[position] < 0:
                        continue
                    table = plan.tables[decided[position]]
                if everything or table.startswith("train"):
                    yield record.fields["text"]
        done += sizes[number]
        progress("tokenizer", done, total)
    if not seen:  # else it would be said that words are rare
        files = [file for input in plan.inputs if input.table.startswith("train") for file in input.found.files]
        where = f"{files[0]} is" if len(files) == 1 else f"the {len(files)} files of the training data are all"
        raise DataError(f"{where} empty; give a file with data in it")
