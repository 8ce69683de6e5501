"""Elastic weight consolidation: options and conflicts."""

from __future__ import annotations

from pydantic import Field

from bottega.config.section import Number, Positive, Probability, Section
from bottega.config.technique_spec import KeyConflict, TechniqueSpec


class EwcOptions(Section):
    """Penalises changes of weights that are important for earlier sources (Kirkpatrick et al., 2017)."""

    strength: Number = Field(1000.0, ge=0, description="weight of the penalty on changes of important weights")
    samples: Positive = Field(256, description="examples of a source that the importance is estimated from")
    decay: Probability = Field(1.0, description="decay of the importance of earlier sources; 1 keeps all of it")


SPEC = TechniqueSpec(
    name="ewc",
    options=EwcOptions,
    apply="bottega.techniques.ewc.apply:apply",
    key_conflicts=(
        KeyConflict(
            "data.online",
            "ewc anchors the weights at the end of each source, and the sources of a stream have no end; keep one",
        ),
    ),
    is_sequential=True,
    needs_sources=True,
    jax_values={},
)
