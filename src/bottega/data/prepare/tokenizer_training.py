"""Train a tokenizer on the texts that are about to be encoded."""

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

# Train on at most this many bytes, evenly spread over the data: more text hardly changes the merges, and 1 GB takes minutes.
MAX_TRAINING_BYTES = 64 << 20


_LAST_TOKENIZER: dict[Path, Tokenizer] = {}
"""Folder -> the last tokenizer used in this process: loading a large vocabulary takes 0.1 s, and a process runs many jobs."""


def load_or_train_tokenizer(
    spec: TokenizerSpec, existing: Tokenizer | None, planned: PlannedTexts, folder: Path, progress: ProgressCallback
) -> Tokenizer:
    """Return the tokenizer in `folder`; if there is none, save the `existing` one there, or one trained on the planned texts."""
    if (folder / "tokenizer_config.json").is_file():  # written last
        return open_tokenizer(folder)
    # Characters come from all splits, so that validation has no unknown characters; other tokenizers are trained on train only.
    read_all = spec.kind == "characters"
    tokenizer = existing or build_tokenizer(spec, _read_texts(planned, progress, read_all=read_all))
    tokenizer.save(folder)
    _LAST_TOKENIZER.clear()
    _LAST_TOKENIZER[folder] = tokenizer
    return tokenizer


def open_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder; cached per process."""
    if folder not in _LAST_TOKENIZER:
        _LAST_TOKENIZER.clear()
        _LAST_TOKENIZER[folder] = Tokenizer.load(folder)
    return _LAST_TOKENIZER[folder]


def get_tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Return the values of meta.json that readers of the tokens need."""
    tokenizer = open_tokenizer(folder)
    return {
        "dtype": tokenizer.dtype.str,
        "end_of_text": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
    }


def _read_texts(planned: PlannedTexts, progress: ProgressCallback, *, read_all: bool) -> Iterator[str]:
    plan = planned.plan
    sizes = [sum(item.bytes for item in job) for job in planned.jobs]
    # A job reads one input; jobs of held-out inputs are not used for training.
    tables = [plan.inputs[job[0].input].table for job in planned.jobs]
    chosen_jobs = np.array([n for n, table in enumerate(tables) if read_all or table.startswith("train")])
    total_bytes = sum(sizes[n] for n in chosen_jobs)
    if not read_all and total_bytes > MAX_TRAINING_BYTES:
        num_jobs = max(1, len(chosen_jobs) * MAX_TRAINING_BYTES // total_bytes)
        chosen_jobs = chosen_jobs[np.unique(np.linspace(0, len(chosen_jobs) - 1, num_jobs).astype(int))]
        total_bytes = sum(sizes[n] for n in chosen_jobs)
    done_bytes, num_records = 0, 0
    progress("tokenizer", 0, total_bytes)
    for number in map(int, chosen_jobs):
        table_numbers = planned.decisions.for_job(number) if planned.decisions is not None else None
        position = -1
        for item in planned.jobs[number]:
            for record in read_records(plan.inputs, item, plan.rules):
                position += 1
                num_records += 1
                if not isinstance(record, Record):
                    continue
                table = item.table or plan.inputs[item.input].table
                if table_numbers is not None and item.table is None:
                    if table_numbers[position] < 0:
                        continue
                    table = plan.tables[table_numbers[position]]
                if read_all or table.startswith("train"):
                    yield record.fields["text"]
        done_bytes += sizes[number]
        progress("tokenizer", done_bytes, total_bytes)
    if not num_records:  # a clearer message than the trainer's about rare words
        files = [file for input in plan.inputs if input.table.startswith("train") for file in input.source_files.paths]
        where = f"{files[0]} is" if len(files) == 1 else f"the {len(files)} files of the training data are all"
        raise DataError(f"{where} empty; give a file with data in it")
