"""Sizes and decay rates of a hierarchical memory, without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from bottega.config.section import Number, Positive, Rate, Section


class MemoryShape(BaseModel):
    """Sizes of the tensors of a memory, and how fast its items decay.

    A tick is one unit of the clock that the caller passes, such as a training step or a segment of a stream.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key_size: int = Field(gt=0)
    value_size: int = Field(gt=0)
    working_slots: int = Field(default=16, gt=0)
    working_decay: float = Field(default=0.9, gt=0, le=1, description="strength is multiplied by this at each tick")
    working_floor: float = Field(default=0.05, ge=0, description="weaker items are forgotten")
    episodic_slots: int = Field(default=256, gt=0)
    episodic_decay: float = Field(
        default=0.999, gt=0, le=1, description="importance and uses are multiplied by this at each tick"
    )
    semantic_slots: int = Field(default=64, gt=0)
    promote_after: float = Field(
        default=3,
        gt=0,
        description="an episode becomes a prototype once it was stored and retrieved this often in total",
    )
    same: float = Field(
        default=0.95, gt=0, le=1, description="keys, and values, with at least this cosine are the same"
    )

    @property
    def slots(self) -> int:
        """Number of slots of all levels."""
        return self.working_slots + self.episodic_slots + self.semantic_slots


class WorkingMemory(Section):
    """Working memory that a stream carries from segment to segment."""

    working_slots: Positive = Field(32, description="largest number of remembered items")
    working_decay: Number = Field(
        0.99, gt=0, le=1, description="the strength of each item is multiplied by this at each segment"
    )
    working_floor: Number = Field(0.0, ge=0, description="weaker items are forgotten")
    temperature: Rate = Field(0.1, description="initial softmax temperature of a read; it is trained")
