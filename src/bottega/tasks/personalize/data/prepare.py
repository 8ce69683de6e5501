"""Preparation of user records; if captions are missing, the captioning model of data.captions is loaded."""

from __future__ import annotations

from pathlib import Path

from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparedData
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.item_captions import Captioner
from bottega.tasks.personalize.data.tables import prepare_personal


def prepare_people(
    data: PersonalizeData, *, progress: ProgressCallback = lambda stage, done, total: None, cache: Path | None = None
) -> PreparedData:
    """Return tables of records and images, as `prepare_personal` does, with captioning models loaded by torch."""
    return prepare_personal(data, progress=progress, cache=cache, load_captioner=_load_captioner)


def _load_captioner(folder: Path) -> Captioner:
    from bottega.models.frozen.captioner import load_captioner

    return load_captioner(folder)
