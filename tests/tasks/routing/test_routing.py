"""The routing task: sums that do not depend on micro-batches, gradients of its loss terms, state updates and routing metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import small_routing
from bottega.core.noise import Noise
from bottega.data.sources.source import ArraySource
from bottega.engines.torch.state_updates import BatchStats
from bottega.models.build import build_models
from bottega.models.experts.config import ExpertsShape
from bottega.models.routing.config import RoutingShape
from bottega.models.spiking.config import SpikingShape
from bottega.models.ssm.config import SSMShape
from bottega.tasks.metrics.routing import count_rule_experts, expert_load, load_entropy, normalised_mutual_information
from bottega.tasks.routing.task import RoutingTask
from toy_task import engine, loader, train_steps, training

SPIKING = {"trunk": "spiking", "num_layers": 3, "spiking": SpikingShape(time_steps=4)}

STATE_SPACE = {"trunk": "state_space", "ssm": SSMShape(hidden_size=16, head_size=8, state_size=4), "token_size": 3}


def task(*, experts: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, **fields: Any) -> RoutingTask:
    experts_shape = ExpertsShape(**{"hidden_size": 16, "expert_size": 8, "num_experts": 3, **(experts or {})})
    inputs = small_routing.INPUTS
    sizes = {"num_inputs": inputs, "num_labels": 2, "hidden_size": 16, "num_layers": 1, **(shape or {})}
    return RoutingTask(shape=RoutingShape(experts=experts_shape, **sizes), num_rules=3, **fields)


def batch(count: int = 24, *, seed: int = 0) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in small_routing.make_rows(count, seed=seed).items()}


def noise(count: int) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def slice_rows(rows: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    return {name: value[first:last] for name, value in rows.items()}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"experts": {"top_k": 2}},
    "sigmoid": {"experts": {"gate": "sigmoid", "balance": "bias"}},
    "spiking": {"shape": SPIKING, "firing_rate": 0.2},
    "spiking router": {"experts": {"router": "spiking"}},
    "state space": {"shape": STATE_SPACE},
    "dense": {"experts": {"num_experts": 1}, "routing_loss_weight": 0.0},
}


@pytest.fixture(params=KINDS, ids=str)
def routing_task(request: pytest.FixtureRequest) -> RoutingTask:
    return task(**{"routing_loss_weight": 0.5, "z_weight": 1e-3, **KINDS[request.param]})


@pytest.mark.parametrize("training", [True, False])
def test_any_split_gives_the_same_sums(routing_task: RoutingTask, training: bool) -> None:
    models, data = build_models(routing_task, 0), batch()
    models["model"].train(training)
    total_output = routing_task.loss(models, data, noise(24))
    outputs = [routing_task.loss(models, slice_rows(data, a, b), noise(b - a)) for a, b in ((0, 5), (5, 6), (6, 24))]
    assert set(total_output.terms) <= set(routing_task.counts(data))
    for name, (total, weight) in total_output.terms.items():
        torch.testing.assert_close(sum(p.terms[name][0] for p in outputs), total, rtol=1e-5, atol=1e-5)
        assert weight == outputs[0].terms[name][1]
    for name, (total, count) in total_output.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name][0] for p in outputs), total, rtol=1e-5, atol=1e-5)
        assert float(sum(p.metrics[name][1] for p in outputs)) == float(count)
    for name, value in total_output.stats.items():
        torch.testing.assert_close(sum(p.stats[name] for p in outputs), value)
    for name, rows in total_output.rows.items():
        torch.testing.assert_close(torch.cat([p.rows[name] for p in outputs]), rows, rtol=1e-5, atol=1e-6)


def test_padding_rows_do_not_count(routing_task: RoutingTask) -> None:
    models, data = build_models(routing_task, 0), batch()
    weight = torch.ones(24)
    weight[20:] = 0
    filled = {**data, "weight": weight, "x": data["x"].clone()}
    filled["x"][20:] = 1e30
    models["model"].train()
    a, b = routing_task.loss(models, slice_rows(data, 0, 20), noise(20)), routing_task.loss(models, filled, noise(24))
    assert routing_task.counts(slice_rows(data, 0, 20)) == routing_task.counts(filled)
    for name in a.terms:
        torch.testing.assert_close(a.terms[name][0], b.terms[name][0], rtol=1e-5, atol=1e-5)
    for name in a.stats:
        torch.testing.assert_close(a.stats[name], b.stats[name])
    assert {name: float(n) for name, (_, n) in a.metrics.items()} == {
        name: float(n) for name, (_, n) in b.metrics.items()
    }


def test_a_prediction_does_not_depend_on_its_batch(routing_task: RoutingTask) -> None:
    models, data = build_models(routing_task, 0), batch()
    models["model"].eval()
    batched = routing_task.predict(models, data["x"])
    outputs = [routing_task.predict(models, data["x"][i : i + 1]) for i in range(24)]
    torch.testing.assert_close(torch.cat([single.logits for single in outputs]), batched.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([single.routing.chosen for single in outputs]), batched.routing.chosen)


def test_every_weight_gets_a_gradient(routing_task: RoutingTask) -> None:
    """Also through several spiking layers, by the surrogate gradient."""
    models, data = build_models(routing_task, 0), batch(240)
    models["model"].train()
    sum(total * weight for total, weight in routing_task.loss(models, data, noise(240)).terms.values()).backward()
    without_gradient = [
        name
        for name, p in models["model"].named_parameters()
        if p.grad is None or not (p.grad.isfinite().all() and p.grad.abs().sum() > 0)
    ]
    # The gate of a single expert is always 1.
    assert without_gradient == (["experts.router.weight"] if routing_task.shape.experts.num_experts == 1 else [])


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_the_routing_loss_pulls_each_sample_to_its_rule(gate: str) -> None:
    routing_task, data = task(experts={"gate": gate}, routing_loss_weight=1.0), batch(96)
    models = build_models(routing_task, 0)
    optimizer = torch.optim.Adam(models["model"].parameters(), lr=1e-2)
    models["model"].train()
    for _ in range(60):
        optimizer.zero_grad()
        routing_task.loss(models, data, noise(96)).terms["routing"][0].backward()
        optimizer.step()
    chosen = routing_task.predict(models, data["x"]).routing.chosen[:, 0]
    assert (chosen == data["rule"]).float().mean() > 0.95


def test_the_load_loss_applies_in_training_only() -> None:
    """An evaluation must be a function of the weights, and the running load is not a weight."""
    routing_task = task(routing_loss_weight=0.5, z_weight=1e-3, shape=SPIKING, firing_rate=0.2, label_smoothing=0.3)
    models, data = build_models(routing_task, 0), batch()
    models["model"].eval()
    before = routing_task.loss(models, data, noise(24))
    models["model"].experts.router.load.copy_(torch.tensor([0.9, 0.1, 0.0]))
    after = routing_task.loss(models, data, noise(24))
    assert set(before.terms) == {"loss", "routing"}
    assert all(torch.equal(before.terms[name][0], after.terms[name][0]) for name in before.terms)
    plain = torch.nn.functional.cross_entropy(
        routing_task.predict(models, data["x"]).logits, data["label"].long(), reduction="sum"
    )
    torch.testing.assert_close(before.terms["loss"][0], plain)
    models["model"].train()
    assert set(routing_task.loss(models, data, noise(24)).terms) == {"loss", "routing", "balance", "router_z", "firing"}


def test_the_load_is_updated_once_per_batch_and_not_by_a_forward() -> None:
    routing_task, data = task(), batch()
    models = build_models(routing_task, 0)
    models["model"].train()
    tensors = {**dict(models["model"].named_parameters()), **dict(models["model"].named_buffers())}
    before = {name: value.clone() for name, value in tensors.items()}
    stats = BatchStats()
    for first in range(0, 24, 8):
        stats.add(routing_task.loss(models, slice_rows(data, first, first + 8), noise(8)), None)
    assert all(torch.equal(value, tensors[name]) for name, value in before.items())
    new = routing_task.update(tensors, stats.reduce(), noise(0))
    fraction = np.bincount(routing_task.predict(models, data["x"]).routing.chosen[:, 0].numpy(), minlength=3) / 24
    np.testing.assert_allclose(new["experts.router.load"], 0.9 / 3 + 0.1 * fraction, rtol=1e-6)


def test_inputs_are_standardised() -> None:
    plain, data = task(), batch()
    rng = np.random.default_rng(1)
    mean, deviation = rng.normal(size=8) * 50, rng.uniform(0.01, 1000, 8)
    scaled = task(mean=tuple(mean.tolist()), scale=tuple((1 / deviation).tolist()))
    raw = data["x"].double() * torch.from_numpy(deviation) + torch.from_numpy(mean)
    a, b = (
        routing_task.predict(build_models(routing_task, 0), x)
        for routing_task, x in ((plain, data["x"]), (scaled, raw.float()))
    )
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-2, atol=1e-3)
    assert not [name for name in build_models(plain, 0)["model"].state_dict() if name in ("mean", "scale")]


def test_dead_and_saturated_units_are_counted() -> None:
    routing_task = task(shape={**SPIKING, "num_layers": 2})
    models, data = build_models(routing_task, 0), batch(48)
    model = models["model"].eval()
    with torch.no_grad():
        model.model.layers[0].synapse.bias[:4] = -100.0
        model.model.layers[1].synapse.bias[:8] = 100.0
    rows = {name: value.detach().numpy() for name, value in routing_task.loss(models, data, noise(48)).rows.items()}
    metrics = routing_task.score(rows)
    assert metrics["dead"] >= 4 / 32
    assert metrics["saturated"] == 8 / 32


def test_units_of_a_spiking_router_are_counted() -> None:
    """A spiking router's units are counted with those of the trunk."""
    router_only, both = (
        task(experts={"router": "spiking"}, shape=shape) for shape in (None, {**SPIKING, "num_layers": 2})
    )
    num_router_units = 3 * 8
    for routing_task, num_trunk_units in ((router_only, 0), (both, 32)):
        models, data = build_models(routing_task, 0), batch(48)
        model = models["model"].eval()
        with torch.no_grad():
            synapse = model.experts.gate.groups.synapse
            synapse.bias[:6], synapse.bias[6:10] = -1e6, 1e6
        out = routing_task.loss(models, data, noise(48))
        rows = {name: value.detach().numpy() for name, value in out.rows.items()}
        assert rows["units"].shape == (48, num_router_units + num_trunk_units)
        metrics, routed = routing_task.score(rows), routing_task.predict(models, data["x"])
        assert metrics["dead"] >= 6 / (num_router_units + num_trunk_units)
        assert (
            4 / (num_router_units + num_trunk_units) <= metrics["saturated"] < 10 / (num_router_units + num_trunk_units)
        )
        rates = [routed.routing.rates] + ([routed.spikes.mean(0)] if routed.spikes is not None else [])
        total, count = out.metrics["firing_rate"]
        assert float(total / count) == pytest.approx(float(torch.cat(rates, 1).detach().mean()), rel=1e-5)


