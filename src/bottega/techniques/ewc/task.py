"""Elastic weight consolidation: a quadratic penalty on changes of weights, scaled by their importance for earlier data.

Kirkpatrick et al., 2017, in the online form of Schwarz et al., 2018: one importance and one anchor per weight for all
sources together, so that the state does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from bottega.core.model_spec import resolve_reference
from bottega.core.types import Array
from bottega.techniques.wrapped_task import WrappedTask

FISHER_PREFIX, ANCHOR_PREFIX = "fisher/", "anchor/"


@final
class Ewc(WrappedTask):
    """A task with the EWC penalty; its state is an importance and an anchor for each trainable weight."""

    divergence_key: ClassVar[str] = "techniques.ewc.strength"
    strength: float
    framework: str = "torch"
    """The framework of the weights: the engine of the run."""

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        create_zeros = resolve_reference("bottega.techniques.ewc.{framework}:create_zeros", self.framework)
        zeros = {
            kind + name: zero
            for kind in (FISHER_PREFIX, ANCHOR_PREFIX)
            for name, zero in create_zeros(parameters).items()
        }
        return {**self.inner.state(parameters), **zeros}

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        """Return strength / 2 * sum(importance * (weight - anchor)^2), which is 0 during the first source."""
        sum_weighted_squares = resolve_reference(
            "bottega.techniques.ewc.{framework}:sum_weighted_squares", self.framework
        )
        names = [name.removeprefix(FISHER_PREFIX) for name in state if name.startswith(FISHER_PREFIX)]
        ewc_penalty = (
            0.5
            * self.strength
            * sum_weighted_squares(
                [parameters[name] for name in names],
                anchors=[state[ANCHOR_PREFIX + name] for name in names],
                importances=[state[FISHER_PREFIX + name] for name in names],
            )
        )
        inner_penalty = self.inner.penalty(parameters, state)
        return ewc_penalty if inner_penalty is None else ewc_penalty + inner_penalty


def consolidate(
    state: Mapping[str, Array], parameters: Mapping[str, Array], importance: Mapping[str, Array], *, decay: float
) -> dict[str, Array]:
    """Return the state after a source: anchors at the current weights, and importance decayed and added to.

    The anchors are the parameters themselves, which the engine copies.
    """
    fisher = {FISHER_PREFIX + name: state[FISHER_PREFIX + name] * decay + new for name, new in importance.items()}
    return {**fisher, **{ANCHOR_PREFIX + name: parameters[name] for name in importance}}
