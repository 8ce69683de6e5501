"""What a person liked and then took: the record that every collection becomes, and prepared records as samples.

A record file is JSON lines or a JSON list of records. Names of pictures are relative to its folder.
"""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from typing import Annotated, Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bottega.core.errors import DataError
from bottega.data.image.augment import normalise_pixels
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import load_image_encoder
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table

IMAGES_TABLE, NAMES_TABLE = "pictures", "names"
"""Folders beside the tables: every distinct picture once, and which picture each name of the records means."""
# Records of a table that stay parsed: a batch and its sheet ask for the same ones several times.
CACHED_RECORDS = 4096

Name = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Part(BaseModel):
    # Closed, because a misspelt key would otherwise be a wish that nobody hears. People and items are often numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Item(_Part):
    id: Name
    caption: str = ""
    """Never blank in prepared records; before that, a file of captions or a model may have it."""
    image: str | None = None
    """A file, relative to the folder of the records; None where nothing but the caption is known."""


class Record(_Part):
    user: Name
    history: tuple[Item, ...]
    """What the person liked before, oldest first."""
    target: Item
    """What the person took then, never one of the history."""
    wish: str | None = None
    """What is asked for in words; None is the caption of the target."""
    style: str | None = None
    truth: dict[str, str] = Field(default_factory=dict)
    """What is known of the person where the data is made, such as the favourite colour."""

    @property
    def wish_or_caption(self) -> str:
        return self.wish or self.target.caption

    @property
    def items(self) -> tuple[Item, ...]:
        """The history, then the target."""
        return (*self.history, self.target)


def evenly_spaced(total: int, count: int) -> list[int]:
    """So many numbers below `total`, evenly apart: neighbours in a sorted file are often alike."""
    count = min(total, count)
    return [number * total // count for number in range(count)]


@final
class PersonalRows(Source):
    """image [b, h, w, 3], float32 from -1 to 1: the target; and person [b], int64: the number of the record."""

    def __init__(self, prepared: PreparedData, table: str) -> None:
        self.table = prepared.table(table)
        self.images, self.names = Table(prepared.folder / IMAGES_TABLE), Table(prepared.folder / NAMES_TABLE)
        self.encoder, self.content = load_image_encoder(prepared), f"{prepared.fingerprint} {table}"

    def __len__(self) -> int:
        return len(self.table)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        numbers = self.table.gather("target", index)
        return {"image": normalise_pixels(self.pixels(numbers), mode="symmetric"), "person": index.astype(np.int64)}

    def record(self, index: int) -> Record:
        return self._record(index)

    def image(self, item: Item) -> np.ndarray:
        """What an item of these records shows: uint8 [h, w, 3]."""
        number = self._numbers.get(item.image) if item.image is not None else None
        if number is None:
            raise DataError(f"item {item.id!r} has no picture among those prepared; only its caption is known")
        return self.pixels(np.array([number]))[0]

    def pixels(self, numbers: np.ndarray) -> np.ndarray:
        """The pictures `numbers` [n]: uint8 [n, h, w, 3], a copy."""
        if self.encoder.store == "decoded":
            return self.images.gather("image", numbers)
        return np.stack([self.encoder.decode_row(self.images.row("image", number), 0) for number in numbers.tolist()])

    @cached_property
    def users(self) -> list[str]:
        """Whose each record is."""
        return [self.table.row("user", number) for number in range(len(self))]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.content} {len(self)} {self.encoder}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        record = self.record(index)
        liked = "; ".join(item.caption for item in record.history)
        head = f"record {index} of {len(self)}: {self.table.row('key', index)}, user {record.user}"
        return f"{head}\nliked: {liked}\nwish: {record.wish_or_caption}\ntarget: {record.target.caption}"

    @cached_property
    def _record(self) -> Any:
        table = self.table
        return lru_cache(maxsize=CACHED_RECORDS)(lambda index: Record.model_validate_json(table.row("record", index)))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        numbers = self.names.values("picture").tolist()
        return {self.names.row("name", at): number for at, number in enumerate(numbers)}
