"""From a record to a row of prepared images: which field is what, and the picture at its wanted shape."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bottega.data.encoder import Encoder
from bottega.data.image.buckets import assign
from bottega.data.image.decode import decode, kind, pillow
from bottega.data.image.resize import Mode, resize
from bottega.data.record import Record, Unreadable
from bottega.data.shards import BYTES, TEXT, Column

IMAGE_FIELDS = ("image", "jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "img", "picture", "file", "pixels")
LABEL_FIELDS = ("label", "cls", "class")
CAPTION_FIELDS = ("caption", "text", "txt")


@final
@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """Pictures of one size, or, with `buckets`, each of the shape among those that is nearest to its own."""

    size: tuple[int, int] | None
    channels: int
    buckets: tuple[tuple[int, int], ...] | None = None
    resize: Mode = "crop"
    store: Literal["decoded", "encoded"] = "decoded"
    field: str | None = None
    label_field: str | None = None
    condition_field: str | None = None
    has_condition: bool = False
    """Whether rows have a numeric vector, from `condition_field` or the field `condition`."""

    def __post_init__(self) -> None:
        assert (self.size is None) != (self.buckets is None), "one size or several shapes"

    @property
    def columns(self) -> dict[str, Column]:
        columns = {"image": BYTES, "key": TEXT, "label": TEXT, "caption": TEXT}
        if self.buckets is not None:
            columns["bucket"] = Column("<i4", (1,))
        elif self.store == "decoded":
            columns["image"] = Column("|u1", self.shape(0))
        if self.has_condition:
            columns["condition"] = Column("<f4", varying=True)
        return columns

    def shape(self, bucket: int) -> tuple[int, int, int]:
        """[h, w, c] of the pictures of a bucket; there is only 0 without buckets."""
        height, width = self.size or (self.buckets or ())[bucket]
        return height, width, self.channels

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        data = medium(record, self.field, names=IMAGE_FIELDS, what="image")
        pixels = decode(data, channels=self.channels)
        bucket = 0 if self.buckets is None else assign(pixels.shape[0], pixels.shape[1], self.buckets)
        height, width, _ = self.shape(bucket)
        shrinks = pixels.shape[0] * pixels.shape[1] > height * width
        if self.store == "encoded" and not shrinks and not isinstance(data, np.ndarray):
            image: Any = data.read_bytes() if isinstance(data, Path) else data
        else:
            image = resize(pixels, (height, width), mode=self.resize) if self.store == "decoded" or shrinks else pixels
            if self.store == "encoded":
                image = _encoded(image, lossy=not isinstance(data, np.ndarray) and kind(data) == "JPEG")
            elif self.buckets is not None:
                image = image.tobytes()
        row = {"image": image, "bucket": [bucket], **descriptions(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = vector(record, self.condition_field)
        yield row

    def pixels(self, stored: Any, bucket: int) -> np.ndarray:
        """What a row of the column `image` shows: uint8 [h, w, c]."""
        height, width, channels = self.shape(bucket)
        if self.store == "decoded":
            return np.frombuffer(stored, dtype=np.uint8).reshape(height, width, channels)
        return resize(decode(stored, channels=channels), (height, width), mode=self.resize)


def medium(record: Record, field: str | None, *, names: tuple[str, ...], what: str) -> Any:
    """The picture, sound or film of a record: its encoded bytes, the Path of its file, or an array."""
    fields = record.fields
    if field is not None and field not in fields:
        raise Unreadable(f"has no field {field!r}; it has {_listed(fields)}")
    if field is None:
        usual = [name for name in names if name in fields]
        # An archive may name its members as it likes: then the only one that can be a medium is it.
        candidates = usual[:1] or [name for name, value in fields.items() if _medium(value) is not None]
        if len(candidates) != 1:
            found = (
                "several fields that could be the"
                if candidates
                else f"no field with {'a' if what == 'video' else 'an'}"
            )
            raise Unreadable(f"has {found} {what}; it has {_listed(fields)}; name one with data.train.field")
        field = candidates[0]
    value = _medium(fields[field])
    if value is None:
        raise Unreadable(f"field {field!r} is no {what} but {type(fields[field]).__name__}; expected a file's content")
    return value


def _medium(value: Any) -> bytes | Path | np.ndarray | None:
    if isinstance(value, dict):  # a column of the kind Image of a Hugging Face data set: {bytes, path}
        value = value.get("bytes")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list) and value and isinstance(value[0], list):
        try:
            value = np.asarray(value)
        except ValueError:
            return None
    if isinstance(value, np.ndarray):
        return value if value.ndim >= 2 and value.dtype.kind in "buif" else None
    return value if isinstance(value, Path) else None


def descriptions(record: Record, *, label_field: str | None) -> dict[str, str]:
    """The columns `key`, `label` and `caption`; the latter two are empty where the record has none."""
    fields = record.fields
    if label_field is not None and label_field not in fields:
        raise Unreadable(f"has no field {label_field!r} for its label; it has {_listed(fields)}")
    label = label_field or next((name for name in LABEL_FIELDS if name in fields), None)
    caption = next((name for name in CAPTION_FIELDS if name in fields and name != label), None)
    return {
        "key": record.key,
        "label": "" if label is None else _text(fields[label], label),
        "caption": "" if caption is None else _text(fields[caption], caption),
    }


def _text(value: Any, field: str) -> str:
    """Text, or a number as text; the members of an archive are bytes."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode().strip()
        except UnicodeDecodeError as error:
            raise Unreadable(f"field {field!r} is not UTF-8") from error
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        raise Unreadable(f"field {field!r} must be text or a number, not {type(value).__name__}")
    return str(value)


def vector(record: Record, field: str | None) -> np.ndarray:
    """The condition as float32 [d]: a number, a list, an array, or numbers in a text, apart by spaces or commas."""
    name = field or "condition"
    if name not in record.fields:
        raise Unreadable(f"has no field {name!r} for its condition; it has {_listed(record.fields)}")
    value = record.fields[name]
    try:
        if isinstance(value, str | bytes):
            text = value if isinstance(value, str) else value.decode()
            value = [float(part) for part in re.split(r"[,\s]+", text.strip(" \t\n[]()"))]
        numbers = np.atleast_1d(np.asarray(value, dtype=np.float32)).reshape(-1)
    except (TypeError, ValueError) as error:
        raise Unreadable(f"field {name!r} is no list of numbers") from error
    if not np.isfinite(numbers).all():
        raise Unreadable(f"field {name!r} has a number that is not finite")
    return numbers


def _encoded(pixels: np.ndarray, *, lossy: bool) -> bytes:
    """PNG, which loses nothing; or JPEG where it was one, at a quality whose loss is small beside the one it has."""
    out = io.BytesIO()
    picture = pillow().fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    picture.save(out, **({"format": "JPEG", "quality": 95, "subsampling": 0} if lossy else {"format": "PNG"}))
    return out.getvalue()


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(map(repr, fields)) or "no fields"
