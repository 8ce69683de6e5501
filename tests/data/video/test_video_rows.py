"""From videos to batches: which frames are sampled, how they are stored, and what a batch holds."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.config import ImageAugmentation
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.classes import find_classes
from bottega.data.tables.shards import ShardWriter, Table
from bottega.data.video import encoder as encoding
from bottega.data.video.encoder import VideoEncoder
from bottega.data.video.source import VideoRows, sample_frame_indices

DATA = os.environ.get("BOTTEGA_DATA")
lengths = st.integers(1, 40)


@given(lengths, lengths, st.integers(1, 5), st.sampled_from(("random", "start", "centre")), st.integers(0, 9))
def test_clip_frames_are_within_the_video_and_in_order(
    length: int, num_frames: int, stride: int, position: Any, epoch: int
) -> None:
    indices = sample_frame_indices(length, num_frames=num_frames, stride=stride, position=position, epoch=epoch)
    assert indices.shape == (num_frames,)
    assert indices.min() >= 0
    assert indices.max() < length
    # In steps of the stride up to the end of the video, which is then repeated.
    steps = np.diff(indices)
    assert ((steps == stride) | (indices[1:] == length - 1)).all()
    if length > (num_frames - 1) * stride:
        assert (steps == stride).all()
    else:
        assert indices[0] == 0
        assert indices[-1] == length - 1


def test_clip_positions_start_centre_and_random() -> None:
    assert sample_frame_indices(100, num_frames=4, stride=2, position="start").tolist() == [0, 2, 4, 6]
    assert sample_frame_indices(100, num_frames=4, stride=2, position="centre").tolist() == [46, 48, 50, 52]
    assert sample_frame_indices(3, num_frames=5, stride=1, position="centre").tolist() == [0, 1, 2, 2, 2]
    starts = {
        int(sample_frame_indices(10, num_frames=4, stride=2, position="random", seed=1, epoch=epoch, index=5)[0])
        for epoch in range(99)
    }
    assert starts == {0, 1, 2, 3}
    assert (
        len(
            {
                tuple(sample_frame_indices(999, num_frames=2, stride=1, position="random", index=index))
                for index in range(50)
            }
        )
        > 40
    )


def build_video(length: int, *, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    """Return a video whose frame n has the value n."""
    return np.broadcast_to(np.arange(length, dtype=np.uint8)[:, None, None, None], (length, *size, 3))


def write_table(folder: Path, encoder: VideoEncoder, rows: Iterable[dict[str, Any]]) -> Table:
    with ShardWriter(folder, encoder.columns) as writer:
        for number, fields in enumerate(rows):
            for row in encoder.rows(Record(f"v{number}", "", fields)):
                writer.add(row)
    return Table(folder)


@pytest.fixture
def videos(tmp_path: Path) -> Table:
    rows = ({"video": build_video(20 + n), "fps": 12, "label": "ab"[n % 2], "caption": f"film {n}"} for n in range(5))
    return write_table(tmp_path / "videos", VideoEncoder((8, 8)), rows)


def frame_values(batch: dict[str, Any]) -> list[list[int]]:
    return denormalise_pixels(batch["video"], mode="symmetric")[..., 0, 0, 0].tolist()


def test_batch_holds_exactly_the_documented_fields(videos: Table) -> None:
    rows = VideoRows(
        videos, content="x", num_frames=4, stride=3, clip="centre", classes=find_classes("ab"), condition="class"
    )
    batch = rows.rows(np.array([4, 1]), np.zeros(2, int))
    assert list(batch) == ["video", "fps", "condition", "label"]
    assert batch["video"].shape == (2, 4, 8, 8, 3)
    assert batch["video"].dtype == np.float32
    assert (batch["fps"].shape, batch["fps"].dtype, int(batch["fps"])) == (
        (),
        np.int32,
        4,
    )  # 12 per second, every third frame
    assert batch["condition"].tolist() == [[1, 0], [0, 1]]
    assert (batch["label"].dtype, batch["label"].tolist()) == (np.int32, [0, 1])
    assert frame_values(batch) == [[7, 10, 13, 16], [5, 8, 11, 14]]
    assert list(VideoRows(videos, content="x", num_frames=4).rows(np.arange(2), np.zeros(2, int))) == [
        "video",
        "fps",
        "condition",
    ]


def test_short_video_repeats_its_last_frame(videos: Table) -> None:
    rows = VideoRows(videos, content="x", num_frames=6, stride=5, clip="random")
    assert frame_values(rows.rows(np.array([0]), np.zeros(1, int))) == [[0, 5, 10, 15, 19, 19]]


def test_random_clip_is_a_function_of_sample_and_epoch(videos: Table) -> None:
    rows = VideoRows(videos, content="x", num_frames=3, seed=1)
    clips = [frame_values(rows.rows(np.arange(5), np.full(5, epoch))) for epoch in range(6)]
    assert frame_values(rows.rows(np.array([3]), np.array([2]))) == [clips[2][3]]
    assert len({str(clip) for clip in clips}) == 6
    again = pickle.loads(pickle.dumps(rows))
    assert frame_values(again.rows(np.array([3]), np.array([2]))) == [clips[2][3]]
    assert rows.fingerprint != VideoRows(videos, content="x", num_frames=3, seed=2).fingerprint
    assert rows.describe(3, 2).splitlines()[1:] == [
        f"frames {clips[2][3][0]} to {clips[2][3][-1]} of 23, at 12 per second",
        "film 3",
    ]


def test_augmentation_keeps_the_shape_of_a_video(videos: Table) -> None:
    options = ImageAugmentation(flip=True, colour_jitter=0.5)
    rows = VideoRows(videos, content="x", num_frames=3, clip="start", augmentation=options)
    batch = rows.rows(np.arange(5), np.zeros(5, int))["video"]
    plain = VideoRows(videos, content="x", num_frames=3, clip="start").rows(np.arange(5), np.zeros(5, int))["video"]
    assert batch.shape == plain.shape
    assert (batch != plain).any()


def test_arrays_need_a_frame_rate_and_are_resampled(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="needs a frame rate"):
        list(VideoEncoder((8, 8)).rows(Record("a", "", {"video": build_video(5)})))
    with pytest.raises(Unreadable, match="is not a video"):
        list(VideoEncoder((8, 8), fps=5).rows(Record("a", "", {"video": np.zeros((5, 4), np.uint8)})))
    (row,) = VideoEncoder((8, 8), fps=5).rows(Record("a", "", {"video": build_video(9), "fps": 10}))
    assert row["video"][:, 0, 0, 0].tolist() == [0, 2, 4, 6]
    assert row["fps"] == [5]
    (grey,) = VideoEncoder((4, 4), channels=1, fps=5).rows(Record("a", "", {"video": build_video(2)[..., 0]}))
    assert grey["video"].shape == (2, 4, 4, 1)


def test_video_above_the_memory_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_VIDEO_BYTES", 8 * 8 * 3 * 4)
    assert list(VideoEncoder((8, 8)).rows(Record("a", "", {"video": build_video(4), "fps": 10})))
    with pytest.raises(Unreadable, match="more than 4 frames"):
        list(VideoEncoder((8, 8)).rows(Record("a", "", {"video": build_video(5), "fps": 10})))


def measure_double_counting() -> float:
    """Return the fraction of an array that tracemalloc counts twice while the array grows in place."""
    tracemalloc.start()
    array = np.empty(1 << 20, np.uint8)
    array.resize((1 << 20) + 4096, refcheck=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / len(array) - 1


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
def test_frames_are_not_copied_in_memory(monkeypatch: pytest.MonkeyPatch, is_file: bool, length: int) -> None:
    # Larger than the stored size, so that each stored frame is a separate array.
    large = build_video(length, size=(96, 96))
    monkeypatch.setattr(encoding, "BLOCK_BYTES", 32 * 64 * 64 * 3)
    monkeypatch.setattr(encoding, "decode_frames", lambda data, **options: (8.0, iter(large)))
    tracemalloc.start()
    (row,) = VideoEncoder((64, 64), fps=8).rows(Record("a", "", {"video": b"a file" if is_file else large}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(row["video"], build_video(length, size=(64, 64)))
    assert row["video"].shape == (length, 64, 64, 3)
    if length == 200:
        # A quarter of spare capacity, and one frame. The system moves the pages of a growing array; some
        # versions of numpy still report both the old and the new one to tracemalloc.
        assert peak < (1.4 + measure_double_counting()) * row["video"].nbytes


@pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
def test_real_clips_become_batches(tmp_path: Path) -> None:
    names = ("carphone_pristine.mp4", "h265_video.mp4", "TrumanShow_wave_f_nm_np1_fr_med_26.avi", "av1_video.mkv")
    files = [Path(str(DATA), "video-clips", name) for name in names]
    encoder = VideoEncoder((32, 48), fps=5, resize="pad")
    prepared = write_table(tmp_path, encoder, ({"video": file, "label": file.suffix} for file in files))
    # 4.004, 1, 1.6 and 5 seconds at 5 frames per second.
    assert prepared.lengths("video").tolist() == [21, 5, 8, 25]
    rows = VideoRows(prepared, content="x", num_frames=8, classes=find_classes([".avi", ".mkv", ".mp4"]))
    batch = rows.rows(np.arange(4), np.zeros(4, int))
    assert batch["video"].shape == (4, 8, 32, 48, 3)
    assert int(batch["fps"]) == 5
    assert batch["label"].tolist() == [2, 2, 0, 1]
    assert (np.abs(batch["video"]) <= 1.000001).all()
