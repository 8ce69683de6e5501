"""Standardised mel spectrograms: they round-trip, share one scale, and are cached where the audio is deterministic."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from bottega.core.errors import CheckpointError
from bottega.data.audio.config import AudioAugmentation
from bottega.data.audio.encoder import AudioEncoder
from bottega.data.audio.mel import MelProcessor, MelRows, MelScale, find_deterministic_samples, fit_mel_processor
from bottega.data.audio.source import AudioRows
from bottega.data.audio.spectrogram import MAGNITUDE_FLOOR, MelSpectrogram
from bottega.data.records.record import Record
from bottega.data.sources.source import ArraySource
from bottega.data.tables.shards import ShardWriter, Table

RATE, LENGTH = 8000, 4000
MEL = MelSpectrogram(sample_rate=RATE, fft_size=256, hop_size=64, num_mels=32)


def build_tone(number: int, length: int = LENGTH) -> np.ndarray:
    time = np.arange(length) / RATE
    return (0.5 * np.sin(2 * np.pi * (220 + 110 * number) * time) * np.exp(-3 * time)).astype(np.float32)


def write_audio_rows(folder: Path, lengths: list[int], **options: object) -> AudioRows:
    encoder = AudioEncoder(sample_rate=RATE)
    with ShardWriter(folder, encoder.columns) as writer:
        for i, length in enumerate(lengths):
            fields = {"audio": build_tone(i, length), "sample_rate": RATE, "label": str(i)}
            for row in encoder.rows(Record(f"{i}", f"/data/{i}", fields)):
                writer.add(row)
    return AudioRows(Table(folder), sample_rate=RATE, labels=np.arange(len(lengths)), **options)  # type: ignore[arg-type]


@pytest.fixture
def processor() -> MelProcessor:
    return fit_mel_processor(
        ArraySource({"audio": np.stack([build_tone(i) for i in range(8)])}), MEL, num_samples=LENGTH, multiple=8
    )


def test_scale_is_fitted_to_the_data(processor: MelProcessor) -> None:
    x = processor.encode(np.stack([build_tone(i) for i in range(8)]))
    assert x.dtype == np.float32
    assert x.shape == (8, *processor.shape)
    assert abs(x.mean()) < 1e-3
    assert x.std() == pytest.approx(0.5, abs=1e-3)
    assert (np.abs(x) <= 1).mean() > 0.9


def test_frames_are_padded_with_silence_to_a_multiple(processor: MelProcessor) -> None:
    """1 + ceil(4000 / 64) = 64 frames; 33 more samples need 65 frames, padded to 72."""
    assert processor.frames == 64
    longer = fit_mel_processor(
        ArraySource({"audio": build_tone(0, LENGTH + 1)[None]}), MEL, num_samples=LENGTH + 33, multiple=8
    )
    assert longer.frames == 72
    padding = longer.scale.undo(longer.encode(build_tone(0, LENGTH)[None]))[0, 68:]
    np.testing.assert_allclose(padding, np.log(MAGNITUDE_FLOOR), atol=1e-4)


def test_spectrogram_round_trips(processor: MelProcessor) -> None:
    audio = np.stack([build_tone(i) for i in range(4)])
    x = processor.encode(audio)
    np.testing.assert_allclose(processor.scale.undo(x[..., 0]), processor.log_mel(audio), atol=1e-5)
    decoded = processor.decode(x)
    assert decoded.shape == audio.shape
    assert decoded.dtype == np.float32
    again = processor.encode(decoded)
    assert (
        np.abs(np.exp(processor.scale.undo(again)) - np.exp(processor.scale.undo(x))).sum()
        < 0.1 * np.exp(processor.scale.undo(x)).sum()
    )
    np.testing.assert_array_equal(processor.decode(x, seed=0), decoded)
    assert processor.decode(x, num_samples=100).shape == (4, 100)


def test_audio_of_another_length_is_cropped_or_padded(processor: MelProcessor) -> None:
    long = processor.encode(np.pad(build_tone(0), (0, 500), constant_values=0.3)[None])
    np.testing.assert_array_equal(long, processor.encode(build_tone(0)[None]))
    short = processor.encode(build_tone(0)[None, :1000])
    filled = processor.encode(np.pad(build_tone(0)[:1000], (0, LENGTH - 1000))[None])
    np.testing.assert_array_equal(short, filled)


def test_silent_data_has_a_finite_scale() -> None:
    silent = fit_mel_processor(ArraySource({"audio": np.zeros((3, LENGTH), np.float32)}), MEL, num_samples=LENGTH)
    assert np.isfinite(silent.encode(np.zeros((1, LENGTH), np.float32))).all()
    assert silent.scale == MelScale(mean=round(float(np.log(MAGNITUDE_FLOOR)), 4), std=1e-3)


def test_rows_hold_mels_and_the_other_fields(tmp_path: Path, processor: MelProcessor) -> None:
    source = write_audio_rows(tmp_path, [LENGTH, 3000, 5000], seconds=LENGTH / RATE, crop="start")
    rows = MelRows(source, processor).rows(np.array([2, 0]), np.array([0, 3]))
    assert set(rows) == {"mel", "sample_rate", "label"}
    np.testing.assert_array_equal(rows["label"], [2, 0])
    np.testing.assert_array_equal(
        rows["mel"], processor.encode(np.stack([build_tone(2, 5000)[:LENGTH], build_tone(0)]))
    )
    assert "64 frames of 32 mel bands" in MelRows(source, processor).describe(0, 0)


def test_deterministic_samples_are_encoded_once(
    tmp_path: Path, processor: MelProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_counts: list[int] = []
    encode = MelProcessor.encode
    monkeypatch.setattr(
        MelProcessor, "encode", lambda self, audio: encoded_counts.append(len(audio)) or encode(self, audio)
    )
    source = write_audio_rows(tmp_path, [LENGTH] * 4, train=True)
    rows = MelRows(source, processor)
    first = rows.rows(np.array([0, 1, 2]), np.zeros(3, int))
    again = rows.rows(np.array([2, 3, 0]), np.ones(3, int))
    assert encoded_counts == [3, 1]
    np.testing.assert_array_equal(again["mel"][[2, 0]], first["mel"][[0, 2]])
    again["mel"][...] = 7  # the caller may modify its batch
    np.testing.assert_array_equal(rows.rows(np.array([0]), np.zeros(1, int))["mel"], first["mel"][:1])
    sent = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 20_000
    np.testing.assert_array_equal(
        sent.rows(np.array([3]), np.zeros(1, int))["mel"], encode(processor, build_tone(3)[None])
    )


def test_random_samples_are_encoded_each_epoch(tmp_path: Path, processor: MelProcessor) -> None:
    cropped = write_audio_rows(tmp_path / "a", [LENGTH + 900], seconds=LENGTH / RATE, train=True)
    noisy = write_audio_rows(tmp_path / "b", [LENGTH], train=True, augmentation=AudioAugmentation(noise=0.1))
    assert not find_deterministic_samples(cropped).any()
    assert not find_deterministic_samples(noisy).any()
    for source in (cropped, noisy):
        rows = MelRows(source, processor)
        first, second = (rows.rows(np.array([0]), np.array([epoch]))["mel"] for epoch in (0, 1))
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(rows.rows(np.array([0]), np.array([0]))["mel"], first)


def test_only_cropped_clips_are_encoded_again(
    tmp_path: Path, processor: MelProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_audio_rows(tmp_path, [LENGTH + 900, LENGTH, LENGTH - 500], seconds=LENGTH / RATE, train=True)
    encoded_counts: list[int] = []
    encode = MelProcessor.encode
    monkeypatch.setattr(
        MelProcessor, "encode", lambda self, audio: encoded_counts.append(len(audio)) or encode(self, audio)
    )
    rows = MelRows(source, processor)
    for epoch in range(3):
        epochs = np.full(3, epoch)
        np.testing.assert_array_equal(
            rows.rows(np.arange(3), epochs)["mel"], encode(processor, source.rows(np.arange(3), epochs)["audio"])
        )
    assert encoded_counts == [3, 1, 1]


def test_processor_round_trips_and_a_damaged_file_is_refused_by_name(tmp_path: Path, processor: MelProcessor) -> None:
    processor.save(tmp_path / "processor")
    assert MelProcessor.load(tmp_path / "processor") == processor
    (tmp_path / "processor" / "mel.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"mel\.json is not a valid mel processor"):
        MelProcessor.load(tmp_path / "processor")
    with pytest.raises(CheckpointError, match="cannot read"):
        MelProcessor.load(tmp_path)
