"""Every update rule: its options, its customary values, and who computes it in each engine. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer by name."""

    torch_class: str
    """The class: of torch.optim by its name, or of the torch engine as "module:name"."""
    options: tuple[str, ...] = ()
    """Options of `training.optimizer` that are handed to it."""
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else it is made with."""
    option_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options whose usual value is another than Adam's."""
    has_coupled_weight_decay: bool = False
    """Whether weight decay is added to the gradient, where AdamW's usual 0.1 would drown it."""
    num_state_tensors: int = 2
    """What it keeps of a parameter, in tensors of its size."""
    state_requires_option: str | None = None
    """An option without which it keeps nothing."""
    is_factored: bool = False
    """Whether it keeps sums over rows and columns of a matrix in place of copies."""
    is_for_hidden_matrices_only: bool = False
    """Whether it is for maps between hidden states alone; the rest is then trained by AdamW, with its options."""


FUSED = {"fused": True}
OPTIMIZER_SPECS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec("AdamW", ("betas", "eps"), FUSED),
    "muon": OptimizerSpec(
        "Muon",
        ("momentum", "nesterov"),
        # An update as large as AdamW's, so that one learning rate serves both halves.
        {"adjust_lr_fn": "match_rms_adamw"},
        {"momentum": 0.95, "nesterov": True},
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
    # torch's reads a norm of every parameter on the host, so it waits for the device each step.
    "adafactor": OptimizerSpec("Adafactor", is_factored=True),
    "adam": OptimizerSpec("Adam", ("betas", "eps"), FUSED, has_coupled_weight_decay=True),
}
FALLBACK_OPTIMIZER = "adamw"
"""Trains what a rule for hidden matrices leaves."""


def list_optimizers_with_option(option: str) -> tuple[str, ...]:
    """The rules that read an option, those among them whose rest does."""
    return tuple(
        name
        for name, rule in OPTIMIZER_SPECS.items()
        if option in rule.options
        or (rule.is_for_hidden_matrices_only and option in OPTIMIZER_SPECS[FALLBACK_OPTIMIZER].options)
    )
