"""SER30K (Liu et al., 2022): 1,887 packs of stickers, each a folder of `Images/`, with an emotion for each sticker.

A pack stands for a person who likes stickers like those. Each sticker is once the target, with others of the same pack
as the history. (The rule that was published with the benchmark on this collection draws the target from another pack, at
random. Such a target has nothing to do with the history: a model cannot learn a preference from it, nor be measured.)

The style is the emotion of the target where `Annotations/` tells it.
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
    find_subfolder,
    image_root,
    shuffle_by_hash,
)
from bottega.tasks.personalize.data.records import Item, Record

LEAST = 3
"""A pack with fewer other stickers than this shows no taste."""
EMOTIONS = ("emotion", "anno", "label", "sentiment")


def read(folder: Path, data: PersonalizeData, limit: int | None) -> CollectionRecords:
    base = image_root(folder, data)
    images = find_subfolder(base, "Images")
    emotions = (
        _emotions(find_subfolder(folder, "Annotations")) if find_subfolder(folder, "Annotations") != folder else {}
    )
    length = data.history_length or DEFAULT_HISTORY_LENGTH
    records: list[Any] = []
    too_few, their = 0, 0
    for topic in sorted(path for path in images.iterdir() if path.is_dir() and not path.name.startswith(".")):
        names = [path.name for path in topic.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        if len(names) <= min(LEAST, length):
            too_few, their = too_few + bool(names), their + len(names)
            continue
        items = [_item(topic.relative_to(base), name) for name in shuffle_by_hash(names, topic.name)]
        for at, target in enumerate(items):
            # In a circle: stickers of a pack have no order, so that all of them may be targets.
            history = (items + items)[at + len(items) - min(length, len(items) - 1) : at + len(items)]
            style = emotions.get(target.id) or emotions.get(Path(target.id).with_suffix("").as_posix())
            records.append((target.image, Record(user=topic.name, history=tuple(history), target=target, style=style)))
    reason = f"in {too_few:,} packs of {min(LEAST, length)} stickers or fewer"
    return CollectionRecords(records, {reason: their} if too_few else {})


def _item(topic: Path, name: str) -> Item:
    return Item(id=f"{topic.name}/{name}", image=(topic / name).as_posix())


def _emotions(folder: Path) -> dict[str, str]:
    """By topic/file. Splits of the annotations lie beside all of them and say the same."""
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: no valid JSON: {error}") from error
        for key, emotion in _annotations(content):
            found.setdefault(key, emotion)
    return found


def _annotations(content: Any) -> Iterator[tuple[str, str]]:
    """Of a list of rows, or of {annotations: rows, categories: names of the numbers in them}."""
    names: dict[str, str] = {}
    if isinstance(content, dict):
        categories = content.get("categories")
        if isinstance(categories, dict):
            # Either way round.
            pairs = [(str(key), str(value)) for key, value in categories.items()]
            names = {number: name for pair in pairs for number, name in (pair, pair[::-1]) if number.isdigit()}
        content = content.get("annotations")
    for row in content if isinstance(content, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            continue
        emotion = next((row[name] for name in EMOTIONS if row.get(name) not in (None, "")), None)
        if emotion is None:
            continue
        topic = row.get("topic")
        key = row["file_name"] if topic is None or "/" in row["file_name"] else f"{topic}/{row['file_name']}"
        yield key.removeprefix("Images/"), names.get(str(emotion), str(emotion))
