"""Open a personalised run for an evaluation: its records, keyword prediction, image generation and CLIP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.analysis.personalize_evaluation import PersonalizedGenerator, ProgressCallback
from bottega.analysis.personalize_random_keywords import generate_random_keywords, is_small_model
from bottega.core.errors import UsageError
from bottega.run.saved import SavedRun
from bottega.tasks.personalize.arms import generate_arm
from bottega.tasks.personalize.data.condition_tokens import PromptedRows
from bottega.tasks.personalize.data.records import PersonalRows, Record
from bottega.tasks.personalize.workload import PersonalizeWorkload

if TYPE_CHECKING:
    from bottega.data.sources.source import Source


@contextmanager
def open_personalized_generator(
    saved: SavedRun, source: Source, *, uses_own_data: bool, seed: int = 0
) -> Iterator[PersonalizedGenerator]:
    """Open a run to generate images for the users of `source`; set `uses_own_data` if it is the data of the run itself."""
    workload, device = saved.workload, saved.engine.device
    assert isinstance(workload, PersonalizeWorkload)
    table = find_personal_rows(source)
    tables = [workload.personal_rows(name) for name in workload.data.prepared.tables] if uses_own_data else [table]
    with saved.engine.sampling() as models:

        def predict_keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return [answer.preference for answer in workload.generate_keywords(records, models)]

        def generate(arm: str, records: Sequence[Record], report_progress: ProgressCallback) -> np.ndarray:
            options: dict[str, Any] = {"device": device, "seed": seed, "progress": report_progress}
            options |= {"arm": "both", "pick": True} if arm == "picked" else {"arm": arm}
            return generate_arm(workload, models, records, **options)[0]

        def predict_random_keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return generate_random_keywords(workload, records, seed=seed)

        clip_scorer, folder = (
            workload.image_sampler.load_clip_scorer(device),
            Path(workload.metadata.language_model.folder),
        )
        control = predict_random_keywords if is_small_model(folder) else None  # skipped for large models
        yield PersonalizedGenerator(
            table,
            tables,
            predict_keywords,
            generate,
            clip_scorer=clip_scorer,
            device=device,
            predict_random_keywords=control,
        )


def find_personal_rows(source: Any) -> PersonalRows:
    """Return the table of users within `source`; raise UsageError if it combines several tables."""
    while not isinstance(source, PersonalRows):
        if isinstance(source, PromptedRows):
            source = source.personal_rows
        elif hasattr(source, "source"):
            raise UsageError("--data: users of several sources cannot be evaluated together; give a single source")
        else:
            raise AssertionError(f"{type(source).__name__} does not contain a table of users")
    return source
