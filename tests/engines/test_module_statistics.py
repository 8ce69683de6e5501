"""Statistics of modules in a step: their values, their independence of any split, and that they change and cost nothing."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gradients import TwoTerms
from torch import Tensor, nn

from bottega.core.engine import Inspection
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.types import Batch
from bottega.engines.module_groups import group_by_module
from bottega.engines.torch.engine import TorchEngine
from bottega.engines.torch.histograms import NUM_BINS, compute_histogram, fetch_histograms
from bottega.engines.torch.module_statistics import MAX_SAMPLED_ELEMENTS, choose_stride
from bottega.engines.torch.step_inspection import StepInspector, TimeBudget
from bottega.techniques.lora.torch import Lora
from toy_task import Toy, copy_state, engine, initialise, loader, training

Statistics = dict[str, dict[str, float]]


def inspect_step(torch_engine: TorchEngine, step: int = 0, batch: Batch | None = None) -> tuple[Statistics, float]:
    """Train a step; return its statistics by module and the gradient norm of the whole model."""
    torch_engine.inspector.budget.share = 1.0
    metrics = torch_engine.train_step(step, batch or loader(of=torch_engine).batch(step), module_statistics=True)
    norm = torch_engine.fetch(metrics)["grad_norm"]
    return torch_engine.fetch_inspection().modules, norm


def copy_weights(torch_engine: TorchEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in torch_engine.model.named_parameters()}


# Modules


@pytest.mark.parametrize(
    ("parameter", "module"),
    [
        ("layers.0.self_attn.q_proj.weight", "layers.0"),
        ("model.layers.11.mlp.bias", "layers.11"),
        ("backbone.layers.11.mlp.bias", "backbone.layers.11"),
        ("down.1.resnets.0.conv.weight", "down.1"),
        ("embed_tokens.weight", "embed_tokens"),
        ("time.linear_1.weight", "time.linear_1"),
        ("0.weight", "0"),
        ("temperature", "temperature"),
    ],
)
def test_a_parameter_is_reported_under_its_block(parameter: str, module: str) -> None:
    assert group_by_module([parameter]) == {parameter: module}


def test_distinct_modules_keep_distinct_names() -> None:
    names = ["model.norm.weight", "norm.weight", "model.layers.0.weight"]
    assert list(group_by_module(names).values()) == ["model.norm", "norm", "model.layers.0"]
    assert list(group_by_module(["model.norm.weight", "lm_head.weight"]).values()) == ["norm", "lm_head"]


def test_a_deep_model_has_a_readable_number_of_modules() -> None:
    names = ["embed.weight", *(f"layers.{i}.{part}.weight" for i in range(150) for part in ("attn", "mlp"))]
    modules = group_by_module(names)
    assert list(dict.fromkeys(modules.values()))[:3] == ["embed", "layers.0-2", "layers.3-5"]
    assert len(set(modules.values())) == 51
    assert modules["layers.149.mlp.weight"] == "layers.147-149"
    branches = [f"stage.branch{i}.part{j}.weight" for i in range(10) for j in range(10)]
    assert set(group_by_module(branches).values()) == {f"stage.branch{i}" for i in range(10)}


@pytest.mark.parametrize("shape", [(1024, 1024), (768, 3072), (50304, 768), (4, 512, 512), (100_000,), (7, 3)])
def test_sampled_elements_reach_every_column(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    stride = choose_stride(tensor)
    positions = np.arange(0, tensor.numel(), stride)
    assert len(positions) <= MAX_SAMPLED_ELEMENTS
    assert len(np.unique(positions % shape[-1])) == min(shape[-1], len(positions))
    if tensor.numel() <= MAX_SAMPLED_ELEMENTS:
        assert stride == 1


# Values


@pytest.mark.parametrize("task", [Toy(), TwoTerms(term_names=("a/error", "b/error"))], ids=["plain", "pcgrad"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_squares_of_the_norms_sum_to_that_of_the_model(task: Toy, max_norm: float | None) -> None:
    statistics, norm = inspect_step(engine(training(max_grad_norm=max_norm), task=task))
    assert list(statistics) == ["first", "norm", "second", "head"]
    squares = sum(values["gradient_norm"] ** 2 for values in statistics.values())
    assert math.sqrt(squares) == pytest.approx(norm, rel=1e-6)
    assert norm > 0.01, "nothing was clipped"


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_statistics_do_not_depend_on_the_micro_batch_split(micro: int) -> None:
    whole, _ = inspect_step(engine(training(optimizer={"name": "sgd"})))
    split, _ = inspect_step(engine(training(optimizer={"name": "sgd"}), micro=micro))
    assert_close(split, whole)


def assert_close(statistics: Statistics, expected: Statistics, *, rel: float = 1e-6) -> None:
    assert list(statistics) == list(expected)
    for module, values in expected.items():
        assert statistics[module] == pytest.approx(values, rel=rel), module


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion", "adafactor"])
def test_update_ratio_is_that_of_the_weights(name: str) -> None:
    torch_engine = engine(training(optimizer={"name": name}))
    before = copy_weights(torch_engine)
    statistics, _ = inspect_step(torch_engine)
    after = copy_weights(torch_engine)
    for module, values in statistics.items():
        names = [n for n in before if n.startswith(f"{module}.")]
        old, new = (torch.cat([weights[n].flatten().double() for n in names]) for weights in (before, after))
        assert values["update_ratio"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-6)
        assert values["update_ratio"] > 0


class WideNet(nn.Module):
    """A model with more parameters in a matrix than are sampled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)).mean(dim=-1)


