"""The data of a personal recipe. Captions that are missing are made by a model; only then is a framework loaded."""

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
    """Records and pictures, from the cache or made now."""
    return prepare_personal(data, progress=progress, cache=cache, captioner=_captioner)


def _captioner(folder: Path) -> Captioner:
    from bottega.models.frozen.captioner import load_captioner

    return load_captioner(folder)
