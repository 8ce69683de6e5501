"""Prepared images, audio and video as samples in the form that a run's model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.config.recipe import Model
from bottega.core.errors import CheckpointError, DataError
from bottega.data.audio.mel import MelProcessor, MelRows
from bottega.data.formats import find_files
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.samples import open_media_source, with_processor_length
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.video.source import VideoRows
from bottega.tasks.metadata import MetadataUnreadable
from bottega.tasks.processor import FolderProcessor
from bottega.tasks.table_data import TableData


def prepare_quietly(recipe: Any) -> PreparedData:
    """Prepare the media of a recipe without reporting progress."""
    return prepare_media(recipe, progress=lambda stage, done, total: None)


def to_mel_samples(rows: Any, mel: MelProcessor | None) -> Source:
    """Return rows with audio as mel spectrograms; rows of other media as they are."""
    return rows if mel is None else MelRows(rows, mel)


@final
@dataclass(frozen=True)
class MediaTables:
    """Reads prepared tables of one run, and other data in the same form.

    Rows are what a table holds (pixels, waveforms); samples are rows as the model reads them.
    """

    recipe: Any
    frame: tuple[int, ...]
    """Height, width and channels of an image or of a frame of video."""
    classes: Classes
    mel: MelProcessor | None = None
    """Audio as mel spectrograms; None for other media."""
    to_samples: Callable[[Any], Source] | None = None
    """Function from rows to samples; by default audio becomes spectrograms."""
    check_rows: Callable[[Any, str], None] = lambda rows, where: None
    """Raises DataError if rows do not fit the run; called with the rows and the path or table that they are from."""

    def read(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        """Return one of the run's own tables as samples."""
        return self.convert_rows(self.read_rows(prepared, name, is_training=is_training))

    def convert_rows(self, rows: Any) -> Source:
        """Return rows as samples."""
        return to_mel_samples(rows, self.mel) if self.to_samples is None else self.to_samples(rows)

    def read_rows(self, prepared: PreparedData, name: str, *, is_training: bool = False) -> Any:
        """Return the rows of one of the run's own tables."""
        return self._open_rows(self.recipe, prepared, name, self.classes, is_training=is_training)

    def read_external(self, external: ExternalData) -> Source:
        """Return other data as samples, with the sizes and classes of this run's own."""
        return self.convert_rows(self.read_external_rows(external))

    def read_external_rows(self, external: ExternalData) -> Any:
        """Return the rows of other data, with the sizes and classes of this run's own."""
        counts = {name: None for name in ("num_labels", "num_classes") if hasattr(self.recipe.model, name)}
        changes = {
            "model": self.recipe.model.model_copy(update=counts),
            "data": external.replace_in(self.recipe.data).model_copy(update=self.get_data_options()),
        }
        recipe = self.recipe.model_copy(update=changes)
        return self._open_rows(recipe, prepare_quietly(recipe), external.table, self.classes, is_training=False)

    def read_unlabelled_rows(self, external: ExternalData) -> Any:
        """Return the rows of other data whatever their labels; a bad record is an error."""
        options = {**self.get_data_options(), "condition_field": None, "bad_records": "stop"}
        section = external.replace_in(self.recipe.data)
        # The field of the training labels need not be there.
        train = section.train.model_copy(update={"label": None, "labels": None, "pattern": None})
        if find_files(train).is_media:  # a file is the medium itself, and has no field of that name
            train = train.model_copy(update={"field": None})
        data = section.model_copy(update={**options, "train": train})
        recipe = self.recipe.model_copy(update={"model": Model(), "data": data})
        return self._open_rows(recipe, prepare_quietly(recipe), external.table, Classes(()), is_training=False)

    def get_data_options(self) -> dict[str, Any]:
        """Return the keys of the data section that a recipe may leave to the data, with the values of this run."""
        if self.mel is not None:
            return {"sample_rate": self.mel.mel.sample_rate}
        height, width, channels = self.frame
        # A recipe has one number for both sides; other data must have unequal sides already, which `_open_rows` checks.
        return {"channels": channels, "image_size": height if height == width else None}

    def _open_rows(self, recipe: Any, prepared: PreparedData, name: str, classes: Classes, *, is_training: bool) -> Any:
        recipe = recipe if self.mel is None else with_processor_length(recipe, self.mel)
        rows: Any = open_media_source(recipe, prepared, name, is_training=is_training, classes=classes)
        where = recipe.data.train.path or name
        if self.mel is None:
            frame = rows.table.columns["video"].shape if isinstance(rows, VideoRows) else rows.encoder.bucket_shape(0)
            if tuple(frame) != tuple(self.frame):
                # A model over patches would silently take the pixels of 16 x 8 for those of 8 x 16.
                actual, expected = (" x ".join(map(str, sides)) for sides in (frame, self.frame))
                raise DataError(
                    f"{where} has samples of {actual}, but this run was trained on {expected} "
                    "(height, width, channels); resize the data to that"
                )
        self.check_rows(rows, where)
        return rows

    def collect_notes(self, prepared: PreparedData) -> list[str]:
        """Return notes on the training data: clipped spectrograms, clips that are too short."""
        return [*(self.mel.notes() if self.mel is not None else []), *self._note_short_clips(prepared)]

    def _note_short_clips(self, prepared: PreparedData) -> list[str]:
        tables = [prepared.table(name) for name in prepared.training_tables]
        if not all("video" in table.columns for table in tables):
            return []
        data = self.recipe.data
        lengths = np.concatenate([table.lengths("video") for table in tables])
        num_short = int((lengths <= (data.num_frames - 1) * data.stride).sum())
        strides = f" at a stride of {data.stride}" if data.stride > 1 else ""
        reason = f"are shorter than data.num_frames {data.num_frames}{strides} and repeat their last frame"
        return [f"{num_short:,} of {len(lengths):,} clips {reason}"] if num_short else []