def test_load_entropy_of_a_step_is_that_of_its_batch_under_any_micro_batch_split() -> None:
    reports = []
    for micro in (None, 5):
        built_engine = engine(training(batch_size=16), task=task(), micro=micro)
        source = ArraySource(small_routing.make_rows(32))
        reports.append(train_steps(built_engine, loader(source, of=built_engine, batch_size=16), 0, 2))
        chosen = built_engine.task.predict(
            {"model": built_engine.model}, torch.from_numpy(small_routing.make_rows(32)["x"])
        ).routing.chosen
        assert len(chosen) == 32
    a, b = ([report["load_entropy"] for report in steps] for steps in reports)
    assert a == pytest.approx(b, rel=1e-6)
    routing_task = task()
    models = build_models(routing_task, 0)
    built_engine = engine(training(batch_size=16), task=routing_task)
    first = loader(source, of=built_engine, batch_size=16).batch(0)["x"]
    chosen_experts = routing_task.predict(models, torch.from_numpy(first)).routing.chosen
    assert a[0] == pytest.approx(load_entropy(expert_load(chosen_experts.numpy(), 3)), rel=1e-5)


# Metrics


def test_load_entropy_is_one_for_even_and_zero_for_collapsed_load() -> None:
    assert load_entropy(expert_load(np.arange(40)[:, None] % 4, 4)) == pytest.approx(1.0)
    assert load_entropy(expert_load(np.zeros((40, 1), int), 4)) == 0.0
    half = load_entropy(expert_load(np.arange(40)[:, None] % 2, 4))
    assert half == pytest.approx(0.5)
    assert math.isnan(load_entropy(np.ones(1)))


