"""The workload of image, audio and video generation: data, condition, model, sampler and export around one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.core.model_spec import resolve_reference
from bottega.core.types import Models
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.latents import LatentRows
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.tables.shards import Table
from bottega.data.text.captions import CaptionRows
from bottega.models import find_framework
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.frozen_models import collect_frozen_hashes
from bottega.tasks.generation.audio import VOCODER_FOLDER, AudioMedium, open_audio, reopen_audio
from bottega.tasks.generation.code_tokenizer import CodeTokenizer, reopen_code_tokenizer, resolve_code_tokenizer
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.tasks.generation.latent_space import LatentSpace, compute_latents, open_latent_space
from bottega.tasks.generation.media import ImageMedium, Medium, VideoMedium, read_fps
from bottega.tasks.generation.metadata import METADATA_FILE, GeneratorMetadata, read_generator_metadata
from bottega.tasks.generation.sampler import GenerationSampler
from bottega.tasks.generation.sampling_options import resolve_sampling_options
from bottega.tasks.generation.shape import build_shape, build_task
from bottega.tasks.generation.text_condition import TextCondition, open_text_condition, reopen_text_condition
from bottega.tasks.media_tables import MediaProcessor, MediaTables, prepare_quietly, to_mel_samples
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

GeneratorRecipe = ImageRecipe | AudioRecipe | VideoRecipe
Progress = Callable[[str, int, int], None]
ROUND_TRIP = "bottega.tasks.generation.{framework}:round_trip"


def open_workload(recipe: Recipe, *, progress: Progress) -> GenerationWorkload:
    """Prepare the data of a recipe, compute its latents if data.latents is set, and choose the model."""
    checked = _check_recipe(recipe)
    prepared, model = prepare_media(checked, progress=progress), checked.model
    code_tokenizer = resolve_code_tokenizer(checked) if model.backbone == "tokens" else None
    space = open_latent_space(checked, checked.task)
    text = open_text_condition(checked, prepared) if model.condition == "text" else None
    base_folder = find_base_folder(checked)
    medium = _open_medium(checked, prepared, space=space, code_tokenizer=code_tokenizer)
    metadata = _build_metadata(
        checked, prepared, medium, code_tokenizer=code_tokenizer, space=space, text=text, base_folder=base_folder
    )
    task = build_task(model, medium.key, metadata, code_tokenizer=code_tokenizer, text=text, base_folder=base_folder)
    # Invalid options raise now rather than hours later, when the first sample is drawn.
    resolve_sampling_options(checked, task, {}, prefix="samples.")
    tables = _build_media_tables(checked, medium, metadata, text)
    latents = _cache_latents(checked, prepared, medium, metadata, tables, progress)
    return GenerationWorkload(
        checked,
        medium,
        metadata,
        task,
        tables,
        code_tokenizer=code_tokenizer,
        text=text,
        prepared=prepared,
        latents=latents,
    )


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> GenerationWorkload:
    """Return the workload of a finished run, from its saved processor."""
    checked = _check_recipe(recipe)
    model = checked.model
    code_tokenizer = reopen_code_tokenizer(checked, processor) if model.backbone == "tokens" else None
    text = reopen_text_condition(checked, processor) if model.condition == "text" else None
    base_folder = find_base_folder(checked, processor_folder=processor)
    metadata = read_generator_metadata(processor)
    if metadata.latents is not None:
        metadata = metadata.model_copy(update={"latents": metadata.latents.relocate(checked, processor)})
    medium = _reopen_medium(checked, processor, metadata)
    task = build_task(model, medium.key, metadata, code_tokenizer=code_tokenizer, text=text, base_folder=base_folder)
    tables = _build_media_tables(checked, medium, metadata, text)
    return GenerationWorkload(
        checked,
        medium,
        metadata,
        task,
        tables,
        code_tokenizer=code_tokenizer,
        text=text,
        expected_fingerprint=fingerprint,
    )


@final
class GenerationWorkload(Workload):
    """A generator of one medium."""

    task: Any
    """`Generation`, or `CodeLanguage` over codes."""
    data: TableData
    processor: MediaProcessor
    sampler: GenerationSampler

    def __init__(
        self,
        recipe: GeneratorRecipe,
        medium: Medium,
        metadata: GeneratorMetadata,
        task: Any,
        tables: MediaTables,
        *,
        code_tokenizer: CodeTokenizer | None,
        text: TextCondition | None,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        latents: Mapping[str, Table] | None = None,
    ) -> None:
        """Take either prepared data, or the fingerprint that the data of a finished run must have.

        `latents` are precomputed latents by the name of the table that they were computed from.
        """
        self.recipe, self.medium, self.metadata, self.task = recipe, medium, metadata, task
        self.tables, self.code_tokenizer, self.text, self._latents = tables, code_tokenizer, text, latents or {}
        self.key, self.mel = medium.key, tables.mel
        self.unit = medium.unit
        if code_tokenizer is not None:
            self.metrics, self.unit = code_tokenizer.metrics, "codes"
        self.data = TableData(
            recipe,
            prepare=prepare_quietly,
            read_table=self._read_table,
            read_external=tables.read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=tables.collect_notes,
        )
        self.processor = MediaProcessor(
            metadata,
            read=self._read_saved_metadata,
            write_files=self._write_files,
            mel=tables.mel,
            has_files=self._has_needed_files,
        )
        self.sampler = GenerationSampler(
            recipe,
            task,
            medium,
            metadata,
            text=text,
            read_training_vectors=lambda count: _read_condition_vectors(recipe, self.data.prepared, count),
        )

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return collect_frozen_hashes(latents=self.metadata.latents, code_tokenizer=self.code_tokenizer, text=self.text)

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        if name not in self._latents:
            return self.tables.read(prepared, name, is_training=is_training)
        rows = self.tables.read_rows(prepared, name, is_training=is_training)
        return _add_captions(LatentRows(rows, self._latents[name]), rows, self.text)

    def read_raw(self, name: str) -> Source:
        """Return a table of the run as it was prepared (audio as waveforms), with captions if the run has any."""
        rows = self.tables.read_rows(self.data.prepared, name)
        return self.data.limit(name, _add_captions(rows, rows, self.text))

    def read_external_raw(self, external: ExternalData) -> Source:
        """Return other data in the form of `read_raw`."""
        rows = self.tables.read_external_rows(external)
        return _add_captions(rows, rows, self.text)

    def round_trip(self, models: Models, samples: np.ndarray, device: Any) -> np.ndarray:
        """Return real samples as a perfect model would generate them: through everything that loses information."""
        values = self.medium.to_values(samples)
        if self.metadata.latents is None:
            values = values.reshape(-1, *self.metadata.shape.sample)
        if self.task.latents is not None:
            encode_and_decode = resolve_reference(ROUND_TRIP, find_framework(models["model"]))
            values = encode_and_decode(self.task, models, values, device=device)
        return self.medium.from_values(values, device=device)

    def _read_saved_metadata(self, folder: Path) -> GeneratorMetadata:
        """Read the metadata of a saved processor, after checking that its frozen models are the same."""
        previous = read_generator_metadata(folder)
        if self.text is not None:
            self.text.check_saved(folder)
        if self.code_tokenizer is not None:
            self.code_tokenizer.check_saved(folder)
        latents = self.metadata.latents
        if latents is not None:
            latents.check_recorded(previous.latents)
            # The same autoencoder, whose folder may have been moved.
            previous = previous.model_copy(update={"latents": latents})
        return previous

    def _write_files(self, folder: Path) -> None:
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")
        if self.text is not None:
            self.text.save(folder)
        if self.code_tokenizer is not None:
            self.code_tokenizer.save(folder)
        if isinstance(self.medium, AudioMedium) and self.medium.vocoder is not None:
            self.medium.vocoder.save(folder / VOCODER_FOLDER)

    def _has_needed_files(self, folder: Path) -> bool:
        needs_vocoder = isinstance(self.medium, AudioMedium) and self.medium.vocoder is not None
        return not needs_vocoder or (folder / VOCODER_FOLDER).is_dir()

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        if self.code_tokenizer is None:
            from bottega.tasks.generation.export import export_generator

            return export_generator(self, models, folder)
        from bottega.tasks.generation.export_codes import export_code_generator  # imports torch

        return export_code_generator(self, models, folder)


def _check_recipe(recipe: Recipe) -> GeneratorRecipe:
    assert isinstance(recipe, GeneratorRecipe)
    if isinstance(recipe, ImageRecipe) and recipe.data.buckets is not None:
        raise UsageError("data.buckets: a generator needs images of one shape; remove it")
    if isinstance(recipe, VideoRecipe) and recipe.model.backbone == "unet":
        raise UsageError("model.backbone: unet is for images and mel spectrograms; use dit for video")
    return recipe


def _open_medium(
    recipe: GeneratorRecipe, prepared: PreparedData, *, space: LatentSpace | None, code_tokenizer: CodeTokenizer | None
) -> Medium:
    if isinstance(recipe, AudioRecipe):
        return open_audio(recipe, prepared, space=space, code_tokenizer=code_tokenizer)
    if isinstance(recipe, VideoRecipe):
        return VideoMedium(recipe, read_fps(recipe, prepared))
    return ImageMedium(recipe)


def _reopen_medium(recipe: GeneratorRecipe, processor: Path, metadata: GeneratorMetadata) -> Medium:
    if isinstance(recipe, AudioRecipe):
        return reopen_audio(recipe, processor)
    return VideoMedium(recipe, metadata.fps) if isinstance(recipe, VideoRecipe) else ImageMedium(recipe)


def _build_metadata(
    recipe: GeneratorRecipe,
    prepared: PreparedData,
    medium: Medium,
    *,
    code_tokenizer: CodeTokenizer | None,
    space: LatentSpace | None,
    text: TextCondition | None,
    base_folder: Path | None,
) -> GeneratorMetadata:
    """Return the shapes and classes of the prepared data; raise DataError if the recipe states different ones."""
    classes, num_classes = tuple(prepared.classes.names), recipe.model.num_classes
    if recipe.model.condition == "class" and num_classes is not None and len(classes) != num_classes:
        raise DataError(f"model.num_classes: {num_classes}, but the data has {len(classes)} classes; remove it")
    sides = medium.read_sides(prepared)
    latents = space.build_metadata(*sides) if space is not None else None
    shape = build_shape(
        recipe.model,
        space.compute_latent_sides(*sides) if space is not None else sides,
        medium.get_patch(),
        classes,
        condition_size=_read_condition_size(recipe, prepared),
        code_tokenizer=code_tokenizer,
        text=text,
        base_folder=base_folder,
    )
    fps = medium.fps if isinstance(medium, VideoMedium) else None
    return GeneratorMetadata(shape=shape, classes=classes, fps=fps, latents=latents)


def _read_condition_size(recipe: GeneratorRecipe, prepared: PreparedData) -> int:
    """Return the width of the condition vectors, or 0 if the condition is not a vector."""
    if recipe.model.condition != "vector":
        return 0
    size, expected = len(_read_condition_vectors(recipe, prepared, 1)[0]), recipe.model.condition_size
    if expected is not None and expected != size:
        raise DataError(f"model.condition_size: {expected}, but the vectors of the data have {size} numbers; remove it")
    return size


def _read_condition_vectors(recipe: GeneratorRecipe, prepared: PreparedData, count: int) -> list[list[float]]:
    """Return the condition vectors of the first `count` training samples, from the beginning again if there are fewer."""
    rows = open_media_source(recipe, prepared, prepared.training_tables[0], is_training=False)
    index = np.arange(count) % len(rows)
    vectors: list[list[float]] = rows.rows(index, np.zeros_like(index))["condition"].tolist()
    return vectors


def _build_media_tables(
    recipe: GeneratorRecipe, medium: Medium, metadata: GeneratorMetadata, text: TextCondition | None
) -> MediaTables:
    condition, mel = metadata.shape.condition, medium.mel if isinstance(medium, AudioMedium) else None

    def check_rows(rows: Any, where: str) -> None:
        if condition.kind == "vector" and rows.conditions.size != condition.size:
            raise DataError(
                f"{where} has vectors of {rows.conditions.size} numbers, but this run was trained on "
                f"vectors of {condition.size}"
            )

    return MediaTables(
        recipe,
        frame=metadata.sample[-3:],
        classes=Classes(metadata.classes),
        mel=mel,
        to_samples=lambda rows: _add_captions(to_mel_samples(rows, mel), rows, text),
        check_rows=check_rows,
    )


def _add_captions(samples: Source, rows: Any, text: TextCondition | None) -> Source:
    return samples if text is None else CaptionRows(samples, rows.table, text.caption_tokenizer)


def _cache_latents(
    recipe: GeneratorRecipe,
    prepared: PreparedData,
    medium: Medium,
    metadata: GeneratorMetadata,
    tables: MediaTables,
    progress: Progress,
) -> dict[str, Table]:
    """Compute the latents of the training and validation tables if data.latents is set."""
    if not recipe.data.latents or metadata.latents is None:
        return {}
    names = [name for name in prepared.tables if name != "test"]
    rows = {name: tables.read_rows(prepared, name, is_training=name not in ("validation", "test")) for name in names}
    samples = {name: (table_rows, to_mel_samples(table_rows, tables.mel)) for name, table_rows in rows.items()}
    return compute_latents(
        metadata.latents,
        metadata.shape.sample,
        samples,
        key=medium.key,
        framework=recipe.engine,
        device=recipe.device,
        progress=progress,
    )
