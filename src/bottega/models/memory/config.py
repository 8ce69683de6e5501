"""The bounds and the pace of a hierarchical memory; no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from bottega.config.section import Number, Positive, Rate, Section


class MemoryShape(BaseModel):
    """All that decides the tensors of a memory and what becomes of what it holds. A tick is one unit of the clock that the
    caller passes: a step of a training, a segment of a stream."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key_size: int = Field(gt=0)
    value_size: int = Field(gt=0)
    working_slots: int = Field(default=16, gt=0)
    working_decay: float = Field(default=0.9, gt=0, le=1, description="strength is multiplied by this at each tick")
    working_floor: float = Field(default=0.05, ge=0, description="what is weaker is forgotten")
    episodic_slots: int = Field(default=256, gt=0)
    episodic_decay: float = Field(default=0.999, gt=0, le=1, description="what a tick leaves of importance and of uses")
    semantic_slots: int = Field(default=64, gt=0)
    promote_after: float = Field(
        default=3, gt=0, description="an episode moves to the prototypes when said and used so often, together"
    )
    same: float = Field(
        default=0.95, gt=0, le=1, description="keys, and values, of this cosine or more are the same one"
    )

    @property
    def slots(self) -> int:
        """Of all levels."""
        return self.working_slots + self.episodic_slots + self.semantic_slots


class WorkingMemory(Section):
    """What a stream carries from segment to segment."""

    working_slots: Positive = Field(32, description="how many things are remembered at most")
    working_decay: Number = Field(0.99, gt=0, le=1, description="a segment leaves so much of the strength of each")
    working_floor: Number = Field(0.0, ge=0, description="what is weaker is forgotten")
    temperature: Rate = Field(0.1, description="how soft a read is at the start; it is learnt")
