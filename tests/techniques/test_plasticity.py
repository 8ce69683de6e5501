"""Plasticity: weights move by the mean of what spike trains call for, once a step, and everything else stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import small_media
import small_run
from bottega.core.errors import UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise, numpy_generator
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.data.sources.source import ArraySource
from bottega.models.build import build_models
from bottega.models.convnet.config import ConvNetShape
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import resolve_shape_fields
from bottega.models.spiking.config import SpikingNetShape, SpikingShape
from bottega.models.spiking.stdp import STDPRule, eligibility
from bottega.models.spiking.units import SpikingGate, SpikingLayer
from bottega.tasks.classify.task import Classification
from bottega.tasks.language.task import Language
from bottega.tasks.multitask.task import Multitask
from bottega.tasks.recipes import load_recipe
from bottega.techniques.plasticity.config import PlasticityOptions
from bottega.techniques.plasticity.torch import (
    COUNT,
    REWARD,
    REWARDED,
    SUM,
    Plasticity,
    compute_reward,
    record_spikes,
    select_trainable_layers,
)
from toy_task import advance, engine, loader, save, state, training

UNITS = SpikingShape(threshold=0.3)  # of so few inputs, more would leave the second layer silent
SHAPE = SpikingNetShape(
    grid=(3, 3), channels=1, num_labels=3, hidden_size=6, num_layers=2, coding="latency", neuron=UNITS
)
FIRST, SECOND = "layers.0.synapse.weight", "layers.1.synapse.weight"
RNG = Noise(0, 0, ())
SLOW = {"optimizer": {"name": "sgd"}, "learning_rate": 1e-2}


CURRENTS = SHAPE.model_copy(update={"coding": "constant"})
"""A latency code makes of a bad value a unit that is silent."""


def task(shape: Any = SHAPE, **options: Any) -> Plasticity:
    own = {"rate": 0.05, "rule": STDPRule(a_minus=0.8, tau_minus=5.0), **options}
    return Plasticity(inner=Classification(key="image", shape=shape), **own)


def data(*, samples: int = 40, bad: int | None = None) -> ArraySource:
    rng = np.random.default_rng(0)
    image = rng.uniform(-1, 1, (samples, 3, 3, 1)).astype(np.float32)
    if bad is not None:
        image[bad, 0, 0, 0] = np.nan
    return ArraySource({"image": image, "label": rng.integers(0, 3, samples)})


def after(
    steps: int,
    of: Any = None,
    *,
    changes: Mapping[str, Any] | None = None,
    source: ArraySource | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    one = engine(training(**SLOW, **(changes or {})), task=of or task(), **options)
    advance(one, loader(source or data(), of=one), 0, steps)
    return state(one)


def weight(found: Mapping[str, np.ndarray], name: str = SECOND) -> np.ndarray:
    return found[f"model.safetensors/{name}"]


def heard_by(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of the weights -> trains of a layer that is called once."""
    layers = select_trainable_layers(model, None)
    with torch.no_grad(), record_spikes(model, list(layers)) as heard:
        model(x)
    return {name: heard[number][0][:2] for number, name in enumerate(layers.values())}


