"""Generation requests: a user of the run's own data, or a new user described by a history file, with a wish."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from bottega.core.errors import DataError, UsageError
from bottega.data.image.decode import decode_image
from bottega.data.records.record import BadRecord, Unreadable
from bottega.tasks.personalize.data.image_files import locate_image
from bottega.tasks.personalize.data.record_files import describe_validation_error
from bottega.tasks.personalize.data.records import Item, PersonalRows, Record

MAX_USERS_NAMED = 5
"""Maximum number of users that an error message names."""
RECORD_SUFFIXES = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class UserRequest:
    """The record of a user, with the wish to generate, and a function that loads the images of its history."""

    record: Record
    load_image: Callable[[Item], np.ndarray | None]
    """Loads an item's image, uint8 (height, width, 3), to draw it on a contact sheet; returns None for an item without one."""

    def with_wish(self, wish: str) -> UserRequest:
        """Return the same user with another wish."""
        return UserRequest(self.record.model_copy(update={"wish": wish}), self.load_image)


def find_users(names: Sequence[str], tables: Iterable[PersonalRows]) -> list[UserRequest]:
    """Return a request for each user by name; of a user's records the last is used, since its history is the longest."""
    tables = list(tables)
    positions = {user: (rows, number) for rows in tables for number, user in enumerate(rows.users)}
    requests = []
    for user in names:
        if user not in positions:
            raise UsageError(
                f"--user {user} is not one of the {len(positions):,} users of this run; choose one, such as {_list_some_users(tables)}"
            )
        rows, number = positions[user]
        requests.append(build_user_request(rows, number))
    return requests


def build_user_request(rows: PersonalRows, number: int) -> UserRequest:
    """Return the request of record `number`."""
    return UserRequest(rows.record(number), lambda item: rows.image(item) if item.image is not None else None)


def _list_some_users(tables: list[PersonalRows]) -> str:
    return ", ".join(
        list(dict.fromkeys(user for rows in tables for user in rows.users[:MAX_USERS_NAMED]))[:MAX_USERS_NAMED]
    )


def read_history(path: Path, *, wishes: Sequence[str] | None) -> list[UserRequest]:
    """Read new users from a file: records, whose target may be missing, or one user's liked captions, one per line.

    A record without a wish needs one in `wishes`.
    """
    if not path.is_file():
        raise UsageError(
            f"--history {path} does not exist; give a record file, or a text file with one liked caption per line"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--history {path} cannot be read as text ({error}); save it as UTF-8") from None
    if path.suffix.lower() in RECORD_SUFFIXES:
        rows = _parse_json(path, text)
    else:
        captions = [line.strip() for line in text.splitlines() if line.strip()]
        if not captions:
            raise DataError(f"--history {path}: the file is empty; give one liked caption per line")
        if _is_json(captions[0]):
            raise DataError(f"--history {path} contains JSON records; rename it to .json or .jsonl")
        history = [{"id": str(number), "caption": caption} for number, caption in enumerate(captions)]
        rows = [{"user": path.stem, "history": history}]
    if not rows:
        raise DataError(
            f"--history {path} contains no record; add one, or give a text file with one liked caption per line"
        )
    return [_parse_request(path, number, row, has_wish=bool(wishes)) for number, row in enumerate(rows)]


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _parse_json(path: Path, text: str) -> list[Any]:
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(text)
            return content if isinstance(content, list) else [content]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"--history {path} is not valid JSON ({error}); correct it") from None


def _parse_request(path: Path, number: int, row: Any, *, has_wish: bool) -> UserRequest:
    where = f"--history {path}, record {number + 1}"
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with user and history")
    if not isinstance(row.get("target") or {}, dict):
        raise DataError(
            f"{where}: target must be an object with id, caption and image; or remove it, and describe the image in the field wish"
        )
    wish = row.get("wish") or (row.get("target") or {}).get("caption")
    if isinstance(wish, str) and wish.isspace():
        raise DataError(f"{where}: the wish is blank; remove it, or describe the image")
    if not wish and not has_wish:
        raise UsageError(f'{where} has no wish; describe the image with --wish, such as --wish "a star"')
    target = row.get("target") or {"id": "wish", "caption": wish or ""}
    fields = {"user": f"{path.stem}-{number + 1}", **row, "wish": wish, "target": target}
    if isinstance(history := row.get("history"), list):  # items of a new user need no id
        fields["history"] = [
            {"id": str(position), **item} if isinstance(item, dict) else item for position, item in enumerate(history)
        ]
    try:
        record = Record.model_validate(fields)
    except ValidationError as error:
        raise DataError(f"{where}: {describe_validation_error(error.errors()[0])}") from None
    if not record.history or any(not item.caption.strip() for item in record.history):
        raise DataError(f"{where}: the history needs at least one item, each with a caption")
    # Decode all images now: an unreadable one should be noticed before anything is generated.
    images = {
        item.id: _decode_item_image(path.parent, item, where) for item in record.history if item.image is not None
    }
    return UserRequest(record, lambda item: images.get(item.id))


def _decode_item_image(folder: Path, item: Item, where: str) -> np.ndarray:
    path = locate_image(folder, str(item.image))
    if isinstance(path, BadRecord):
        raise DataError(f"{where}: {path.reason}")
    try:
        return decode_image(path, channels=3)
    except Unreadable as error:
        raise DataError(f"{where}: the image {path} cannot be read ({error}); replace it") from None
