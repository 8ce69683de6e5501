"""Who watches. A callback is told what happened; it never sees the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bottega.core.errors import CheckpointError


@dataclass
class Progress:
    """All that is not a tensor, and not a function of the step. Saved as progress.json in every checkpoint."""

    step: int = 0
    samples: int = 0
    total: int = 0
    best: float | None = None
    best_step: int = 0
    evaluated: int = 0
    rate_scale: float = 1.0
    micro_batch_size: int | None = None
    skip_steps: list[int] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop: str | None = None
    """A callback that wants the run to end says why here."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        try:
            return _ADAPTER.validate_python({**fields, "stop": None})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise CheckpointError(f"progress.json: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


_ADAPTER = TypeAdapter(Progress)


class Callback:
    """Override what you need. `note` and `recall` carry a callback's own memory through a resume."""

    name: str = ""

    def start(self, progress: Progress) -> None: ...
    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None: ...
    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None: ...
    def after_sample(self, progress: Progress, folder: Path) -> None: ...
    def after_save(self, progress: Progress, folder: Path) -> None: ...
    def rewind(self, progress: Progress) -> None:
        """The run has gone back to an earlier step: forget what came after it."""

    def finish(self, progress: Progress, error: BaseException | None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, note: dict[str, Any]) -> None: ...
