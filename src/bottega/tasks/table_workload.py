"""A branch whose data are prepared tables: what is learnt from, what is held out, and whether it is still the same."""

from __future__ import annotations

import glob
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from bottega.config.data import get_source_names
from bottega.core.errors import DataError
from bottega.data.formats.files import RANGE
from bottega.data.order.interleaved import Interleaved
from bottega.data.order.orders import Order
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources import combine
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take
from bottega.tasks.data_paths import DataMissing, resolve_paths
from bottega.tasks.workload import Workload


class TableWorkload(Workload):
    """Either with prepared data, or again for a finished run, whose data is prepared when asked for."""

    recipe: Any
    _prepared: PreparedData | None
    _expected: str | None
    """The fingerprint that data prepared again must have."""

    @abstractmethod
    def prepare_again(self, recipe: Any) -> PreparedData:
        """The data of the run's recipe, whose paths lead to where it is now, without a word about it."""

    @abstractmethod
    def table(self, name: str, *, is_training: bool) -> Source:
        """One of its tables as samples."""

    @property
    def prepared(self) -> PreparedData:
        if self._prepared is None:
            recipe = self.located_recipe()
            try:
                prepared = self.prepare_again(recipe)
            except DataError as error:
                raise self._gone(recipe) or error from None
            if prepared.fingerprint != self._expected:
                raise DataMissing(f"{self.describe_source()}: has changed since this run learnt from it; restore it")
            self._prepared = prepared
        return self._prepared

    @property
    def data_fingerprint(self) -> str | None:
        """Of the data that the run has learnt from, also where that is not there any more."""
        return self._expected or (self._prepared.fingerprint if self._prepared is not None else None)

    def located_recipe(self) -> Any:
        """The recipe with its relative data paths resolved against the folder that the run was started in."""
        return self.recipe.model_copy(update={"data": resolve_paths(self.recipe.data, self.started_in)})

    def _gone(self, recipe: Any) -> DataMissing | None:
        """What to say where a file or folder of the recipe is not there."""
        data = recipe.data
        sources = [*(data.sources or (data.train,)), *filter(None, (data.validation, data.test))]
        for source in sources:
            path = source.path
            if path is None or source.kind == "huggingface" or "://" in path or glob.has_magic(path):
                continue
            if not Path(path).expanduser().exists() and not RANGE.search(path):
                where = f"in {self.started_in[0]}, where the run was started," if self.started_in else "there"
                return DataMissing(f"{path}: the data of this run is not {where} any more; put it back")
        return None

    def describe_source(self) -> str:
        """The run's own data in words, as its recipe names it."""
        data = self.recipe.data
        paths = [one.path for one in data.sources or (data.train,) if one.path is not None]
        return ", ".join(paths) or "the data of this run"

    @property
    def fingerprint(self) -> str:
        return self.prepared.fingerprint

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
        return self.prepared.notes()

    def headline_metrics(self, *names: str) -> tuple[str, ...]:
        """A headline: these, what decides which checkpoint is best, and in a sequence that of each source."""
        watched, stopping = self.recipe.evaluation.metric, self.recipe.training.early_stopping
        found = [*names, watched, *([stopping.metric] if stopping is not None else [])]
        if self.recipe.data.mixture == "sequence":
            found += [f"{name}/{watched}" for name in get_source_names(self.recipe.data.sources or ())]
            found += ["average", "backward_transfer", "forgetting"]
        return tuple(dict.fromkeys(found))

    def training(self) -> Source:
        return self._combined[0]

    @property
    def order(self) -> Order | None:
        return self._combined[1]

    @cached_property
    def _combined(self) -> tuple[Source, Order | None]:
        data, tables = self.recipe.data, self.prepared.training_tables
        # Shards that were prepared elsewhere may hold several sources; they are then equal among themselves.
        options = data.sources if data.sources is not None else (data.train,) * len(tables)
        parts = [(self.table(table, is_training=True), one) for table, one in zip(tables, options, strict=True)]
        replay = self.table("replay", is_training=True) if "replay" in self.prepared.tables else None
        return combine.combine_sources(parts, data, seed=self.recipe.seed, replay=replay)

    def validation(self) -> Source | None:
        return self._held_out("validation")

    def test(self) -> Source | None:
        return self._held_out("test")

    def training_samples(self) -> Source:
        tables = [self.table(name, is_training=False) for name in self.prepared.training_tables]
        return tables[0] if len(tables) == 1 else combine.Concat(tables)

    def _held_out(self, name: str) -> Source | None:
        if name not in self.prepared.tables:
            return None
        return self._limited(name, self.table(name, is_training=False))

    def _limited(self, name: str, samples: Source) -> Source:
        """As many as the recipe measures of what is held out; of a sequence, of each source."""
        rows = self.prepared.metadata.get("by_source", {}).get(name)
        if rows is not None:
            samples = Interleaved(samples, rows, name=name)
        part = getattr(self.recipe.data, name) if name in ("validation", "test") else None
        return samples if part is None or part.limit is None else Take(samples, part.limit)
