"""Sounds as standardised spectrograms: there and back, one scale for all, and made once where nothing changes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from bottega.core.errors import CheckpointError
from bottega.data.audio.config import AudioAugmentation
from bottega.data.audio.encoder import AudioEncoder
from bottega.data.audio.mel import MelCodec, MelRows, MelScale, fit, is_fixed
from bottega.data.audio.source import AudioRows
from bottega.data.audio.spectrogram import FLOOR, Mel
from bottega.data.records.record import Record
from bottega.data.sources.source import ArraySource
from bottega.data.tables.shards import ShardWriter, Table

RATE, LENGTH = 8000, 4000
MEL = Mel(sample_rate=RATE, fft_size=256, hop_size=64, num_mels=32)


def sound(number: int, length: int = LENGTH) -> np.ndarray:
    time = np.arange(length) / RATE
    return (0.5 * np.sin(2 * np.pi * (220 + 110 * number) * time) * np.exp(-3 * time)).astype(np.float32)


def sounds(folder: Path, lengths: list[int], **options: object) -> AudioRows:
    encoder = AudioEncoder(sample_rate=RATE)
    with ShardWriter(folder, encoder.columns) as writer:
        for i, length in enumerate(lengths):
            fields = {"audio": sound(i, length), "sample_rate": RATE, "label": str(i)}
            for made in encoder.rows(Record(f"{i}", f"/data/{i}", fields)):
                writer.add(made)
    return AudioRows(Table(folder), sample_rate=RATE, labels=np.arange(len(lengths)), **options)  # type: ignore[arg-type]


@pytest.fixture
def codec() -> MelCodec:
    return fit(ArraySource({"audio": np.stack([sound(i) for i in range(8)])}), MEL, num_samples=LENGTH, multiple=8)


def test_the_scale_is_that_of_the_data_and_most_values_are_within_one(codec: MelCodec) -> None:
    x = codec.encode(np.stack([sound(i) for i in range(8)]))
    assert x.dtype == np.float32
    assert x.shape == (8, *codec.shape)
    assert abs(x.mean()) < 1e-3
    assert x.std() == pytest.approx(0.5, abs=1e-3)
    assert (np.abs(x) <= 1).mean() > 0.9


def test_time_is_filled_up_with_silence_to_a_multiple(codec: MelCodec) -> None:
    """1 + ceil(4000 / 64) = 64 frames; with one sample more there are 65, and of eights 72."""
    assert codec.frames == 64
    longer = fit(ArraySource({"audio": sound(0, LENGTH + 1)[None]}), MEL, num_samples=LENGTH + 33, multiple=8)
    assert longer.frames == 72
    quiet = longer.scale.undo(longer.encode(sound(0, LENGTH)[None]))[0, 68:]
    np.testing.assert_allclose(quiet, np.log(FLOOR), atol=1e-4)


def test_there_and_back_is_the_same_spectrogram(codec: MelCodec) -> None:
    audio = np.stack([sound(i) for i in range(4)])
    x = codec.encode(audio)
    np.testing.assert_allclose(codec.scale.undo(x[..., 0]), codec.log_mel(audio), atol=1e-5)
    heard = codec.decode(x)
    assert heard.shape == audio.shape
    assert heard.dtype == np.float32
    again = codec.encode(heard)
    assert (
        np.abs(np.exp(codec.scale.undo(again)) - np.exp(codec.scale.undo(x))).sum()
        < 0.1 * np.exp(codec.scale.undo(x)).sum()
    )
    np.testing.assert_array_equal(codec.decode(x, seed=0), heard)
    assert codec.decode(x, num_samples=100).shape == (4, 100)


def test_a_sound_of_another_length_is_cut_or_filled_up(codec: MelCodec) -> None:
    long = codec.encode(np.pad(sound(0), (0, 500), constant_values=0.3)[None])
    np.testing.assert_array_equal(long, codec.encode(sound(0)[None]))
    short = codec.encode(sound(0)[None, :1000])
    filled = codec.encode(np.pad(sound(0)[:1000], (0, LENGTH - 1000))[None])
    np.testing.assert_array_equal(short, filled)


def test_silence_alone_has_a_scale() -> None:
    quiet = fit(ArraySource({"audio": np.zeros((3, LENGTH), np.float32)}), MEL, num_samples=LENGTH)
    assert np.isfinite(quiet.encode(np.zeros((1, LENGTH), np.float32))).all()
    assert quiet.scale == MelScale(mean=round(float(np.log(FLOOR)), 4), std=1e-3)


def test_rows_are_mels_with_the_other_fields(tmp_path: Path, codec: MelCodec) -> None:
    source = sounds(tmp_path, [LENGTH, 3000, 5000], seconds=LENGTH / RATE, crop="start")
    rows = MelRows(source, codec).rows(np.array([2, 0]), np.array([0, 3]))
    assert set(rows) == {"mel", "sample_rate", "label"}
    np.testing.assert_array_equal(rows["label"], [2, 0])
    np.testing.assert_array_equal(rows["mel"], codec.encode(np.stack([sound(2, 5000)[:LENGTH], sound(0)])))
    assert "64 frames of 32 mel bands" in MelRows(source, codec).describe(0, 0)


def test_what_never_changes_is_made_once(tmp_path: Path, codec: MelCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    encode = MelCodec.encode
    monkeypatch.setattr(MelCodec, "encode", lambda self, audio: made.append(len(audio)) or encode(self, audio))
    source = sounds(tmp_path, [LENGTH] * 4, train=True)
    rows = MelRows(source, codec)
    first = rows.rows(np.array([0, 1, 2]), np.zeros(3, int))
    again = rows.rows(np.array([2, 3, 0]), np.ones(3, int))
    assert made == [3, 1]
    np.testing.assert_array_equal(again["mel"][[2, 0]], first["mel"][[0, 2]])
    again["mel"][...] = 7  # a batch is its owner's to change
    np.testing.assert_array_equal(rows.rows(np.array([0]), np.zeros(1, int))["mel"], first["mel"][:1])
    sent = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 20_000
    np.testing.assert_array_equal(sent.rows(np.array([3]), np.zeros(1, int))["mel"], encode(codec, sound(3)[None]))


def test_what_changes_is_made_anew(tmp_path: Path, codec: MelCodec) -> None:
    cropped = sounds(tmp_path / "a", [LENGTH + 900], seconds=LENGTH / RATE, train=True)
    noisy = sounds(tmp_path / "b", [LENGTH], train=True, augmentation=AudioAugmentation(noise=0.1))
    assert not is_fixed(cropped).any()
    assert not is_fixed(noisy).any()
    for source in (cropped, noisy):
        rows = MelRows(source, codec)
        first, second = (rows.rows(np.array([0]), np.array([epoch]))["mel"] for epoch in (0, 1))
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(rows.rows(np.array([0]), np.array([0]))["mel"], first)


def test_only_the_sounds_that_are_cropped_are_made_anew(
    tmp_path: Path, codec: MelCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sounds(tmp_path, [LENGTH + 900, LENGTH, LENGTH - 500], seconds=LENGTH / RATE, train=True)
    made: list[int] = []
    encode = MelCodec.encode
    monkeypatch.setattr(MelCodec, "encode", lambda self, audio: made.append(len(audio)) or encode(self, audio))
    rows = MelRows(source, codec)
    for epoch in range(3):
        epochs = np.full(3, epoch)
        np.testing.assert_array_equal(
            rows.rows(np.arange(3), epochs)["mel"], encode(codec, source.rows(np.arange(3), epochs)["audio"])
        )
    assert made == [3, 1, 1]


def test_a_codec_is_saved_whole_and_a_damaged_one_is_named(tmp_path: Path, codec: MelCodec) -> None:
    codec.save(tmp_path / "codec")
    assert MelCodec.load(tmp_path / "codec") == codec
    (tmp_path / "codec" / "mel.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"mel\.json holds no mel codec"):
        MelCodec.load(tmp_path / "codec")
    with pytest.raises(CheckpointError, match="cannot be read"):
        MelCodec.load(tmp_path)
