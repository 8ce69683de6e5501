"""Elastic weight consolidation: options and conflicts."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bottega.config.conflicts import find_sequence_conflicts
from bottega.config.recipe import Recipe
from bottega.config.section import Number, Positive, Probability, Section
from bottega.config.technique_spec import Conflict, TechniqueSpec


class EwcOptions(Section):
    """Penalises changes of weights that are important for earlier sources (Kirkpatrick et al., 2017)."""

    strength: Number = Field(1000.0, ge=0, description="weight of the penalty on changes of important weights")
    samples: Positive = Field(256, description="examples of a source that the importance is estimated from")
    decay: Probability = Field(1.0, description="decay of the importance of earlier sources; 1 keeps all of it")


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