class Wide(Toy):
    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(WideNet, 300, initial=Initial(initialise))}


def test_update_ratio_of_a_large_matrix_is_estimated_from_a_sample() -> None:
    torch_engine = engine(training(optimizer={"name": "sgd"}), task=Wide())
    with torch.no_grad():
        # A bias as large as the matrix, which is not sampled: both must count as what they are of the whole.
        torch_engine.model.get_parameter("head.bias").fill_(5.0)
    before = copy_weights(torch_engine)
    statistics, _ = inspect_step(torch_engine)
    change, weight = (
        math.sqrt(sum(f(n).double().square().sum().item() for n in ("head.weight", "head.bias")))
        for f in (lambda n: copy_weights(torch_engine)[n] - before[n], lambda n: before[n])
    )
    assert statistics["head"]["update_ratio"] == pytest.approx(change / weight, rel=0.05)
    assert statistics["head"]["update_ratio"] != pytest.approx(change / weight, rel=1e-12), "nothing was sampled"


def test_a_skipped_update_has_ratio_zero() -> None:
    torch_engine = engine(training(on_nonfinite="skip"))
    batch = dict(loader(of=torch_engine).batch(0))
    batch["x"] = np.full_like(batch["x"], np.nan)
    statistics, _ = inspect_step(torch_engine, batch=batch)
    assert [values["update_ratio"] for values in statistics.values()] == [0.0] * 4
    assert all(math.isnan(values["gradient_norm"]) for values in statistics.values())
    torch_engine.skip_steps = frozenset({1})
    torch_engine.reset_bad_steps()
    statistics, _ = inspect_step(torch_engine, 1)
    assert all(values["update_ratio"] == 0.0 and values["gradient_norm"] > 0 for values in statistics.values())


