"""Keywords of the records of a run: of all records of its prepared tables, and of other records on request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from bottega.core.types import Models
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparedData
from bottega.models.device import choose_device
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.language import load_language_model
from bottega.tasks.personalize.data.condition_tokens import ConditionTokenizer, PromptedRows, RecordKeywords
from bottega.tasks.personalize.data.records import PersonalRows, Record
from bottega.tasks.personalize.keywords import KeywordGenerator


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@final
class LanguageModelLoader:
    """Loads the language model of a folder when it is first called."""

    def __init__(self, folder: str, *, precision: FrozenPrecision, device: Any) -> None:
        self.folder, self.precision, self.device = folder, precision, device

    def __call__(self) -> Any:
        return self._model

    @cached_property
    def _model(self) -> Any:
        model = load_language_model(self.folder, precision=self.precision, checkpointing=False, device=self.device)
        return model.to(self.device)


@final
class RunKeywords:
    """Generates the keywords of records with the language model of a run.

    `folder` is that of the language model; `device` is the value in the recipe, resolved when keywords are generated.
    """

    def __init__(self, generator: KeywordGenerator, *, folder: str, precision: FrozenPrecision, device: str) -> None:
        self.generator = generator
        self._folder, self._precision, self._device = folder, precision, device
        self._by_table: dict[str, list[RecordKeywords]] = {}

    def generate(
        self, records: Sequence[Record], models: Models | None = None, progress: ProgressCallback = ignore_progress
    ) -> list[RecordKeywords]:
        """Return the keywords of each record.

        Without `models`, the language model is loaded if an answer is missing, and released afterwards.
        """
        if models is not None:
            model = models["language_model"]
            return self.generator.generate(records, model, next(model.parameters()).device, progress)
        device = choose_device(self._device)
        load_model = LanguageModelLoader(self._folder, precision=self._precision, device=device)
        return self.generator.generate(records, load_model, device, progress)

    def generate_tables(
        self, prepared: PreparedData, names: Sequence[str], progress: ProgressCallback = ignore_progress
    ) -> None:
        """Generate the keywords of all records of the named tables, in one pass."""
        records_by_table = {name: list_records(PersonalRows(prepared, name)) for name in names}
        keywords = self.generate(
            [record for records in records_by_table.values() for record in records], progress=progress
        )
        for name, records in records_by_table.items():
            self._by_table[name], keywords = keywords[: len(records)], keywords[len(records) :]

    def read_table(self, prepared: PreparedData, name: str, tokenizer: ConditionTokenizer) -> PromptedRows:
        """Return the samples of a table with its keywords, which are generated if they are missing."""
        if name not in self._by_table:
            self.generate_tables(prepared, [name])
        return PromptedRows(PersonalRows(prepared, name), self._by_table[name], tokenizer)

    def hash_tables(self) -> str:
        """Return a hash of the keywords of all tables."""
        return hashlib.sha256(repr(sorted(self._by_table.items())).encode()).hexdigest()


def list_records(rows: PersonalRows) -> list[Record]:
    """Return all records of a table."""
    return [rows.record(number) for number in range(len(rows))]
