"""Preview of prepared user records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bottega.data.prepare.preview import Preview, choose_evenly_spaced_rows, make_image_path
from bottega.data.tables.shards import Table

MAX_HISTORY_IMAGES = 6
"""Maximum number of images of a history on the contact sheet, beside the target."""


class PeoplePreview(Preview):
    """Shows each user's liked items and wish."""

    column, unit = "history", "liked items"

    def describe(self, row: dict[str, Any]) -> str:
        from bottega.tasks.personalize.data.records import Record

        record = Record.model_validate_json(row["record"])
        liked = "; ".join(item.caption for item in record.history)
        return f"user {record.user} liked: {liked}\nwish: {record.wish_or_caption}"

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the record as it can be read again; images are referenced by name."""
        record: dict[str, Any] = json.loads(row["record"])
        return record

    def draw(self, table: Table, count: int, folder: Path) -> list[Path]:
        """Write a contact sheet with a row for each user: the last liked items, then the target; an item without an image is white."""
        from bottega.data.image.contact_sheet import write_contact_sheet
        from bottega.tasks.personalize.data.records import PersonalRows

        rows = PersonalRows(self.prepared, self.prepared.training_tables[0])
        records = [rows.record(number) for number in choose_evenly_spaced_rows(table, 4)]
        num_columns = min(MAX_HISTORY_IMAGES, max(len(record.history) for record in records)) + 1
        size = self.prepared.metadata["image_size"]
        white = np.full((size, size, 3), 255, np.uint8)
        images, captions = [], []
        for record in records:
            items = record.items[-num_columns:]
            num_missing = num_columns - len(items)
            images += [white] * num_missing + [white if item.image is None else rows.image(item) for item in items]
            captions += [""] * num_missing + [item.caption for item in items[:-1]] + [f"chose: {items[-1].caption}"]
        path = make_image_path(folder, "people.png")
        write_contact_sheet(images, path, captions=captions, columns=num_columns)
        return [path]
