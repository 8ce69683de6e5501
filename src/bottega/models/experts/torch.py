"""A layer of experts of which each token asks a few, and what is needed so that all of them are asked.

B batch   T tokens   N all tokens   D hidden size   E experts   k choices of a token   G groups that share the room

A forward reads the running load and never changes it: `stats` says what was seen, and `renewed` is the pure update that
follows each step. So no token's answer or loss depends on which others are in its micro-batch, with one exception: limited
room for single samples [N, D] is shared by those of the forward. For tokens [B, T, D] it is each row's own.
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
    """What one forward did: sums over the tokens that count, so they add up over micro-batches."""

    balance: Tensor
    """Sum over tokens of E * sum over experts of load * probability: 1 a token when either is even. Has a gradient."""
    z: Tensor
    """Sum of logsumexp(logits)^2 (ST-MoE, Zoph et al., 2022). Has a gradient."""
    load: Tensor
    """[E]: how often each expert was chosen, full or not."""
    dropped: Tensor
    """Choices for which an expert had no room."""
    entropy: Tensor
    """Sum of the entropies of the tokens' gates, in nats."""
    tokens: Tensor
    """How many counted."""
    chosen: Tensor
    """[..., k]."""
    gates: Tensor
    """[..., E]: probabilities of the experts."""
    logits: Tensor
    """[..., E], in float32."""
    rates: Tensor | None = None
    """[..., units]: how often the units of a spiking router fired."""


