"""Optimizers: their options, defaults and classes. To add one, add an entry to OPTIMIZER_SPECS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer."""

    torch_class: str
    """The class: a name in torch.optim, or "module:name" in the torch engine."""
    options: tuple[str, ...] = ()
    """Options of `training.optimizer` that are passed to it."""
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of its constructor."""
    option_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from Adam's."""
    has_coupled_weight_decay: bool = False
    """Whether weight decay is added to the gradient (L2); AdamW's default of 0.1 would then dominate."""
    num_state_tensors: int = 2
    """Number of state tensors for each parameter, all of the parameter's shape."""
    state_requires_option: str | None = None
    """An option that must be set for it to keep state."""
    is_factored: bool = False
    """Whether it keeps sums over the rows and columns of a matrix instead of full-size state."""
    is_for_hidden_matrices_only: bool = False
    """Whether it trains matrices between hidden states only; AdamW trains the other parameters."""


FUSED = {"fused": True}
OPTIMIZER_SPECS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec("AdamW", ("betas", "eps"), FUSED),
    "muon": OptimizerSpec(
        "muon:Muon",
        ("momentum", "nesterov"),
        option_defaults={"momentum": 0.95, "nesterov": True},
        num_state_tensors=1,
        is_for_hidden_matrices_only=True,
    ),
    "sgd": OptimizerSpec(
        "SGD",
        ("momentum", "nesterov"),
        FUSED,
        has_coupled_weight_decay=True,
        num_state_tensors=1,
        state_requires_option="momentum",
    ),
    "lion": OptimizerSpec("lion:Lion", ("betas",), {"weight_decay": 0.0}, {"betas": (0.9, 0.99)}, num_state_tensors=1),
    # torch's Adafactor reads a norm of every parameter on the host, so it synchronises with the device in each step.
    "adafactor": OptimizerSpec("Adafactor", is_factored=True),
    "adam": OptimizerSpec("Adam", ("betas", "eps"), FUSED, has_coupled_weight_decay=True),
}
FALLBACK_OPTIMIZER = "adamw"
"""Trains the other parameters where the chosen optimizer is for hidden matrices only."""


def list_optimizers_with_option(option: str) -> tuple[str, ...]:
    """Return the optimizers that use an option, directly or through their fallback optimizer."""
    return tuple(
        name
        for name, spec in OPTIMIZER_SPECS.items()
        if option in spec.options
        or (spec.is_for_hidden_matrices_only and option in OPTIMIZER_SPECS[FALLBACK_OPTIMIZER].options)
    )


def is_hidden_matrix(name: str, num_dimensions: int) -> bool:
    """Return whether Muon applies: it orthogonalises maps between hidden states; embeddings and heads stay with AdamW.

    The weights of n-grams are both.
    """
    return num_dimensions == 2 and not any(word in name for word in ("embed", "head", "ngrams"))


def describe_fallback(num_dimensions: Mapping[str, int], optimizer: str) -> list[str]:
    """Return a note if an optimizer applies to none of the parameters (name -> dimensions) and AdamW trains all of them."""
    if not OPTIMIZER_SPECS[optimizer].is_for_hidden_matrices_only or any(
        is_hidden_matrix(name, count) for name, count in num_dimensions.items()
    ):
        return []
    return [
        f"training.optimizer.name: {optimizer} is for matrices between hidden states, and this model trains none; AdamW "
        "trains all of its parameters"
    ]
