"""Replay: options and conflicts."""

from __future__ import annotations

from pydantic import Field

from bottega.config.section import Positive, Probability, Section
from bottega.config.technique_spec import KeyConflict, TechniqueSpec


class ReplayOptions(Section):
    """A fraction of each batch comes from earlier sources."""

    share: Probability = Field(0.2, gt=0, lt=1, description="fraction of each batch after the first source")
    memory: Positive | None = Field(None, description="examples of each earlier source to store; null is all")


SPEC = TechniqueSpec(
    name="replay",
    options=ReplayOptions,
    apply="bottega.techniques.replay.apply:apply",
    key_conflicts=(
        KeyConflict(
            "data.online",
            "the technique replay is for sequences; in a stream set data.online.replay, such as 0.2, instead",
        ),
    ),
    is_sequential=True,
    needs_sources=True,
    jax_values={},
)
