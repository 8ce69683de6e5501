"""The routing task: exact sums, what each term pushes, and measures that say what they are called."""

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
from bottega.tasks.measures import routing as measures
from bottega.tasks.routing.task import RoutingTask
from toy_task import advance, engine, loader, training

SPIKING = {"trunk": "spiking", "num_layers": 3, "spiking": SpikingShape(time_steps=4)}

STATE_SPACE = {"trunk": "state_space", "ssm": SSMShape(hidden_size=16, head_size=8, state_size=4), "token_size": 3}


def task(*, experts: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, **fields: Any) -> RoutingTask:
    chosen = ExpertsShape(**{"hidden_size": 16, "expert_size": 8, "num_experts": 3, **(experts or {})})
    inputs = small_routing.INPUTS
    given = {"num_inputs": inputs, "num_labels": 2, "hidden_size": 16, "num_layers": 1, **(shape or {})}
    return RoutingTask(shape=RoutingShape(experts=chosen, **given), num_rules=3, **fields)


def batch(count: int = 24, *, seed: int = 0) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in small_routing.rows(count, seed=seed).items()}


def noise(count: int) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def part(whole: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    return {name: value[first:last] for name, value in whole.items()}


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
def one(request: pytest.FixtureRequest) -> RoutingTask:
    return task(**{"routing_loss_weight": 0.5, "z_weight": 1e-3, **KINDS[request.param]})


@pytest.mark.parametrize("training", [True, False])
def test_any_split_gives_the_same_sums(one: RoutingTask, training: bool) -> None:
    models, data = build_models(one, 0), batch()
    models["model"].train(training)
    whole = one.loss(models, data, noise(24))
    parts = [one.loss(models, part(data, a, b), noise(b - a)) for a, b in ((0, 5), (5, 6), (6, 24))]
    assert set(whole.terms) <= set(one.counts(data))
    for name, (total, weight) in whole.terms.items():
        torch.testing.assert_close(sum(p.terms[name][0] for p in parts), total, rtol=1e-5, atol=1e-5)
        assert weight == parts[0].terms[name][1]
    for name, (total, count) in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name][0] for p in parts), total, rtol=1e-5, atol=1e-5)
        assert float(sum(p.metrics[name][1] for p in parts)) == float(count)
    for name, value in whole.stats.items():
        torch.testing.assert_close(sum(p.stats[name] for p in parts), value)
    for name, rows in whole.rows.items():
        torch.testing.assert_close(torch.cat([p.rows[name] for p in parts]), rows, rtol=1e-5, atol=1e-6)


def test_what_fills_up_a_batch_counts_nowhere(one: RoutingTask) -> None:
    models, data = build_models(one, 0), batch()
    weight = torch.ones(24)
    weight[20:] = 0
    filled = {**data, "weight": weight, "x": data["x"].clone()}
    filled["x"][20:] = 1e30
    models["model"].train()
    a, b = one.loss(models, part(data, 0, 20), noise(20)), one.loss(models, filled, noise(24))
    assert one.counts(part(data, 0, 20)) == one.counts(filled)
    for name in a.terms:
        torch.testing.assert_close(a.terms[name][0], b.terms[name][0], rtol=1e-5, atol=1e-5)
    for name in a.stats:
        torch.testing.assert_close(a.stats[name], b.stats[name])
    assert {name: float(n) for name, (_, n) in a.metrics.items()} == {
        name: float(n) for name, (_, n) in b.metrics.items()
    }


def test_a_sample_is_answered_by_itself_alone(one: RoutingTask) -> None:
    models, data = build_models(one, 0), batch()
    models["model"].eval()
    together = one.predict(models, data["x"])
    alone = [one.predict(models, data["x"][i : i + 1]) for i in range(24)]
    torch.testing.assert_close(torch.cat([each.logits for each in alone]), together.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([each.routing.chosen for each in alone]), together.routing.chosen)


