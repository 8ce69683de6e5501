"""Replay: options and conflicts."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bottega.config.conflicts import find_sequence_conflicts
from bottega.config.recipe import Recipe
from bottega.config.section import Positive, Probability, Section
from bottega.config.technique_spec import Conflict, TechniqueSpec


class ReplayOptions(Section):
    """A fraction of each batch comes from earlier sources."""

    share: Probability = Field(0.2, gt=0, lt=1, description="fraction of each batch after the first source")
    memory: Positive | None = Field(None, description="examples stored of each earlier source; null is all")


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    in_stream = "replay is of a sequence of sources; in a stream (data.online) say data.online.replay: 0.2"
    return find_sequence_conflicts(recipe, names, "replay", in_stream=in_stream)


SPEC = TechniqueSpec(
    name="replay",
    options=ReplayOptions,
    apply="bottega.techniques.replay.apply:apply",
    find_conflicts=clashes,
    is_sequential=True,
    needs_sources=True,
)
