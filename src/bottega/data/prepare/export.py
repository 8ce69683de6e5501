"""Prepared rows for the rest of the world: text as text, pictures as PNG, sound as FLAC, frames as arrays."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bottega.data.prepare.prepared import Prepared
from bottega.data.records.record import Record
from bottega.data.sources.samples import picture


def public_records(prepared: Prepared, table: str, progress: Callable[[int], None]) -> Iterator[Record]:
    """The rows of a table in order, their numbers as keys."""
    rows = prepared.table(table)
    convert = _CONVERTERS.get(prepared.meta["task"], _plain)
    for number in range(len(rows)):
        row = {name: rows.row(name, number) for name in rows.columns}
        fields = {name: value for name, value in convert(prepared, row).items() if value is not None}
        yield Record(f"{number:08d}", f"{table} row {number}", fields)
        progress(number + 1)


def _language(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    tokens = row["tokens"]
    if len(tokens) and tokens[-1] == prepared.meta["end_of_text"]:
        tokens = tokens[:-1]
    return {"text": prepared.tokenizer.decode(tokens), "source": row["key"]}


def _classify(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    label = json.loads(row["label"]) if prepared.meta.get("multi_label") else row["label"]
    return {"text": row["text"], "label": label, "source": row["key"]}


def _image(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    if prepared.meta["encoder"]["store"] == "encoded":
        return {_suffix(row["image"]): row["image"], **_said(row)}
    pixels, out = picture(prepared, row), io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
    return {"png": out.getvalue(), **_said(row)}


def _suffix(data: bytes) -> str:
    return "jpg" if data.startswith(b"\xff\xd8") else "webp" if data[8:12] == b"WEBP" else "png"


def _audio(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    from bottega.data.audio.decode import encode_flac

    rate = int(prepared.meta["sample_rate"])
    return {"flac": encode_flac(np.asarray(row["audio"]), rate), **_said(row)}


def _video(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    return {"video": np.asarray(row["video"]), "fps": float(np.ravel(row["fps"])[0]), **_said(row)}


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """What is said about a medium; an empty text says nothing."""
    named = {"label": row.get("label"), "caption": row.get("caption"), "source": row["key"]}
    said: dict[str, Any] = {name: value for name, value in named.items() if value}
    if "condition" in row:
        said["condition"] = np.asarray(row["condition"])
    return said


def _personal(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    """A record as it can be read again; its pictures stay where they are."""
    return json.loads(row["record"])


def _plain(prepared: Prepared, row: dict[str, Any]) -> dict[str, Any]:
    plain = {name: np.asarray(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
    return {**{name: value for name, value in plain.items() if name != "key"}, "source": row["key"]}


_CONVERTERS = {
    "language": _language,
    "classify": _classify,
    "image": _image,
    "image_vae": _image,
    "image_tokens": _image,
    "audio": _audio,
    "video": _video,
    "personalize": _personal,
}
