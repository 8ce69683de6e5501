"""Elastic weight consolidation: options and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bottega.config.conflicts import find_sequence_conflicts
from bottega.config.recipe import Recipe
from bottega.config.section import Number, Positive, Probability, Section
from bottega.config.technique_spec import Conflict, TechniqueSpec


class EwcOptions(Section):
    """Weights that mattered for earlier sources are held where they were (Kirkpatrick et al., 2017)."""

    strength: Number = Field(1000.0, ge=0, description="of the pull back to the old weights")
    samples: Positive = Field(256, description="examples of a source that tell how much each weight mattered")
    decay: Probability = Field(1.0, description="of what was known of still earlier sources; 1 forgets none")


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Conflict]:
    in_stream = (
        "ewc holds weights at the end of each source, and a stream (data.online) has no end of one; leave one out"
    )
    return find_sequence_conflicts(recipe, names, "ewc", in_stream=in_stream)


SPEC = TechniqueSpec(
    name="ewc",
    options=EwcOptions,
    apply="bottega.techniques.ewc.apply:apply",
    find_conflicts=clashes,
    is_sequential=True,
    needs_sources=True,
)
