"""The workload of image, audio and video classifiers, with a convolutional or a spiking network.

A trained classifier also evaluates generated samples: see `MediaClassifyWorkload.predict_with_features`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import TypeAdapter

from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Batch, Models, Rows
from bottega.data.audio.mel import MelProcessor
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.samples import fit_mel_processor, load_image_encoder
from bottega.data.tables.classes import Classes, read_text_column
from bottega.data.text.labelled import describe_rare_classes, encode_labels, find_training_classes
from bottega.models.convnet.config import ConvNetShape
from bottega.models.folders.weights_file import save_weights
from bottega.models.spiking.config import SpikingNetShape, SpikingShape
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.classify import text_workload as text_classify
from bottega.tasks.classify.config import (
    SPIKING_KEYS,
    AudioClassifyRecipe,
    ClassifyRecipe,
    ImageClassifier,
    ImageClassifyRecipe,
    VideoClassifyRecipe,
)
from bottega.tasks.classify.objective import Objective, includes_unseen_classes
from bottega.tasks.classify.predict import predict_media
from bottega.tasks.classify.prediction_tables import build_prediction_tables
from bottega.tasks.classify.task import Classification
from bottega.tasks.media_tables import MediaProcessor, MediaTables, build_media_data
from bottega.tasks.metadata import read_metadata
from bottega.tasks.sampler import NoSampler, Sampler
from bottega.tasks.workload import Predictor, Workload, choose_headline_metrics

CLASSES_FILE, SHAPE_FILE, CONFIG_FILE = "classes.json", "shape.json", "config.json"
MODEL_TYPE, SPIKING_TYPE = "bottega-convnet", "bottega-spiking"
MediaRecipe = ImageClassifyRecipe | AudioClassifyRecipe | VideoClassifyRecipe
Shape = ConvNetShape | SpikingNetShape
SHAPE_ADAPTER: TypeAdapter[Shape] = TypeAdapter(Shape)


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> Workload:
    """Prepare the data of a classifier of any medium and open its workload."""
    if isinstance(recipe, ClassifyRecipe):
        return text_classify.open_workload(recipe, progress=progress)
    checked = _check_recipe(recipe)
    prepared = prepare_media(checked, progress=progress)
    classes = Classes(prepared.classes.names)
    if len(classes) < 2:
        description = f"only the class {classes.names[0]}" if len(classes) else "no classes"
        raise DataError(
            f"data.train has {description}; a classifier needs two or more; set data.condition_field to the field with the classes"
        )
    classes = find_training_classes(prepared, include_held_out=includes_unseen_classes(checked))
    mel = fit_mel_processor(checked, prepared) if isinstance(checked, AudioClassifyRecipe) else None

    def read_labels() -> np.ndarray:
        return np.concatenate([encode_labels(prepared.table(name), classes) for name in prepared.training_tables])

    objective = Objective.from_options(checked.loss, read_labels, classes.names)
    shape = _resolve_shape(checked, prepared, len(classes), mel)
    return MediaClassifyWorkload(checked, shape, classes, mel, objective, prepared=prepared)


def reopen_workload(recipe: Recipe, processor_folder: Path, fingerprint: str) -> Workload:
    """Open the workload of a finished run from the folder of its saved processor."""
    if isinstance(recipe, ClassifyRecipe):
        return text_classify.reopen_workload(recipe, processor_folder, fingerprint)
    checked = _check_recipe(recipe)
    mel = MelProcessor.load(processor_folder) if isinstance(checked, AudioClassifyRecipe) else None
    objective = Objective.load(checked.loss, processor_folder)
    shape, classes = _read_shape(processor_folder), _read_classes(processor_folder)
    return MediaClassifyWorkload(
        checked, shape, classes, mel, objective, expected_fingerprint=fingerprint, processor_folder=processor_folder
    )


def _check_recipe(recipe: Recipe) -> MediaRecipe:
    assert isinstance(recipe, MediaRecipe)
    if not isinstance(recipe, AudioClassifyRecipe) and recipe.data.buckets is not None:
        raise UsageError("data.buckets: a classifier reads images of one size; remove it")
    return recipe


@final
class MediaClassifyWorkload(Workload):
    """A classifier of images, audio or video."""

    def __init__(
        self,
        recipe: MediaRecipe,
        shape: Shape,
        classes: Classes,
        mel: MelProcessor | None,
        objective: Objective,
        *,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        processor_folder: Path | None = None,
    ) -> None:
        """Open with `prepared` data, or reopen from a finished run's `processor_folder` and its data fingerprint."""
        self.recipe = recipe
        self.shape, self.classes, self.mel, self.objective = shape, classes, mel, objective
        self.batch_key: Literal["image", "mel", "video"] = "mel" if recipe.data.input == "audio" else recipe.data.input
        base_folder = find_base_folder(recipe, processor_folder=processor_folder)
        self.task: Classification = Classification(
            key=self.batch_key,
            shape=shape,
            label_smoothing=recipe.training.label_smoothing,
            **objective.task_fields,
            **_get_firing_rate_fields(recipe),
            pretrained=str(_check_base_model(base_folder, shape)) if base_folder is not None else None,
        )
        self.metrics = (*text_classify.SINGLE_LABEL_METRICS, *(("objective",) if self.task.has_modified_loss else ()))
        if isinstance(shape, SpikingNetShape):
            self.metrics += (
                "firing_rate",
                "dead",
                "saturated",
                *(("firing",) if self.task.has_firing_rate_target else ()),
            )

        self.tables = MediaTables(recipe, frame=(*shape.grid[-2:], shape.channels), classes=classes, mel=mel)
        self.data = build_media_data(
            self.tables,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=lambda prepared: describe_rare_classes(prepared, classes),
        )
        self.processor = MediaProcessor(
            (shape, classes),
            read=lambda folder: (_read_shape(folder), _read_classes(folder)),
            write_files=self._write_files,
            mel=mel,
        )
        self.sampler: Sampler = NoSampler(recipe)
        if isinstance(shape, SpikingNetShape):
            from bottega.tasks.classify.spike_sampler import SpikeSampler

            self.sampler = SpikeSampler(recipe, classes, self.data)
        self.predictor = Predictor("files", partial(predict_media, self))

    @property
    def headline(self) -> tuple[str, ...] | None:
        is_spiking = isinstance(self.shape, SpikingNetShape)
        return choose_headline_metrics(self.recipe, "loss", "accuracy", "firing_rate", "dead") if is_spiking else None

    def _write_files(self, folder: Path) -> None:
        (folder / CLASSES_FILE).write_text(json.dumps(self.classes.names, indent=1) + "\n")
        (folder / SHAPE_FILE).write_text(self.shape.model_dump_json(indent=1) + "\n")
        self.objective.save(folder)

    def predict_with_features(
        self, models: Models, samples: np.ndarray, *, device: Any, batch_size: int = 256
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the class probabilities, (n, classes), and the features of the last hidden layer, (n, features).

        Images (n, height, width, channels) and videos (n, frames, height, width, channels) are floats in the range of
        `data.normalise`; audio is (n, samples) at the sample rate of this run.
        """
        rank = 2 if self.mel is not None else len(self.shape.grid) + 2
        expected = (*self.shape.grid, self.shape.channels)
        if samples.ndim != rank or (self.mel is None and samples.shape[1:] != expected):
            expected_shape = "(n, samples)" if self.mel is not None else str(("n", *expected)).replace("'", "")
            raise UsageError(f"expected {self.recipe.data.input} of shape {expected_shape}; got {samples.shape}")
        probabilities, features = [], []
        for start in range(0, len(samples), batch_size):
            chunk = samples[start : start + batch_size]
            x = np.ascontiguousarray(chunk if self.mel is None else self.mel.encode(chunk), np.float32)
            outputs = self.task.predict_with_features(models, x, device=device)
            probabilities.append(outputs[0])
            features.append(outputs[1])
        empty = np.zeros((0, self.shape.num_labels), np.float32), np.zeros((0, self.shape.num_features), np.float32)
        return np.concatenate([empty[0], *probabilities]), np.concatenate([empty[1], *features])

    def predict(
        self, models: Models, external: ExternalData, *, device: Any, batch_size: int = 64
    ) -> tuple[list[str], np.ndarray]:
        """Return the names of external samples, which need no label, and their class probabilities, float32 (n, classes)."""
        rows = self.tables.read_unlabelled_rows(external)
        source = self.tables.convert_rows(rows)
        probabilities = [np.zeros((0, len(self.classes)), np.float32)]
        for start in range(0, len(source), batch_size):
            index = np.arange(start, min(start + batch_size, len(source)))
            batch: Batch = {self.batch_key: source.rows(index, np.zeros_like(index))[self.batch_key]}
            probabilities.append(self.task.predict_probabilities(models, batch, device=device))
        return read_text_column(rows.table, "key"), np.concatenate(probabilities)

    def build_evaluation_tables(self, rows: Rows) -> dict[str, Any]:
        return build_prediction_tables(rows, tuple(self.classes.names))

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write model.safetensors and a config.json that describes the network in full, since no other library has it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": SPIKING_TYPE if isinstance(self.shape, SpikingNetShape) else MODEL_TYPE,
            "input": self.recipe.data.input,
            "shape": self.shape.model_dump(),
            "classes": self.classes.names,
            "normalise": self.recipe.data.normalise,
            "mel": self.mel.model_dump() if self.mel is not None else None,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
        save_weights(models["model"], folder / "model.safetensors")
        return {"library_name": "bottega", "pipeline_tag": f"{self.recipe.data.input}-classification"}


def _resolve_shape(recipe: MediaRecipe, prepared: PreparedData, num_labels: int, mel: MelProcessor | None) -> Shape:
    if mel is not None:
        *grid, channels = mel.shape
    elif isinstance(recipe, VideoClassifyRecipe):
        height, width, channels = prepared.table(prepared.training_tables[0]).columns["video"].shape
        grid = [recipe.data.num_frames, height, width]
    else:
        *grid, channels = load_image_encoder(prepared).bucket_shape(0)
    model = recipe.model
    dropout = {"dropout": model.dropout} if model.dropout is not None else {}
    sizes: dict[str, Any] = {"hidden_size": model.hidden_size, "num_layers": model.num_layers, **dropout}
    sizes |= {"grid": tuple(grid), "channels": channels, "num_labels": num_labels}
    if not isinstance(model, ImageClassifier) or model.kind != "spiking":
        return ConvNetShape(**sizes)
    options = {key: value for key in SPIKING_KEYS if (value := getattr(model, key)) is not None}
    threshold = {"threshold": options.pop("spike_threshold")} if "spike_threshold" in options else {}
    neuron = SpikingShape(**{key: options[key] for key in SpikingShape.model_fields if key in options}, **threshold)
    coding = {"coding": model.coding} if model.coding is not None else {}
    lowest = -1.0 if recipe.data.normalise == "symmetric" else 0.0
    return SpikingNetShape(**sizes, **coding, lowest=lowest, neuron=neuron)


def _get_firing_rate_fields(recipe: MediaRecipe) -> dict[str, float]:
    """Return the fields of a `Classification` that set the target firing rate."""
    keys = ("firing_rate", "firing_rate_weight")
    return {key: value for key in keys if (value := getattr(recipe.model, key, None)) is not None}


def _check_base_model(folder: Path, shape: Shape) -> Path:
    """Return the folder of the weights to start from; raise UsageError if its network differs from `shape`."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        base = SHAPE_ADAPTER.validate_python(config["shape"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"model.from: {folder} is not an exported classifier of images, audio or video; give one, or remove it"
        ) from None
    if type(base) is not type(shape):
        kind = "spiking" if isinstance(base, SpikingNetShape) else "convnet"
        raise UsageError(f"model.from: {folder} has a {kind} network; set model.kind={kind}, or give another folder")
    for key in ("hidden_size", "num_layers", "num_labels", "channels", "grid"):
        needed, actual = getattr(shape, key), getattr(base, key)
        if needed != actual:
            raise UsageError(
                f"model.from: {folder} has {key} {actual}, but this run needs {needed}; give another folder"
            )
    return folder


def _read_shape(processor_folder: Path) -> Shape:
    return read_metadata(processor_folder / SHAPE_FILE, SHAPE_ADAPTER.validate_json)


def _read_classes(processor_folder: Path) -> Classes:
    return read_metadata(processor_folder / CLASSES_FILE, lambda raw: Classes(tuple(map(str, json.loads(raw)))))
