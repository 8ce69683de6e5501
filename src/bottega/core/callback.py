"""Callbacks of the trainer, and the progress that they are handed. A callback never sees the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from bottega.core.errors import CheckpointError


@dataclass
class Progress:
    """State of a run that is neither a tensor nor a function of the step. Saved as progress.json in every checkpoint.

    `total` is the number of steps of the run, `evaluated_step` the step of the last evaluation, `best` the best value of the
    metric so far, and `callback_states` the `state_dict` of each callback by its name. Aliases are keys of progress.json.
    """

    step: int = 0
    samples: int = 0
    total: int = 0
    best: float | None = None
    best_step: int = 0
    evaluated_step: Annotated[int, Field(alias="evaluated")] = 0
    learning_rate_scale: Annotated[float, Field(alias="rate_scale")] = 1.0
    micro_batch_size: int | None = None
    skip_steps: list[int] = field(default_factory=list)
    callback_states: Annotated[dict[str, dict[str, Any]], Field(alias="notes")] = field(default_factory=dict)
    stop: str | None = None
    """The reason to end the run early, set by a callback."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of progress.json."""
        return dict(_ADAPTER.dump_python(self, by_alias=True, warnings=False))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """Return the progress of a saved run; raise CheckpointError if a field has the wrong type."""
        try:
            return _ADAPTER.validate_python({**fields, "stop": None})
        except ValidationError as error:
            problem = error.errors()[0]
            raise CheckpointError(f"progress.json: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


_ADAPTER = TypeAdapter(Progress)


class Histogram(NamedTuple):
    """Numbers of values between consecutive edges; there is one more edge than counts."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Callback:
    """Base class whose methods do nothing; override the events you need.

    `state_dict` is saved in every checkpoint and handed to `load_state_dict` when the run resumes or rolls back.
    """

    name: str = ""

    def start(self, progress: Progress) -> None:
        """Called before the first step, also of a resumed run."""

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Called at each logged step with its metrics."""

    def after_inspect(self, progress: Progress, modules: Mapping[str, Mapping[str, float]]) -> None:
        """Called before `after_step`, if the step was inspected, with statistics by module and name, such as `gradient_norm`."""

    def after_histograms(self, progress: Progress, histograms: Mapping[str, Histogram]) -> None:
        """Called with histograms of the parameters, by "weights/NAME" and "gradients/NAME"."""

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Called after an evaluation with its metrics."""

    def after_sample(self, progress: Progress, folder: Path) -> None:
        """Called after samples were written to `folder`."""

    def after_save(self, progress: Progress, folder: Path) -> None:
        """Called after a checkpoint was written to `folder`."""

    def rewind(self, progress: Progress) -> None:
        """The run was rolled back to the step of `progress`: discard everything recorded after it."""

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        """Called once at the end, with the error that ended the run, if any."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
