"""Every update rule: its options, its customary values, and who computes it in each engine. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer by name."""

    torch: str
    """The class: of torch.optim by its name, or of the torch engine as "module:name"."""
    reads: tuple[str, ...] = ()
    """Options of `training.optimizer` that are handed to it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else it is made with."""
    customary: Mapping[str, Any] = field(default_factory=dict)
    """Options whose usual value is another than Adam's."""
    adds_decay_to_gradient: bool = False
    """Whether weight decay is added to the gradient, where AdamW's usual 0.1 would drown it."""
    copies: int = 2
    """What it keeps of a parameter, in tensors of its size."""
    copies_need: str | None = None
    """An option without which it keeps nothing."""
    is_factored: bool = False
    """Whether it keeps sums over rows and columns of a matrix in place of copies."""
    hidden_matrices_only: bool = False
    """Whether it is for maps between hidden states alone; the rest is then trained by AdamW, with its options."""


FUSED = {"fused": True}
RULES: dict[str, UpdateRule] = {
    "adamw": UpdateRule("AdamW", ("betas", "eps"), FUSED),
    "muon": UpdateRule(
        "Muon",
        ("momentum", "nesterov"),
        # An update as large as AdamW's, so that one learning rate serves both halves.
        {"adjust_lr_fn": "match_rms_adamw"},
        {"momentum": 0.95, "nesterov": True},
        copies=1,
        hidden_matrices_only=True,
    ),
    "sgd": UpdateRule(
        "SGD", ("momentum", "nesterov"), FUSED, adds_decay_to_gradient=True, copies=1, copies_need="momentum"
    ),
    "lion": UpdateRule("lion:Lion", ("betas",), {"weight_decay": 0.0}, {"betas": (0.9, 0.99)}, copies=1),
    # torch's reads a norm of every parameter on the host, so it waits for the device each step.
    "adafactor": UpdateRule("Adafactor", is_factored=True),
    "adam": UpdateRule("Adam", ("betas", "eps"), FUSED, adds_decay_to_gradient=True),
}
REST = "adamw"
"""Trains what a rule for hidden matrices leaves."""


def readers(option: str) -> tuple[str, ...]:
    """The rules that read an option, those among them whose rest does."""
    return tuple(
        name
        for name, rule in RULES.items()
        if option in rule.reads or (rule.hidden_matrices_only and option in RULES[REST].reads)
    )