def test_mutual_information_of_rule_and_expert() -> None:
    rng = np.random.default_rng(0)
    rule = rng.integers(0, 4, 20_000)

    def information(chosen: np.ndarray, experts: int = 4) -> float:
        return normalised_mutual_information(count_rule_experts(rule, chosen, num_rules=4, num_experts=experts))

    assert information(rule) == pytest.approx(1.0)
    assert information(np.array([2, 0, 3, 1])[rule]) == pytest.approx(1.0), (
        "a permutation of the experts does not matter"
    )
    assert information(rng.integers(0, 4, 20_000)) < 0.001
    assert information(np.zeros(20_000, int)) == 0.0
    assert information(rule // 2, 2) == pytest.approx(1.0, abs=1e-3), "normalised by min(H(rule), log experts)"
    assert information(rule // 2) == pytest.approx(0.5, abs=1e-3)
    noisy = np.where(rng.random(20_000) < 0.25, (rule + rng.integers(1, 4, 20_000)) % 4, rule)
    # Mutual information of a symmetric channel: log 4 - H(1/4) - 1/4 log 3.
    exact = 1 - (0.25 * math.log(4 * 3) + 0.75 * math.log(4 / 3)) / math.log(4)
    assert information(noisy) == pytest.approx(exact, abs=0.01)


def test_evaluation_metrics_lists_every_metric(routing_task: RoutingTask) -> None:
    models, data = build_models(routing_task, 0), batch()
    models["model"].eval()
    out = routing_task.loss(models, data, noise(24))
    rows = {name: value.detach().numpy() for name, value in out.rows.items()}
    assert {*out.terms, *out.metrics, *routing_task.score(rows)} == set(routing_task.evaluation_metrics)