def test_loss_scale_is_divided_out() -> None:
    plain = engine(training(optimizer={"name": "sgd"}))
    scaled = engine(training(optimizer={"name": "sgd"}))
    expected, norm = inspect_step(plain)
    scale = torch.tensor(1024.0)
    parameters = list(scaled.model.parameters())
    batch = loader(of=scaled).batch(0)
    scaled.inspector.request(modules=True, histograms=True)
    scaled.backward(0, {k: torch.from_numpy(v) for k, v in batch.items()}, scaled.task.counts(batch), 8)
    for p in parameters:
        assert p.grad is not None
        p.grad *= scale
    scaled.inspector.before_update(parameters, scale=scale)
    scale *= 2  # as the guard does before the optimizer steps
    scaled.inspector.after_update()
    results = scaled.inspector.fetch()
    for module, values in results.modules.items():
        assert values["gradient_norm"] == pytest.approx(expected[module]["gradient_norm"], rel=1e-6)
    largest = max(abs(edge) for n, h in results.histograms.items() if n[0] == "g" for edge in h.edges)
    assert 0 < largest <= norm


# Dead units


class ReluNet(nn.Module):
    """Units of `hidden` and `conv` with a large negative bias never fire; experts beyond the first get no example."""

    def __init__(self, num_dead: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.hidden, self.head = nn.Linear(4, 10), nn.Linear(10, 1)
        self.conv, self.up = nn.Conv1d(4, 6, 1), nn.ConvTranspose1d(6, 5, 1)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.empty(4, 4, 3))
        self.experts.bias = nn.Parameter(torch.empty(3))
        self.frozen = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.num_dead = num_dead

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[1]) % 3
        x = self.frozen(x) + self.embed(tokens)
        hidden = self.head(torch.relu(self.hidden(x))).squeeze(-1)
        channels = self.up(torch.relu(self.conv(x.transpose(1, 2))))[:, :3].mean(dim=1)
        no_gradient = 0.0 * self.experts.bias  # a vector is not a unit, even if its gradient is 0
        return hidden + channels + (x @ self.experts.up_proj[0] + no_gradient).mean(dim=-1)


def initialise_dead(model: nn.Module, seed: int) -> None:
    initialise(model, seed)
    assert isinstance(model, ReluNet)
    with torch.no_grad():
        for layer in (model.hidden, model.conv):
            assert layer.bias is not None
            layer.bias.fill_(10.0)
            layer.bias[: model.num_dead] = -1e4


class WithDeadUnits(Toy):
    num_dead: int

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(ReluNet, self.num_dead, initial=Initial(initialise_dead))}


@pytest.mark.parametrize("num_dead", [0, 3])
def test_dead_units_are_counted_exactly(num_dead: int) -> None:
    groups = [{"pattern": "frozen.*", "scale": "none"}, {"pattern": ".*"}]
    statistics, _ = inspect_step(
        engine(training(groups=groups, max_grad_norm=None), task=WithDeadUnits(num_dead=num_dead))
    )
    dead = {module: values.get("dead_fraction") for module, values in statistics.items()}
    assert dead == {
        "embed": None,  # 47 of its 50 tokens are absent
        "hidden": num_dead / 10,
        "head": 0.0,
        "conv": num_dead / 6,
        "up": 2 / 5,  # only three of its five output channels are used
        "experts": 3 / 4,
    }


# Techniques and frozen parts


def test_frozen_parts_are_absent_until_they_train() -> None:
    groups = [{"pattern": "first.*", "scale": "none"}, {"pattern": "second.*", "starts": 2}, {"pattern": ".*"}]
    torch_engine = engine(training(groups=groups))
    torch_engine.set_schedule(torch_engine.rate, total=8, steps_per_epoch=5)
    modules = [list(inspect_step(torch_engine, step)[0]) for step in range(4)]
    assert modules == [["norm", "head"]] * 2 + [["norm", "second", "head"]] * 2


def test_lora_reports_its_own_parameters() -> None:
    torch_engine = engine(task=Lora(inner=Toy(), rank=2, targets=("first", "second")))
    inspect_step(torch_engine)
    statistics, norm = inspect_step(torch_engine, 1)
    trainable = {n.partition(".")[0] for n, p in torch_engine.model.named_parameters() if p.requires_grad}
    assert set(statistics) == trainable
    assert math.hypot(*(values["gradient_norm"] for values in statistics.values())) == pytest.approx(norm, rel=1e-6)


