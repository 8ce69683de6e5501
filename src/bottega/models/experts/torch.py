"""Mixture-of-experts layer with top-k routing and load balancing.

B batch   T tokens   N all tokens   D hidden size   E experts   k choices of a token   G groups that share capacity

A forward reads the running load and never changes it: `routing_stats` returns the loads of a batch, and
`update_router_state` is the pure update after each step. So no token's output or loss depends on the others in its
micro-batch, with one exception: limited capacity is shared by all samples (N, D) of a forward; for tokens (B, T, D) each row
has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.noise import Noise, numpy_generator
from bottega.models.experts.config import SPIKING_UNITS_PER_EXPERT, ExpertsShape
from bottega.models.experts.dispatch import StackedExperts
from bottega.models.spiking.units import SpikingGate


class Routing(NamedTuple):
    """Routing decisions and statistics of one forward; the statistics are sums over tokens, additive over micro-batches."""

    balance: Tensor
    """Sum over tokens of E * sum over experts of load * probability: 1 per token when either is uniform. Differentiable."""
    z: Tensor
    """Sum of logsumexp(logits)^2 (router z-loss of ST-MoE, Zoph et al., 2022). Differentiable."""
    load: Tensor
    """(E): number of choices of each expert, dropped ones included."""
    dropped: Tensor
    """Number of choices dropped for lack of capacity."""
    entropy: Tensor
    """Sum of the entropies of the tokens' gates, in nats."""
    tokens: Tensor
    """Number of tokens in the sums."""
    chosen: Tensor
    """(..., k): indices of the chosen experts."""
    gates: Tensor
    """(..., E): probabilities of the experts."""
    logits: Tensor
    """(..., E), in float32."""
    rates: Tensor | None = None
    """(..., units): firing rates of a spiking router's units."""


