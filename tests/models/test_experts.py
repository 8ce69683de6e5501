"""Mixture of experts: the output is the gate-weighted sum of experts in every implementation; capacity, balance and
additive statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

import bottega.models.experts.dispatch as dispatch
from bottega.core.noise import Noise
from bottega.models.experts.config import ExpertsShape
from bottega.models.experts.torch import (
    Experts,
    Routing,
    drop_initial_experts,
    load_entropy,
    routing_stats,
    update_router_state,
)
from bottega.models.initial import initialise
from bottega.models.multitask import find_shared_layers
from bottega.models.spiking.config import SpikingShape

D, E = 8, 4


def build_shape(**changes: Any) -> ExpertsShape:
    return ExpertsShape(**{"hidden_size": D, "expert_size": 16, "num_experts": E, **changes})


def build_layer(seed: int = 0, *, spread: float = 1.0, **changes: Any) -> Experts:
    model = Experts(build_shape(**changes))
    initialise(model, seed, residual_layers=1)
    if model.router.weight is not None:
        with torch.no_grad():
            model.router.weight.mul_(spread / 0.02)  # far enough apart that no choice is a tie
    return model


def draw_inputs(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run_expert(model: Experts, e: int, x: Tensor) -> Tensor:
    weights = model.experts
    up = x @ weights.up_proj[e].T
    inner = F.gelu(up) if weights.gate_proj is None else F.silu(x @ weights.gate_proj[e].T) * up
    return inner @ weights.down_proj[e].T


def compute_reference(
    model: Experts, x: Tensor, *, keep: Callable[[int, int], bool] = lambda token, choice: True
) -> Tensor:
    """Compute token by token: the chosen experts, weighted by their gates."""
    shape, router = model.shape, model.router
    assert router.weight is not None
    out = []
    for n, token in enumerate(x):
        logits = router.weight @ token
        scores = logits.softmax(-1) if shape.gate == "softmax" else logits.sigmoid()
        ranking_scores = scores + router.bias if shape.balance == "bias" else scores
        chosen = ranking_scores.argsort(descending=True)[: shape.top_k].tolist()
        total = sum(scores[e] for e in chosen) if shape.top_k > 1 else 1.0
        outputs = [scores[e] / total * run_expert(model, e, token) for j, e in enumerate(chosen) if keep(n, j)]
        out.append(sum(outputs, torch.zeros_like(token)) + (0 if model.shared is None else model.shared(token)))
    return torch.stack(out)


def compute_gradients(model: Experts, out: Tensor, x: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).cos()).sum(), [x, *model.parameters()])
    )


VARIANTS = list(itertools.product(("softmax", "sigmoid"), (1, 2, E), ("swiglu", "gelu")))


@pytest.mark.parametrize(("gate", "k", "activation"), VARIANTS)
def test_output_is_the_gate_weighted_sum_of_experts(gate: str, k: int, activation: str) -> None:
    model = build_layer(gate=gate, top_k=k, activation=activation, num_shared=k % 2, balance="bias").double()
    model.router.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    x = draw_inputs(13, dtype=torch.float64).requires_grad_()
    out, reference_out = model(x)[0], compute_reference(model, x)
    torch.testing.assert_close(out, reference_out, rtol=0, atol=1e-12)
    for gradient, expected in zip(
        compute_gradients(model, out, x), compute_gradients(model, reference_out, x), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("k", [1, 2, E])
def test_grouped_and_looped_experts_agree(k: int) -> None:
    """The grouped kernel is meant for GPUs and exists on CPUs in bfloat16, whose precision bounds the difference."""
    model, x = build_layer(top_k=k), draw_inputs(40)
    weights = model.experts
    assert weights.gate_proj is not None
    chosen = torch.rand(40, E, generator=torch.Generator().manual_seed(1)).topk(k).indices
    gates = torch.rand(40, k, generator=torch.Generator().manual_seed(2))
    stacks = weights.gate_proj, weights.up_proj, weights.down_proj

    def run_bf16(run: Callable[..., Tensor]) -> list[Tensor]:
        bf16_stacks = tuple(stack.detach().bfloat16().requires_grad_() for stack in stacks)
        rows = x.bfloat16().requires_grad_()
        out = dispatch.dispatch_sorted(rows, chosen, gates, bf16_stacks, run=run)
        return [out, *torch.autograd.grad(out.float().square().sum(), [rows, *bf16_stacks])]

    for actual, expected in zip(run_bf16(dispatch.run_grouped), run_bf16(dispatch.run_loop), strict=True):
        assert float((actual - expected).detach().abs().max()) < 0.02 * float(expected.detach().abs().max())


def test_gradients_agree_with_finite_differences() -> None:
    model = build_layer(top_k=2, expert_size=2, num_experts=3).double()
    model.router.load.copy_(torch.tensor([0.7, 0.2, 0.1]))

    def outputs(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        names = [name for name, _ in model.named_parameters()]
        out, routing = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        return out, routing.balance, routing.z

    values = [draw_inputs(2, 2, dtype=torch.float64), *(p.detach().clone() for p in model.parameters())]
    values = [value.requires_grad_() for value in values]
    assert torch.autograd.gradcheck(outputs, values)
    assert torch.autograd.gradgradcheck(lambda x: outputs(x, *values[1:])[0], values[:1])  # needed by meta-learning


@pytest.mark.parametrize("k", [1, 2])
def test_samples_are_independent(k: int) -> None:
    model, x = build_layer(top_k=k), draw_inputs(31)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3))
    out = model(x)[0]
    torch.testing.assert_close(model(x[order])[0], out[order])
    torch.testing.assert_close(torch.cat([model(row[None])[0] for row in x]), out)
    torch.testing.assert_close(model(x.view(1, 31, D))[0][0], out)


def find_over_capacity(chosen: Tensor, capacity: int) -> list[list[bool]]:
    """Return for each token which of its choices are over capacity, counted one by one."""
    counts, over_capacity = [0] * E, []
    for experts in chosen.tolist():
        over_capacity.append([counts[e] >= capacity for e in experts])
        for e in experts:
            counts[e] += 1
    return over_capacity


@pytest.mark.parametrize(
    ("changes", "capacity"), [({"capacity": 3}, 3), ({"capacity_factor": 1.1}, 6), ({"capacity_factor": 0.1}, 1)]
)
def test_choices_beyond_capacity_are_dropped_and_counted(changes: dict[str, Any], capacity: int) -> None:
    model, x = build_layer(top_k=2, num_shared=1, **changes), draw_inputs(3, 10)
    assert model.shape.capacity_for(10) == capacity
    out, routing = model(x)
    num_dropped = 0
    for row, row_out, chosen in zip(x, out, routing.chosen, strict=True):
        dropped = find_over_capacity(chosen, capacity)
        num_dropped += sum(map(sum, dropped))
        expected = compute_reference(model, row, keep=lambda n, j, dropped=dropped: not dropped[n][j])
        torch.testing.assert_close(row_out, expected)
    assert int(routing.dropped) == num_dropped > 0
    assert int(routing.load.sum()) == 3 * 10 * 2


def test_later_tokens_never_take_capacity_of_earlier_ones() -> None:
    model, x = build_layer(top_k=2, capacity=3), draw_inputs(2, 12)
    out = model(x)[0]
    for t in (1, 5, 11):
        changed = x.clone()
        changed[:, t:] = draw_inputs(2, 12 - t, seed=9)
        torch.testing.assert_close(model(changed)[0][:, :t], out[:, :t])
    torch.testing.assert_close(model(x[1:])[0], out[1:])  # capacity is per row


def test_padding_takes_no_capacity_and_enters_no_sum() -> None:
    model, x = build_layer(top_k=2, capacity_factor=1.0), draw_inputs(2, 8)
    padded = torch.cat((torch.full((2, 4, D), 5.0), x, draw_inputs(2, 7, seed=5)), dim=1)
    token_mask = torch.zeros(2, 19)
    token_mask[:, 4:12] = 1
    (out, routing), (padded_out, padded_routing) = model(x), model(padded, token_mask=token_mask)
    torch.testing.assert_close(padded_out[:, 4:12], out)
    for name in ("balance", "z", "load", "dropped", "entropy", "tokens"):
        torch.testing.assert_close(getattr(padded_routing, name), getattr(routing, name))
    assert float(routing.dropped) > 0


def test_capacity_and_expert_dropout_apply_in_training_only() -> None:
    limited, free = build_layer(capacity=1, expert_dropout=0.5), build_layer()
    limited.router.get_buffer("absent").copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    x = draw_inputs(2, 9)
    routing = limited(x)[1]
    assert float(routing.dropped) > 0
    assert routing.load[:2].tolist() == [0, 0]
    limited.eval()
    out, routing = limited(x)
    torch.testing.assert_close(out, free(x)[0])
    assert float(routing.dropped) == 0


def test_sums_add_up_over_splits() -> None:
    model, x = build_layer(top_k=2, capacity=3), draw_inputs(6, 7)
    full, parts = model(x)[1], [model(part)[1] for part in x.split([1, 3, 2])]
    for name in ("balance", "z", "load", "dropped", "entropy", "tokens"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(full, name))
    torch.testing.assert_close(torch.cat([part.chosen for part in parts]), full.chosen)


def test_single_token_and_single_expert() -> None:
    out, routing = build_layer(top_k=2)(draw_inputs(3, 1))
    assert out.shape == (3, 1, D)
    assert int(routing.tokens) == 3
    single = build_layer(num_experts=1)
    x = draw_inputs(5)
    torch.testing.assert_close(single(x)[0], run_expert(single, 0, x))


def test_balance_loss_penalises_overload_and_is_lowest_when_even() -> None:
    model, x = build_layer(), draw_inputs(50)
    even = model(x)[1]
    assert float(even.balance.detach()) == pytest.approx(50)
    model.router.load.copy_(torch.tensor([0.7, 0.1, 0.1, 0.1]))
    logits = torch.randn(50, E, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x, logits=logits)[1].balance, logits)
    assert bool((gradient[:, 0] > 0).all())
    assert bool((gradient[:, 1:] < 0).all())
    # Where the load equals the gates, the mean is E * sum of squares: 1 if even, more otherwise.
    for skew in (0.5, 1.0, 3.0):
        uneven = (skew * torch.tensor([1.0, 0.0, -1.0, 0.5])).expand(50, E)
        model.router.load.copy_(uneven[0].softmax(-1))
        assert float(model(x, logits=uneven)[1].balance) / 50 > 1.01


def update_router(model: Experts, routing: Routing, step: int = 0, *, seed: int = 0) -> None:
    """Apply the router update as an engine does after a step."""
    tensors = {f"layer.{name}": value for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name, value in update_router_state(
            tensors, routing_stats(routing, "layer"), name="layer", shape=model.shape, rng=Noise(seed, step, ())
        ).items():
            tensors[name].copy_(value)


def train_load_entropy(balance: str, seed: int) -> float:
    """Return the normalised load entropy on new samples after training from a router that prefers one expert."""
    model = build_layer(seed, balance=balance, bias_rate=5e-3, gate="sigmoid" if balance == "bias" else "softmax")
    middle, target = draw_inputs(1, seed=seed + 7), draw_inputs(D, seed=seed + 8)
    assert model.router.weight is not None
    with torch.no_grad():
        model.router.weight.mul_(0.1)
        model.router.weight[0] += middle[0] / middle.norm()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(200):
        # The rate decays to 0; otherwise the router would oscillate about the even load.
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)
        x = draw_inputs(64, seed=100 + step) + middle
        out, routing = model(x)
        loss = F.mse_loss(out, (x @ target).tanh()) + (0.1 * routing.balance / 64 if balance == "loss" else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_router(model, routing, step)
    load = model.eval()(draw_inputs(1000, seed=1) + middle)[1].load / 1000
    return float(torch.special.entr(load).sum()) / math.log(E)


@pytest.mark.parametrize("seed", [0, 1])
def test_balancing_evens_out_a_skewed_load(seed: int) -> None:
    assert train_load_entropy("none", seed) < 0.5
    assert train_load_entropy("loss", seed) >= 0.95
    assert train_load_entropy("bias", seed) >= 0.95


def test_router_update_matches_the_paper() -> None:
    shape = build_shape(balance="bias", bias_rate=0.25, load_decay=0.75)
    load, bias = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    tensors, stats = {"m.router.load": load, "m.router.bias": bias}, {"m.load": torch.tensor([6.0, 2.0, 0.0, 0.0])}
    new = update_router_state(tensors, stats, name="m", shape=shape)
    torch.testing.assert_close(new["m.router.load"], 0.75 * load + 0.25 * torch.tensor([0.75, 0.25, 0.0, 0.0]))
    assert new["m.router.bias"].tolist() == [-0.25, 1.0, 0.25, 0.25]
    unchanged = update_router_state(tensors, {"m.load": torch.zeros(E)}, name="m", shape=shape)
    assert torch.equal(unchanged["m.router.load"], load)
    assert torch.equal(unchanged["m.router.bias"], bias)
    assert load.tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1]), "the update is not in place"


def test_bias_affects_selection_but_not_the_gate() -> None:
    model, x = build_layer(balance="bias"), draw_inputs(20)
    model.router.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    out, routing = model(x)
    assert routing.load.tolist() == [0, 0, 20, 0]
    torch.testing.assert_close(out, routing.gates[:, 2:3] * run_expert(model, 2, x))


def test_expert_dropout_depends_on_the_step_and_leaves_top_k() -> None:
    model = build_layer(top_k=2, expert_dropout=0.6)
    absent, counts = model.router.get_buffer("absent"), []
    assert int(absent.sum()) == 0
    for step in range(200):
        before = model.router.load.clone()
        routing = model(draw_inputs(20, seed=step))[1]
        assert float((routing.load * absent).sum()) == 0
        was_absent = absent.clone() > 0
        update_router(model, routing, step)
        assert torch.equal(model.router.load[was_absent], before[was_absent])  # a dropped expert's load is not updated
        assert float(model.router.load.sum()) == pytest.approx(1, abs=1e-5)
        counts.append(int(absent.sum()))
    assert max(counts) == E - 2
    assert len(set(counts)) == 3
    update_router(model, routing, 41)
    first = absent.clone()
    update_router(model, routing, 42)
    assert not torch.equal(absent, first)
    update_router(model, routing, 41)
    assert torch.equal(absent, first)


def test_expert_dropout_depends_on_the_seed_from_the_first_step() -> None:
    def record_dropped_experts(seed: int) -> list[list[float]]:
        model = torch.nn.Module()
        model.add_module("layer", build_layer(top_k=2, expert_dropout=0.6))
        drop_initial_experts(model, seed)
        absent, history = model.layer.router.get_buffer("absent"), []
        for step in range(20):
            history.append(absent.tolist())
            update_router(model.layer, model.layer(draw_inputs(20))[1], step, seed=seed)
        return history

    assert record_dropped_experts(0) == record_dropped_experts(0)
    assert record_dropped_experts(0) != record_dropped_experts(1)
    assert any(any(record_dropped_experts(seed)[0]) for seed in range(3)), "the first step drops experts too"
    layers = torch.nn.ModuleDict({name: build_layer(expert_dropout=0.6, num_experts=16) for name in ("a", "b")})
    drop_initial_experts(layers, 0)
    assert not torch.equal(layers["a"].router.get_buffer("absent"), layers["b"].router.get_buffer("absent")), (
        "layers drop different experts"
    )


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_ties_choose_the_lower_expert_index(count: int) -> None:
    """Groups of eight spiking units have few distinct logits; the choice must not depend on the rest of the batch."""
    model = build_layer(num_experts=40, top_k=3)
    votes = torch.randint(0, 3, (500, 40), generator=torch.Generator().manual_seed(0)).float()
    chosen = model(draw_inputs(500)[:count], logits=votes[:count])[1].chosen
    expected = [sorted(range(40), key=lambda e, row=row: (-row[e], e))[:3] for row in votes[:count].tolist()]
    assert chosen.tolist() == expected


def test_load_entropy_values() -> None:
    assert float(load_entropy(torch.tensor([[4.0, 4, 4, 4], [16, 0, 0, 0]]))) == pytest.approx(0.5)
    assert float(load_entropy(torch.tensor([5.0, 5, 0, 0]))) == pytest.approx(0.5)
    assert float(load_entropy(torch.zeros(4))) == 0


def test_dropped_expert_keeps_its_bias() -> None:
    shape = build_shape(balance="bias", expert_dropout=0.5)
    names = ("load", "bias", "absent")
    values = (torch.full((E,), 0.25), torch.zeros(E), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensors = {f"m.router.{name}": value for name, value in zip(names, values, strict=True)}
    new = update_router_state(
        tensors, {"m.load": torch.tensor([0.0, 4.0, 4.0, 4.0])}, name="m", shape=shape, rng=Noise(0, 0, ())
    )
    assert new["m.router.bias"].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(new["m.router.load"], torch.full((E,), 0.25))


@pytest.mark.parametrize("renormalise", [None, True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_router_gets_gradients_unless_its_gate_is_constant(renormalise: bool | None, k: int) -> None:
    model = build_layer(top_k=k, renormalise=renormalise)
    model(draw_inputs(9))[0].square().sum().backward()
    assert model.router.weight is not None
    assert model.router.weight.grad is not None
    assert (float(model.router.weight.grad.abs().max()) > 1e-3) == (renormalise is not True or k > 1)


def test_given_logits_replace_the_router() -> None:
    model, x = build_layer(), draw_inputs(6)
    targets = torch.tensor([3, 1, 0, 0, 2, 1])
    routing = model(x, logits=20.0 * F.one_hot(targets, E))[1]
    assert routing.chosen[:, 0].tolist() == targets.tolist()
    router_logits = model(x)[1].logits
    torch.testing.assert_close(model(x, logits=router_logits)[0], model(x)[0])


def test_router_runs_in_float32_under_autocast() -> None:
    model, x = build_layer(top_k=2), draw_inputs(2, 20)
    routing = model(x)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, autocast_routing = model(x)
    assert out.dtype is torch.bfloat16
    assert torch.equal(autocast_routing.logits, routing.logits)
    assert torch.equal(autocast_routing.chosen, routing.chosen)
    assert float((out - model(x)[0]).detach().abs().max()) < 0.05


def test_initialisation_from_the_meta_device_matches_direct_construction() -> None:
    with torch.device("meta"):
        materialised = Experts(build_shape(top_k=2, expert_dropout=0.1, num_shared=1))
    materialised.to_empty(device="cpu")
    direct = Experts(build_shape(top_k=2, expert_dropout=0.1, num_shared=1))
    for model in (materialised, direct):
        initialise(model, 3, residual_layers=2)
    for (name, value), other in zip(direct.state_dict().items(), materialised.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert materialised.router.load.tolist() == [0.25] * E


def test_buffers_stay_in_float32() -> None:
    model = build_layer()
    model.router.bias.fill_(0.501)
    model.bfloat16()
    assert model.router.bias.dtype is torch.float32
    assert float(model.router.bias[0]) == pytest.approx(0.501)


def test_initial_weights_preserve_the_signal_scale() -> None:
    model = Experts(build_shape(hidden_size=64, expert_size=32, num_experts=3))
    initialise(model, 0, residual_layers=8)
    assert model.experts.up_proj.detach().std() == pytest.approx(1 / 8, rel=0.05)
    assert model.experts.down_proj.detach().std() == pytest.approx(1 / math.sqrt(32) / 4, rel=0.05)  # 16 additions
    first = model.experts.up_proj.detach().clone()
    initialise(model, 1, residual_layers=8)
    assert not torch.equal(first, model.experts.up_proj)


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "gelu"}, {"num_shared": 2, "shared_size": 5}, {"top_k": 3}, {"router": "spiking"}],
)
def test_parameters_are_counted_exactly(changes: dict[str, Any]) -> None:
    shape = build_shape(**changes)
    model = Experts(shape)
    assert shape.num_parameters() == sum(p.numel() for p in model.parameters())
    num_idle = (shape.num_experts - shape.top_k) * sum(p[0].numel() for p in model.experts.parameters())
    assert shape.num_active_parameters() == shape.num_parameters() - num_idle


def test_spiking_router_gets_gradients_and_reports_rates() -> None:
    units = SpikingShape(time_steps=4)
    model = build_layer(router="spiking", spiking=units, top_k=2)
    out, routing = model(2 * draw_inputs(2, 9))
    (out.square().sum() + routing.z).backward()
    assert routing.rates is not None
    assert routing.rates.shape[:2] == (2, 9)
    assert 0 < float(routing.rates.detach().mean()) < 1
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.gate.parameters())  # type: ignore[union-attr]


def test_router_and_experts_are_shareable_layers() -> None:
    models = {
        name: torch.nn.Sequential(Experts(build_shape(num_shared=1)), torch.nn.Linear(D, 2)) for name in ("a", "b")
    }
    assert {"0.router", "0.experts", "0.shared.up_proj"} <= set(find_shared_layers(models))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by the compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("use_grouped", [False, True])
def test_layer_compiles_to_one_graph_with_the_grouped_kernel_only(
    use_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grouped kernel needs no host sync. Without it, a single graph would run every expert on every token."""
    model, x = build_layer(top_k=2, capacity_factor=1.0, balance="bias", num_shared=1), draw_inputs(2, 8)
    if use_grouped:
        monkeypatch.setattr(dispatch, "can_use_grouped_mm", lambda x, weight: True)
    looped_rows: list[int] = []
    run_loop = dispatch.run_loop
    monkeypatch.setattr(dispatch, "run_loop", lambda x, *args: looped_rows.append(len(x)) or run_loop(x, *args))
    assert model.experts.can_capture_graph(x) is use_grouped
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=use_grouped, dynamic=False, backend="aot_eager")

    def run(layer: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_grouped):
            out, routing = layer(x)
        model.zero_grad()
        (out.float().square().sum() + routing.balance + routing.z).backward()
        return [out.detach().float(), routing.load, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for actual, expected in zip(run(compiled), run(model), strict=True):
        assert float((actual - expected).abs().max()) <= (0.01 if use_grouped else 1e-5) * max(
            1.0, float(expected.abs().max())
        )
    assert looped_rows == ([] if use_grouped else [16 * 2] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 5}, "top_k 5 is more than num_experts 4; lower top_k to 4"),
        (
            {"capacity": 2, "capacity_factor": 1.25},
            "capacity 2 and capacity_factor 1.25 both set an expert's capacity; keep one",
        ),
        ({"shared_size": 3}, "shared_size 3 has no effect without shared experts; set num_shared"),
        ({"spiking": SpikingShape()}, "spiking is set but router is 'linear'; set router to 'spiking'"),
        ({"capacity": 0}, "capacity 0 must be at least 1; remove it to drop no tokens"),
        ({"capacity": -2}, "capacity -2 must be at least 1"),
        ({"capacity_factor": 0.0}, "capacity_factor 0 must be more than 0; remove it"),
        ({"capacity_factor": math.inf}, "capacity_factor"),
        ({"num_experts": 0}, "num_experts 0 is too small; give at least 1"),
        ({"hidden_size": -8}, "hidden_size -8 is too small; give at least 1"),
        ({"expert_size": 0}, "expert_size 0 is too small; give at least 1"),
        ({"top_k": 0}, "top_k 0 is too small; give at least 1"),
        ({"num_shared": -1}, "num_shared -1 is too small; give at least 0"),
        ({"num_shared": 1, "shared_size": 0}, "shared_size 0 is too small; give at least 1"),
        ({"expert_dropout": 1.0}, "expert_dropout"),
        ({"load_decay": 1.0}, "load_decay"),
        ({"topk": 1}, "topk"),
    ],
)
def test_invalid_shape_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        build_shape(**changes)
    assert message in str(error.value)


def test_capacity_is_robust_to_rounding() -> None:
    assert 1.1 * 2 * 100 / E > 55
    assert build_shape(capacity_factor=1.1, top_k=2).capacity_for(100) == 55
    assert build_shape(capacity_factor=1.1, top_k=2).capacity_for(101) == 56
    assert build_shape(capacity_factor=1e-3).capacity_for(1) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("num_experts", [4, 16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_dispatch_on_the_device_equals_the_loop(num_tokens: int, num_experts: int, activation: Any) -> None:
    """One token with two of 16 experts copies their weights; in the other cases all experts are applied."""
    model = build_layer(num_experts=num_experts, top_k=2, activation=activation, num_shared=1).eval()
    x, stack = draw_inputs(num_tokens), model.experts
    with torch.no_grad():
        chosen, weights = model.route(x)
        out = dispatch.dispatch_on_device(x, chosen, weights, (stack.gate_proj, stack.up_proj, stack.down_proj))
        assert model.shared is not None
        expected, routing = model(x)
    assert torch.equal(chosen, routing.chosen)
    torch.testing.assert_close(out + model.shared(x), expected, atol=1e-6, rtol=1e-5)
