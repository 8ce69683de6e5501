"""Encode a record as a table row with its image: found in a field, decoded and resized."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bottega.data.image.buckets import assign_bucket
from bottega.data.image.decode import decode_image, detect_image_format, import_pillow
from bottega.data.image.resize import ResizeMode, resize_image
from bottega.data.prepare.encoder import Encoder
from bottega.data.records.fields import get_original_names, list_fields, read_annotations, read_condition
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.shards import BYTES, TEXT, Column

IMAGE_FIELDS = ("image", "jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "img", "picture", "file", "pixels")


@final
@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """Encode images at one size, or, with `buckets`, each at the nearest of several shapes."""

    size: tuple[int, int] | None
    """Height and width; None with `buckets`."""
    channels: int
    buckets: tuple[tuple[int, int], ...] | None = None
    """Height and width of each bucket."""
    resize: ResizeMode = "crop"
    store: Literal["decoded", "encoded"] = "decoded"
    """Whether the column `image` holds pixels or the bytes of an image file."""
    field: str | None = None
    label_field: str | None = None
    condition_field: str | None = None
    has_condition: bool = False
    """Whether rows have a condition vector, from `condition_field` or the field `condition`."""

    def __post_init__(self) -> None:
        assert (self.size is None) != (self.buckets is None), "give either size or buckets"

    @property
    def columns(self) -> dict[str, Column]:
        columns = {"image": BYTES, "key": TEXT, "label": TEXT, "caption": TEXT}
        if self.buckets is not None:
            columns["bucket"] = Column("<i4", (1,))
        elif self.store == "decoded":
            columns["image"] = Column("|u1", self.bucket_shape(0))
        if self.has_condition:
            columns["condition"] = Column("<f4", varying=True)
        return columns

    def bucket_shape(self, bucket: int) -> tuple[int, int, int]:
        """Return (height, width, channels) of a bucket; without buckets there is only bucket 0."""
        height, width = self.size or (self.buckets or ())[bucket]
        return height, width, self.channels

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        data = read_media_field(record, self.field, names=IMAGE_FIELDS, medium="image")
        pixels = decode_image(data, channels=self.channels)
        bucket = 0 if self.buckets is None else assign_bucket(pixels.shape[0], pixels.shape[1], self.buckets)
        height, width, _ = self.bucket_shape(bucket)
        is_larger = pixels.shape[0] * pixels.shape[1] > height * width
        if self.store == "encoded" and not is_larger and not isinstance(data, np.ndarray):
            image: Any = data.read_bytes() if isinstance(data, Path) else data
        else:
            image = (
                resize_image(pixels, (height, width), mode=self.resize)
                if self.store == "decoded" or is_larger
                else pixels
            )
            if self.store == "encoded":
                image = _encode_image(
                    image, is_lossy=not isinstance(data, np.ndarray) and detect_image_format(data) == "JPEG"
                )
            elif self.buckets is not None:
                image = image.tobytes()
        row = {"image": image, "bucket": [bucket], **read_annotations(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = read_condition(record, self.condition_field)
        yield row

    def decode_row(self, value: Any, bucket: int) -> np.ndarray:
        """Return the pixels of a value of the column `image`, uint8 `(height, width, channels)`."""
        height, width, channels = self.bucket_shape(bucket)
        if self.store == "decoded":
            return np.frombuffer(value, dtype=np.uint8).reshape(height, width, channels)
        return resize_image(decode_image(value, channels=channels), (height, width), mode=self.resize)


def read_media_field(record: Record, field: str | None, *, names: tuple[str, ...], medium: str) -> Any:
    """Return the image or video of a record: its encoded bytes, the path of its file, or an array.

    Without `field`, take the first of `names`, else the only field that can hold the medium.
    """
    fields = record.fields
    if field is not None and field not in fields:
        raise Unreadable(f"has no field {field!r}; it has {list_fields(fields)}")
    if field is None:
        known_names = [name for name in names if name in fields]
        # Members of an archive may have any name; take the only one that can hold the medium.
        original = get_original_names(fields)
        other_names = (name for name, value in fields.items() if name not in original and _to_media(value) is not None)
        candidates = known_names[:1] or list(other_names)
        if len(candidates) != 1:
            problem = f"several fields could contain the {medium}" if candidates else f"no field contains the {medium}"
            raise Unreadable(f"{problem}; the record has {list_fields(fields)}; set data.train.field")
        field = candidates[0]
    value = _to_media(fields[field])
    if value is None:
        raise Unreadable(
            f"field {field!r} is not {'a video' if medium == 'video' else 'an image'} but {type(fields[field]).__name__}; expected the content of a file"
        )
    return value


def _to_media(value: Any) -> bytes | Path | np.ndarray | None:
    if isinstance(value, dict):  # the Image feature of a Hugging Face dataset: {bytes, path}
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


def _encode_image(pixels: np.ndarray, *, is_lossy: bool) -> bytes:
    """Encode as lossless PNG, or as JPEG of quality 95 if the image was a JPEG."""
    encoded = io.BytesIO()
    image = import_pillow().fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    image.save(encoded, **({"format": "JPEG", "quality": 95, "subsampling": 0} if is_lossy else {"format": "PNG"}))
    return encoded.getvalue()