class Router(nn.Module):
    """Linear router with its load-balancing buffers; a module of its own, so that several models can share it."""

    load: Tensor
    bias: Tensor
    absent: Tensor | None

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.num_experts = shape.num_experts
        is_linear = shape.router == "linear"
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size)) if is_linear else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("load", torch.full((shape.num_experts,), 1 / shape.num_experts))
        self.register_buffer("bias", torch.zeros(shape.num_experts))
        self.register_buffer("absent", torch.zeros(shape.num_experts) if shape.expert_dropout else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., E) of x (..., D)."""
        assert self.weight is not None
        return F.linear(x, self.weight.to(x.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # `to_empty` leaves buffers undefined, and bfloat16 would round away steps of 0.001 from 0.5 on.
        old_buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in old_buffers.items():
            new = self._buffers[name]
            assert new is not None
            if old.is_meta and not new.is_meta:
                initial = 1 / self.num_experts if name == "load" else 0.0
                self._buffers[name] = torch.full_like(new, initial, dtype=torch.float32)
            elif new.dtype is not torch.float32:
                self._buffers[name] = old.to(new.device)
        return self


class FeedForward(nn.Module):
    """The shared experts, computed as one MLP."""

    def __init__(self, hidden_size: int, size: int, *, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False) if activation == "swiglu" else None
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up)


class Experts(nn.Module):
    """A mixture-of-experts layer."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        width, activation = shape.hidden_size, shape.activation
        self.router = Router(shape)
        units = shape.spiking_units
        self.gate = (
            SpikingGate(width, shape.num_experts, units, group_size=SPIKING_UNITS_PER_EXPERT)
            if units is not None
            else None
        )
        self.experts = StackedExperts(width, shape.expert_size, shape.num_experts, activation=activation)
        self.shared = FeedForward(width, shape.shared_width, activation=activation) if shape.num_shared else None

    def forward(
        self, x: Tensor, *, logits: Tensor | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Return the output for tokens (B, T, D) or samples (N, D), and their routing.

        `logits` (..., E) replace the router's. `token_mask` (...) is false for padding, which takes no capacity and enters
        no statistic.
        """
        assert x.dim() > 1, "experts take samples (N, D) or tokens (B, T, D)"
        with torch.autocast(x.device.type, enabled=False):
            logits, rates = self._compute_logits(x, logits, token_mask)
            valid = (
                torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if token_mask is None else token_mask > 0
            )
            scores, gates, chosen = self._choose_experts(logits)
            weights = self._weigh_choices(scores, chosen)
            expert_ids = torch.arange(self.shape.num_experts, device=x.device)
            choices = (chosen[..., None] == expert_ids) & valid[..., None, None]
            dropped = (
                self._find_over_capacity(choices, token_mask)
                if self.training and self.shape.has_capacity_limit
                else None
            )
            if dropped is not None:
                weights = weights.masked_fill(dropped, 0.0)
            routing = self._build_routing(
                logits, gates, chosen, valid=valid, choices=choices, dropped=dropped, rates=rates
            )
        k = self.shape.top_k
        out = self.experts(x.flatten(0, -2), chosen.view(-1, k), weights.reshape(-1, k)).view(x.shape)
        return out if self.shared is None else out + self.shared(x), routing

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts chosen for x (..., D) and their weights, (..., k) each, without statistics: for generation."""
        with torch.autocast(x.device.type, enabled=False):
            logits, _ = self._compute_logits(x, None, None)
            scores, _, chosen = self._choose_experts(logits)
            return chosen, self._weigh_choices(scores, chosen)

    def _weigh_choices(self, scores: Tensor, chosen: Tensor) -> Tensor:
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-20) if self.shape.renormalises else weights

    def _compute_logits(
        self, x: Tensor, logits: Tensor | None, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return router logits and firing rates; in float32 at least, or rounding would decide between close experts."""
        if logits is not None:
            return logits if logits.dtype is torch.float64 else logits.float(), None
        x = x if x.dtype is torch.float64 else x.float()
        if self.gate is None:
            return self.router(x), None
        output: tuple[Tensor, Tensor] = self.gate(x, token_mask)
        return output

    def _choose_experts(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (..., E) that weigh the experts, probabilities (..., E), and choices (..., k)."""
        shape = self.shape
        absent = self.router.absent if self.training else None
        if absent is not None:
            logits = logits.masked_fill(absent > 0, -torch.inf)
        if shape.gate == "softmax":
            scores = gates = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            gates = scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
        ranking_scores = scores.detach()
        if shape.balance == "bias":
            ranking_scores = ranking_scores + self.router.bias
            if absent is not None:
                ranking_scores = ranking_scores.masked_fill(absent > 0, -torch.inf)
        # A stable sort, so that the lower index comes first among ties, which votes of spiking units often have; `topk` leaves
        # their order undefined.
        ranked_experts = ranking_scores.sort(dim=-1, descending=True, stable=True).indices
        return scores, gates, ranked_experts[..., : shape.top_k]

    def _find_over_capacity(self, choices: Tensor, token_mask: Tensor | None) -> Tensor:
        """Return a mask (..., k) of choices over capacity.

        Earlier tokens take precedence with all their choices, so that no token's output depends on a later token.
        """
        shape = self.shape
        # Each row is a group; samples without rows are one group.
        groups = choices.flatten(1, -2) if choices.dim() > 3 else choices.flatten(0, 1)[None]
        counts = groups.cumsum(1, dtype=torch.int32)
        if token_mask is None or shape.capacity is not None:
            capacity: int | Tensor = shape.capacity_for(groups.shape[1] // shape.top_k)
        else:
            assert shape.capacity_factor is not None
            # Only real tokens count, or padding to the longest row of a micro-batch would add capacity.
            num_tokens = groups.sum((1, 2)).double() / shape.top_k
            even_share = shape.capacity_factor * shape.top_k * num_tokens / shape.num_experts
            capacity = (even_share - 1e-6).ceil().int()[:, None, None]
        return ((counts > capacity) & groups).any(-1).view(choices.shape[:-1])

    def _build_routing(
        self,
        logits: Tensor,
        gates: Tensor,
        chosen: Tensor,
        *,
        valid: Tensor,
        choices: Tensor,
        dropped: Tensor | None,
        rates: Tensor | None,
    ) -> Routing:
        def sum_over_tokens(per_token: Tensor) -> Tensor:
            return torch.where(valid, per_token, 0.0).sum()

        num_tokens = valid.sum().float()
        return Routing(
            balance=sum_over_tokens(self.shape.num_experts * (gates * self.router.load).sum(-1)),
            z=sum_over_tokens(logits.logsumexp(-1) ** 2),
            load=choices.flatten(0, -2).sum(0).float(),
            dropped=torch.zeros_like(num_tokens) if dropped is None else dropped.sum().float(),
            entropy=sum_over_tokens(torch.special.entr(gates.detach()).sum(-1)),
            tokens=num_tokens,
            chosen=chosen,
            gates=gates,
            logits=logits,
            rates=rates,
        )


def routing_stats(routing: Routing, name: str) -> dict[str, Tensor]:
    """Return the load of a forward for `Loss.stats`; `name` is the module path of the layer."""
    return {f"{name}.load": routing.load}


def update_router_state(
    tensors: Mapping[str, Any],
    batch_stats: Mapping[str, Any],
    *,
    name: str,
    shape: ExpertsShape,
    rng: Noise | None = None,
) -> dict[str, Tensor]:
    """Return the new buffers of `{name}.router` from the statistics of a whole step, for the task's state update.

    The bias follows Wang et al., 2024: experts with less than the mean load become easier to choose. `rng` is needed with
    expert_dropout, because the experts dropped in the next step are drawn from seed and step.
    """
    load, bias = tensors[f"{name}.router.load"], tensors[f"{name}.router.bias"]
    counts = batch_stats[f"{name}.load"].to(load)
    present = torch.ones_like(load)
    if shape.expert_dropout:
        present = present - tensors[f"{name}.router.absent"]
    # Dropped experts keep their fraction of the load; the others divide the rest.
    num_choices = counts.sum()
    fraction = counts / num_choices.clamp_min(1) * (load * present).sum()
    new_load = load * shape.load_decay + fraction * (1 - shape.load_decay)
    updates = {f"{name}.router.load": torch.where((present > 0) & (num_choices > 0), new_load, load)}
    if shape.balance == "bias":
        direction = torch.sign(num_choices / present.sum() - counts)
        updates[f"{name}.router.bias"] = bias + shape.bias_rate * direction * present
    if shape.expert_dropout:
        assert rng is not None, "expert dropout is drawn from seed and step; pass `rng`"
        updates[f"{name}.router.absent"] = _draw_absent(name, rng.seed, rng.step + 1, shape).to(load)
    return updates


@torch.no_grad()
def drop_initial_experts(model: nn.Module, seed: int) -> None:
    """Draw the experts that are dropped in the first step; `update_router_state` draws those of later steps."""
    for name, layer in model.named_modules():
        if isinstance(layer, Experts) and layer.router.absent is not None:
            layer.router.absent.copy_(_draw_absent(name, seed, 0, layer.shape))


def _draw_absent(name: str, seed: int, step: int, shape: ExpertsShape) -> Tensor:
    """Return 1 for the experts that are dropped in a step, the same on every rank and in every micro-batch."""
    draws = numpy_generator(seed, "expert dropout", name, step).random(shape.num_experts)
    droppable = sorted(draws)[: shape.num_experts - shape.top_k]
    max_draw = droppable[-1] if droppable else -1
    return torch.from_numpy(((draws < shape.expert_dropout) & (draws <= max_draw)).astype("float32"))


def count_active_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters used for one token: of each stack of experts, top_k count."""
    total = sum(p.numel() for p in model.parameters())
    stacks = {layer.experts: layer.shape for layer in model.modules() if isinstance(layer, Experts)}
    idle_counts = [
        sum(p.numel() for p in stack.parameters()) // shape.num_experts * (shape.num_experts - shape.top_k)
        for stack, shape in stacks.items()
    ]
    return total - sum(idle_counts)


def load_entropy(load: Tensor) -> Tensor:
    """Return the normalized entropy of loads (..., E), averaged over layers: 1 is uniform, 0 a single expert for all."""
    fractions = load / load.sum(-1, keepdim=True).clamp_min(1)
    return torch.special.entr(fractions).sum(-1).mean() / math.log(max(2, load.shape[-1]))
