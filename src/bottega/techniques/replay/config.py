"""Replay: options and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bottega.config.recipe import Recipe
from bottega.config.section import Positive, Probability, Section
from bottega.config.technique_spec import Clash, TechniqueSpec
from bottega.config.together import clashes_of_sequences


class ReplayOptions(Section):
    """A part of each batch comes from earlier sources."""

    share: Probability = Field(0.2, gt=0, lt=1, description="of each batch, once there is something earlier")
    memory: Positive | None = Field(None, description="examples kept of each earlier source; null is all")


def clashes(recipe: Recipe, names: list[str]) -> Iterator[Clash]:
    in_stream = "replay is of a sequence of sources; in a stream (data.online) say data.online.replay: 0.2"
    return clashes_of_sequences(recipe, names, "replay", in_stream=in_stream)


SPEC = TechniqueSpec(
    name="replay",
    options=ReplayOptions,
    apply="bottega.techniques.replay.apply:apply",
    clashes=clashes,
    is_in_turn=True,
    needs_sources=True,
)