KINDS = {
    "pair": {},
    "triplet": {"rule": STDPRule(a3_plus=0.5, a3_minus=0.2)},
    "reward": {"reward": "accuracy"},
    "soft": {"reward": "loss", "bounds": "soft", "normalise": True},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
RATES_OF_ZERO = {"groups": [{"pattern": ".*synapse.*", "scale": 0.0}, {"pattern": ".*"}]}


# What a step does


def test_a_step_moves_weights_by_the_mean_of_what_each_example_calls_for() -> None:
    one = engine(training(**SLOW, **RATES_OF_ZERO), task=task(low=-9.0, high=9.0))
    batches = loader(data(), of=one)
    before = state(one)
    trains = heard_by(one.model, torch.from_numpy(batches.batch(0)["image"]))
    advance(one, batches, 0, 1)
    for name, (pre, post) in trains.items():
        each = eligibility(pre, post, STDPRule(a_minus=0.8, tau_minus=5.0))
        assert len(each) == 8
        expected = weight(before, name) + 0.05 * each.mean(0).numpy()
        np.testing.assert_allclose(weight(state(one), name), expected, rtol=1e-5, atol=1e-6)
        assert np.abs(weight(state(one), name) - weight(before, name)).max() > 1e-3


def test_it_comes_after_the_optimizer_and_changes_neither_loss_nor_gradient() -> None:
    plain = engine(training(**SLOW), task=task().inner)
    plastic = engine(training(**SLOW), task=task())
    reports = [advance(one, loader(data(), of=one), 0, 1)[0] for one in (plain, plastic)]
    for key in ("loss", "grad_norm", "accuracy"):
        assert reports[0][key] == reports[1][key]
    a, b = state(plain), state(plastic)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == [
        f"model.safetensors/{name}" for name in (FIRST, SECOND)
    ]


def test_a_rate_of_zero_leaves_everything_to_the_gradient() -> None:
    plain, still = after(3, task().inner), after(3, task(rate=0.0))
    assert [name for name in plain if not np.array_equal(plain[name], still[name])] == []


@kinds
def test_weights_stay_between_the_bounds(options: dict[str, Any]) -> None:
    found = after(20, task(**{**options, "rate": 5.0, "low": -0.3, "high": 0.4}), changes=RATES_OF_ZERO)
    start = state(engine(task=task()))
    for name in (FIRST, SECOND):
        old, new = weight(start, name), weight(found, name)
        assert (new >= np.minimum(old, np.float32(-0.3))).all()
        assert (new <= np.maximum(old, np.float32(0.4))).all()
        assert np.abs(new - old).max() > 0.1


def test_normalising_keeps_sum_and_length_of_what_comes_into_a_unit() -> None:
    wide = {"low": -9.0, "high": 9.0, "rate": 0.5}
    kept, free = (after(5, task(normalise=on, **wide), changes=RATES_OF_ZERO) for on in (True, False))
    start = state(engine(task=task()))
    for name in (FIRST, SECOND):
        lengths = [np.linalg.norm(weight(found, name), axis=1) for found in (start, kept, free)]
        np.testing.assert_allclose(lengths[1], lengths[0], rtol=1e-5)
        np.testing.assert_allclose(weight(kept, name).sum(1), weight(start, name).sum(1), atol=1e-5)
        assert np.abs(lengths[2] - lengths[0]).max() > 0.1
        assert np.abs(weight(kept, name) - weight(start, name)).max() > 0.05


def test_frozen_layers_and_those_that_are_not_meant_stay() -> None:
    start = state(engine(task=task()))
    frozen = after(2, changes={"freeze": ["layers.0"]})
    assert np.array_equal(weight(frozen, FIRST), weight(start, FIRST))
    assert not np.array_equal(weight(frozen), weight(start))
    meant = after(2, task(targets=("layers.1",)), changes=RATES_OF_ZERO)
    assert np.array_equal(weight(meant, FIRST), weight(start, FIRST))
    assert not np.array_equal(weight(meant), weight(start))


def test_an_average_follows_the_weights_as_they_are_in_the_end() -> None:
    found = after(1, changes={"ema": 0.5, **RATES_OF_ZERO})
    start = state(engine(task=task()))
    middle = found[f"ema.safetensors/{SECOND}"] - weight(start)
    assert np.abs(middle).max() > 1e-3
    way = weight(found) - weight(start)
    there = np.abs(way) > 1e-3
    shares = middle[there] / way[there]
    np.testing.assert_allclose(shares, shares[0], rtol=1e-3)


# What is promised


@kinds
@pytest.mark.parametrize("micro", [1, 3])
def test_any_split_gives_the_same(options: dict[str, Any], micro: int) -> None:
    whole, split = after(3, task(**options)), after(3, task(**options), micro=micro)
    assert set(whole) == set(split)
    for name in whole:
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-6, atol=1e-6, err_msg=name)


