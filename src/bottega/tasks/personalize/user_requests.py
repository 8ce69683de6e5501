"""For whom and for what a person asks: users of the run's own data, or somebody new by what they liked."""

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

NAMED = 5
"""Users that a message names."""
RECORDS = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class UserRequest:
    """A record, and what its pictures show; `show` is asked only for what is drawn."""

    record: Record
    load_image: Callable[[Item], np.ndarray | None]

    def with_wish(self, wish: str) -> UserRequest:
        return UserRequest(self.record.model_copy(update={"wish": wish}), self.load_image)


def find_users(wanted: Sequence[str], tables: Iterable[PersonalRows]) -> list[UserRequest]:
    """Each by name, in whichever table; one with several records by the last, which knows most."""
    tables = list(tables)
    places = {user: (rows, number) for rows in tables for number, user in enumerate(rows.users)}
    found = []
    for user in wanted:
        if user not in places:
            raise UsageError(
                f"--user {user}: is none of the {len(places):,} users of this run, such as {_some(tables)}"
            )
        rows, number = places[user]
        found.append(request_for_record(rows, number))
    return found


def request_for_record(rows: PersonalRows, number: int) -> UserRequest:
    return UserRequest(rows.record(number), lambda item: rows.image(item) if item.image is not None else None)


def _some(tables: list[PersonalRows]) -> str:
    return ", ".join(list(dict.fromkeys(user for rows in tables for user in rows.users[:NAMED]))[:NAMED])


def read_history(path: Path, *, wishes: Sequence[str] | None) -> list[UserRequest]:
    """People of a file: records, whose targets may be missing, or the captions of one person, one a line.

    Who has no wish of their own needs one that is asked for.
    """
    if not path.is_file():
        raise UsageError(f"--history {path}: is no file; give records, or a text with one caption a line")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--history {path}: cannot be read as text ({error}); save it as UTF-8") from None
    if path.suffix.lower() in RECORDS:
        said = _parsed(path, text)
    else:
        captions = [line.strip() for line in text.splitlines() if line.strip()]
        if not captions:
            raise DataError(f"--history {path}: is empty; give one liked caption a line")
        if _is_json(captions[0]):
            raise DataError(f"--history {path}: looks like records in a text; name it .json or .jsonl")
        said = [{"user": path.stem, "history": [{"id": str(n), "caption": one} for n, one in enumerate(captions)]}]
    if not said:
        raise DataError(f"--history {path}: holds no record; give one, or a text with one caption a line")
    return [_new(path, number, one, has_wish=bool(wishes)) for number, one in enumerate(said)]


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _parsed(path: Path, text: str) -> list[Any]:
    try:
        if path.suffix.lower() == ".json":
            whole = json.loads(text)
            return whole if isinstance(whole, list) else [whole]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"--history {path}: is no JSON ({error}); correct it") from None


def _new(path: Path, number: int, said: Any, *, has_wish: bool) -> UserRequest:
    where = f"--history {path}, record {number + 1}"
    if not isinstance(said, dict):
        raise DataError(f"{where}: is no object with user and history")
    if not isinstance(said.get("target") or {}, dict):
        raise DataError(
            f"{where}: target is no object with id, caption and image; leave it out, and give the wish as wish"
        )
    wish = said.get("wish") or (said.get("target") or {}).get("caption")
    if isinstance(wish, str) and wish.isspace():
        raise DataError(f"{where}: its wish is blank; leave it out, or say what the picture should show")
    if not wish and not has_wish:
        raise UsageError(f'{where}: has no wish; say what the picture should show with --wish, such as --wish "a star"')
    target = said.get("target") or {"id": "wish", "caption": wish or ""}
    named = {"user": f"{path.stem}-{number + 1}", **said, "wish": wish, "target": target}
    if isinstance(history := said.get("history"), list):  # of somebody new items need no names
        named["history"] = [{"id": str(n), **one} if isinstance(one, dict) else one for n, one in enumerate(history)]
    try:
        record = Record.model_validate(named)
    except ValidationError as error:
        raise DataError(f"{where}: {describe_validation_error(error.errors()[0])}") from None
    if not record.history or any(not item.caption.strip() for item in record.history):
        raise DataError(f"{where}: every item that was liked needs a caption, and there must be one at least")
    # All of them now: a picture that cannot be read must not be found out when everything is drawn.
    shown = {item.id: _picture(path.parent, item, where) for item in record.history if item.image is not None}
    return UserRequest(record, lambda item: shown.get(item.id))


def _picture(folder: Path, item: Item, where: str) -> np.ndarray:
    found = locate_image(folder, str(item.image))
    if isinstance(found, BadRecord):
        raise DataError(f"{where}: {found.reason}")
    try:
        return decode_image(found, channels=3)
    except Unreadable as error:
        raise DataError(f"{where}: the picture {found} cannot be read ({error}); put a good one there") from None
