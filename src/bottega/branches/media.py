"""Prepared pictures, sounds and clips as a branch's data: training, held out, and given by hand."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from bottega.branches.branch import Branch
from bottega.core.errors import DataError
from bottega.data import combine
from bottega.data.classes import Classes
from bottega.data.first import First
from bottega.data.mel import MelCodec, MelRows
from bottega.data.orders import Order
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import Prepared
from bottega.data.samples import media_samples, with_codec
from bottega.data.source import Source


class MediaBranch(Branch):
    """Either with prepared data, or again from the codec of a finished run, whose data is prepared when asked for."""

    recipe: Any
    mel: MelCodec | None = None
    """How sound is seen; None for all other media."""

    def __init__(self, recipe: Any, prepared: Prepared | None, *, expected: str | None) -> None:
        """`expected` is the fingerprint that data prepared again must have."""
        self.recipe, self._prepared, self._expected = recipe, prepared, expected

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """What a recipe may leave to its data (sizes, rates), as it was there: other data is brought to it."""

    @abstractmethod
    def known_classes(self) -> Classes: ...

    @abstractmethod
    def write_codec(self, folder: Path) -> None:
        """All that must be known to use the model where its data is not."""

    @abstractmethod
    def has_codec(self, folder: Path) -> bool:
        """Whether it is there; a DataError where it is another one."""

    def served(self, rows: Any) -> Source:
        """The samples of the data layer as this branch's batches. Sound is served beside its spectrogram where it is
        held out, for those who listen."""
        return rows if self.mel is None else MelRows(rows, self.mel)

    @property
    def prepared(self) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare_media(self.recipe, progress=lambda stage, done, total: None)
            if self._prepared.fingerprint != self._expected:
                raise DataError("the data of this run has changed since it was trained; evaluate with --data")
        return self._prepared

    @property
    def fingerprint(self) -> str:
        return self.prepared.fingerprint

    @property
    def notes(self) -> list[str]:
        return self.prepared.notes()

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
        return combine.build(parts, data, seed=self.recipe.seed, replay=replay)

    def validation(self) -> Source | None:
        return self._held_out("validation")

    def test(self) -> Source | None:
        return self._held_out("test")

    def other(self, path: str) -> Source:
        """Other data in the form and with the classes of this run's own."""
        recipe, prepared = self.other_prepared(path)
        return self.served(self._rows(recipe, prepared, "train", is_training=False))

    def other_prepared(self, path: str) -> tuple[Any, Prepared]:
        data = self.recipe.data
        train = data.train.model_copy(update={"path": path, "kind": "auto"})
        alone = {"train": train, "sources": None, "validation": None, "test": None, "split": None, "replay": None}
        counted = {name: None for name in ("num_labels", "num_classes") if hasattr(self.recipe.model, name)}
        changes = {
            "model": self.recipe.model.model_copy(update=counted),
            "data": data.model_copy(update={**alone, **self.form()}),
        }
        recipe = self.recipe.model_copy(update=changes)
        return recipe, prepare_media(recipe, progress=lambda stage, done, total: None)

    def table(self, name: str, *, is_training: bool) -> Source:
        return self.served(self._rows(self.recipe, self.prepared, name, is_training=is_training))

    def raw(self, name: str) -> Source:
        """One table as the data layer gives it, unchanged: sounds are waves."""
        return self._rows(self.recipe, self.prepared, name, is_training=False)

    def raw_other(self, path: str) -> Source:
        recipe, prepared = self.other_prepared(path)
        return self._rows(recipe, prepared, "train", is_training=False)

    def _rows(self, recipe: Any, prepared: Prepared, name: str, *, is_training: bool) -> Source:
        recipe = recipe if self.mel is None else with_codec(recipe, self.mel)
        return media_samples(recipe, prepared, name, is_training=is_training, classes=self.known_classes())

    def _held_out(self, name: str) -> Source | None:
        if name not in self.prepared.tables:
            return None
        samples, part = self.table(name, is_training=False), getattr(self.recipe.data, name)
        return samples if part is None or part.limit is None else First(samples, part.limit)

    def save_codec(self, folder: Path) -> None:
        """Once, whole or not at all."""
        if self.has_codec(folder):
            return
        temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        temporary.mkdir(parents=True, exist_ok=True)
        self.write_codec(temporary)
        if folder.exists():
            shutil.rmtree(folder)  # of a process that was killed before it had finished this
        os.rename(temporary, folder)