@kinds
def test_a_resumed_run_is_the_one_that_never_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    straight, first, second = (engine(task=task(**options), micro=3) for _ in range(3))
    advance(straight, loader(data(), of=straight), 0, 6)
    advance(first, loader(data(), of=first), 0, 2)
    second.load(save(first, tmp_path, 2))
    advance(second, loader(data(), of=second), 2, 6)
    a, b = state(straight), state(second)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


@kinds
def test_a_step_that_is_held_back_changes_nothing(options: dict[str, Any]) -> None:
    one = engine(task=task(CURRENTS, **options))
    batches = loader(data(bad=11), of=one)
    bad = next(step for step in range(5) if not np.isfinite(batches.batch(step)["image"]).all())
    advance(one, batches, 0, bad)
    before = state(one)
    advance(one, batches, bad, bad + 1)
    found = state(one)
    assert [name for name in before if not np.array_equal(before[name], found[name])] == []


def test_blocks_that_are_computed_again_count_once() -> None:
    plain, again = after(3), after(3, changes={"gradient_checkpointing": True})
    assert [name for name in plain if not np.array_equal(plain[name], again[name])] == []


def test_an_evaluation_learns_nothing() -> None:
    one = engine(task=task(reward="accuracy"))
    before = state(one)
    one.eval_step(loader(data(), of=one).batch(0))
    found = state(one)
    assert [name for name in before if not np.array_equal(before[name], found[name])] == []
    assert _seen(one.task, one.model.eval()) == {}  # and pays nothing for it


RANKS = {"pair": {}, "reward": KINDS["soft"]}


@pytest.mark.slow
def test_two_ranks_change_weights_as_one_does(tmp_path: Path) -> None:
    before = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000), "WORLD_SIZE": "2"}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={**os.environ, **before, "RANK": str(rank), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for one in both:
        _, err = one.communicate(timeout=200)
        assert one.returncode == 0, err
    for name, options in RANKS.items():
        alone = after(3, task(**options))
        for rank in (0, 1):
            found = load_file(tmp_path / f"{name}.{rank}.safetensors")
            assert set(found) == {key.replace("/", "|") for key in alone}
            for key, value in alone.items():
                np.testing.assert_allclose(found[key.replace("/", "|")], value, rtol=1e-6, atol=1e-6, err_msg=key)


def one_of_two(folder: Path) -> None:
    import torch.distributed as dist

    leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    for name, options in RANKS.items():
        found = after(3, task(**options), micro=3)
        tensors = {key.replace("/", "|"): value for key, value in found.items()}
        save_file(tensors, folder / f"{name}.{os.environ['RANK']}.safetensors")
    dist.barrier()
    leave()


# Reward


def test_a_reward_counts_examples_by_how_much_better_than_usual_they_went() -> None:
    plastic = task(reward="accuracy", reward_decay=0.9)
    model = build_models(plastic, 0)["model"]
    batch = {name: torch.from_numpy(values[:8]) for name, values in data().arrays.items()}
    (pre, post) = heard_by(model, batch["image"])[SECOND]
    found = plastic.loss({"model": model}, batch, Noise(0, 0, torch.arange(8), torch))
    right = (found.rows["probability"].argmax(1) == batch["label"]).float()
    assert 0 < right.sum() < 8
    old = torch.tensor([0.8 * 0.3, 0.3])  # a mean of 0.8, of a few steps
    tensors = {**_tensors(model), REWARD: old}
    new = plastic.update(tensors, found.stats, RNG)
    running = 0.9 * old + 0.1 * torch.stack((right.mean(), torch.ones(())))
    torch.testing.assert_close(new[REWARD], running)
    each = eligibility(pre, post, plastic.rule)
    surprise = right - running[0] / running[1]
    expected = tensors[SECOND] + 0.05 * torch.einsum("b,boi->oi", surprise, each) / 8
    torch.testing.assert_close(new[SECOND], expected, rtol=1e-5, atol=1e-6)


def test_where_all_went_as_usual_nothing_changes() -> None:
    plastic = task(reward="accuracy")
    model = build_models(plastic, 0)["model"]
    seen = _seen(plastic, model)
    seen[REWARD] = torch.tensor([8.0, 8.0])
    for name in (FIRST, SECOND):
        seen[REWARDED + name] = seen[SUM + name]
    tensors = {**_tensors(model), REWARD: torch.zeros(2)}
    new = plastic.update(tensors, seen, RNG)
    for name in (FIRST, SECOND):
        torch.testing.assert_close(new[name], tensors[name], rtol=0, atol=1e-6)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _seen(plastic: Plasticity, model: nn.Module, **more: Tensor) -> dict[str, Tensor]:
    batch = {name: torch.from_numpy(values[:8]) for name, values in data().arrays.items()}
    return dict(plastic.loss({"model": model}, {**batch, **more}, Noise(0, 0, torch.arange(8), torch)).stats)


def test_rows_that_fill_up_a_batch_count_for_nothing() -> None:
    plastic = task(reward="loss")
    model = build_models(plastic, 0)["model"]
    padded = _seen(plastic, model, weight=torch.tensor([1.0] * 5 + [0.0] * 3))
    batch = {name: torch.from_numpy(values[:5]) for name, values in data().arrays.items()}
    short = plastic.loss({"model": model}, batch, Noise(0, 0, torch.arange(5), torch)).stats
    for name, value in short.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-5, atol=1e-6)


