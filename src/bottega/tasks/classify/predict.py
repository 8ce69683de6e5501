"""Predictions of a classifier for new texts, images, audio and video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.formats import find_files
from bottega.data.sources.external import ExternalData
from bottega.tasks.prediction import NewSamples, is_missing, predict_class, read_lines, read_texts
from bottega.terminal import print_notice

if TYPE_CHECKING:
    from bottega.tasks.classify.media_workload import MediaClassifyWorkload
    from bottega.tasks.classify.text_workload import TextClassifyWorkload

THRESHOLD = 0.5
"""Multi-label: the probability from which a label is predicted."""
SOURCE_KINDS = {"image": "images", "audio": "audio", "video": "video"}


def predict_texts(
    workload: TextClassifyWorkload, models: Models, new_samples: NewSamples, *, device: Any
) -> list[dict[str, Any]]:
    """Return the predicted class or classes of each text; an empty text has none."""
    texts = _read_texts(workload, new_samples)
    if not any(text.strip() for text in texts):
        raise DataError("there is no text to classify; give texts, a file with --data, or lines on standard input")
    probabilities = workload.predict(models, texts, device=device)
    num_truncated, limit = workload.count_truncated(texts)
    if num_truncated:
        print_notice(
            f"{num_truncated:,} of {len(texts):,} texts are truncated to {limit} tokens, the maximum of this run"
        )
    names = workload.classes.names
    predictions: list[dict[str, Any]] = []
    for text, text_probabilities in zip(texts, probabilities.tolist(), strict=True):
        if not text.strip():
            predictions.append({"text": text, "predicted": None, "probability": None, "probabilities": None})
        elif workload.recipe.data.multi_label:
            by_name = dict(zip(names, text_probabilities, strict=True))
            predicted = [name for name, probability in by_name.items() if probability >= THRESHOLD]
            predictions.append({"text": text, "predicted": predicted, "probability": by_name, "probabilities": by_name})
        else:
            predictions.append({"text": text, **predict_class(names, text_probabilities)})
    return predictions


def _read_texts(workload: TextClassifyWorkload, new_samples: NewSamples) -> Sequence[str]:
    if new_samples.data is not None:
        return read_texts(new_samples.data, workload.recipe.data.train)
    return (
        new_samples.inputs
        if new_samples.inputs or new_samples.standard_input is None
        else read_lines(new_samples.standard_input)
    )


def predict_media(
    workload: MediaClassifyWorkload, models: Models, new_samples: NewSamples, *, device: Any
) -> list[dict[str, Any]]:
    """Return the predicted class of each image, audio clip or video in files and folders."""
    medium = workload.recipe.data.input
    if not new_samples.paths:
        raise UsageError(f"this run classifies {medium}; give files or folders: bottega predict RUN PATH")
    for path in filter(is_missing, new_samples.paths):
        raise UsageError(f"{path} does not exist; this run classifies {medium}: give files or folders")
    keys, probabilities = workload.predict(
        models, ExternalData(_build_media_source(new_samples.paths, medium)), device=device
    )
    names = workload.classes.names
    return [{"file": key, **predict_class(names, row)} for key, row in zip(keys, probabilities.tolist(), strict=True)]


def _build_media_source(paths: list[str], medium: str) -> Source:
    """Return the paths as a source; in folders, only files of the medium are read."""
    source = Source.model_validate({"path": paths})
    if not any(Path(path).expanduser().is_dir() for path in paths):
        return source
    try:
        media_only = Source.model_validate({"path": paths, "kind": SOURCE_KINDS[medium]})
        find_files(media_only)
    except DataError:
        return source  # archives, tables or arrays
    return media_only
