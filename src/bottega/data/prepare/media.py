"""Pictures, sounds, videos and vectors to tables: what is not said in the recipe is read off the first good record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bottega.config.data import Data, HeldOut, Source
from bottega.config.media import MediaRecipe
from bottega.core.errors import DataError, UsageError
from bottega.data.audio.config import AudioData
from bottega.data.embedded import Medium, materialise_embedded, resolve_embedded_sources
from bottega.data.formats import find_files
from bottega.data.image.config import ImageData
from bottega.data.numbers.config import RoutingData
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.inputs import Input, Shares, check_medium, collect_inputs
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparationPlan, PreparedData, open_if_prepared, prepare
from bottega.data.prepare.rules import DroppedRecord, Rules
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.cache import default_cache
from bottega.data.video.config import VideoData

# Pictures are kept as pixels up to so many bytes in all, else as files.
DECODED_LIMIT = 2 << 30
# So many records at the beginning may be bad before there is nothing to read a size off.
TRIES = 100

T = TypeVar("T")


def prepare_media(recipe: MediaRecipe, *, progress: ProgressCallback, cache: Path | None = None) -> PreparedData:
    """Tables of a medium with key, label and caption."""
    medium: Medium = (
        "audio" if isinstance(recipe.data, AudioData) else "video" if isinstance(recipe.data, VideoData) else "image"
    )
    # What a classifier or an autoencoder learns from is what a generator of the same medium does, so they share it.
    ready = open_if_prepared(recipe.data, task=medium)
    if ready is not None:
        return ready
    inputs, shares = _inputs(recipe.data, medium)
    rules = Rules(medium)
    condition = getattr(recipe.model, "condition", "none")
    data: Any = recipe.data  # the schema of each medium adds condition_field
    encoder, facts = _encoder(data, condition, _first(inputs, rules), inputs)
    plan = PreparationPlan(
        task=medium,
        inputs=inputs,
        shares=shares,
        data=recipe.data,
        rules=rules,
        encoder=lambda texts, folder, progress: encoder,
        options=(encoder,),
        metadata=facts,
        label_field=data.condition_field if condition == "class" else None,
        num_classes=getattr(recipe.model, "num_classes", None) if condition == "class" else None,
        needs_classes=condition == "class",
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


def prepare_vectors(data: RoutingData, *, progress: ProgressCallback, cache: Path | None = None) -> PreparedData:
    """Tables of x, label, rule and key."""
    from bottega.data.numbers.numeric_fields import infer_layout
    from bottega.data.numbers.vectors import VectorEncoder

    ready = open_if_prepared(data, task="routing")
    if ready is not None:
        return ready
    inputs, shares = _vector_inputs(data)
    check_medium(inputs, "x")
    is_made, rules = data.is_synthetic, Rules("x")
    layout = None if is_made else infer_layout(itertools.islice(_readable(inputs, rules), TRIES))
    encoder = VectorEncoder(is_made=is_made, num_rules=data.num_rules if is_made else None, layout=layout)
    plan = PreparationPlan(
        task="routing",
        inputs=inputs,
        shares=shares,
        data=data,
        rules=rules,
        encoder=lambda texts, folder, progress: replace(
            encoder, tables=tuple(folder / table for table in texts.plan.tables)
        ),
        options=(encoder,),
        num_classes=data.num_labels if is_made else None,
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


def _vector_inputs(data: RoutingData) -> tuple[tuple[Input, ...], Shares]:
    """With what is made in files like any other. What is held out is then made of each source, one after the other."""
    from bottega.data.embedded import rules

    def in_file(source: Source | None, folder: Callable[[Any], Path]) -> Source | None:
        if source is None:
            return None
        plain = HeldOut if isinstance(source, HeldOut) else Source
        said = {name: getattr(source, name) for name in plain.model_fields}
        if source.kind == "embedded":
            raise UsageError("data.train.kind: no numbers are embedded; say synthetic, or give a path with --data")
        return plain(**said if source.kind != "synthetic" else {**said, "kind": "numpy", "path": str(folder(source))})

    sources = [
        in_file(source, partial(rules.materialise_training, data, number=number))
        for number, source in enumerate(data.sources or (data.train,))
    ]
    held_out = {name: getattr(data, name) for name in ("validation", "test")}
    made = {name: part for name, part in held_out.items() if part is not None and part.kind == "synthetic"}
    there = {name: in_file(part, Path) if name not in made else None for name, part in held_out.items()}
    named = {"train": sources[0], "sources": None} if data.sources is None else {"sources": tuple(sources)}
    inputs, shares = collect_inputs(data.model_copy(update={**named, **there}))
    if len(sources) > 1 and data.is_synthetic and not any(part.rules for part in made.values()):
        # Whose each held-out sample is stays known, also where the sources are no sequence: they are tasks to adapt to.
        inputs = tuple(replace(one, source=_number(one)) for one in inputs)
    first = [
        Input(find_files(Source(kind="numpy", path=str(folder))), name, source=number if len(sources) > 1 else None)
        for name, part in made.items()
        for number, folder in enumerate(rules.materialise_held_out(data, part, table=name))
    ]
    return (*first, *inputs), shares


def _readable(inputs: tuple[Input, ...], rules: Rules) -> Iterator[Record]:
    """The training records that are none of the bad, from the first on."""
    for input in inputs:
        for piece in input.found.list_pieces(64 << 20) if input.table.startswith("train") else ():
            for record in input.found.read(piece):
                ruled = record if isinstance(record, BadRecord) else rules.apply(record, input.found.source)
                if isinstance(ruled, Record):
                    yield ruled


def _number(input: Input) -> int | None:
    number = input.table.partition(".")[2]
    return int(number) if number else None


def _inputs(data: Data, medium: Medium) -> tuple[tuple[Input, ...], Shares]:
    for source in (*(data.sources or (data.train,)), data.validation, data.test):
        if source is not None and source.kind == "synthetic":
            raise UsageError("data.train.kind: synthetic data is of the task routing; say embedded, or give a path")
    inputs, shares = collect_inputs(resolve_embedded_sources(data, "numpy", partial(materialise_embedded, medium)))
    check_medium(inputs, medium)
    return inputs, shares


def _first(inputs: tuple[Input, ...], rules: Rules) -> Callable[[Callable[[Record], T]], T]:
    """A function that asks records of train, from the first on, until one has an answer."""

    def ask(question: Callable[[Record], T]) -> T:
        problem = None
        for record in _some(inputs, rules):
            try:
                if not isinstance(record, BadRecord):
                    return question(record)
                problem = problem or str(record)
            except Unreadable as error:
                problem = problem or f"{record.where}: {error}"
        train = next(input.found for input in inputs if input.table.startswith("train"))
        if problem is None:
            raise DataError(f"{train.root} is empty; give data with something in it")
        raise DataError(f"{train.root}: none of its first records can be read; the first of all: {problem}")

    return ask


def _some(inputs: tuple[Input, ...], rules: Rules) -> Iterator[Record | BadRecord]:
    tried = 0
    for input in inputs:
        if not input.table.startswith("train"):
            continue
        for piece in input.found.list_pieces(64 << 20):
            for record in input.found.read(piece):
                ruled = record if isinstance(record, BadRecord) else rules.apply(record, input.found.source)
                if isinstance(ruled, BadRecord) and not tried and not input.found.is_media:
                    raise DataError(str(ruled))
                if not isinstance(ruled, DroppedRecord):
                    yield ruled
                    tried += 1
                if tried >= TRIES:
                    return


def _encoder(
    data: Any, condition: str, first: Callable[[Callable[[Record], Any]], Any], inputs: tuple[Input, ...]
) -> tuple[Encoder, dict[str, Any]]:
    named = {
        "label_field": data.condition_field if condition == "class" else None,
        "condition_field": data.condition_field if condition == "vector" else None,
        "has_condition": condition == "vector",
    }
    if isinstance(data, AudioData):
        return _audio(data, named, first)
    return _video(data, named, first) if isinstance(data, VideoData) else _image(data, named, first, inputs)


def _audio(data: AudioData, named: dict[str, Any], first: Any) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.audio.encoder import AudioEncoder, read_sample_rate

    rate = data.sample_rate or first(read_sample_rate)
    return AudioEncoder(rate, data.normalise, **named), {"sample_rate": rate}


def _image(
    data: ImageData, named: dict[str, Any], first: Any, inputs: tuple[Input, ...]
) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.image.buckets import compute_bucket_shapes
    from bottega.data.image.decode import read_image_shape
    from bottega.data.image.encoder import IMAGE_FIELDS, ImageEncoder, read_media_field

    def look(record: Record) -> tuple[tuple[int, int, int], int]:
        picture = read_media_field(record, None, names=IMAGE_FIELDS, medium="image")
        return read_image_shape(picture), _encoded_size(picture)

    (height, width, channels), encoded = first(look)
    size = (data.image_size, data.image_size) if data.image_size is not None else (height, width)
    total = sum(input.found.total_bytes for input in inputs)
    pixels = size[0] * size[1] * (data.channels or channels) * (total / max(1, encoded))
    stored = ("decoded" if pixels <= DECODED_LIMIT else "encoded") if data.store == "auto" else data.store
    if data.buckets is not None and data.image_size is None:
        raise UsageError("data.buckets needs data.image_size: the shapes have about image_size^2 pixels")
    encoder = ImageEncoder(
        size=size if data.buckets is None else None,
        channels=data.channels or min(3, channels),
        buckets=compute_bucket_shapes(data.buckets, size[0]) if data.buckets is not None else None,
        resize=data.resize,
        store=stored,
        **named,
    )
    return encoder, {"encoder": asdict(encoder)}


def _encoded_size(picture: Any) -> int:
    if isinstance(picture, Path):
        return picture.stat().st_size
    return len(picture) if isinstance(picture, bytes) else picture.nbytes


def _video(data: VideoData, named: dict[str, Any], first: Any) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.image.decode import read_image_shape
    from bottega.data.image.encoder import read_media_field
    from bottega.data.video.decode import decode_frames
    from bottega.data.video.encoder import VIDEO_FIELDS, VideoEncoder

    if data.buckets is not None:
        raise UsageError("data.buckets: videos are of one shape; leave it out")

    def look(record: Record) -> tuple[int, int, int]:
        """Height, width and channels of the first frame."""
        video = read_media_field(record, None, names=VIDEO_FIELDS, medium="video")
        return read_image_shape(next(decode_frames(video).frames) if not hasattr(video, "shape") else video[0])

    side, channels = data.image_size or 0, data.channels or 0
    height, width, in_colour = (side, side, channels) if side and channels else first(look)
    size = (side, side) if side else (height, width)
    encoder = VideoEncoder(size, channels=channels or in_colour, fps=data.fps, resize=data.resize, **named)
    return encoder, {"size": list(size), "channels": encoder.channels}
