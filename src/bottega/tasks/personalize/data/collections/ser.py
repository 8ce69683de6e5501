"""SER30K (Liu et al., 2022): 1,887 packs of stickers, each a folder of `Images/`, with an emotion for each sticker.

A pack stands for a user who likes such stickers. Each sticker is the target once, with others of the same pack as the history.
(The benchmark published with this collection draws the target from a random other pack. Such a target is unrelated to the
history, so a model can neither learn a preference from it nor be evaluated on it.)

The style is the emotion of the target, if `Annotations/` has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError
from bottega.data.formats.folders import IMAGE_SUFFIXES
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import (
    DEFAULT_HISTORY_LENGTH,
    CollectionRecords,
    find_image_root,
    find_subfolder,
    shuffle_by_hash,
)
from bottega.tasks.personalize.data.records import Item, Record

MIN_OTHER_STICKERS = 3
"""Minimum number of stickers in a pack besides the target; a smaller pack shows no taste."""
EMOTION_KEYS = ("emotion", "anno", "label", "sentiment")


def read(folder: Path, data: PersonalizeData, limit: int | None) -> CollectionRecords:
    """Read SER30K: the stickers of a pack, each in turn as target with others as history."""
    base = find_image_root(folder, data)
    images = find_subfolder(base, "Images")
    emotions = (
        _read_emotions(find_subfolder(folder, "Annotations")) if find_subfolder(folder, "Annotations") != folder else {}
    )
    length = data.history_length or DEFAULT_HISTORY_LENGTH
    records: list[Any] = []
    num_small_packs, num_left_out = 0, 0
    for pack in sorted(path for path in images.iterdir() if path.is_dir() and not path.name.startswith(".")):
        names = [path.name for path in pack.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        if len(names) <= min(MIN_OTHER_STICKERS, length):
            num_small_packs, num_left_out = num_small_packs + bool(names), num_left_out + len(names)
            continue
        items = [_build_item(pack.relative_to(base), name) for name in shuffle_by_hash(names, pack.name)]
        for index, target in enumerate(items):
            # Cyclic, since stickers of a pack have no order: each can be the target with the same history length.
            history = (items + items)[index + len(items) - min(length, len(items) - 1) : index + len(items)]
            style = emotions.get(target.id) or emotions.get(Path(target.id).with_suffix("").as_posix())
            records.append((target.image, Record(user=pack.name, history=tuple(history), target=target, style=style)))
    reason = f"in {num_small_packs:,} packs of {min(MIN_OTHER_STICKERS, length)} stickers or fewer"
    return CollectionRecords(records, {reason: num_left_out} if num_small_packs else {})


def _build_item(pack: Path, name: str) -> Item:
    return Item(id=f"{pack.name}/{name}", image=(pack / name).as_posix())


def _read_emotions(folder: Path) -> dict[str, str]:
    """Return "pack/file" -> emotion; of several annotations of a sticker the first counts, since the annotation files of the
    splits repeat those of the complete file."""
    emotions: dict[str, str] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: not valid JSON: {error}; correct or delete it") from error
        for key, emotion in _parse_annotations(content):
            emotions.setdefault(key, emotion)
    return emotions


def _parse_annotations(content: Any) -> Iterator[tuple[str, str]]:
    """Yield ("pack/file", emotion) from a list of rows, or from {annotations: rows, categories: the names of the emotions}."""
    category_names: dict[str, str] = {}
    if isinstance(content, dict):
        categories = content.get("categories")
        if isinstance(categories, dict):
            # Number -> name or name -> number.
            pairs = [(str(key), str(value)) for key, value in categories.items()]
            category_names = {number: name for pair in pairs for number, name in (pair, pair[::-1]) if number.isdigit()}
        content = content.get("annotations")
    for row in content if isinstance(content, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            continue
        emotion = next((row[name] for name in EMOTION_KEYS if row.get(name) not in (None, "")), None)
        if emotion is None:
            continue
        topic = row.get("topic")
        key = row["file_name"] if topic is None or "/" in row["file_name"] else f"{topic}/{row['file_name']}"
        yield key.removeprefix("Images/"), category_names.get(str(emotion), str(emotion))
