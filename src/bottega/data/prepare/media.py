"""Prepare images, audio, video and vectors; sizes and rates that the recipe leaves out are those of the first good record."""

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
from bottega.data.video.config import VideoData
from bottega.storage.cache_folder import default_cache

# Images are stored decoded if all of them take at most this many bytes, otherwise encoded.
MAX_DECODED_BYTES = 2 << 30
# Number of records that are tried for a size or rate before the data is rejected.
MAX_TRIED_RECORDS = 100

T = TypeVar("T")


def prepare_media(recipe: MediaRecipe, *, progress: ProgressCallback, cache: Path | None = None) -> PreparedData:
    """Prepare tables of images, audio or video, with key, label and caption."""
    medium: Medium = (
        "audio" if isinstance(recipe.data, AudioData) else "video" if isinstance(recipe.data, VideoData) else "image"
    )
    # Classifiers, autoencoders and generators of a medium share its tables.
    prepared = open_if_prepared(recipe.data, task=medium)
    if prepared is not None:
        return prepared
    inputs, fractions = _collect_media_inputs(recipe.data, medium)
    rules = Rules(medium)
    condition = getattr(recipe.model, "condition", "none")
    data: Any = recipe.data  # the schema of each medium adds condition_field
    encoder, metadata = _build_encoder(data, condition, _build_probe_function(inputs, rules), inputs)
    plan = PreparationPlan(
        task=medium,
        inputs=inputs,
        split_fractions=fractions,
        data=recipe.data,
        rules=rules,
        build_encoder=lambda planned, folder, progress: encoder,
        options=(encoder,),
        metadata=metadata,
        label_field=data.condition_field if condition == "class" else None,
        num_classes=getattr(recipe.model, "num_classes", None) if condition == "class" else None,
        needs_classes=condition == "class",
        deduplicate=data.deduplicate,
        content_encoder=encoder,
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


def prepare_vectors(data: RoutingData, *, progress: ProgressCallback, cache: Path | None = None) -> PreparedData:
    """Prepare tables of vectors, with x, label, rule and key."""
    from bottega.data.numbers.numeric_fields import infer_layout
    from bottega.data.numbers.vectors import VectorEncoder

    prepared = open_if_prepared(data, task="routing")
    if prepared is not None:
        return prepared
    inputs, fractions = _collect_vector_inputs(data)
    check_medium(inputs, "x")
    is_synthetic, rules = data.is_synthetic, Rules("x")
    layout = (
        None
        if is_synthetic
        else infer_layout(itertools.islice(_read_training_records(inputs, rules), MAX_TRIED_RECORDS))
    )
    encoder = VectorEncoder(is_made=is_synthetic, num_rules=data.num_rules if is_synthetic else None, layout=layout)
    plan = PreparationPlan(
        task="routing",
        inputs=inputs,
        split_fractions=fractions,
        data=data,
        rules=rules,
        build_encoder=lambda planned, folder, progress: replace(
            encoder, tables=tuple(folder / table for table in planned.plan.tables)
        ),
        options=(encoder,),
        num_classes=data.num_labels if is_synthetic else None,
        deduplicate=data.deduplicate,
        content_encoder=encoder,
    )
    return prepare(plan, cache=cache or default_cache(), progress=progress)


def _collect_vector_inputs(data: RoutingData) -> tuple[tuple[Input, ...], Shares]:
    """Return the inputs; synthetic data is written to files first, its held-out part separately for each source."""
    from bottega.data.embedded import rules

    def materialise(source: Source | None, write_files: Callable[[Any], Path]) -> Source | None:
        """Return an equal source, for synthetic data a source of the files that `write_files` writes."""
        if source is None:
            return None
        section_class = HeldOut if isinstance(source, HeldOut) else Source
        options = {name: getattr(source, name) for name in section_class.model_fields}
        if source.kind == "embedded":
            raise UsageError(
                "data.train.kind: there is no built-in dataset of numbers; use synthetic, or give a path with --data"
            )
        changes = {"kind": "numpy", "path": str(write_files(source))} if source.kind == "synthetic" else {}
        return section_class(**{**options, **changes})

    sources = [
        materialise(source, partial(rules.materialise_training, data, number=number))
        for number, source in enumerate(data.sources or (data.train,))
    ]
    held_out = {name: getattr(data, name) for name in ("validation", "test")}
    synthetic = {
        name: section for name, section in held_out.items() if section is not None and section.kind == "synthetic"
    }
    other_held_out = {
        name: materialise(section, Path) if name not in synthetic else None for name, section in held_out.items()
    }
    training = {"train": sources[0], "sources": None} if data.sources is None else {"sources": tuple(sources)}
    inputs, fractions = collect_inputs(data.model_copy(update={**training, **other_held_out}))
    if len(sources) > 1 and data.is_synthetic and not any(section.rules for section in synthetic.values()):
        # The source of each held-out sample is kept even without a sequence: meta-learning takes sources as tasks.
        inputs = tuple(replace(input, source_index=_parse_source_index(input)) for input in inputs)
    generated = [
        Input(
            find_files(Source(kind="numpy", path=str(folder))), name, source_index=number if len(sources) > 1 else None
        )
        for name, section in synthetic.items()
        for number, folder in enumerate(rules.materialise_held_out(data, section, table=name))
    ]
    return (*generated, *inputs), fractions


def _read_training_records(inputs: tuple[Input, ...], rules: Rules) -> Iterator[Record]:
    """Yield the training records that are not bad."""
    for input in inputs:
        for piece in input.source_files.list_pieces(64 << 20) if input.table.startswith("train") else ():
            for record in input.source_files.read(piece):
                result = record if isinstance(record, BadRecord) else rules.apply(record, input.source_files.source)
                if isinstance(result, Record):
                    yield result


def _parse_source_index(input: Input) -> int | None:
    """Return the number i of a table train.i; None for any other table."""
    number = input.table.partition(".")[2]
    return int(number) if number else None


def _collect_media_inputs(data: Data, medium: Medium) -> tuple[tuple[Input, ...], Shares]:
    for source in (*(data.sources or (data.train,)), data.validation, data.test):
        if source is not None and source.kind == "synthetic":
            raise UsageError("data.train.kind: synthetic is for the task routing only; use embedded, or give a path")
    inputs, fractions = collect_inputs(resolve_embedded_sources(data, "numpy", partial(materialise_embedded, medium)))
    check_medium(inputs, medium)
    return inputs, fractions


def _build_probe_function(inputs: tuple[Input, ...], rules: Rules) -> Callable[[Callable[[Record], T]], T]:
    """Return a function that applies a probe to the first training records until one can be read."""

    def apply_probe(probe: Callable[[Record], T]) -> T:
        problem = None
        for record in _read_first_records(inputs, rules):
            try:
                if not isinstance(record, BadRecord):
                    return probe(record)
                problem = problem or str(record)
            except Unreadable as error:
                problem = problem or f"{record.where}: {error}"
        train = next(input.source_files for input in inputs if input.table.startswith("train"))
        if problem is None:
            raise DataError(f"{train.root} is empty; give a file with data in it")
        raise DataError(
            f"{train.root}: none of the first records can be read; the first problem is {problem}; give other data"
        )

    return apply_probe


def _read_first_records(inputs: tuple[Input, ...], rules: Rules) -> Iterator[Record | BadRecord]:
    """Yield the first training records, bad ones too. Raises DataError if the first record of a table is bad."""
    num_tried = 0
    for input in inputs:
        if not input.table.startswith("train"):
            continue
        for piece in input.source_files.list_pieces(64 << 20):
            for record in input.source_files.read(piece):
                result = record if isinstance(record, BadRecord) else rules.apply(record, input.source_files.source)
                if isinstance(result, BadRecord) and not num_tried and not input.source_files.is_media:
                    raise DataError(str(result))
                if not isinstance(result, DroppedRecord):
                    yield result
                    num_tried += 1
                if num_tried >= MAX_TRIED_RECORDS:
                    return


def _build_encoder(
    data: Any, condition: str, probe_first: Callable[[Callable[[Record], Any]], Any], inputs: tuple[Input, ...]
) -> tuple[Encoder, dict[str, Any]]:
    """Return the encoder of a medium, and values for meta.json. `probe_first` applies a probe to the first good record."""
    fields = {
        "label_field": data.condition_field if condition == "class" else None,
        "condition_field": data.condition_field if condition == "vector" else None,
        "has_condition": condition == "vector",
    }
    if isinstance(data, AudioData):
        return _build_audio_encoder(data, fields, probe_first)
    return (
        _build_video_encoder(data, fields, probe_first)
        if isinstance(data, VideoData)
        else _build_image_encoder(data, fields, probe_first, inputs)
    )


def _build_audio_encoder(data: AudioData, fields: dict[str, Any], probe_first: Any) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.audio.encoder import AudioEncoder, read_sample_rate

    rate = data.sample_rate or probe_first(read_sample_rate)
    return AudioEncoder(rate, data.normalise, **fields), {"sample_rate": rate}


def _build_image_encoder(
    data: ImageData, fields: dict[str, Any], probe_first: Any, inputs: tuple[Input, ...]
) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.image.buckets import compute_bucket_shapes
    from bottega.data.image.decode import read_image_shape
    from bottega.data.image.encoder import IMAGE_FIELDS, ImageEncoder, read_media_field

    def probe_image(record: Record) -> tuple[tuple[int, int, int], int]:
        image = read_media_field(record, None, names=IMAGE_FIELDS, medium="image")
        return read_image_shape(image), _get_encoded_size(image)

    (height, width, channels), encoded_bytes = probe_first(probe_image)
    size = (data.image_size, data.image_size) if data.image_size is not None else (height, width)
    total_bytes = sum(input.source_files.total_bytes for input in inputs)
    decoded_bytes = size[0] * size[1] * (data.channels or channels) * (total_bytes / max(1, encoded_bytes))
    store = ("decoded" if decoded_bytes <= MAX_DECODED_BYTES else "encoded") if data.store == "auto" else data.store
    if data.buckets is not None and data.image_size is None:
        raise UsageError(
            "data.buckets requires data.image_size, since each shape has about image_size^2 pixels; set it"
        )
    encoder = ImageEncoder(
        size=size if data.buckets is None else None,
        channels=data.channels or min(3, channels),
        buckets=compute_bucket_shapes(data.buckets, size[0]) if data.buckets is not None else None,
        resize=data.resize,
        store=store,
        **fields,
    )
    return encoder, {"encoder": asdict(encoder)}


def _get_encoded_size(image: Any) -> int:
    if isinstance(image, Path):
        return image.stat().st_size
    return len(image) if isinstance(image, bytes) else image.nbytes


def _build_video_encoder(data: VideoData, fields: dict[str, Any], probe_first: Any) -> tuple[Encoder, dict[str, Any]]:
    from bottega.data.image.decode import read_image_shape
    from bottega.data.image.encoder import read_media_field
    from bottega.data.video.decode import decode_frames
    from bottega.data.video.encoder import VIDEO_FIELDS, VideoEncoder

    if data.buckets is not None:
        raise UsageError("data.buckets is for images only; remove it")

    def probe_video(record: Record) -> tuple[int, int, int]:
        """Return height, width and channels of the first frame."""
        video = read_media_field(record, None, names=VIDEO_FIELDS, medium="video")
        return read_image_shape(next(decode_frames(video).frames) if not hasattr(video, "shape") else video[0])

    side, channels = data.image_size or 0, data.channels or 0
    height, width, probed_channels = (side, side, channels) if side and channels else probe_first(probe_video)
    size = (side, side) if side else (height, width)
    encoder = VideoEncoder(size, channels=channels or probed_channels, fps=data.fps, resize=data.resize, **fields)
    return encoder, {"size": list(size), "channels": encoder.channels}
