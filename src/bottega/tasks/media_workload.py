"""Prepared pictures, sounds and clips as a branch's data: training, held out, and given by hand."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

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
from bottega.storage.durable import writing_folder
from bottega.tasks.metadata import MetadataMissing
from bottega.tasks.table_workload import TableWorkload


class MediaWorkload(TableWorkload):
    """Either with prepared data, or again from the codec of a finished run, whose data is prepared when asked for."""

    recipe: Any
    mel: MelProcessor | None = None
    """How sound is seen; None for all other media."""

    def __init__(self, recipe: Any, prepared: PreparedData | None, *, expected: str | None) -> None:
        """`expected` is the fingerprint that data prepared again must have."""
        self.recipe, self._prepared, self._expected = recipe, prepared, expected

    @abstractmethod
    def frame(self) -> tuple[int, ...]:
        """Height, width and channels of a picture, or of a frame of a clip."""

    def form(self) -> dict[str, Any]:
        """What a recipe may leave to its data (sizes, rates), as it was there: other data is brought to it."""
        if self.mel is not None:
            return {"sample_rate": self.mel.mel.sample_rate}
        height, width, channels = self.frame()
        # A recipe has one number for both sides; data for others must have them already, which `_rows` looks after.
        return {"channels": channels, "image_size": height if height == width else None}

    @abstractmethod
    def class_names(self) -> Classes: ...

    @abstractmethod
    def write_processor(self, folder: Path) -> None:
        """All that must be known to use the model where its data is not."""

    @property
    @abstractmethod
    def metadata(self) -> Any:
        """What the codec says of the data, other than how sound is seen."""

    @abstractmethod
    def read_metadata(self, folder: Path) -> Any:
        """The same of a codec that is there; NotKept where it cannot be read."""

    def has_processor(self, folder: Path) -> bool:
        """Whether it is there and whole; a DataError where it is another one."""
        try:
            before = self.read_metadata(folder)
        except MetadataMissing:
            return False  # it is written again
        if before != self.metadata:
            raise DataError("the data gives other sizes or classes than this run has; start over with --fresh")
        return self.mel is None or _has_mel(folder, self.mel)

    def served(self, rows: Any) -> Source:
        """The samples of the data layer as this branch's batches; of sound, its spectrogram in its place."""
        return rows if self.mel is None else MelRows(rows, self.mel)

    def prepare_again(self, recipe: Any) -> PreparedData:
        return prepare_media(recipe, progress=lambda stage, done, total: None)

    @property
    def notes(self) -> list[str]:
        heard = self.mel.notes() if self.mel is not None else []
        return [*super().notes, *heard, *self._short_clips()]

    def _short_clips(self) -> list[str]:
        tables = [self.prepared.table(name) for name in self.prepared.training_tables]
        if not all("video" in table.columns for table in tables):
            return []
        data = self.recipe.data
        lengths = np.concatenate([table.lengths("video") for table in tables])
        short = int((lengths <= (data.num_frames - 1) * data.stride).sum())
        strides = f" at a stride of {data.stride}" if data.stride > 1 else ""
        said = f"are shorter than data.num_frames {data.num_frames}{strides} and repeat their last frame"
        return [f"{short:,} of {len(lengths):,} clips {said}"] if short else []

    def read_given(self, given: ExternalData) -> Source:
        """Other data in the form and with the classes of this run's own."""
        recipe, prepared = self.other_prepared(given)
        return self.served(self._rows(recipe, prepared, given.table, is_training=False))

    def read_unlabelled(self, given: ExternalData) -> Any:
        """Other samples in the form of this run's own, whatever they are called; a bad one is an error."""
        form = {**self.form(), "condition_field": None, "bad_records": "stop"}
        section = given.replace_in(self.recipe.data)
        # The label that the run has learnt from need not be there.
        train = section.train.model_copy(update={"label": None, "labels": None, "pattern": None})
        if find_files(train).is_media:  # a file is the medium itself, and has no field of that name
            train = train.model_copy(update={"field": None})
        data = section.model_copy(update={**form, "train": train})
        recipe = self.recipe.model_copy(update={"model": Model(), "data": data})
        prepared = prepare_media(recipe, progress=lambda stage, done, total: None)
        return self._rows(recipe, prepared, given.table, is_training=False, classes=Classes(()))

    def other_prepared(self, given: ExternalData) -> tuple[Any, PreparedData]:
        counted = {name: None for name in ("num_labels", "num_classes") if hasattr(self.recipe.model, name)}
        changes = {
            "model": self.recipe.model.model_copy(update=counted),
            "data": given.replace_in(self.recipe.data).model_copy(update=self.form()),
        }
        recipe = self.recipe.model_copy(update=changes)
        return recipe, prepare_media(recipe, progress=lambda stage, done, total: None)

    def table(self, name: str, *, is_training: bool) -> Source:
        return self.served(self._rows(self.recipe, self.prepared, name, is_training=is_training))

    def read_raw(self, name: str) -> Source:
        """One table as the data layer gives it, unchanged: sounds are waves."""
        return self._limited(name, self._rows(self.recipe, self.prepared, name, is_training=False))

    def read_given_raw(self, given: ExternalData) -> Source:
        recipe, prepared = self.other_prepared(given)
        return self._rows(recipe, prepared, given.table, is_training=False)

    def _rows(
        self, recipe: Any, prepared: PreparedData, name: str, *, is_training: bool, classes: Classes | None = None
    ) -> Source:
        recipe = recipe if self.mel is None else with_processor_length(recipe, self.mel)
        classes = self.class_names() if classes is None else classes
        rows: Any = open_media_source(recipe, prepared, name, is_training=is_training, classes=classes)
        if self.mel is None:
            found = rows.table.columns["video"].shape if isinstance(rows, VideoRows) else rows.encoder.bucket_shape(0)
            if tuple(found) != tuple(self.frame()):
                # A model over patches would take the pixels of 16 x 8 for those of 8 x 16, and say nothing.
                here, wanted = (" x ".join(map(str, sides)) for sides in (found, self.frame()))
                raise DataError(
                    f"{recipe.data.train.path or name}: is of {here}, and this run has learnt from {wanted} "
                    "(height, width, channels); resize the data to that"
                )
        return rows

    def save_processor(self, folder: Path) -> None:
        """Once, whole or not at all."""
        if self.has_processor(folder):
            return
        with writing_folder(folder) as temporary:
            self.write_processor(temporary)


def _has_mel(folder: Path, now: MelProcessor) -> bool:
    try:
        before = MelProcessor.load(folder)
    except CheckpointError:
        return False  # it is written again
    # Another processor may add up in another order; what is kept has four digits.
    near = np.allclose((before.scale.mean, before.scale.std), (now.scale.mean, now.scale.std), rtol=0, atol=1e-3)
    if before.model_copy(update={"scale": now.scale}) != now or not near:
        raise DataError(
            "the data gives spectrograms of another form or loudness than this run has; start over with --fresh"
        )
    return True
