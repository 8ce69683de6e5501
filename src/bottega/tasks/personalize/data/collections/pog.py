"""POG (Chen et al., 2019, Alibaba iFashion): what people clicked on, and the outfit they then chose.

`user_data.txt` has lines `user,item;item;...,outfit`, `outfit_data.txt` has `outfit,item;item;...`, and `item_data.txt`
has `item,category,image address,title`. The images are not published with it; downloaded ones are expected in a folder,
named by the id of the item. The history is what was clicked on, the target one item of the outfit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bottega.core.errors import DataError
from bottega.data.formats.compression import iter_lines, open_decompressed
from bottega.data.formats.folders import IMAGE_SUFFIXES
from bottega.data.records.record import BadRecord
from bottega.data.tables.splits import hash_key
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import (
    DEFAULT_HISTORY_LENGTH,
    CollectionRecords,
    find_file,
    find_image_root,
    find_subfolder,
    shuffle_by_hash,
)
from bottega.tasks.personalize.data.records import Item, Record

USERS_FILE, OUTFITS_FILE, ITEMS_FILE = "user_data.txt", "outfit_data.txt", "item_data.txt"
IMAGE_FOLDERS = ("images", "images_sampled", "pictures")

Click = tuple[int, str, tuple[str, ...], str]
"""Line, user, history, target."""


def read(folder: Path, data: PersonalizeData, limit: int | None) -> CollectionRecords:
    """Read POG: the clicked items of each user as history, and an item of the chosen outfit as target."""
    base = find_image_root(folder, data)
    images = _find_images(base)
    if not images:
        raise DataError(
            f"{base} has no images; put them into {base / IMAGE_FOLDERS[0]}, each named by the id of its item"
        )
    left_out: Counter[str] = Counter()
    bad_records: list[tuple[str, Record | BadRecord]] = []
    clicks = list(
        _read_clicks(folder, images, data.history_length or DEFAULT_HISTORY_LENGTH, limit, left_out, bad_records)
    )
    titles = _read_titles(folder, {item for _, _, history, target in clicks for item in (*history, target)})
    records: list[tuple[str, Record | BadRecord]] = list(bad_records)
    for line, user, history, target in clicks:
        # An item without a title has no caption, unless data.captions supplies one.
        captioned_items = [item for item in history if item in titles or data.captions is not None]
        if not captioned_items or (target not in titles and data.captions is None):
            left_out["of which nothing has a title"] += 1
            continue
        items = {
            item: Item(id=item, caption=titles.get(item, ""), image=images.get(item))
            for item in (*captioned_items, target)
        }
        record = Record(user=user, history=tuple(items[item] for item in captioned_items), target=items[target])
        records.append((f"{USERS_FILE}, line {line}", record))
    return CollectionRecords(records, dict(left_out))


def _read_clicks(
    folder: Path,
    images: dict[str, str],
    length: int,
    limit: int | None,
    left_out: Counter[str],
    bad_records: list[tuple[str, Record | BadRecord]],
) -> Iterator[Click]:
    """Yield up to `limit` clicks with histories of up to `length` items.

    Lines that cannot be used are counted in `left_out` by reason; malformed ones are added to `bad_records`.
    """
    outfits = _read_outfits(folder, images)
    digests: set[int] = set()
    file, num_clicks = find_file(folder, USERS_FILE), 0
    for line, text in _read_lines(file):
        fields = text.split(",")
        if len(fields) != 3 or not fields[0].strip() or not fields[2].strip():
            where = f"{file}, line {line}"
            bad_records.append(
                (f"{USERS_FILE}, line {line}", BadRecord(where, where, "expected user,item;item;...,outfit"))
            )
            continue
        user, outfit = fields[0].strip(), fields[2].strip()
        # An item clicked twice counts once, at its last position.
        clicked_items = list(dict.fromkeys(reversed([item.strip() for item in fields[1].split(";") if item.strip()])))[
            ::-1
        ]
        digest = hash_key(f"{user},{';'.join(clicked_items)},{outfit}")
        if outfit not in outfits:
            left_out["whose outfit has no item with a picture"] += 1
        elif not clicked_items:
            left_out["with nothing clicked on"] += 1
        elif digest in digests:
            left_out["the same as an earlier line"] += 1
        elif not (new_items := [item for item in outfits[outfit] if item not in clicked_items]):
            left_out["whose outfit has only what was clicked on before"] += 1
        else:
            digests.add(digest)
            yield line, user, tuple(clicked_items[-length:]), shuffle_by_hash(new_items, user, outfit)[0]
            num_clicks += 1
            if limit is not None and num_clicks >= limit:
                return


def _find_images(base: Path) -> dict[str, str]:
    """Return item -> image, relative to `base`."""
    images: dict[str, str] = {}
    for folder, folders, files in os.walk(find_subfolder(base, *IMAGE_FOLDERS)):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix.lower() in IMAGE_SUFFIXES:
                images.setdefault(path.stem, path.relative_to(base).as_posix())
    return images


def _read_outfits(folder: Path, images: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return outfit -> its items with an image, for outfits that have any."""
    file = find_file(folder, OUTFITS_FILE)
    outfits = {}
    for line, text in _read_lines(file):
        outfit, comma, items = text.partition(",")
        if not comma or not outfit.strip():
            raise DataError(f"{file}, line {line}: expected outfit,item;item;..., got {text[:60]!r}")
        items_with_image = tuple(dict.fromkeys(item.strip() for item in items.split(";") if item.strip() in images))
        if items_with_image:
            outfits[outfit.strip()] = items_with_image
    return outfits


def _read_titles(folder: Path, ids: set[str]) -> dict[str, str]:
    """Return item -> title for those of `ids` that have one. Only the title, the last field, may contain commas."""
    file = find_file(folder, ITEMS_FILE)
    titles = {}
    for line, text in _read_lines(file):
        fields = text.split(",", 3)
        if len(fields) < 3:
            raise DataError(f"{file}, line {line}: expected item,category,address,title, got {text[:60]!r}")
        title = fields[3].strip() if len(fields) == 4 else ""
        if fields[0].strip() in ids and title:
            titles[fields[0].strip()] = title
    return titles


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    with open_decompressed(file) as stream:
        for number, raw in enumerate(iter_lines(stream, None), start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, line {number}: not UTF-8; convert it, for example with iconv -f latin1 -t utf-8"
                ) from error
            if text.strip():
                yield number, text
