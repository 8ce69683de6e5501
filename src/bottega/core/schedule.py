"""Learning-rate schedules: a multiplier of the peak rate, between 0 and 1, as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Rate = Callable[[int], float]


@dataclass(frozen=True)
class Schedule:
    """The schedule `name` over `total` steps after a linear warm-up of `warmup` steps, never below `floor` after it.

    Steps count from 0; step `warmup - 1` is the first at the peak. `plateau` is constant here: its factor depends on
    evaluations and is stored in the progress. `cycle` is in steps; `wsd` decays in the last `decay_fraction` of all steps.
    """

    name: str
    total: int
    warmup: int = 0
    floor: float = 0.0
    cycle: int | None = None
    power: float = 1.0
    gamma: float = 0.1
    decay_fraction: float = 0.2

    def __call__(self, step: int) -> float:
        if self.name == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup:
            return (step + 1) / self.warmup
        shape = SHAPES[self.name]
        return self.floor + (1.0 - self.floor) * shape(self, step - self.warmup)

    @property
    def span(self) -> int:
        """Steps after the warm-up, at least 1."""
        return max(1, self.total - self.warmup)

    def _one_cycle(self, step: int) -> float:
        # Smith's policy: from 1/25 up to the peak over the warm-up (default 30 %), then down to the floor, both by cosine.
        warmup = self.warmup or max(1, round(0.3 * self.total))
        if step < warmup:
            return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * (step + 1) / warmup))
        fraction = min(1.0, (step - warmup) / max(1, self.total - warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * fraction))


def _cosine(s: Schedule, elapsed: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed / s.span)))


def _cosine_with_restarts(s: Schedule, elapsed: int) -> float:
    length = s.cycle or s.span
    return 0.5 * (1 + math.cos(math.pi * (elapsed % length) / length))


def _warmup_stable_decay(s: Schedule, elapsed: int) -> float:
    num_decay_steps = max(1, round(s.decay_fraction * s.total))
    return min(1.0, max(0.0, (s.span - elapsed) / num_decay_steps))


SHAPES: dict[str, Callable[[Schedule, int], float]] = {  # `elapsed`: steps since the warm-up
    "constant": lambda s, elapsed: 1.0,
    "plateau": lambda s, elapsed: 1.0,
    "linear": lambda s, elapsed: max(0.0, 1 - elapsed / s.span),
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": lambda s, elapsed: max(0.0, 1 - elapsed / s.span) ** s.power,
    "exponential": lambda s, elapsed: s.gamma ** (elapsed / s.span),
    "inverse_sqrt": lambda s, elapsed: math.sqrt(max(1, s.warmup) / (max(1, s.warmup) + elapsed)),
    "wsd": _warmup_stable_decay,
}


def ema_decay_at(step: int, decay: float | None) -> float:
    """Return the decay of the weight average at `step`, which grows from 0.1 to `decay`.

    With 0.999 from the start, the average after 3,000 steps would still be 5 % initial weights.
    """
    return min(decay or 0.0, (1 + step) / (10 + step))