class Router(nn.Module):
    """The logits of the experts, and what keeps their load even; a layer of its own, so that several models can share it."""

    load: Tensor
    bias: Tensor
    absent: Tensor | None

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.num_experts = shape.num_experts
        linear = shape.router == "linear"
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size)) if linear else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("load", torch.full((shape.num_experts,), 1 / shape.num_experts))
        self.register_buffer("bias", torch.zeros(shape.num_experts))
        self.register_buffer("absent", torch.zeros(shape.num_experts) if shape.expert_dropout else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] of x [..., D]."""
        assert self.weight is not None
        return F.linear(x, self.weight.to(x.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # `to_empty` leaves buffers undefined, and bfloat16 would swallow steps of 0.001 from 0.5 on.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert new is not None
            if old.is_meta and not new.is_meta:
                start = 1 / self.num_experts if name == "load" else 0.0
                self._buffers[name] = torch.full_like(new, start, dtype=torch.float32)
            elif new.dtype is not torch.float32:
                self._buffers[name] = old.to(new.device)
        return self


class FeedForward(nn.Module):
    """The experts that see everything, side by side as one."""

    def __init__(self, hidden_size: int, size: int, *, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False) if activation == "swiglu" else None
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up)


class Experts(nn.Module):
    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        width, activation = shape.hidden_size, shape.activation
        self.router = Router(shape)
        units = shape.spiking_units
        self.gate = (
            SpikingGate(width, shape.num_experts, units, group=SPIKING_UNITS_PER_EXPERT) if units is not None else None
        )
        self.experts = StackedExperts(width, shape.expert_size, shape.num_experts, activation=activation)
        self.shared = FeedForward(width, shape.shared_width, activation=activation) if shape.num_shared else None

    def forward(
        self, x: Tensor, *, logits: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Tokens [B, T, D] or samples [N, D], and how they were routed.

        `logits` [..., E] take the place of the router's. `counted` [...] tells tokens from padding, which takes no room and
        enters no sum.
        """
        assert x.dim() > 1, "experts want samples [N, D] or tokens [B, T, D]"
        before = x.shape[:-1]
        with torch.autocast(x.device.type, enabled=False):
            logits, rates = self._logits(x, logits, counted)
            counts = torch.ones(before, dtype=torch.bool, device=x.device) if counted is None else counted > 0
            scores, gates, chosen = self._choose(logits)
            weights = scores.gather(-1, chosen)
            if self.shape.renormalises:
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
            every = torch.arange(self.shape.num_experts, device=x.device)
            asked = (chosen[..., None] == every) & counts[..., None, None]
            full = self._full(asked, counted) if self.training and self.shape.has_capacity_limit else None
            if full is not None:
                weights = weights.masked_fill(full, 0.0)
            routing = self._routing(logits, gates, chosen, counts=counts, asked=asked, full=full, rates=rates)
        k = self.shape.top_k
        out = self.experts(x.flatten(0, -2), chosen.view(-1, k), weights.reshape(-1, k)).view(x.shape)
        return out if self.shared is None else out + self.shared(x), routing

    def _logits(self, x: Tensor, logits: Tensor | None, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """In float32 at least: two experts that are nearly even would else be told apart by rounding."""
        if logits is not None:
            return logits if logits.dtype is torch.float64 else logits.float(), None
        x = x if x.dtype is torch.float64 else x.float()
        if self.gate is None:
            return self.router(x), None
        found: tuple[Tensor, Tensor] = self.gate(x, counted)
        return found

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [..., E] to weigh by, the same as probabilities, and the choices [..., k]."""
        shape = self.shape
        absent = self.router.absent if self.training else None
        if absent is not None:
            logits = logits.masked_fill(absent > 0, -torch.inf)
        if shape.gate == "softmax":
            scores = gates = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            gates = scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
        rank = scores.detach()
        if shape.balance == "bias":
            rank = rank + self.router.bias
            if absent is not None:
                rank = rank.masked_fill(absent > 0, -torch.inf)
        # `topk` promises no order of equals, which votes of spiking units often are: the lower number comes first.
        ranked = rank.sort(dim=-1, descending=True, stable=True).indices
        return scores, gates, ranked[..., : shape.top_k]

    def _full(self, asked: Tensor, counted: Tensor | None) -> Tensor:
        """[..., k]: the choices for which there is no room. Earlier tokens come first, with all their choices, so that no
        token's answer depends on a later one."""
        shape = self.shape
        # A row is a group; samples without rows are one.
        groups = asked.flatten(1, -2) if asked.dim() > 3 else asked.flatten(0, 1)[None]
        before = groups.cumsum(1, dtype=torch.int32)
        if counted is None or shape.capacity is not None:
            room: int | Tensor = shape.capacity_for(groups.shape[1] // shape.top_k)
        else:
            assert shape.capacity_factor is not None
            # Of the tokens that count, or else padding to the longest row of a micro-batch would make room.
            tokens = groups.sum((1, 2)).double() / shape.top_k
            even = shape.capacity_factor * shape.top_k * tokens / shape.num_experts
            room = (even - 1e-6).ceil().int()[:, None, None]
        return ((before > room) & groups).any(-1).view(asked.shape[:-1])

    def _routing(
        self,
        logits: Tensor,
        gates: Tensor,
        chosen: Tensor,
        *,
        counts: Tensor,
        asked: Tensor,
        full: Tensor | None,
        rates: Tensor | None,
    ) -> Routing:
        def total(each: Tensor) -> Tensor:
            return torch.where(counts, each, 0.0).sum()

        number = counts.sum().float()
        return Routing(
            balance=total(self.shape.num_experts * (gates * self.router.load).sum(-1)),
            z=total(logits.logsumexp(-1) ** 2),
            load=asked.flatten(0, -2).sum(0).float(),
            dropped=torch.zeros_like(number) if full is None else full.sum().float(),
            entropy=total(torch.special.entr(gates.detach()).sum(-1)),
            tokens=number,
            chosen=chosen,
            gates=gates,
            logits=logits,
            rates=rates,
        )


def routing_stats(routing: Routing, name: str) -> dict[str, Tensor]:
    """What a task adds to `Loss.stats`; `name` is where the model has the layer."""
    return {f"{name}.load": routing.load}


def update_router_state(
    tensors: Mapping[str, Any],
    batch_stats: Mapping[str, Any],
    *,
    name: str,
    shape: ExpertsShape,
    rng: Noise | None = None,
) -> dict[str, Tensor]:
    """New values of the buffers of the router `{name}.router`, from what a whole step saw; for `Task.update`.

    The bias follows Wang et al., 2024: whoever was asked less than the mean is a little easier to choose next time. `rng` is
    needed where experts are left out, since who it is next is a function of seed and step.
    """
    load, bias = tensors[f"{name}.router.load"], tensors[f"{name}.router.bias"]
    asked = batch_stats[f"{name}.load"].to(load)
    there = torch.ones_like(load)
    if shape.expert_dropout:
        there = there - tensors[f"{name}.router.absent"]
    # Who was left out was not asked, and that says nothing: it keeps its share, and the others divide the rest.
    total = asked.sum()
    share = asked / total.clamp_min(1) * (load * there).sum()
    mixed = load * shape.load_decay + share * (1 - shape.load_decay)
    new = {f"{name}.router.load": torch.where((there > 0) & (total > 0), mixed, load)}
    if shape.balance == "bias":
        below = torch.sign(total / there.sum() - asked)
        new[f"{name}.router.bias"] = bias + shape.bias_rate * below * there
    if shape.expert_dropout:
        assert rng is not None, "experts are left out by seed and step; give `rng` to `renewed`"
        new[f"{name}.router.absent"] = _absent(name, rng.seed, rng.step + 1, shape).to(load)
    return new


@torch.no_grad()
def drop_initial_experts(model: nn.Module, seed: int) -> None:
    """The experts that the very first step does without; `renewed` says it of all later ones."""
    for name, layer in model.named_modules():
        if isinstance(layer, Experts) and layer.router.absent is not None:
            layer.router.absent.copy_(_absent(name, seed, 0, layer.shape))


def _absent(name: str, seed: int, step: int, shape: ExpertsShape) -> Tensor:
    """1 for the experts that a step does without, the same on every rank and in every micro-batch."""
    draw = numpy_generator(seed, "expert dropout", name, step).random(shape.num_experts)
    most = sorted(draw)[: shape.num_experts - shape.top_k]
    return torch.from_numpy(((draw < shape.expert_dropout) & (draw <= (most[-1] if most else -1))).astype("float32"))


def count_active_parameters(model: nn.Module) -> int:
    """How many of a model's parameters take part in one token: of each stack of experts, as many as a token asks."""
    total = sum(p.numel() for p in model.parameters())
    asked = {layer.experts: layer.shape for layer in model.modules() if isinstance(layer, Experts)}
    idle = [
        sum(p.numel() for p in stack.parameters()) // shape.num_experts * (shape.num_experts - shape.top_k)
        for stack, shape in asked.items()
    ]
    return total - sum(idle)


def load_entropy(load: Tensor) -> Tensor:
    """The entropy of loads [..., E] as a share of the most there can be, as a mean over layers: 1 is even, 0 one for all."""
    shares = load / load.sum(-1, keepdim=True).clamp_min(1)
    return torch.special.entr(shares).sum(-1).mean() / math.log(max(2, load.shape[-1]))