def test_every_weight_gets_a_gradient(one: RoutingTask) -> None:
    """Also through six thresholds, where the guide's own spikes passed none on."""
    models, data = build_models(one, 0), batch(240)
    models["model"].train()
    sum(total * weight for total, weight in one.loss(models, data, noise(240)).terms.values()).backward()
    still = [
        name
        for name, p in models["model"].named_parameters()
        if p.grad is None or not (p.grad.isfinite().all() and p.grad.abs().sum() > 0)
    ]
    # The gate of a single expert is always 1.
    assert still == (["experts.router.weight"] if one.shape.experts.num_experts == 1 else [])


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_the_routing_loss_pulls_each_sample_to_its_rule(gate: str) -> None:
    one, data = task(experts={"gate": gate}, routing_loss_weight=1.0), batch(96)
    models = build_models(one, 0)
    optimizer = torch.optim.Adam(models["model"].parameters(), lr=1e-2)
    models["model"].train()
    for _ in range(60):
        optimizer.zero_grad()
        one.loss(models, data, noise(96)).terms["routing"][0].backward()
        optimizer.step()
    chosen = one.predict(models, data["x"]).routing.chosen[:, 0]
    assert (chosen == data["rule"]).float().mean() > 0.95


def test_training_alone_pays_for_the_load() -> None:
    """What is measured must be a function of the weights, and the running load is none."""
    one = task(routing_loss_weight=0.5, z_weight=1e-3, shape=SPIKING, firing_rate=0.2, label_smoothing=0.3)
    models, data = build_models(one, 0), batch()
    models["model"].eval()
    before = one.loss(models, data, noise(24))
    models["model"].experts.router.load.copy_(torch.tensor([0.9, 0.1, 0.0]))
    after = one.loss(models, data, noise(24))
    assert set(before.terms) == {"loss", "routing"}
    assert all(torch.equal(before.terms[name][0], after.terms[name][0]) for name in before.terms)
    plain = torch.nn.functional.cross_entropy(
        one.predict(models, data["x"]).logits, data["label"].long(), reduction="sum"
    )
    torch.testing.assert_close(before.terms["loss"][0], plain)
    models["model"].train()
    assert set(one.loss(models, data, noise(24)).terms) == {"loss", "routing", "balance", "router_z", "firing"}


def test_the_load_follows_the_whole_batch_and_no_forward_changes_it() -> None:
    one, data = task(), batch()
    models = build_models(one, 0)
    models["model"].train()
    tensors = {**dict(models["model"].named_parameters()), **dict(models["model"].named_buffers())}
    before = {name: value.clone() for name, value in tensors.items()}
    seen = BatchStats()
    for first in range(0, 24, 8):
        seen.add(one.loss(models, part(data, first, first + 8), noise(8)), None)
    assert all(torch.equal(value, tensors[name]) for name, value in before.items())
    new = one.update(tensors, seen.reduce(), noise(0))
    share = np.bincount(one.predict(models, data["x"]).routing.chosen[:, 0].numpy(), minlength=3) / 24
    np.testing.assert_allclose(new["experts.router.load"], 0.9 / 3 + 0.1 * share, rtol=1e-6)


def test_inputs_are_brought_to_one_scale() -> None:
    plain, data = task(), batch()
    draw = np.random.default_rng(1)
    mean, deviation = draw.normal(size=8) * 50, draw.uniform(0.01, 1000, 8)
    scaled = task(mean=tuple(mean.tolist()), scale=tuple((1 / deviation).tolist()))
    raw = data["x"].double() * torch.from_numpy(deviation) + torch.from_numpy(mean)
    a, b = (one.predict(build_models(one, 0), x) for one, x in ((plain, data["x"]), (scaled, raw.float())))
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-2, atol=1e-3)
    assert not [name for name in build_models(plain, 0)["model"].state_dict() if name in ("mean", "scale")]


def test_units_that_never_or_always_fire_are_told() -> None:
    one = task(shape={**SPIKING, "num_layers": 2})
    models, data = build_models(one, 0), batch(48)
    model = models["model"].eval()
    with torch.no_grad():
        model.model.layers[0].synapse.bias[:4] = -100.0
        model.model.layers[1].synapse.bias[:8] = 100.0
    rows = {name: value.detach().numpy() for name, value in one.loss(models, data, noise(48)).rows.items()}
    found = one.score(rows)
    assert found["dead"] >= 4 / 32
    assert found["saturated"] == 8 / 32