@final
@dataclass(frozen=True)
class MediaProcessor(FolderProcessor):
    """The processor of a run over images, audio or video: metadata of its data and, for audio, its mel spectrograms."""

    metadata: Any
    read: Callable[[Path], Any]
    """Reads the metadata of a saved processor; raises MetadataUnreadable."""
    write_files: Callable[[Path], None]
    mel: MelProcessor | None = None
    has_files: Callable[[Path], bool] = lambda folder: True
    """Whether files other than the metadata are complete."""

    def is_saved(self, folder: Path) -> bool:
        try:
            previous = self.read(folder)
        except MetadataUnreadable:
            return False
        if previous != self.metadata:
            raise DataError(
                "the sizes or the classes of the data differ from those of this run; start over with --fresh"
            )
        return (self.mel is None or _has_mel(folder, self.mel)) and self.has_files(folder)

    def write(self, folder: Path) -> None:
        self.write_files(folder)
        if self.mel is not None:
            self.mel.save(folder)


def _has_mel(folder: Path, mel: MelProcessor) -> bool:
    try:
        previous = MelProcessor.load(folder)
    except CheckpointError:
        return False
    # Another CPU may sum in another order, so mean and std may differ slightly; they are saved with four digits.
    is_close = np.allclose(
        (previous.scale.mean, previous.scale.std), (mel.scale.mean, mel.scale.std), rtol=0, atol=1e-3
    )
    if previous.model_copy(update={"scale": mel.scale}) != mel or not is_close:
        raise DataError(
            "the shape or the loudness of the spectrograms differs from that of this run; start over with --fresh"
        )
    return True


def build_media_data(
    tables: MediaTables,
    *,
    prepared: PreparedData | None,
    expected_fingerprint: str | None,
    notes: Callable[[PreparedData], list[str]] = lambda prepared: [],
) -> TableData:
    """Return the data of a run whose samples are what `tables` reads."""
    return TableData(
        tables.recipe,
        prepare=prepare_quietly,
        read_table=tables.read,
        read_external=tables.read_external,
        prepared=prepared,
        expected_fingerprint=expected_fingerprint,
        notes=lambda prepared: [*tables.collect_notes(prepared), *notes(prepared)],
    )