def test_two_ranks_match_one_process(two_ranks: Path) -> None:
    one, _ = inspect_step(engine(training(optimizer={"name": "sgd"})))
    assert_close(json.loads((two_ranks / "inspection.0.json").read_text()), one)
    assert json.loads((two_ranks / "inspection.1.json").read_text()) == {}, "only rank 0 computes"


# No effect on training


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_weights_are_equal_with_and_without_inspection(name: str) -> None:
    states = []
    for is_inspected in (False, True):
        torch_engine = engine(training(optimizer={"name": name}, ema=0.9), task=Toy(dropout=0.3), micro=3)
        torch_engine.inspector.budget.share = 1.0
        for step in range(5):
            batch = loader(of=torch_engine).batch(step)
            torch_engine.train_step(step, batch, module_statistics=is_inspected, histograms=is_inspected)
            assert all(map(bool, torch_engine.fetch_inspection())) is is_inspected
        states.append(copy_state(torch_engine))
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


def test_results_belong_to_the_last_step_only() -> None:
    torch_engine = engine()
    batch = loader(of=torch_engine).batch(0)
    torch_engine.train_step(0, batch, module_statistics=True, histograms=True)
    torch_engine.train_step(1, batch)
    assert torch_engine.fetch_inspection() == Inspection()
    inspected = engine()
    inspected.train_step(0, batch, module_statistics=True)
    results = inspected.fetch_inspection()
    assert results.modules
    assert not results.histograms
    assert inspected.fetch_inspection() == Inspection()


def test_nothing_waits_for_the_device_before_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_engine = engine()
    batch = loader(of=torch_engine).batch(0)
    torch_engine.train_step(0, batch)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a value was copied to the host")

    torch_engine.train_step(1, batch, module_statistics=True, histograms=True)  # the layout is built once, on the host
    with monkeypatch.context() as patch:
        for method in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
            patch.setattr(Tensor, method, refuse)
        torch_engine.inspector.budget.share = 1.0
        parameters = list(torch_engine.model.parameters())
        for p in parameters:
            p.grad = torch.ones_like(p)
        torch_engine.inspector.request(modules=True, histograms=True)
        torch_engine.inspector.before_update(parameters, scale=None)
        torch_engine.inspector.after_update()


# Cost


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_limits_the_share_of_the_time(seed: int) -> None:
    """Whatever steps and inspections cost, inspections take at most 2 % of the time from the first to the start of the last."""
    rng, clock = random.Random(seed), FakeClock()
    budget = TimeBudget(clock=clock)
    costs, starts = [], []
    for _ in range(20_000):
        clock.seconds += rng.expovariate(1 / 0.1)
        if budget.is_available():
            starts.append(clock.seconds)
            costs.append(rng.expovariate(1 / rng.choice((0.0001, 0.01, 1.0))))
            clock.seconds += costs[-1]
            budget.spend(costs[-1])
            assert sum(costs[:-1]) <= 0.02 * (starts[-1] - starts[0]) + 1e-9
    assert len(costs) > 5


def test_a_cheap_inspection_is_never_left_out() -> None:
    clock = FakeClock()
    budget = TimeBudget(clock=clock)
    for _ in range(100):
        clock.seconds += 1.0
        assert budget.is_available()
        clock.seconds += 0.01
        budget.spend(0.01)


