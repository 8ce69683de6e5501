"""The record of a user, what they liked and then chose, and prepared records as samples.

A record file is JSON lines or a JSON list of records. Image names are relative to its folder.
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
"""Tables beside the records: every distinct image once, and the number of the image behind each name."""
# Number of parsed records that stay in memory: a batch and a contact sheet read the same records several times.
NUM_CACHED_RECORDS = 4096

Name = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Model(BaseModel):
    # No extra keys, so that a misspelt one is an error. Ids of users and items are often numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Item(_Model):
    """An image that a user liked or chose, with its caption."""

    id: Name
    caption: str = ""
    """Never empty in prepared records; preparation may take it from a caption file or a captioning model."""
    image: str | None = None
    """File name, relative to the folder of the records; None if only the caption is known."""


class Record(_Model):
    """One choice of a user, with the items they liked before."""

    user: Name
    history: tuple[Item, ...]
    """Items liked before, oldest first."""
    target: Item
    """The item chosen next, which is not in the history."""
    wish: str | None = None
    """The prompt; None uses the caption of the target."""
    style: str | None = None
    truth: dict[str, str] = Field(default_factory=dict)
    """Ground truth of synthetic users, such as the favourite colour."""

    @property
    def wish_or_caption(self) -> str:
        """The wish, or the caption of the target if there is no wish."""
        return self.wish or self.target.caption

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of the history, then the target."""
        return (*self.history, self.target)


def pick_evenly_spaced(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `total`, since neighbours in a sorted file are often similar."""
    count = min(total, count)
    return [number * total // count for number in range(count)]


@final
class PersonalRows(Source):
    """Samples with `image`, the target, float32 (batch, height, width, 3) from -1 to 1, and `person`, the number of the
    record, int64 (batch,)."""

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
        """Return the record of one row."""
        return self._read_record(index)

    def image(self, item: Item) -> np.ndarray:
        """Return the image of an item, uint8 (height, width, 3)."""
        number = self._image_numbers.get(item.image) if item.image is not None else None
        if number is None:
            raise DataError(
                f"item {item.id!r} has no image in the prepared data; add an image to its record and prepare the data again"
            )
        return self.pixels(np.array([number]))[0]

    def pixels(self, numbers: np.ndarray) -> np.ndarray:
        """Return a copy of the images with these numbers, uint8 (images, height, width, 3)."""
        if self.encoder.store == "decoded":
            return self.images.gather("image", numbers)
        return np.stack([self.encoder.decode_row(self.images.row("image", number), 0) for number in numbers.tolist()])

    @cached_property
    def users(self) -> list[str]:
        """The user of each record."""
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
    def _read_record(self) -> Any:
        table = self.table
        return lru_cache(maxsize=NUM_CACHED_RECORDS)(
            lambda index: Record.model_validate_json(table.row("record", index))
        )

    @cached_property
    def _image_numbers(self) -> dict[str, int]:
        numbers = self.names.values("picture").tolist()
        return {self.names.row("name", row): number for row, number in enumerate(numbers)}
