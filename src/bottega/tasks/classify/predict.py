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
KINDS = {"image": "images", "audio": "audio", "video": "video"}


def predict_texts(
    workload: TextClassifyWorkload, models: Models, new: NewSamples, *, device: Any
) -> list[dict[str, Any]]:
    texts = _texts(workload, new)
    if not any(text.strip() for text in texts):
        raise DataError("there is no text to classify; give some, a file with --data, or lines on standard input")
    chances = workload.predict(models, texts, device=device)
    cut, limit = workload.count_truncated(texts)
    if cut:
        print_notice(f"{cut:,} of {len(texts):,} texts are cut at {limit} tokens, which is what the run reads")
    names = workload.classes.names
    rows: list[dict[str, Any]] = []
    for text, row in zip(texts, chances.tolist(), strict=True):
        if not text.strip():
            rows.append({"text": text, "predicted": None, "probability": None, "probabilities": None})
        elif workload.recipe.data.multi_label:
            every = dict(zip(names, row, strict=True))
            chosen = [name for name, chance in every.items() if chance >= THRESHOLD]
            rows.append({"text": text, "predicted": chosen, "probability": every, "probabilities": every})
        else:
            rows.append({"text": text, **predict_class(names, row)})
    return rows


def _texts(workload: TextClassifyWorkload, new: NewSamples) -> Sequence[str]:
    if new.data is not None:
        return read_texts(new.data, workload.recipe.data.train)
    return new.inputs if new.inputs or new.standard_input is None else read_lines(new.standard_input)


def predict_media(
    workload: MediaClassifyWorkload, models: Models, new: NewSamples, *, device: Any
) -> list[dict[str, Any]]:
    medium = workload.recipe.data.input
    if not new.paths:
        raise UsageError(f"this run classifies {medium}; name files or folders of it: bottega predict RUN PATH")
    for path in filter(is_missing, new.paths):
        raise UsageError(f"{path} is not there; this run classifies {medium}: name files or folders")
    keys, chances = workload.predict(models, ExternalData(_media_source(new.paths, medium)), device=device)
    names = workload.classes.names
    return [{"file": key, **predict_class(names, row)} for key, row in zip(keys, chances.tolist(), strict=True)]


def _media_source(paths: list[str], medium: str) -> Source:
    """Paths as a source. Of folders only the files of the medium are taken, whatever else lies there."""
    source = Source.model_validate({"path": paths})
    if not any(Path(path).expanduser().is_dir() for path in paths):
        return source
    try:
        chosen = Source.model_validate({"path": paths, "kind": KINDS[medium]})
        find_files(chosen)
    except DataError:
        return source  # archives, tables or arrays
    return chosen