def test_the_engine_measures_its_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which each inspection takes three seconds, the next follows 150 seconds after its start."""
    torch_engine, clock = engine(), FakeClock()
    torch_engine.inspector.budget = TimeBudget(clock=clock)
    statistics: Any = torch_engine.inspector.statistics
    for method in ("record_gradients", "record_update", "fetch"):
        monkeypatch.setattr(statistics, method, take_a_second(getattr(statistics, method), clock))
    batch, inspected = loader(of=torch_engine).batch(0), []
    for step in range(330):
        clock.seconds = max(clock.seconds, float(step))
        torch_engine.train_step(step, batch, module_statistics=True)
        inspected += [step] if torch_engine.fetch_inspection().modules else []
    assert inspected == [0, 150, 300]


def take_a_second(function: Callable[..., Any], clock: FakeClock) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        clock.seconds += 1.0
        return function(*arguments, **named)

    return call


# Histograms


@pytest.mark.parametrize("size", [1, 7, 1000, (1 << 20) + 5])
def test_histogram_matches_numpy(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(size).integers(-1000, 1000, size).astype(np.float32))
    (histogram,) = fetch_histograms({"x": compute_histogram(values)}).values()
    counts, edges = np.histogram(values.numpy().astype(np.float64), NUM_BINS)
    np.testing.assert_allclose(histogram.edges, edges, rtol=1e-6)
    # A value on an edge may fall on either side of it.
    assert np.abs(np.cumsum(histogram.counts) - np.cumsum(counts)).max() <= max(1, 0.001 * size)
    assert sum(histogram.counts) == size


def test_histogram_leaves_out_values_that_are_not_finite() -> None:
    values = torch.tensor([1.0, math.nan, 2.0, math.inf, -math.inf, 5.0])
    histograms = fetch_histograms(
        {"some": compute_histogram(values), "none": compute_histogram(torch.full((3,), math.nan))}
    )
    assert list(histograms) == ["some"]
    assert (histograms["some"].edges[0], histograms["some"].edges[-1]) == (1.0, 5.0)
    assert sum(histograms["some"].counts) == 3
    constant = fetch_histograms({"zeros": compute_histogram(torch.zeros(9))})["zeros"]
    assert constant.edges[0] < 0 < constant.edges[-1]
    assert sum(constant.counts) == 9


def test_histograms_are_those_of_the_step() -> None:
    torch_engine = engine()
    weights = copy_weights(torch_engine)
    torch_engine.train_step(0, loader(of=torch_engine).batch(0), histograms=True)
    results = torch_engine.fetch_inspection()
    assert not results.modules, "no statistics were requested"
    histograms = results.histograms
    assert set(histograms) == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in weights}
    for name, weight in weights.items():
        assert histograms[f"weights/{name}"].edges[-1] == pytest.approx(
            weight.max().item() + 0.5 * (weight.numel() == 1), rel=1e-6
        )
        assert sum(histograms[f"gradients/{name}"].counts) == weight.numel()


@pytest.mark.parametrize("values", [[3e7], [1e30, 1e30], [3e38, -3e38, 0.0], [-(2.0**24)] * 3, [3.4e38, math.nan]])
def test_histogram_of_huge_values_counts_each(values: list[float]) -> None:
    (histogram,) = fetch_histograms({"x": compute_histogram(torch.tensor(values))}).values()
    assert sum(histogram.counts) == sum(map(math.isfinite, values))
    assert all(map(math.isfinite, histogram.edges))
    assert all(low < high for low, high in itertools.pairwise(histogram.edges))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_histogram_counts_the_finite_values_between_its_edges(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    histograms = fetch_histograms({"x": compute_histogram(torch.tensor(values))})
    assert bool(histograms) is bool(finite)
    for histogram in histograms.values():
        assert sum(histogram.counts) == len(finite)
        assert histogram.edges[0] <= min(finite)
        assert histogram.edges[-1] >= max(finite)


def test_a_step_without_any_gradient_has_no_statistics() -> None:
    model = nn.Linear(2, 3)
    inspector = StepInspector(model, device=torch.device("cpu"), is_active=True)
    inspector.request(modules=True, histograms=True)
    inspector.before_update(list(model.parameters()), scale=None)
    inspector.after_update()
    assert not any(inspector.fetch())
