"""The data of a personal recipe. Captions that are missing are made by a model; only then is a framework loaded."""

from __future__ import annotations

from pathlib import Path

from bottega.data.prepare.jobs import Progress
from bottega.data.prepare.prepared import Prepared
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.item_captions import Describe
from bottega.tasks.personalize.data.tables import prepare_personal


def prepare_people(
    data: PersonalizeData, *, progress: Progress = lambda stage, done, total: None, cache: Path | None = None
) -> Prepared:
    """Records and pictures, from the cache or made now."""
    return prepare_personal(data, progress=progress, cache=cache, captioner=_captioner)


def _captioner(folder: Path) -> Describe:
    from bottega.models.frozen.captioner import load_captioner

    return load_captioner(folder)
