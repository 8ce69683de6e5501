"""A personalised run opened for an evaluation over people: its tables, its words, its generator and its judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.analysis.personal import Say, Studio
from bottega.analysis.personal_keywords import is_small, keywords_at_random
from bottega.core.errors import UsageError
from bottega.run.saved import SavedRun
from bottega.tasks.personalize.arms import draw_arm
from bottega.tasks.personalize.branch import PersonalizeBranch
from bottega.tasks.personalize.data.prompted import PromptedRows
from bottega.tasks.personalize.data.records import PersonalRows, Record

if TYPE_CHECKING:
    from bottega.data.sources.source import Source


@contextmanager
def studio_of(saved: SavedRun, source: Source, *, is_own: bool, seed: int = 0) -> Iterator[Studio]:
    """`source` is whom to draw for, as their loss was measured; `is_own` says that they are of the run's own data."""
    branch, device = saved.branch, saved.engine.device
    assert isinstance(branch, PersonalizeBranch)
    table = people_in(source)
    tables = [branch.people(name) for name in branch.prepared.tables] if is_own else [table]
    with saved.engine.sampling() as models:

        def keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return [said.preference for said in branch.keywords(records, models)]

        def draw(arm: str, records: Sequence[Record], say: Say) -> np.ndarray:
            how: dict[str, Any] = {"device": device, "seed": seed, "say": say}
            how |= {"arm": "both", "pick": True} if arm == "picked" else {"arm": arm}
            return draw_arm(branch, models, records, **how)[0]

        def at_random(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return keywords_at_random(branch, records, seed=seed)

        judge, folder = branch.artist.judge(device), Path(branch.facts.language_model.folder)
        extra = at_random if is_small(folder) else None
        yield Studio(table, tables, keywords, draw, judge=judge, device=device, at_random=extra)


def people_in(source: Any) -> PersonalRows:
    """However the people are wrapped."""
    while not isinstance(source, PersonalRows):
        if isinstance(source, PromptedRows):
            source = source.people
        elif hasattr(source, "source"):
            raise UsageError("--data: several sources of people are measured one at a time; give one of them")
        else:
            raise AssertionError(f"{type(source).__name__} holds no people")
    return source
