"""Real datasets prepared completely: the counts are those in their own index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.run.prepare import prepare_recipe, read_recipe

DATA = Path(os.environ.get("BOTTEGA_DATA", ""))
pytestmark = pytest.mark.skipif("BOTTEGA_DATA" not in os.environ, reason="BOTTEGA_DATA is not set")

# Number of decoded frames of each clip, at its own frame rate.
FRAMES = {
    "R6llTwEh07w.mp4": 303,
    "RATRACE_wave_f_nm_np1_fr_goo_37.avi": 72,
    "TrumanShow_wave_f_nm_np1_fr_med_26.avi": 48,
    "v_SoccerJuggling_g23_c01.avi": 240,
    "basketball.mp4": 333,
    "bikes.mp4": 250,
    "carphone_pristine.mp4": 120,
    "av1_video.mkv": 125,
    "h265_video.mp4": 10,
    "nasa_13013.mp4": 325,
    "llamafactory_1.mp4": 243,
    "llamafactory_3.mp4": 146,
}


def prepare_words(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return prepare_recipe(read_recipe(words.format(data=DATA).split()), lambda stage, done, total: None)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("classify --data {data}/text-cls-sst2/train.tsv data.validation.path={data}/text-cls-sst2/dev.tsv "
         "data.test.path={data}/text-cls-sst2/test.tsv", {"validation": 872, "test": 1821, "train": 6920}),
        ("image --data {data}/image-fashion-mnist data.validation.split=test", {"validation": 10_000, "train": 60_000}),
        ("audio --data {data}/audio-fsdd/recordings.tar.xz data.validation=null", {"train": 3000}),
        ("audio --data {data}/audio-ljspeech-sample data.validation=null", {"train": 16}),
        ("image --data {data}/readers-webdataset/sample.tgz data.validation=null", {"train": 90}),
        ("image --data {data}/readers-webdataset/cc12m-train-0000.tar data.image_size=32 data.validation=null", {"train": 32}),
        ("image --data {data}/readers-webdataset/256_ObjectCategories.tar data.image_size=32 data.validation=null", {"train": 6}),
        ("language --data {data}/readers-webdataset/txt.tar data.validation=null", {"train": 3}),
        ("language --data {data}/readers-webdataset/txt.tar.gz data.validation=null", {"train": 3}),
        ("language --data {data}/readers-webdataset/csv.tar data.train.field=csv data.validation=null", {"train": 3}),
        ("language --data {data}/readers-webdataset/csv.tar.gz data.train.field=csv data.validation=null", {"train": 3}),
        ("routing --data {data}/readers-tfrecord/mnist.tfrecord data.train.field=image_floats "
         "data.train.label=image_class data.validation=null", {"train": 1000}),
        ("routing --data {data}/readers-tfrecord/penguin/Split-train data.train.label=species "
         "data.validation.path={data}/readers-tfrecord/penguin/Split-eval data.validation.label=species",
         {"validation": 100, "train": 234}),
        ("routing --data {data}/readers-tfrecord/example.tfrecord data.train.field=x_float data.validation=null",
         {"train": 4}),
    ],
)  # fmt: skip
def test_every_record_is_prepared(
    words: str, rows: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare_words(words, tmp_path, monkeypatch)
    assert {name: counts["rows"] for name, counts in prepared.tables.items()} == rows
    assert prepared.metadata["bad"] == 0


def test_every_byte_of_text_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_words(
        "language --data {data}/text-lm-tinyshakespeare/input.txt --tokenizer bytes", tmp_path, monkeypatch
    )
    assert sum(counts["bytes"] for counts in prepared.tables.values()) == 1_115_394


def test_every_frame_of_every_clip_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_words(
        "video --data {data}/video-clips data.image_size=16 data.validation=null", tmp_path, monkeypatch
    )
    table = prepared.table("train")
    lengths = dict(zip((table.row("key", n) for n in range(12)), table.lengths("video").tolist(), strict=True))
    assert lengths == FRAMES


def test_speech_has_its_transcript_as_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = prepare_words(
        "audio --data {data}/audio-ljspeech-sample data.validation=null", tmp_path, monkeypatch
    ).table("train")
    captions = [table.row("caption", n) for n in range(16)]
    assert sum(map(bool, captions)) == 8
    assert captions[0].startswith("Printing, in the only sense")
    assert np.isclose(table.lengths("audio").sum() / 22_050, 106.5, atol=0.1)
