"""Prepared audio as samples of one length: cropped or padded, and augmented for training."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError, UsageError
from bottega.data.audio.augment import CropPosition, augment_audio, choose_crop_start
from bottega.data.audio.config import AudioAugmentation
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Conditions
from bottega.data.tables.shards import Table

MAX_CLIP_BYTES = 1 << 30


@final
class AudioRows(Source):
    """Samples with `audio`, float32 `(batch, samples)`, and `sample_rate`, an int32 scalar.

    Optional fields: `label`, int32 `(batch,)`, from `labels` or `conditions`; `condition`, float32 `(batch, d)`, from
    `conditions`; `lengths`, int32 `(batch,)`, the number of samples of a row without its padding. The table was written by
    an AudioEncoder of this sample rate.
    """

    def __init__(
        self,
        table: Table,
        *,
        sample_rate: int,
        content: str | None = None,
        seconds: float | None = None,
        crop: CropPosition = "random",
        train: bool = False,
        seed: int = 0,
        labels: np.ndarray | None = None,
        conditions: Conditions | None = None,
        augmentation: AudioAugmentation | None = None,
        with_lengths: bool = False,
    ) -> None:
        """`content` is the hash of the files that the table was made from; None hashes the table.

        Without `train` nothing is augmented, and `random` crops become `centre`: evaluation must not depend on the seed.
        """
        if not len(table):
            raise DataError(f"{table.folder}: the table has no rows; check data.train.path")
        if labels is not None and len(labels) != len(table):
            raise DataError(f"{table.folder}: the table has {len(table)} rows, but there are {len(labels)} labels")
        assert labels is None or conditions is None, "conditions bring their own labels"
        self.table, self.sample_rate, self.content, self.seed = table, sample_rate, content, seed
        self.crop: CropPosition = "centre" if crop == "random" and not train else crop
        self.augmentation = augmentation if train and augmentation is not None and augmentation.enabled else None
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int32)
        self.conditions, self.with_lengths = conditions, with_lengths
        self.num_samples = self._find_longest_clip() if seconds is None else max(1, round(seconds * sample_rate))

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        audio = np.zeros((len(index), self.num_samples), np.float32)
        lengths = np.zeros(len(index), np.int32)
        for row, (sample_index, sample_epoch) in enumerate(zip(index.tolist(), epoch.tolist(), strict=True)):
            clip = self._load_clip(sample_index, sample_epoch)
            lengths[row] = len(clip)
            audio[row, : len(clip)] = clip
        rows = {"audio": audio, "sample_rate": np.array(self.sample_rate, np.int32)}
        if self.labels is not None:
            rows["label"] = self.labels[index]
        if self.conditions is not None:
            rows.update(self.conditions.rows(index))
        if self.with_lengths:
            rows["lengths"] = lengths
        return rows

    @cached_property
    def fingerprint(self) -> str:
        content = self.content or self._hash_content()
        labels = None if self.labels is None else hashlib.sha256(self.labels.tobytes()).hexdigest()
        names = self.conditions.classes.names if self.conditions is not None and self.conditions.classes else None
        fields = (labels, names, self.conditions.kind if self.conditions is not None else None, self.with_lengths)
        augmentation = self.augmentation.model_dump_json() if self.augmentation is not None else None
        seed = self.seed if augmentation or self.crop == "random" else None
        parts = (content, len(self), self.sample_rate, self.num_samples, self.crop, fields, augmentation, seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        length, rate = len(self.table.row("audio", index)), self.sample_rate
        start = self._choose_crop_start(index, epoch)
        stop = min(length, start + self.num_samples)
        used_span = f"used from {start / rate:.2f} to {stop / rate:.2f} s"
        lines = [
            f"clip {index} of {len(self)}: {self.table.row('key', index)}, {length / rate:.2f} s at {rate} Hz, {used_span}"
        ]
        if self.conditions is not None:
            lines += self.conditions.describe(index)
        elif self.labels is not None:
            lines.append(f"class {self.labels[index]}: {self.table.row('label', index)}")
        caption = self.table.row("caption", index)
        return "\n".join((*lines, *([caption] if caption else [])))

    def _load_clip(self, index: int, epoch: int) -> np.ndarray:
        start = self._choose_crop_start(index, epoch)
        clip = self.table.row("audio", index)[start : start + self.num_samples]
        if self.augmentation is None:
            return clip
        return augment_audio(clip, self.augmentation, rate=self.sample_rate, random_key=(self.seed, epoch, index))

    def _choose_crop_start(self, index: int, epoch: int) -> int:
        ends = self.table.ends("audio")
        length = int(ends[index]) - (int(ends[index - 1]) if index else 0)
        return choose_crop_start(length, self.num_samples, crop=self.crop, random_key=(self.seed, epoch, index))

    def _find_longest_clip(self) -> int:
        """Return the length in samples of the longest clip; raise `UsageError` if padding to it would take over 1 GiB per clip."""
        lengths = self.table.lengths("audio")
        longest = int(lengths.max())
        if longest * 4 > MAX_CLIP_BYTES:
            key = self.table.row("key", int(lengths.argmax()))
            raise UsageError(
                f"data.seconds: must be set, because all clips would be padded to the length of {key}, {longest / self.sample_rate:.0f} s"
            )
        return longest

    def _hash_content(self) -> str:
        digest = hashlib.sha256()
        for name in ("audio", "key", "label"):
            for values in (self.table.values(name), self.table.ends(name)):
                digest.update(values.view(np.uint8).data if values.size else b"")
                digest.update(b"\0")
        return digest.hexdigest()
