"""Data given to evaluate or predict on in place of a run's own: a source, a split of it, and field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.config.data import Data, HeldOut, Source, Splitting

D = TypeVar("D", bound=Data)

# Keys that concern the run's own data only: how much of it is read, and how it is mixed.
OWN_SOURCE_KEYS = ("more_paths", "split", "subset", "metadata", "name", "weight", "limit", "repeat")
OWN_DATA_KEYS = ("sources", "validation", "test", "split", "replay", "curriculum", "limit", "deduplicate")


@dataclass(frozen=True)
class ExternalData:
    """A source that is read like the run's own data, except for the keys it sets."""

    source: Source
    table: str = "train"
    """The split to evaluate; `train` is the whole source if nothing is held out."""
    held_out: HeldOut | None = None
    """The fraction of the source that makes up `table`."""
    split: Splitting | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the data section for reading rows, such as label_field."""

    @property
    def path(self) -> str:
        """Path of the source, or its kind if it has none."""
        return self.source.path or self.source.kind

    def replace_in(self, run_data: D) -> D:
        """Return the data section of a run with this data in place of its own."""
        changes: dict[str, Any] = {**dict.fromkeys(OWN_DATA_KEYS), "train": self._merge_source(run_data), **self.fields}
        if self.held_out is not None or self.split is not None:
            changes |= {"split": self.split, self.table: self.held_out}
        return run_data.model_copy(
            update={key: value for key, value in changes.items() if key in type(run_data).model_fields}
        )

    def _merge_source(self, run_data: Data) -> Source:
        base = run_data.sources[0] if run_data.sources else run_data.train
        changes = {name: getattr(self.source, name) for name in self.source.model_fields_set}
        return base.model_copy(update={**dict.fromkeys(OWN_SOURCE_KEYS), "kind": "auto", **changes})
