"""Properties of every kind of prepared data: one order for any world size and workers, constant-time seek, exact resume."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.config.data import Curriculum, Data, Stage, TextData
from bottega.config.data import Source as Options
from bottega.config.units import Interval
from bottega.data.audio.config import AudioAugmentation, AudioData
from bottega.data.audio.decode import encode_wav
from bottega.data.image.config import ImageAugmentation, ImageData
from bottega.data.loading.loader import Loader
from bottega.data.order.bucketed import Bucketed
from bottega.data.order.curriculum import plan_stages, rank_samples
from bottega.data.order.orders import CurriculumOrder, Order
from bottega.data.prepare.media import prepare_media, prepare_vectors
from bottega.data.sources import combine
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.text.labelled import LabelledTexts
from bottega.data.text.tokens import TokenDocuments, TokenWindows
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.data.video.config import VideoData
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.generation import config as media
from bottega.tasks.generation.config import VideoGenerator
from bottega.tasks.language.prepare import prepare_language
from bottega.tasks.routing.config import RoutingData, RoutingRecipe, VectorAugmentation
from operations import count_operations

BATCH = 24
WORLDS = (1, 2, 3, 4, 6, 8)
BYTES = TokenizerSpec(kind="bytes")
Built = tuple[Source, Order | None]


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def write_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"text": f"{'word ' * (n % 9)}number {n}", "label": n % 4, "score": (n * 37) % 100} for n in range(90)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def encode_png(number: int, size: tuple[int, int]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_images(folder: Path, *, shapes: int = 1) -> Path:
    for number in range(40):
        path = folder / "images" / f"class-{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(number, ((16, 16), (12, 24), (24, 12))[number % shapes]))
    return folder / "images"


def write_audio(folder: Path) -> Path:
    for number in range(30):
        path = folder / "audio" / f"class-{number % 3}" / f"{number:02}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = np.sin(np.arange(400 + 10 * number) * (number + 1) / 40).astype(np.float32)
        path.write_bytes(encode_wav(wave, 8000))
    return folder / "audio"


def write_videos(folder: Path) -> Path:
    arrays = np.random.default_rng(0).integers(0, 256, (30, 7, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "videos.npz", video=arrays, fps=np.full(30, 8.0))
    return folder / "videos.npz"


def open_language(folder: Path, *, padding: bool = False, table: str = "train") -> Source:
    data = TextData(train=Options(path=str(write_rows(folder))), curriculum=Curriculum(by="score", stages=(FIRST,)))
    prepared = prepare_language(data, BYTES, progress=quiet, cache=folder / "cache")
    if padding:
        return TokenDocuments(prepared.folder, table, sequence_length=20)
    return TokenWindows(prepared.folder, table, sequence_length=16, seed=3)


def open_classify(folder: Path) -> Built:
    data = ClassifyData(train=Options(path=str(write_rows(folder))), validation=None)
    prepared = prepare_classify(data, BYTES, seed=0, progress=quiet, cache=folder / "cache")
    labels = prepared.class_ids("train")
    assert labels is not None
    return LabelledTexts(prepared.folder, "train", labels=labels), None


def open_recipe(recipe: Any, folder: Path) -> Source:
    prepare = prepare_vectors if isinstance(recipe, RoutingRecipe) else prepare_media
    argument = recipe.data if isinstance(recipe, RoutingRecipe) else recipe
    prepared = prepare(argument, progress=quiet, cache=folder / "cache")  # type: ignore[operator]
    return open_media_source(recipe, prepared, "train", is_training=True)


def open_images(folder: Path, **options: Any) -> Source:
    augmentation = ImageAugmentation(crop=0.3, flip=True, colour_jitter=0.2)
    data = ImageData(train=Options(path=str(write_images(folder))), augmentation=augmentation, **options)
    return open_recipe(media.ImageRecipe(data=data), folder)


def open_buckets(folder: Path) -> Built:
    train = Options(path=str(write_images(folder, shapes=3)))
    data = ImageData(train=train, image_size=16, buckets=3)
    source: Any = open_recipe(media.ImageRecipe(data=data), folder)
    return source, Bucketed(source.buckets, BATCH, seed=1)


def open_audio(folder: Path) -> Built:
    augmentation = AudioAugmentation(noise=0.1, gain=3.0, time_mask=0.2)
    data = AudioData(train=Options(path=str(write_audio(folder))), seconds=0.05, augmentation=augmentation)
    return open_recipe(media.AudioRecipe(data=data), folder), None


def open_video(folder: Path) -> Built:
    data = VideoData(train=Options(path=str(write_videos(folder))), num_frames=4)
    return open_recipe(media.VideoRecipe(model=VideoGenerator(condition="none"), data=data), folder), None


def open_vectors(folder: Path) -> Built:
    np.savez(folder / "v.npz", x=np.random.default_rng(0).normal(size=(60, 5)), label=np.arange(60) % 3)
    augmentation = VectorAugmentation(noise_level=0.1, mask_probability=0.2)
    data = RoutingData(train=Options(path=str(folder / "v.npz")), validation=None, augmentation=augmentation)
    return open_recipe(RoutingRecipe(data=data), folder), None


FIRST = Stage(share=0.4, steps=Interval(3))


def open_mixture(folder: Path) -> Built:
    a, b = open_language(folder), open_language(folder)
    options = (Options(path="a", weight=3.0), Options(path="b", weight=1.0))
    return combine.combine_sources(
        [(a, options[0]), (b, options[1])], Data(sources=options, mixture="weighted"), seed=1
    )


def open_curriculum(folder: Path) -> Built:
    source = open_language(folder, padding=True)
    stages = (
        FIRST,
        Stage(share=0.7, steps=Interval(4), batch_size=2 * BATCH, replay=0.25),
        Stage(steps=Interval(9)),
    )
    plan = Curriculum(by="score", stages=stages)
    planned = plan_stages(plan, size=len(source), total_steps=100, steps_per_epoch=5, batch_size=BATCH)
    return source, CurriculumOrder(rank_samples(source, "score"), planned, seed=1)


SOURCES: dict[str, Callable[[Path], Built]] = {
    "packed text": lambda folder: (open_language(folder), None),
    "documents": lambda folder: (open_language(folder, padding=True), None),
    "labelled text": open_classify,
    "pixels": lambda folder: (open_images(folder), None),
    "encoded images": lambda folder: (open_images(folder, store="encoded"), None),
    "buckets": open_buckets,
    "audio": open_audio,
    "video": open_video,
    "vectors": open_vectors,
    "mixture": open_mixture,
    "curriculum": open_curriculum,
}


@pytest.fixture(scope="module", params=SOURCES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return SOURCES[request.param](tmp_path_factory.mktemp("source"))


def build_loader(built: Built, **options: Any) -> Loader:
    return Loader(built[0], BATCH, seed=1, order=built[1], **options)


def batches_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def join_batches(parts: list[dict[str, Any]], padding_values: dict[str, int]) -> dict[str, Any]:
    """Concatenate batches; fields padded to their longest text are padded to a common width first."""

    def join_field(name: str) -> Any:
        values = [part[name] for part in parts]
        if name in padding_values:
            width = max(value.shape[1] for value in values)
            padding = [((0, 0), (0, width - value.shape[1])) for value in values]
            values = [
                np.pad(v, by, constant_values=padding_values[name]) for v, by in zip(values, padding, strict=True)
            ]
        return values[0] if np.ndim(values[0]) == 0 else np.concatenate(values)

    return {name: join_field(name) for name in parts[0]}


@pytest.mark.parametrize("world", WORLDS[1:])
def test_batches_of_all_ranks_equal_those_of_one_process(built: Built, world: int) -> None:
    loader = build_loader(built)
    ranks = [build_loader(built, data_rank=rank, data_size=world) for rank in range(world)]
    for step in (0, 1, 2, 7, 1000):
        padding_values = built[0].padding_values
        assert batches_equal(join_batches([rank.batch(step) for rank in ranks], padding_values), loader.batch(step))


def test_batches_do_not_depend_on_workers_or_restarts(built: Built) -> None:
    plain = [build_loader(built).batch(step) for step in range(9)]
    for workers in (1, 2):
        stream = build_loader(built, workers=workers, prefetch=workers)(0)
        assert all(map(batches_equal, islice(stream, 9), plain))
        stream.close()
    resumed = build_loader(built)(4)
    assert all(map(batches_equal, islice(resumed, 5), plain[4:]))


def test_every_sample_occurs_once_per_epoch(built: Built) -> None:
    source, order = built
    loader = build_loader(built)
    samples_by_epoch: dict[int, list[int]] = {}
    for step in range(60):
        for index, epoch in zip(*loader.indices(step), strict=True):
            samples_by_epoch.setdefault(int(epoch), []).append(int(index))
    if isinstance(order, CurriculumOrder):
        return  # a stage uses its own fraction; tested in test_orders.py
    assert all(len(set(numbers)) == len(numbers) for numbers in samples_by_epoch.values())
    if order is None:
        assert sorted(samples_by_epoch[0]) == list(range(len(source)))


def test_seeking_is_constant_time(built: Built) -> None:
    loader = build_loader(built)
    loader.batch(0)
    loader.batch(10**6 + 1)
    near = max(count_operations(lambda step=step: loader.indices(step)) for step in range(20))
    for step in (10**6, 10**9):
        assert count_operations(lambda step=step: loader.indices(step)) <= 2 * near
        first = loader.indices(step)
        assert all(map(np.array_equal, first, build_loader(built).indices(step)))


def test_batch_fields_have_the_documented_dtypes(built: Built, request: pytest.FixtureRequest) -> None:
    batch = build_loader(built).batch(0)
    forms = {name: (value.dtype.str.lstrip("<|"), np.ndim(value)) for name, value in batch.items()}
    if "input_ids" in forms:
        assert forms["input_ids"] == forms["attention_mask"] == ("i4", 2)
    if "image" in forms:
        assert (forms["image"], forms["condition"]) == (("f4", 4), ("f4", 2))
    if "audio" in forms:
        assert (forms["audio"], forms["sample_rate"]) == (("f4", 2), ("i4", 0))
    if "video" in forms:
        assert (forms["video"], forms["fps"]) == (("f4", 5), ("i4", 0))
    assert {"input_ids", "image", "audio", "video", "x"} & forms.keys()