def test_units_of_a_router_fire_too() -> None:
    """Of a router alone, and beside those of the trunk: all of them are the model's units."""
    alone, both = (task(experts={"router": "spiking"}, shape=shape) for shape in (None, {**SPIKING, "num_layers": 2}))
    units = 3 * 8
    for one, others in ((alone, 0), (both, 32)):
        models, data = build_models(one, 0), batch(48)
        model = models["model"].eval()
        with torch.no_grad():
            synapse = model.experts.gate.groups.synapse
            synapse.bias[:6], synapse.bias[6:10] = -1e6, 1e6
        out = one.loss(models, data, noise(48))
        rows = {name: value.detach().numpy() for name, value in out.rows.items()}
        assert rows["units"].shape == (48, units + others)
        found, routed = one.score(rows), one.predict(models, data["x"])
        assert found["dead"] >= 6 / (units + others)
        assert 4 / (units + others) <= found["saturated"] < 10 / (units + others)
        rates = [routed.routing.rates] + ([routed.spikes.mean(0)] if routed.spikes is not None else [])
        total, count = out.metrics["firing_rate"]
        assert float(total / count) == pytest.approx(float(torch.cat(rates, 1).detach().mean()), rel=1e-5)


def test_a_step_tells_how_even_the_whole_batch_was_under_any_split() -> None:
    reports = []
    for micro in (None, 5):
        of = engine(training(batch_size=16), task=task(), micro=micro)
        source = ArraySource(small_routing.rows(32))
        reports.append(advance(of, loader(source, of=of, batch_size=16), 0, 2))
        chosen = of.task.predict({"model": of.model}, torch.from_numpy(small_routing.rows(32)["x"])).routing.chosen
        assert len(chosen) == 32
    a, b = ([report["load_entropy"] for report in one] for one in reports)
    assert a == pytest.approx(b, rel=1e-6)
    fresh = task()
    models = build_models(fresh, 0)
    of = engine(training(batch_size=16), task=fresh)
    first = loader(source, of=of, batch_size=16).batch(0)["x"]
    asked = fresh.predict(models, torch.from_numpy(first)).routing.chosen
    assert a[0] == pytest.approx(measures.load_entropy(measures.expert_load(asked.numpy(), 3)), rel=1e-5)


# Measures


def test_the_load_is_even_or_not() -> None:
    assert measures.load_entropy(measures.expert_load(np.arange(40)[:, None] % 4, 4)) == pytest.approx(1.0)
    assert measures.load_entropy(measures.expert_load(np.zeros((40, 1), int), 4)) == 0.0
    half = measures.load_entropy(measures.expert_load(np.arange(40)[:, None] % 2, 4))
    assert half == pytest.approx(0.5)
    assert math.isnan(measures.load_entropy(np.ones(1)))


def test_an_expert_tells_the_rule_or_says_nothing_of_it() -> None:
    draw = np.random.default_rng(0)
    rule = draw.integers(0, 4, 20_000)

    def said(chosen: np.ndarray, experts: int = 4) -> float:
        return measures.normalised_mutual_information(
            measures.count_rule_experts(rule, chosen, num_rules=4, num_experts=experts)
        )

    assert said(rule) == pytest.approx(1.0)
    assert said(np.array([2, 0, 3, 1])[rule]) == pytest.approx(1.0), "whichever expert it is"
    assert said(draw.integers(0, 4, 20_000)) < 0.001
    assert said(np.zeros(20_000, int)) == 0.0
    assert said(rule // 2, 2) == pytest.approx(1.0, abs=1e-3), "two experts can say no more of four rules"
    assert said(rule // 2) == pytest.approx(0.5, abs=1e-3)
    noisy = np.where(draw.random(20_000) < 0.25, (rule + draw.integers(1, 4, 20_000)) % 4, rule)
    # Of a symmetric channel: log 4 - H(1/4) - 1/4 log 3.
    exact = 1 - (0.25 * math.log(4 * 3) + 0.75 * math.log(4 / 3)) / math.log(4)
    assert said(noisy) == pytest.approx(exact, abs=0.01)


def test_names_of_all_measures_are_known_beforehand(one: RoutingTask) -> None:
    models, data = build_models(one, 0), batch()
    models["model"].eval()
    out = one.loss(models, data, noise(24))
    rows = {name: value.detach().numpy() for name, value in out.rows.items()}
    assert {*out.terms, *out.metrics, *one.score(rows)} == set(one.evaluation_metrics)
