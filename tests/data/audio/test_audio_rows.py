"""From records to audio batches: one rate, level and length, each row a function of its index and epoch."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core.errors import DataError
from bottega.data.audio.config import AudioAugmentation
from bottega.data.audio.decode import encode_flac, encode_wav
from bottega.data.audio.encoder import AudioEncoder, read_sample_rate
from bottega.data.audio.loudness import measure_loudness
from bottega.data.audio.source import AudioRows
from bottega.data.loading.loader import Loader
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.classes import Classes, Conditions
from bottega.data.tables.shards import ShardWriter, Table

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
DATA = os.environ.get("BOTTEGA_DATA")
RATE = 8000


def build_tone(seconds: float, rate: int = RATE, hertz: float = 440) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encode_row(fields: dict[str, Any], key: str = "a", **options: Any) -> dict[str, Any]:
    (row,) = AudioEncoder(**{"sample_rate": RATE, **options}).rows(Record(key, f"/data/{key}", fields))
    return row


def write_table(folder: Path, clips: list[np.ndarray], labels: list[str] | None = None) -> Table:
    encoder = AudioEncoder(sample_rate=RATE)
    with ShardWriter(folder, encoder.columns) as writer:
        for i, clip in enumerate(clips):
            fields = {"audio": clip, "sample_rate": RATE, "label": labels[i] if labels else None, "text": f"words {i}"}
            for row in encoder.rows(Record(f"{i}.wav", f"/data/{i}.wav", fields)):
                writer.add(row)
    return Table(folder)


def test_audio_is_read_from_every_common_field_layout(tmp_path: Path) -> None:
    tone, wav = build_tone(0.1), encode_wav(build_tone(0.1), RATE)
    file = tmp_path / "a.flac"
    file.write_bytes(encode_flac(tone, RATE))
    layouts: list[dict[str, Any]] = [
        {"audio": wav},
        {"wav": wav, "txt": b"hello", "cls": b"3"},
        {"flac": file.read_bytes(), "json": {"audio": "a.flac"}},
        {"audio": file},
        {"file": "a.flac", "sound": wav},
        {"audio": {"bytes": wav, "path": "/etc/passwd"}},
        {"audio": {"array": tone, "sampling_rate": RATE, "path": None}},
        {"audio": tone, "sample_rate": RATE},
        {"audio": tone.astype(np.float64), "sampling_rate": np.int64(RATE)},
        {"audio": np.rint(tone * 32768).astype(np.int16), "sr": np.array([RATE])},
        {"audio": np.rint(tone * 2**31).astype(np.int32), "sample_rate": float(RATE)},
        {"audio": tone.tolist(), "sample_rate": RATE},
        {"audio": np.stack([tone, tone]), "sample_rate": RATE},
        {"audio": np.stack([tone * 2, tone * 0], axis=1), "sample_rate": RATE},
    ]
    for fields in layouts:
        row = encode_row(fields)
        np.testing.assert_allclose(row["audio"], tone, atol=2**-15, err_msg=str(list(fields)))
        assert row["audio"].dtype == np.float32
        assert read_sample_rate(Record("a", "a", fields)) == RATE
    np.testing.assert_allclose(encode_row({"other": wav, "audio": file}, field="other")["audio"], tone, atol=2**-15)


def test_record_without_valid_audio_is_refused_with_the_reason() -> None:
    tone = build_tone(0.1)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"text": "hello"}, {}, "no field contains audio"),
        ({"audio": "a.wav"}, {}, "no field contains audio"),
        ({"audio": b"abc"}, {"field": "wav"}, "has no field 'wav'; it has audio"),
        ({"audio": {"bytes": None, "path": "/etc/passwd"}}, {}, "neither bytes nor array"),
        ({"audio": tone}, {}, "needs its sample rate"),
        (
            {"audio": tone, "sample_rate": 3},
            {},
            "sample rate is 3; it must be a whole number of hertz between 1,000 and 768,000",
        ),
        ({"audio": tone, "sample_rate": "fast"}, {}, "sample rate is 'fast'; it must be"),
        ({"audio": np.array(["a"]), "sample_rate": RATE}, {}, "is not audio"),
        ({"audio": [[0.1], [0.1, 0.2]], "sample_rate": RATE}, {}, "not an array"),
        ({"audio": np.zeros((2, 2, 2)), "sample_rate": RATE}, {}, "is not audio"),
        ({"audio": np.array([0, np.inf]), "sample_rate": RATE}, {}, "sample 1 is not finite"),
        ({"audio": np.zeros(1), "sample_rate": 48000}, {"sample_rate": 8000}, "0 samples at 8000"),
        ({"audio": tone, "sample_rate": 1000}, {"sample_rate": 48000, "limit_samples": 10_000}, "38,400 samples"),
        ({"audio": encode_wav(tone, RATE), "label": b"\xff"}, {}, "field 'label' is not text"),
        ({"audio": encode_wav(tone, RATE)}, {"label_field": "mood"}, "no field 'mood'"),
    ]
    for fields, options, message in cases:
        with pytest.raises(Unreadable, match=message):
            encode_row(fields, **options)


def test_labels_and_captions_come_from_fields_and_never_from_a_file_name() -> None:
    wav = encode_wav(build_tone(0.1), RATE)
    row = encode_row({"audio": wav}, key="7_jackson_32.wav")
    assert (row["key"], row["label"], row["caption"]) == ("7_jackson_32.wav", "", "")
    for value in (3, 3.0, "3", b"3\n", np.int64(3), np.array([3])):
        assert encode_row({"audio": wav, "label": value})["label"] == "3"
    assert encode_row({"audio": wav, "digit": 7, "speaker": "jackson"})["label"] == "7"
    assert encode_row({"audio": wav, "digit": 7, "speaker": "jackson"}, label_field="speaker")["label"] == "jackson"
    assert encode_row({"audio": wav, "transcript": "In being."})["caption"] == "In being."


def test_audio_is_resampled_and_normalised() -> None:
    tone = build_tone(0.5, rate=44100) * np.float32(0.1)
    samples = encode_row({"audio": tone, "sample_rate": 44100}, normalise="peak")["audio"]
    assert len(samples) == 4000
    assert np.abs(samples).max() == pytest.approx(0.95, abs=1e-6)
    assert measure_loudness(
        encode_row({"audio": tone, "sample_rate": 44100}, normalise="loudness")["audio"], RATE
    ) == pytest.approx(-23, abs=0.01)


def test_batch_has_exactly_the_requested_fields(tmp_path: Path) -> None:
    table = write_table(tmp_path, [build_tone(0.5), build_tone(1.0), build_tone(0.25)], ["b", "a", "b"])
    index = np.array([2, 0, 1])
    rows = AudioRows(table, sample_rate=RATE).rows(index, np.zeros(3, int))
    assert set(rows) == {"audio", "sample_rate"}
    assert (rows["audio"].shape, rows["audio"].dtype) == ((3, 8000), np.float32)
    assert (rows["sample_rate"].shape, rows["sample_rate"].dtype, int(rows["sample_rate"])) == ((), np.int32, RATE)
    np.testing.assert_array_equal(rows["audio"][0], np.pad(build_tone(0.25), (0, 6000)))
    labels = Classes(("a", "b")).ids(["b", "a", "b"])
    source = AudioRows(table, sample_rate=RATE, labels=labels, with_lengths=True)
    rows = source.rows(index, np.zeros(3, int))
    assert set(rows) == {"audio", "sample_rate", "label", "lengths"}
    assert (rows["label"].tolist(), rows["label"].dtype) == ([1, 1, 0], np.int32)
    assert (rows["lengths"].tolist(), rows["lengths"].dtype) == ([2000, 4000, 8000], np.int32)
    conditions = Conditions(table, "class", classes=Classes(("a", "b")))
    rows = AudioRows(table, sample_rate=RATE, conditions=conditions).rows(index, np.zeros(3, int))
    assert set(rows) == {"audio", "sample_rate", "label", "condition"}


def test_random_crop_is_used_only_for_training(tmp_path: Path) -> None:
    ramp = (np.arange(8000) / 8000).astype(np.float32)
    table = write_table(tmp_path, [ramp] * 3)

    def first_samples(epoch: int, **options: Any) -> np.ndarray:
        source = AudioRows(table, sample_rate=RATE, seconds=0.25, **options)
        assert source.num_samples == 2000
        return source.rows(np.arange(3), np.full(3, epoch))["audio"][:, 0]

    np.testing.assert_array_equal(first_samples(0), ramp[3000])
    np.testing.assert_array_equal(first_samples(0, crop="start", train=True), 0)
    np.testing.assert_array_equal(first_samples(9, crop="centre", train=True), ramp[3000])
    starts = np.array([first_samples(epoch, train=True) for epoch in range(4)])
    assert len(np.unique(starts)) == 12
    np.testing.assert_array_equal(starts[2], first_samples(2, train=True))
    assert (first_samples(0, train=True, seed=1) != starts[0]).all()


def test_a_row_does_not_depend_on_its_batch_or_its_worker(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = write_table(tmp_path, [rng.uniform(-1, 1, 900 + 50 * i).astype(np.float32) for i in range(12)])
    options = AudioAugmentation(noise=0.1, gain=3.0, time_mask=0.2, frequency_mask=0.2)
    source = AudioRows(table, sample_rate=RATE, seconds=0.1, train=True, augmentation=options, seed=5)
    expected = source.rows(np.arange(12), np.arange(12) // 6)["audio"]
    copy = pickle.loads(pickle.dumps(source))
    for i in (0, 5, 6, 11):
        np.testing.assert_array_equal(copy.rows(np.array([i]), np.array([i // 6]))["audio"][0], expected[i])
    later = source.rows(np.arange(12), np.arange(12) // 6 + 1)["audio"]
    assert not any(np.array_equal(*pair) for pair in zip(expected, later, strict=True))
    # Without a random crop, augmentation alone must differ between epochs.
    fixed = AudioRows(table, sample_rate=RATE, seconds=0.1, crop="start", train=True, augmentation=options)
    first, second = (fixed.rows(np.arange(12), np.full(12, epoch))["audio"] for epoch in (0, 1))
    assert not any(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    # Held-out audio is never augmented.
    held_out = AudioRows(table, sample_rate=RATE, seconds=0.1, augmentation=options)
    np.testing.assert_array_equal(
        held_out.rows(np.arange(12), np.zeros(12, int))["audio"],
        held_out.rows(np.arange(12), np.ones(12, int))["audio"],
    )
    batch = Loader(source, batch_size=4, seed=0).batch(1)
    assert batch["audio"].shape == (4, 800)


def test_fingerprint_changes_with_the_samples_and_with_nothing_else(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a", [build_tone(0.5), build_tone(0.5, hertz=300)])
    other = write_table(tmp_path / "b", [build_tone(0.5), build_tone(0.5, hertz=301)])
    plain: dict[str, Any] = {"sample_rate": RATE, "train": True, "crop": "start"}
    base = AudioRows(table, **plain).fingerprint
    assert AudioRows(Table(tmp_path / "a"), **plain).fingerprint == base
    assert AudioRows(table, **plain, seed=3).fingerprint == base  # nothing is random
    changed: list[dict[str, Any]] = [
        {"seconds": 0.1},
        {"crop": "random"},
        {"crop": "random", "seed": 1},
        {"augmentation": AudioAugmentation(gain=1.0)},
        {"augmentation": AudioAugmentation(gain=1.0), "seed": 1},
        {"labels": np.array([0, 1])},
        {"labels": np.array([1, 0])},
        {"content": "given"},
    ]
    fingerprints = [AudioRows(table, **{**plain, **options}).fingerprint for options in changed]
    fingerprints += [base, AudioRows(other, **plain).fingerprint]
    assert len(set(fingerprints)) == len(fingerprints)


def test_sample_description(tmp_path: Path) -> None:
    table = write_table(tmp_path, [build_tone(1.0)], ["a4"])
    text = AudioRows(table, sample_rate=RATE, seconds=0.5, labels=np.array([0])).describe(0, 0)
    assert text == "clip 0 of 1: 0.wav, 1.00 s at 8000 Hz, used from 0.25 to 0.75 s\nclass 0: a4\nwords 0"


def test_invalid_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the table has no rows"):
        AudioRows(write_table(tmp_path / "none", []), sample_rate=RATE)
    with pytest.raises(DataError, match="has 1 rows, but there are 2 labels"):
        AudioRows(write_table(tmp_path / "one", [build_tone(0.1)]), sample_rate=RATE, labels=np.array([0, 1]))


@pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
def test_real_recordings_become_batches(tmp_path: Path) -> None:
    assert DATA is not None
    encoder = AudioEncoder(sample_rate=16000, normalise="loudness")
    digits: list[str] = []
    with (
        tarfile.open(Path(DATA, "audio-fsdd", "recordings.tar.xz"), "r|xz") as archive,
        ShardWriter(tmp_path, encoder.columns) as writer,
    ):
        for member in islice((member for member in archive if member.isfile()), 40):
            file: io.BufferedReader | None = archive.extractfile(member)  # type: ignore[assignment]
            assert file is not None
            digits.append(Path(member.name).name[0])
            record = Record(member.name, member.name, {"wav": file.read(), "digit": digits[-1]})
            for row in encoder.rows(record):
                writer.add(row)
    table = Table(tmp_path)
    assert [table.row("label", i) for i in range(len(table))] == digits
    rows = AudioRows(table, sample_rate=16000, seconds=0.5, train=True).rows(np.arange(40), np.zeros(40, int))
    assert rows["audio"].shape == (40, 8000)
    assert np.isfinite(rows["audio"]).all()
    assert np.abs(rows["audio"]).max() <= 0.951
    levels = [measure_loudness(table.row("audio", i), 16000) for i in range(40)]
    assert max(levels) < -22.9
    assert np.median(levels) == pytest.approx(-23, abs=0.01)
