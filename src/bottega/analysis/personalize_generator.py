"""A personalised run opened for an evaluation over people: its tables, its words, its generator and its judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.analysis.personalize_evaluation import PersonalizedGenerator, ProgressCallback
from bottega.analysis.personalize_random_keywords import is_small_model, random_model_keywords
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
    saved: SavedRun, source: Source, *, is_own: bool, seed: int = 0
) -> Iterator[PersonalizedGenerator]:
    """`source` is whom to draw for, as their loss was measured; `is_own` says that they are of the run's own data."""
    workload, device = saved.workload, saved.engine.device
    assert isinstance(workload, PersonalizeWorkload)
    table = find_personal_rows(source)
    tables = [workload.personal_rows(name) for name in workload.data.prepared.tables] if is_own else [table]
    with saved.engine.sampling() as models:

        def keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return [said.preference for said in workload.keywords(records, models)]

        def draw(arm: str, records: Sequence[Record], say: ProgressCallback) -> np.ndarray:
            how: dict[str, Any] = {"device": device, "seed": seed, "progress": say}
            how |= {"arm": "both", "pick": True} if arm == "picked" else {"arm": arm}
            return generate_arm(workload, models, records, **how)[0]

        def at_random(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return random_model_keywords(workload, records, seed=seed)

        judge, folder = workload.image_sampler.load_judge(device), Path(workload.metadata.language_model.folder)
        extra = at_random if is_small_model(folder) else None
        yield PersonalizedGenerator(table, tables, keywords, draw, judge=judge, device=device, random_keywords=extra)


def find_personal_rows(source: Any) -> PersonalRows:
    """However the people are wrapped."""
    while not isinstance(source, PersonalRows):
        if isinstance(source, PromptedRows):
            source = source.people
        elif hasattr(source, "source"):
            raise UsageError("--data: several sources of people are measured one at a time; give one of them")
        else:
            raise AssertionError(f"{type(source).__name__} holds no people")
    return source