def test_an_example_that_is_told_wrong_for_certain_costs_no_more_than_a_number() -> None:
    rows = {"probability": torch.tensor([[1.0, 0.0], [0.5, 0.5]]), "label": torch.tensor([1, 0])}
    assert compute_reward(rows, "loss").isfinite().all()
    assert compute_reward(rows, "accuracy").tolist() == [0.0, 1.0]
    several = {"probability": torch.tensor([[0.9, 0.8, 0.1]]), "labels": torch.tensor([[1.0, 0.0, 0.0]])}
    assert compute_reward(several, "accuracy").tolist() == pytest.approx([2 / 3])
    assert compute_reward(several, "loss").tolist() == pytest.approx([np.mean(np.log([0.9, 0.2, 0.9]))])


def test_what_is_no_number_moves_no_weight() -> None:
    plastic = task()
    model = build_models(plastic, 0)["model"]
    seen = _seen(plastic, model)
    seen[SUM + SECOND][0, 0] = torch.inf
    tensors = _tensors(model)
    new = plastic.update(tensors, seen, RNG)
    assert torch.equal(new[SECOND], tensors[SECOND])
    assert not torch.equal(new[FIRST], tensors[FIRST])


# Who is listened to


class Twice(nn.Module):
    """Two layers with the same weights, and a router, whose input is a constant current."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = SpikingShape(time_steps=5, threshold=0.3)
        self.first, self.second = SpikingLayer(4, 4, shape), SpikingLayer(4, 4, shape)
        self.second.synapse = self.first.synapse
        self.gate = SpikingGate(4, 2, shape, group=3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.second(self.first(x))
        return self.gate(found.sum(0))[0]


def test_layers_that_share_their_weights_change_them_together_and_a_router_learns_too() -> None:
    model = Twice()
    layers = select_trainable_layers(model, None)
    names = ["first.synapse.weight"] * 2 + ["gate.groups.synapse.weight"]
    assert list(layers.values()) == names
    with torch.no_grad(), record_spikes(model, list(layers)) as heard:
        model(torch.rand(5, 7, 4, generator=torch.Generator().manual_seed(0)).round())
    assert [heard[i][0].pre.shape for i in range(3)] == [(5, 7, 4)] * 3
    plastic = task()
    sums = plastic._compute_stats(layers, heard, Loss(terms={}), {})
    expected = sum(eligibility(*heard[i][0][:2], plastic.rule).sum(0) for i in (0, 1))
    torch.testing.assert_close(sums[f"{SUM}first.synapse.weight"], expected)
    assert sums["plasticity/count/first.synapse.weight"] == 14
    assert sums[f"{SUM}gate.groups.synapse.weight"].abs().sum() > 0


def test_a_layer_that_nothing_came_by_is_there_all_the_same() -> None:
    layers = select_trainable_layers(Twice(), None)
    sums = task()._compute_stats(layers, {number: [] for number in range(3)}, Loss(terms={}), {})
    assert len(sums) == 4
    assert all(not value.any() for value in sums.values())


def routed(**changes: Any) -> Plasticity:
    shape = TransformerShape(
        vocab_size=20,
        context=16,
        **resolve_shape_fields(
            "moe", None, {"num_layers": 1, "hidden_size": 16, "num_experts": 4, "router": "spiking", **changes}
        ),
    )
    return Plasticity(inner=Language(shape=shape), rate=0.05)


def said(plastic: Task, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    rng = Noise(0, 0, torch.arange(2), torch)
    return dict(plastic.loss({"model": model}, batch, rng).stats)


def test_padding_of_a_text_teaches_a_router_nothing() -> None:
    plastic = routed()
    model = loud(build_models(plastic, 0)["model"])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (2, 9)))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    alone = said(plastic, model, {"input_ids": ids, "attention_mask": mask})
    wide = torch.cat((ids, torch.full((2, 5), 7)), dim=1)
    more = torch.cat((mask, torch.zeros(2, 5, dtype=torch.long)), dim=1)
    padded = said(plastic, model, {"input_ids": wide, "attention_mask": more})
    name = "model.layers.0.mlp.gate.groups.synapse.weight"
    assert alone[COUNT + name] == padded[COUNT + name] == 8 + 5
    assert alone[SUM + name].abs().max() > 0.01
    torch.testing.assert_close(padded[SUM + name], alone[SUM + name], rtol=1e-5, atol=1e-5)
    tensors = {**_tensors(model), **dict(model.named_buffers())}
    a, b = (plastic.update(tensors, seen, RNG)[name] for seen in (alone, padded))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def loud(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "synapse.weight" in name:
                parameter.mul_(20)
    return model


def test_rows_that_count_for_one_part_of_several_teach_that_part() -> None:
    parts = {"a": Classification(key="image", shape=SHAPE), "b": Classification(key="image", shape=SHAPE)}
    plastic = Plasticity(inner=Multitask(parts=parts, weights=dict.fromkeys(parts, 1.0)), rate=0.05)
    model = build_models(plastic, 0)["model"]
    names = list(select_trainable_layers(model, None).values())
    first = {name: torch.from_numpy(values[:2]) for name, values in data().arrays.items()}
    weight = torch.tensor([1.0, 0.0])
    short = {name: value[:1] for name, value in first.items()}
    found = said(plastic, model, {"a": {**first, "weight": weight}, "b": first})
    separate = [said(plastic, model, batch) for batch in ({"a": short}, {"b": first})]
    assert found[COUNT + names[0]] == 3
    for name in names:
        torch.testing.assert_close(found[SUM + name], sum(one[SUM + name] for one in separate), rtol=1e-5, atol=1e-6)


# What it learns

STEPS, INPUTS, UNITS_OF_LAYER = 20, 100, 8


def draw_sentinel(model: Any, seed: int) -> None:
    drawn = numpy_generator(seed, "sentinel").uniform(0, 1, (UNITS_OF_LAYER, INPUTS))
    with torch.no_grad():
        model.layer.synapse.weight.copy_(torch.from_numpy(drawn))
        model.head.weight.zero_()


class Watching(Task):
    """A layer that is shown trains [b, S, I] and not told what they are; only what reads it learns by gradient."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(lambda config: Sentinel(), initial=Initial(draw_sentinel))}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": float(len(batch["x"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        answer = models["model"](batch["x"].float().transpose(0, 1))
        return Loss(terms={"loss": ((answer - 1).square().sum(), 1.0)})


class Sentinel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # One spike an example at most, so that when it comes is all there is to see.
        shape = SpikingShape(time_steps=STEPS, threshold=12.0, leak=0.9, refractory=STEPS)
        self.layer = SpikingLayer(INPUTS, UNITS_OF_LAYER, shape, bias=False)
        self.head = nn.Linear(UNITS_OF_LAYER, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).sum(0))


def shown(seed: int, pattern: np.ndarray, samples: int, *, repeats: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Trains [n, S, I], and which of them hold the pattern: half of the inputs then spike in its order, those of the others
    at any step. Each input spikes once, or is missing, as often with the pattern as without, so nothing but time tells."""
    rng = np.random.default_rng(seed)
    holds, at = rng.random(samples) < 0.5, rng.integers(0, STEPS, (samples, INPUTS))
    for one in np.flatnonzero(holds):
        at[one, : len(pattern)] = pattern if repeats else rng.permutation(pattern)
    example, which = np.nonzero(rng.random((samples, INPUTS)) < 0.8)
    x = np.zeros((samples, STEPS, INPUTS), np.uint8)
    x[example, at[example, which], which] = 1
    return x, holds


def first_spikes(model: nn.Module, x: np.ndarray) -> np.ndarray:
    """[n, units]; the number of steps where there is none."""
    with torch.no_grad():
        spikes = model.layer(torch.from_numpy(x).float().transpose(0, 1))  # type: ignore[operator]
    return np.where(spikes.sum(0).numpy() > 0, spikes.argmax(0).numpy(), STEPS)


def told_apart(first: np.ndarray, holds: np.ndarray) -> float:
    """The chance that a train with the pattern is answered sooner than one without it; 0.5 is none. Mean over units."""
    a, b = first[holds, None], first[None, ~holds]
    return float(((a < b) + 0.5 * (a == b)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False], ids=["pattern", "no-pattern"])
def test_a_layer_finds_what_repeats_by_its_timing_alone(repeats: bool) -> None:
    pattern = np.random.default_rng(5).permutation(np.arange(50)) * STEPS // 50
    plastic = Plasticity(inner=Watching(), rate=0.01, low=0.0, high=1.0, normalise=True)
    only = {"groups": [{"pattern": "layer.*", "scale": 0.0}, {"pattern": ".*"}]}
    one = engine(training(**SLOW, **only), task=plastic)
    test, holds = shown(1, pattern, 400)
    before = first_spikes(one.model, test)
    assert abs(told_apart(before, holds) - 0.5) < 0.1
    x, _ = shown(0, pattern, 3200, repeats=repeats)
    advance(one, loader(ArraySource({"x": x}), of=one, batch_size=16), 0, 300)
    found, weights = first_spikes(one.model, test), weight(state(one), "layer.synapse.weight")
    early, late = weights[:, :50][:, pattern < STEPS // 4].mean(), weights[:, :50][:, pattern >= STEPS // 2].mean()
    if repeats:
        assert told_apart(found, holds) > 0.8
        assert found[holds].mean() < before[holds].mean() - 2
        assert abs(found[~holds].mean() - before[~holds].mean()) < 0.5
        assert early > late + 0.3
    else:
        assert abs(told_apart(found, holds) - 0.5) < 0.1
        assert abs(early - late) < 0.1


def test_a_whole_run_is_cut_short_and_ends_the_same(tmp_path: Path) -> None:
    import bottega

    pictures = {key: value for key, value in small_media.image(tmp_path).items() if key.startswith("data.")}
    values = {
        **{key: value for key, value in small_run.SMALL.items() if not key.startswith(("model.", "data."))},
        **pictures,
        "output_dir": str(tmp_path),
        "name": "run",
        "model.hidden_size": 8,
        "model.coding": "rate",
        "training.max_steps": 6,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
        "training.ema": 0.9,
        "techniques": [{"name": "plasticity", "options": {"rule": "triplet", "reward": "accuracy", "rate": 0.01}}],
    }
    run = bottega.train("classify/spiking", values)
    end = small_run.tensors(run.path)
    assert end["state.safetensors/plasticity/reward"][1] > 0
    for step in (5, 6):
        shutil.rmtree(run.path / "checkpoints" / f"step-{step:08d}")
    again = bottega.train("classify/spiking", values)
    assert small_run.different(end, small_run.tensors(again.path)) == []
    assert bottega.load(run.path).evaluate()["accuracy"] == pytest.approx(run.metrics["accuracy"])


# What is refused


def test_a_model_without_spiking_layers_is_refused() -> None:
    shape = ConvNetShape(grid=(8, 8), channels=1, num_labels=3, hidden_size=8)
    with pytest.raises(UsageError, match="ConvNet has none; remove it, or train a spiking model"):
        build_models(task(shape), 0)


def test_a_target_that_is_no_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'head' is not a spiking layer; the model has layers\.0, layers\.1"):
        build_models(task(targets=("head",)), 0)
    with pytest.raises(UsageError, match=r"'\(' is not a regular expression"):
        build_models(task(targets=("(",)), 0)


def test_a_reward_needs_a_task_that_knows_what_is_right() -> None:
    with pytest.raises(UsageError, match=r"plasticity.reward: accuracy needs class probabilities .*; set it to none"):
        compute_reward({"other": torch.zeros(3)}, "accuracy")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"techniques": ["lora", "plasticity"]}, "lora freezes the weights that plasticity changes"),
    "maml": ({"techniques": ["plasticity", "maml"]}, "maml has several sets of weights in a step"),
    "compile": ({"techniques": ["plasticity"], "training.compile": True}, "plasticity records spikes inside the model"),
    "twice": ({"techniques": ["plasticity", "plasticity"]}, "plasticity is listed 2 times; keep one"),
    "low": ({"techniques": [{"name": "plasticity", "options": {"low": 2}}]}, r"low: 2 must be below high \(1\)"),
    "pair": (
        {"techniques": [{"name": "plasticity", "options": {"tau_y": 3}}]},
        "tau_y: 3 applies to the triplet rule only; set rule: triplet",
    ),
    "tau": (
        {"techniques": [{"name": "plasticity", "options": {"tau_plus": 0}}]},
        "tau_plus: expected a number above 0, got 0",
    ),
}


def test_several_tasks_may_have_it_but_no_reward() -> None:
    asked = {"techniques": [{"name": "plasticity", "options": {"reward": "loss"}}]}
    with pytest.raises(
        UsageError, match=r"plasticity.reward needs a single task, but this recipe has several; set it to none"
    ):
        load_recipe(["multitask", asked])
    assert load_recipe(["multitask", {"techniques": ["plasticity"]}]).recipe.techniques[0].name == "plasticity"


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_runs(name: str) -> None:
    changes, text = REFUSED[name]
    with pytest.raises(UsageError, match=text):
        load_recipe(["classify/spiking", changes])


def test_where_every_layer_is_frozen_it_is_refused(tmp_path: Path) -> None:
    import bottega

    frozen = {"training.freeze": ["layers"], "techniques": ["plasticity"], "output_dir": str(tmp_path)}
    with pytest.raises(UsageError, match=r"layers\.0\.synapse\.weight and every other spiking layer is frozen"):
        bottega.train("classify/spiking", frozen)


def test_where_the_model_asks_for_it_the_same_is_refused(tmp_path: Path) -> None:
    import bottega

    changes = {"model.plasticity": True, "training.compile": True, "output_dir": str(tmp_path)}
    with pytest.raises(UsageError, match=r"training\.compile: .*; or set model\.plasticity: false"):
        bottega.train("routing", changes)


def test_options_of_the_recipe_become_the_rule() -> None:
    from bottega.techniques.plasticity.apply import build_rule

    triplet = PlasticityOptions(rule="triplet", a3_plus=0.5, tau_y=3.0, tau_plus=2.0)
    assert build_rule(triplet) == STDPRule(a3_plus=0.5, a3_minus=0.0, tau_y=3.0, tau_plus=2.0)
    assert build_rule(PlasticityOptions()) == STDPRule()


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
