"""The data of a workload as prepared tables, read again for a finished run when they are used."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

from bottega.core.errors import DataError
from bottega.data.formats.files import BRACE_RANGE
from bottega.data.order.interleaved import Interleaved
from bottega.data.order.orders import Order
from bottega.data.prepare.prepared import PreparedData
from bottega.data.prepare.split_comparison import compare_tables
from bottega.data.sources import combine
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take
from bottega.data.tables.classes import read_text_column
from bottega.data.tables.shards import Table
from bottega.tasks.data_paths import DataMissing, resolve_paths
from bottega.tasks.task_data import TaskData


class ReadTable(Protocol):
    """Read one prepared table as samples; `is_training` turns augmentation on."""

    def __call__(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source: ...


@final
class TableData(TaskData):
    """Prepared tables as the data of a run; what differs between tasks is passed in as functions."""

    def __init__(
        self,
        recipe: Any,
        *,
        prepare: Callable[[Any], PreparedData],
        read_table: ReadTable,
        read_external: Callable[[ExternalData], Source],
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        notes: Callable[[PreparedData], list[str]] = lambda prepared: [],
        derived_fingerprint: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Take either prepared tables, or for a finished run the fingerprint that they must have when prepared again.

        `prepare` prepares the data of a recipe whose paths are resolved; `notes` adds to the notes of the tables.
        """
        self.recipe = recipe
        self._prepare, self._read_table, self._read_external = prepare, read_table, read_external
        self._prepared, self._expected_fingerprint = prepared, expected_fingerprint
        self._extra_notes, self._compute_derived_fingerprint = notes, derived_fingerprint

    @property
    def prepared(self) -> PreparedData:
        """The prepared tables. Raises DataMissing if the data of a finished run was removed or changed."""
        if self._prepared is None:
            recipe = self.located_recipe()
            try:
                prepared = self._prepare(recipe)
            except DataError as error:
                raise self._missing_error(recipe) or error from None
            if prepared.fingerprint != self._expected_fingerprint:
                raise DataMissing(f"{self.describe_source()} has changed since this run was trained on it; restore it")
            self._prepared = prepared
        return self._prepared

    @property
    def recorded_fingerprint(self) -> str | None:
        """Fingerprint of the data that the run was trained on, even if that data is gone."""
        return self._expected_fingerprint or (self._prepared.fingerprint if self._prepared is not None else None)

    def located_recipe(self) -> Any:
        """Return the recipe with relative data paths resolved against the folder in which the run was started."""
        return self.recipe.model_copy(update={"data": resolve_paths(self.recipe.data, self.started_in)})

    def _missing_error(self, recipe: Any) -> DataMissing | None:
        """Return the error for the first file or folder of the recipe that does not exist."""
        data = recipe.data
        sources = [*(data.sources or (data.train,)), *filter(None, (data.validation, data.test))]
        for source in sources:
            path = source.path
            if path is None or source.kind == "huggingface" or "://" in path or glob.has_magic(path):
                continue
            if not Path(path).expanduser().exists() and not BRACE_RANGE.search(path):
                where = f" in {self.started_in[0]}, where the run was started" if self.started_in else ""
                return DataMissing(f"{path}: the data of this run no longer exists{where}; restore it")
        return None

    def describe_source(self) -> str:
        """Return the paths of the run's own data, as its recipe names them."""
        data = self.recipe.data
        paths = [source.path for source in data.sources or (data.train,) if source.path is not None]
        return ", ".join(paths) or "the data of this run"

    @property
    def fingerprint(self) -> str:
        return self.prepared.fingerprint

    @property
    def derived_fingerprint(self) -> str | None:
        return self._compute_derived_fingerprint()

    @property
    def held_out(self) -> dict[str, str]:
        tables = [name for name in ("validation", "test") if name in self.prepared.tables]
        contents = {
            f"{name}.content": self.prepared.held_out_hashes[name]
            for name in tables
            if name in self.prepared.held_out_hashes
        }
        return {name: self.prepared.hash_samples(name) for name in tables} | contents

    @property
    def notes(self) -> list[str]:
        return [*self.prepared.notes(), *self._extra_notes(self.prepared)]

    def count_classes(self) -> dict[str, int]:
        names, prepared = self.prepared.classes.names, self.prepared
        tables = [prepared.table(name) for name in prepared.training_tables]
        counts = Counter(
            label for table in tables if "label" in table.columns for label in read_text_column(table, "label")
        )
        return {name: counts[name] for name in names} if names and counts.keys() <= set(names) else {}

    def compare_splits(self) -> dict[str, Any]:
        data, prepared = self.recipe.data, self.prepared
        if "deduplicate" not in type(data).model_fields:
            return {}  # the rows of these tables are not the samples, as for the people of personalize
        train_limits = [limit for limit in (data.limit, data.train.limit) if limit is not None]
        limits: dict[str, int | None] = {"train": min(train_limits, default=None)}
        held_out: dict[str, Table] = {}
        for name in ("validation", "test"):
            if name in prepared.tables:
                held_out[name] = prepared.table(name)
                limits[name] = section.limit if (section := getattr(data, name)) is not None else None
        training = [prepared.table(name) for name in prepared.training_tables]
        comparison = compare_tables(training, held_out, limits=limits)
        return {"key": "data", **comparison} if comparison else {}

    def table(self, name: str, *, is_training: bool) -> Source:
        """Return one of the run's tables as samples."""
        return self._read_table(self.prepared, name, is_training=is_training)

    def training(self) -> Source:
        return self._combined[0]

    @property
    def order(self) -> Order | None:
        return self._combined[1]

    @cached_property
    def _combined(self) -> tuple[Source, Order | None]:
        data, tables = self.recipe.data, self.prepared.training_tables
        # Shards that were prepared elsewhere may hold several sources; they then have equal weights.
        options = data.sources if data.sources is not None else (data.train,) * len(tables)
        sources = [(self.table(table, is_training=True), source) for table, source in zip(tables, options, strict=True)]
        replay = self.table("replay", is_training=True) if "replay" in self.prepared.tables else None
        return combine.combine_sources(sources, data, seed=self.recipe.seed, replay=replay)

    def validation(self) -> Source | None:
        return self._read_held_out("validation")

    def test(self) -> Source | None:
        return self._read_held_out("test")

    def training_samples(self) -> Source:
        tables = [self.table(name, is_training=False) for name in self.prepared.training_tables]
        return tables[0] if len(tables) == 1 else combine.Concat(tables)

    def read_external(self, external: ExternalData) -> Source:
        return self._read_external(external)

    def _read_held_out(self, name: str) -> Source | None:
        if name not in self.prepared.tables:
            return None
        return self.limit(name, self.table(name, is_training=False))

    def limit(self, name: str, samples: Source) -> Source:
        """Return the first samples of the held-out table `name`, as many as its `limit` in the recipe.

        If data.mixture is sequence, the sources are interleaved first, so that each has its share of these samples.
        """
        rows_per_source = self.prepared.metadata.get("by_source", {}).get(name)
        if rows_per_source is not None:
            samples = Interleaved(samples, rows_per_source, name=name)
        options = getattr(self.recipe.data, name) if name in ("validation", "test") else None
        return samples if options is None or options.limit is None else Take(samples, options.limit)
