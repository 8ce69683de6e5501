"""Data that is measured in place of a run's own: a source, which part of it, and how its fields are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.config.data import Data, HeldOut, Source, Splitting

D = TypeVar("D", bound=Data)

# What belongs to the run's own data alone: how much of it is read, and how it is mixed.
OF_THE_RUN = ("more_paths", "split", "subset", "metadata", "name", "weight", "limit", "repeat")
ALONE = ("sources", "validation", "test", "split", "replay", "curriculum", "limit")


@dataclass(frozen=True)
class ExternalData:
    """A source, read as the run's own data is read except where it says otherwise."""

    source: Source
    table: str = "train"
    """Which part of it is measured; `train` is all of it where nothing is held out."""
    held_out: HeldOut | None = None
    """The share of it that makes up `table`."""
    split: Splitting | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the data section that say how a row is read, such as label_field."""

    @property
    def path(self) -> str:
        return self.source.path or self.source.kind

    def replace_in(self, own: D) -> D:
        """The data section of a run with this data in place of its own."""
        changes: dict[str, Any] = {**dict.fromkeys(ALONE), "train": self._merged(own), **self.fields}
        if self.held_out is not None or self.split is not None:
            changes |= {"split": self.split, self.table: self.held_out}
        return own.model_copy(update={key: value for key, value in changes.items() if key in type(own).model_fields})

    def _merged(self, own: Data) -> Source:
        like = own.sources[0] if own.sources else own.train
        given = {name: getattr(self.source, name) for name in self.source.model_fields_set}
        return like.model_copy(update={**dict.fromkeys(OF_THE_RUN), "kind": "auto", **given})
