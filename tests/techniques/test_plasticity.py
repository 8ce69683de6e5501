"""Plasticity: a step adds the mean eligibility of the spike trains to the weights, and changes nothing else."""

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
from bottega.models.spiking.stdp import STDPRule, compute_eligibility
from bottega.models.spiking.units import SpikingGate, SpikingLayer
from bottega.tasks.classify.task import Classification
from bottega.tasks.language.task import Language
from bottega.tasks.multitask.task import Multitask
from bottega.tasks.recipes import load_recipe
from bottega.techniques.plasticity.config import PlasticityOptions
from bottega.techniques.plasticity.torch import (
    COUNT_PREFIX,
    REWARD,
    REWARDED_PREFIX,
    SUM_PREFIX,
    Plasticity,
    compute_reward,
    record_spikes,
    select_trainable_layers,
)
from toy_task import copy_state, engine, loader, save_checkpoint, train_steps, training

UNITS = SpikingShape(threshold=0.3)  # with few inputs, a higher threshold would leave the second layer silent
SHAPE = SpikingNetShape(
    grid=(3, 3), channels=1, num_labels=3, hidden_size=6, num_layers=2, coding="latency", neuron=UNITS
)
FIRST, SECOND = "layers.0.synapse.weight", "layers.1.synapse.weight"
RNG = Noise(0, 0, ())
SGD = {"optimizer": {"name": "sgd"}, "learning_rate": 1e-2}


CURRENTS = SHAPE.model_copy(update={"coding": "constant"})
"""Constant currents propagate NaN; a latency code would turn it into a silent unit."""


def build_task(shape: Any = SHAPE, **options: Any) -> Plasticity:
    fields = {"rate": 0.05, "rule": STDPRule(a_minus=0.8, tau_minus=5.0), **options}
    return Plasticity(inner=Classification(key="image", shape=shape), **fields)


def build_source(*, samples: int = 40, bad: int | None = None) -> ArraySource:
    rng = np.random.default_rng(0)
    image = rng.uniform(-1, 1, (samples, 3, 3, 1)).astype(np.float32)
    if bad is not None:
        image[bad, 0, 0, 0] = np.nan
    return ArraySource({"image": image, "label": rng.integers(0, 3, samples)})


def train_state(
    steps: int,
    task: Any = None,
    *,
    changes: Mapping[str, Any] | None = None,
    source: ArraySource | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    subject = engine(training(**SGD, **(changes or {})), task=task or build_task(), **options)
    train_steps(subject, loader(source or build_source(), of=subject), 0, steps)
    return copy_state(subject)


def weight_of(tensors: Mapping[str, np.ndarray], name: str = SECOND) -> np.ndarray:
    return tensors[f"model.safetensors/{name}"]


def record_trains(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name of the weights -> (pre, post) spike trains, for layers that are called once."""
    layers = select_trainable_layers(model, None)
    with torch.no_grad(), record_spikes(model, list(layers)) as recorded:
        model(x)
    return {name: recorded[number][0][:2] for number, name in enumerate(layers.values())}


KINDS = {
    "pair": {},
    "triplet": {"rule": STDPRule(a3_plus=0.5, a3_minus=0.2)},
    "reward": {"reward": "accuracy"},
    "soft": {"reward": "loss", "bounds": "soft", "normalise": True},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
NO_SYNAPSE_GRADIENT = {"groups": [{"pattern": ".*synapse.*", "scale": 0.0}, {"pattern": ".*"}]}


# The update


def test_step_moves_weights_by_the_mean_eligibility() -> None:
    subject = engine(training(**SGD, **NO_SYNAPSE_GRADIENT), task=build_task(low=-9.0, high=9.0))
    batches = loader(build_source(), of=subject)
    before = copy_state(subject)
    trains = record_trains(subject.model, torch.from_numpy(batches.batch(0)["image"]))
    train_steps(subject, batches, 0, 1)
    for name, (pre, post) in trains.items():
        eligibility = compute_eligibility(pre, post, STDPRule(a_minus=0.8, tau_minus=5.0))
        assert len(eligibility) == 8
        expected = weight_of(before, name) + 0.05 * eligibility.mean(0).numpy()
        np.testing.assert_allclose(weight_of(copy_state(subject), name), expected, rtol=1e-5, atol=1e-6)
        assert np.abs(weight_of(copy_state(subject), name) - weight_of(before, name)).max() > 1e-3


def test_update_follows_the_optimizer_and_changes_neither_loss_nor_gradient() -> None:
    plain = engine(training(**SGD), task=build_task().inner)
    plastic = engine(training(**SGD), task=build_task())
    reports = [train_steps(subject, loader(build_source(), of=subject), 0, 1)[0] for subject in (plain, plastic)]
    for key in ("loss", "grad_norm", "accuracy"):
        assert reports[0][key] == reports[1][key]
    a, b = copy_state(plain), copy_state(plastic)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == [
        f"model.safetensors/{name}" for name in (FIRST, SECOND)
    ]


def test_rate_of_zero_equals_training_without_plasticity() -> None:
    plain, without_rate = train_state(3, build_task().inner), train_state(3, build_task(rate=0.0))
    assert [name for name in plain if not np.array_equal(plain[name], without_rate[name])] == []


@kinds
def test_weights_stay_between_the_bounds(options: dict[str, Any]) -> None:
    tensors = train_state(
        20, build_task(**{**options, "rate": 5.0, "low": -0.3, "high": 0.4}), changes=NO_SYNAPSE_GRADIENT
    )
    start = copy_state(engine(task=build_task()))
    for name in (FIRST, SECOND):
        old, new = weight_of(start, name), weight_of(tensors, name)
        assert (new >= np.minimum(old, np.float32(-0.3))).all()
        assert (new <= np.maximum(old, np.float32(0.4))).all()
        assert np.abs(new - old).max() > 0.1


def test_normalising_preserves_sum_and_norm_of_incoming_weights() -> None:
    wide = {"low": -9.0, "high": 9.0, "rate": 0.5}
    normalised, free = (
        train_state(5, build_task(normalise=on, **wide), changes=NO_SYNAPSE_GRADIENT) for on in (True, False)
    )
    start = copy_state(engine(task=build_task()))
    for name in (FIRST, SECOND):
        lengths = [np.linalg.norm(weight_of(tensors, name), axis=1) for tensors in (start, normalised, free)]
        np.testing.assert_allclose(lengths[1], lengths[0], rtol=1e-5)
        np.testing.assert_allclose(weight_of(normalised, name).sum(1), weight_of(start, name).sum(1), atol=1e-5)
        assert np.abs(lengths[2] - lengths[0]).max() > 0.1
        assert np.abs(weight_of(normalised, name) - weight_of(start, name)).max() > 0.05


def test_frozen_and_untargeted_layers_do_not_change() -> None:
    start = copy_state(engine(task=build_task()))
    frozen = train_state(2, changes={"freeze": ["layers.0"]})
    assert np.array_equal(weight_of(frozen, FIRST), weight_of(start, FIRST))
    assert not np.array_equal(weight_of(frozen), weight_of(start))
    targeted = train_state(2, build_task(targets=("layers.1",)), changes=NO_SYNAPSE_GRADIENT)
    assert np.array_equal(weight_of(targeted, FIRST), weight_of(start, FIRST))
    assert not np.array_equal(weight_of(targeted), weight_of(start))


def test_ema_averages_the_weights_after_the_update() -> None:
    tensors = train_state(1, changes={"ema": 0.5, **NO_SYNAPSE_GRADIENT})
    start = copy_state(engine(task=build_task()))
    ema_change = tensors[f"ema.safetensors/{SECOND}"] - weight_of(start)
    assert np.abs(ema_change).max() > 1e-3
    change = weight_of(tensors) - weight_of(start)
    has_moved = np.abs(change) > 1e-3
    fractions = ema_change[has_moved] / change[has_moved]
    np.testing.assert_allclose(fractions, fractions[0], rtol=1e-3)


# Invariances


@kinds
@pytest.mark.parametrize("micro", [1, 3])
def test_result_is_independent_of_the_micro_batch_size(options: dict[str, Any], micro: int) -> None:
    full, split = train_state(3, build_task(**options)), train_state(3, build_task(**options), micro=micro)
    assert set(full) == set(split)
    for name in full:
        np.testing.assert_allclose(split[name], full[name], rtol=1e-6, atol=1e-6, err_msg=name)


@kinds
def test_resume_is_bitwise_equal(options: dict[str, Any], tmp_path: Path) -> None:
    straight, first, second = (engine(task=build_task(**options), micro=3) for _ in range(3))
    train_steps(straight, loader(build_source(), of=straight), 0, 6)
    train_steps(first, loader(build_source(), of=first), 0, 2)
    second.load(save_checkpoint(first, tmp_path, 2))
    train_steps(second, loader(build_source(), of=second), 2, 6)
    a, b = copy_state(straight), copy_state(second)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


@kinds
def test_skipped_step_changes_nothing(options: dict[str, Any]) -> None:
    subject = engine(task=build_task(CURRENTS, **options))
    batches = loader(build_source(bad=11), of=subject)
    bad = next(step for step in range(5) if not np.isfinite(batches.batch(step)["image"]).all())
    train_steps(subject, batches, 0, bad)
    before = copy_state(subject)
    train_steps(subject, batches, bad, bad + 1)
    after_step = copy_state(subject)
    assert [name for name in before if not np.array_equal(before[name], after_step[name])] == []


def test_recomputed_blocks_count_once() -> None:
    plain, checkpointed = train_state(3), train_state(3, changes={"gradient_checkpointing": True})
    assert [name for name in plain if not np.array_equal(plain[name], checkpointed[name])] == []


def test_evaluation_changes_nothing_and_records_no_stats() -> None:
    subject = engine(task=build_task(reward="accuracy"))
    before = copy_state(subject)
    subject.eval_step(loader(build_source(), of=subject).batch(0))
    after_eval = copy_state(subject)
    assert [name for name in before if not np.array_equal(before[name], after_eval[name])] == []
    assert compute_example_stats(subject.task, subject.model.eval()) == {}  # and costs nothing


RANKS = {"pair": {}, "reward": KINDS["soft"]}


@pytest.mark.slow
def test_two_ranks_match_one(tmp_path: Path) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000), "WORLD_SIZE": "2"}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={**os.environ, **environment, "RANK": str(rank), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    for name, options in RANKS.items():
        alone = train_state(3, build_task(**options))
        for rank in (0, 1):
            tensors = load_file(tmp_path / f"{name}.{rank}.safetensors")
            assert set(tensors) == {key.replace("/", "|") for key in alone}
            for key, value in alone.items():
                np.testing.assert_allclose(tensors[key.replace("/", "|")], value, rtol=1e-6, atol=1e-6, err_msg=key)


def run_rank(folder: Path) -> None:
    import torch.distributed as dist

    destroy_process_group, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    for name, options in RANKS.items():
        result = train_state(3, build_task(**options), micro=3)
        tensors = {key.replace("/", "|"): value for key, value in result.items()}
        save_file(tensors, folder / f"{name}.{os.environ['RANK']}.safetensors")
    dist.barrier()
    destroy_process_group()


# Reward


def test_reward_weighs_examples_by_advantage_over_the_running_mean() -> None:
    plastic = build_task(reward="accuracy", reward_decay=0.9)
    model = build_models(plastic, 0)["model"]
    batch = {name: torch.from_numpy(values[:8]) for name, values in build_source().arrays.items()}
    (pre, post) = record_trains(model, batch["image"])[SECOND]
    loss = plastic.loss({"model": model}, batch, Noise(0, 0, torch.arange(8), torch))
    correct = (loss.rows["probability"].argmax(1) == batch["label"]).float()
    assert 0 < correct.sum() < 8
    old = torch.tensor([0.8 * 0.3, 0.3])  # a running mean of 0.8 after a few steps
    tensors = {**_tensors(model), REWARD: old}
    new = plastic.update(tensors, loss.stats, RNG)
    running = 0.9 * old + 0.1 * torch.stack((correct.mean(), torch.ones(())))
    torch.testing.assert_close(new[REWARD], running)
    eligibility = compute_eligibility(pre, post, plastic.rule)
    advantage = correct - running[0] / running[1]
    expected = tensors[SECOND] + 0.05 * torch.einsum("b,boi->oi", advantage, eligibility) / 8
    torch.testing.assert_close(new[SECOND], expected, rtol=1e-5, atol=1e-6)


def test_reward_equal_to_the_running_mean_changes_nothing() -> None:
    plastic = build_task(reward="accuracy")
    model = build_models(plastic, 0)["model"]
    stats = compute_example_stats(plastic, model)
    stats[REWARD] = torch.tensor([8.0, 8.0])
    for name in (FIRST, SECOND):
        stats[REWARDED_PREFIX + name] = stats[SUM_PREFIX + name]
    tensors = {**_tensors(model), REWARD: torch.zeros(2)}
    new = plastic.update(tensors, stats, RNG)
    for name in (FIRST, SECOND):
        torch.testing.assert_close(new[name], tensors[name], rtol=0, atol=1e-6)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compute_example_stats(plastic: Plasticity, model: nn.Module, **more: Tensor) -> dict[str, Tensor]:
    batch = {name: torch.from_numpy(values[:8]) for name, values in build_source().arrays.items()}
    return dict(plastic.loss({"model": model}, {**batch, **more}, Noise(0, 0, torch.arange(8), torch)).stats)


def test_padding_rows_do_not_count() -> None:
    plastic = build_task(reward="loss")
    model = build_models(plastic, 0)["model"]
    padded = compute_example_stats(plastic, model, weight=torch.tensor([1.0] * 5 + [0.0] * 3))
    batch = {name: torch.from_numpy(values[:5]) for name, values in build_source().arrays.items()}
    short = plastic.loss({"model": model}, batch, Noise(0, 0, torch.arange(5), torch)).stats
    for name, value in short.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-5, atol=1e-6)


def test_reward_is_finite_at_probability_zero() -> None:
    rows = {"probability": torch.tensor([[1.0, 0.0], [0.5, 0.5]]), "label": torch.tensor([1, 0])}
    assert compute_reward(rows, "loss").isfinite().all()
    assert compute_reward(rows, "accuracy").tolist() == [0.0, 1.0]
    several = {"probability": torch.tensor([[0.9, 0.8, 0.1]]), "labels": torch.tensor([[1.0, 0.0, 0.0]])}
    assert compute_reward(several, "accuracy").tolist() == pytest.approx([2 / 3])
    assert compute_reward(several, "loss").tolist() == pytest.approx([np.mean(np.log([0.9, 0.2, 0.9]))])


def test_non_finite_stats_change_no_weight() -> None:
    plastic = build_task()
    model = build_models(plastic, 0)["model"]
    stats = compute_example_stats(plastic, model)
    stats[SUM_PREFIX + SECOND][0, 0] = torch.inf
    tensors = _tensors(model)
    new = plastic.update(tensors, stats, RNG)
    assert torch.equal(new[SECOND], tensors[SECOND])
    assert not torch.equal(new[FIRST], tensors[FIRST])


# Recorded layers


class SharedSynapses(nn.Module):
    """Two layers that share their weights, and a router whose input is a constant current."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = SpikingShape(time_steps=5, threshold=0.3)
        self.first, self.second = SpikingLayer(4, 4, shape), SpikingLayer(4, 4, shape)
        self.second.synapse = self.first.synapse
        self.gate = SpikingGate(4, 2, shape, group_size=3)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.second(self.first(x))
        return self.gate(spikes.sum(0))[0]


def test_shared_weights_and_spiking_routers_are_updated() -> None:
    model = SharedSynapses()
    layers = select_trainable_layers(model, None)
    names = ["first.synapse.weight"] * 2 + ["gate.groups.synapse.weight"]
    assert list(layers.values()) == names
    with torch.no_grad(), record_spikes(model, list(layers)) as recorded:
        model(torch.rand(5, 7, 4, generator=torch.Generator().manual_seed(0)).round())
    assert [recorded[i][0].pre.shape for i in range(3)] == [(5, 7, 4)] * 3
    plastic = build_task()
    sums = plastic._compute_stats(layers, recorded, Loss(terms={}), {})
    expected = sum(compute_eligibility(*recorded[i][0][:2], plastic.rule).sum(0) for i in (0, 1))
    torch.testing.assert_close(sums[f"{SUM_PREFIX}first.synapse.weight"], expected)
    assert sums["plasticity/count/first.synapse.weight"] == 14
    assert sums[f"{SUM_PREFIX}gate.groups.synapse.weight"].abs().sum() > 0


def test_layer_without_inputs_has_zero_stats() -> None:
    layers = select_trainable_layers(SharedSynapses(), None)
    sums = build_task()._compute_stats(layers, {number: [] for number in range(3)}, Loss(terms={}), {})
    assert len(sums) == 4
    assert all(not value.any() for value in sums.values())


def build_routed_task(**changes: Any) -> Plasticity:
    shape = TransformerShape(
        vocab_size=20,
        context=16,
        **resolve_shape_fields(
            "moe", None, {"num_layers": 1, "hidden_size": 16, "num_experts": 4, "router": "spiking", **changes}
        ),
    )
    return Plasticity(inner=Language(shape=shape), rate=0.05)


def compute_stats(plastic: Task, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    rng = Noise(0, 0, torch.arange(2), torch)
    return dict(plastic.loss({"model": model}, batch, rng).stats)


def test_router_ignores_padding_tokens() -> None:
    plastic = build_routed_task()
    model = scale_synapses(build_models(plastic, 0)["model"])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (2, 9)))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    alone = compute_stats(plastic, model, {"input_ids": ids, "attention_mask": mask})
    wide = torch.cat((ids, torch.full((2, 5), 7)), dim=1)
    more = torch.cat((mask, torch.zeros(2, 5, dtype=torch.long)), dim=1)
    padded = compute_stats(plastic, model, {"input_ids": wide, "attention_mask": more})
    name = "model.layers.0.mlp.gate.groups.synapse.weight"
    assert alone[COUNT_PREFIX + name] == padded[COUNT_PREFIX + name] == 8 + 5
    assert alone[SUM_PREFIX + name].abs().max() > 0.01
    torch.testing.assert_close(padded[SUM_PREFIX + name], alone[SUM_PREFIX + name], rtol=1e-5, atol=1e-5)
    tensors = {**_tensors(model), **dict(model.named_buffers())}
    a, b = (plastic.update(tensors, stats, RNG)[name] for stats in (alone, padded))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def scale_synapses(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "synapse.weight" in name:
                parameter.mul_(20)
    return model


def test_padding_of_one_task_is_not_padding_of_the_other() -> None:
    parts = {"a": Classification(key="image", shape=SHAPE), "b": Classification(key="image", shape=SHAPE)}
    plastic = Plasticity(inner=Multitask(parts=parts, weights=dict.fromkeys(parts, 1.0)), rate=0.05)
    model = build_models(plastic, 0)["model"]
    names = list(select_trainable_layers(model, None).values())
    first = {name: torch.from_numpy(values[:2]) for name, values in build_source().arrays.items()}
    weight = torch.tensor([1.0, 0.0])
    short = {name: value[:1] for name, value in first.items()}
    stats = compute_stats(plastic, model, {"a": {**first, "weight": weight}, "b": first})
    separate = [compute_stats(plastic, model, batch) for batch in ({"a": short}, {"b": first})]
    assert stats[COUNT_PREFIX + names[0]] == 3
    for name in names:
        torch.testing.assert_close(
            stats[SUM_PREFIX + name],
            sum(part_stats[SUM_PREFIX + name] for part_stats in separate),
            rtol=1e-5,
            atol=1e-6,
        )


# Learning

STEPS, INPUTS, UNITS_OF_LAYER = 20, 100, 8


def initialise_detector(model: Any, seed: int) -> None:
    weights = numpy_generator(seed, "sentinel").uniform(0, 1, (UNITS_OF_LAYER, INPUTS))
    with torch.no_grad():
        model.layer.synapse.weight.copy_(torch.from_numpy(weights))
        model.head.weight.zero_()


class PatternDetectorTask(Task):
    """A layer that sees unlabelled trains [b, S, I]; only its readout is trained by gradient."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(lambda config: PatternDetector(), initial=Initial(initialise_detector))}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": float(len(batch["x"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        answer = models["model"](batch["x"].float().transpose(0, 1))
        return Loss(terms={"loss": ((answer - 1).square().sum(), 1.0)})


class PatternDetector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # At most one spike per example, so that its timing is the only information.
        shape = SpikingShape(time_steps=STEPS, threshold=12.0, leak=0.9, refractory=STEPS)
        self.layer = SpikingLayer(INPUTS, UNITS_OF_LAYER, shape, bias=False)
        self.head = nn.Linear(UNITS_OF_LAYER, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).sum(0))


def draw_trains(seed: int, pattern: np.ndarray, samples: int, *, repeats: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return trains [n, S, I], and which of them have the pattern: half of the inputs then spike in its order, the others
    at random steps. Each input spikes once or not at all, equally often with and without the pattern, so that only the
    timing distinguishes them."""
    rng = np.random.default_rng(seed)
    has_pattern, spike_steps = rng.random(samples) < 0.5, rng.integers(0, STEPS, (samples, INPUTS))
    for row in np.flatnonzero(has_pattern):
        spike_steps[row, : len(pattern)] = pattern if repeats else rng.permutation(pattern)
    example, unit = np.nonzero(rng.random((samples, INPUTS)) < 0.8)
    x = np.zeros((samples, STEPS, INPUTS), np.uint8)
    x[example, spike_steps[example, unit], unit] = 1
    return x, has_pattern


def find_first_spikes(model: nn.Module, x: np.ndarray) -> np.ndarray:
    """Return the step of each unit's first spike [n, units]; STEPS where there is none."""
    with torch.no_grad():
        spikes = model.layer(torch.from_numpy(x).float().transpose(0, 1))  # type: ignore[operator]
    return np.where(spikes.sum(0).numpy() > 0, spikes.argmax(0).numpy(), STEPS)


def compute_auc(first_spike_steps: np.ndarray, has_pattern: np.ndarray) -> float:
    """Return the AUC of the first spike as a detector of the pattern (0.5 is chance), averaged over units."""
    a, b = first_spike_steps[has_pattern, None], first_spike_steps[None, ~has_pattern]
    return float(((a < b) + 0.5 * (a == b)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False], ids=["pattern", "no-pattern"])
def test_layer_learns_a_repeating_pattern_from_spike_timing_alone(repeats: bool) -> None:
    pattern = np.random.default_rng(5).permutation(np.arange(50)) * STEPS // 50
    plastic = Plasticity(inner=PatternDetectorTask(), rate=0.01, low=0.0, high=1.0, normalise=True)
    frozen_layer = {"groups": [{"pattern": "layer.*", "scale": 0.0}, {"pattern": ".*"}]}
    subject = engine(training(**SGD, **frozen_layer), task=plastic)
    test, has_pattern = draw_trains(1, pattern, 400)
    before = find_first_spikes(subject.model, test)
    assert abs(compute_auc(before, has_pattern) - 0.5) < 0.1
    x, _ = draw_trains(0, pattern, 3200, repeats=repeats)
    train_steps(subject, loader(ArraySource({"x": x}), of=subject, batch_size=16), 0, 300)
    trained, weights = find_first_spikes(subject.model, test), weight_of(copy_state(subject), "layer.synapse.weight")
    early, late = weights[:, :50][:, pattern < STEPS // 4].mean(), weights[:, :50][:, pattern >= STEPS // 2].mean()
    if repeats:
        assert compute_auc(trained, has_pattern) > 0.8
        assert trained[has_pattern].mean() < before[has_pattern].mean() - 2
        assert abs(trained[~has_pattern].mean() - before[~has_pattern].mean()) < 0.5
        assert early > late + 0.3
    else:
        assert abs(compute_auc(trained, has_pattern) - 0.5) < 0.1
        assert abs(early - late) < 0.1


def test_run_resumes_bitwise_equal(tmp_path: Path) -> None:
    import bottega

    images = {key: value for key, value in small_media.image(tmp_path).items() if key.startswith("data.")}
    values = {
        **{key: value for key, value in small_run.SMALL.items() if not key.startswith(("model.", "data."))},
        **images,
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
    final = small_run.read_tensors(run.path)
    assert final["state.safetensors/plasticity/reward"][1] > 0
    for step in (5, 6):
        shutil.rmtree(run.path / "checkpoints" / f"step-{step:08d}")
    resumed = bottega.train("classify/spiking", values)
    assert small_run.differing_tensors(final, small_run.read_tensors(resumed.path)) == []
    assert bottega.load(run.path).evaluate()["accuracy"] == pytest.approx(run.metrics["accuracy"])


# Errors


def test_a_model_without_spiking_layers_is_refused() -> None:
    shape = ConvNetShape(grid=(8, 8), channels=1, num_labels=3, hidden_size=8)
    with pytest.raises(UsageError, match="ConvNet has none; remove it, or train a spiking model"):
        build_models(build_task(shape), 0)


def test_target_that_is_not_a_spiking_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'head' is not a spiking layer; the model has layers\.0, layers\.1"):
        build_models(build_task(targets=("head",)), 0)
    with pytest.raises(UsageError, match=r"'\(' is not a regular expression"):
        build_models(build_task(targets=("(",)), 0)


def test_reward_requires_class_probabilities() -> None:
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


def test_multitask_supports_plasticity_without_reward() -> None:
    changes = {"techniques": [{"name": "plasticity", "options": {"reward": "loss"}}]}
    with pytest.raises(
        UsageError, match=r"plasticity.reward needs a single task, but this recipe has several; set it to none"
    ):
        load_recipe(["multitask", changes])
    assert load_recipe(["multitask", {"techniques": ["plasticity"]}]).recipe.techniques[0].name == "plasticity"


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_recipe_is_refused_on_load(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        load_recipe(["classify/spiking", changes])


def test_all_layers_frozen_is_refused(tmp_path: Path) -> None:
    import bottega

    frozen = {"training.freeze": ["layers"], "techniques": ["plasticity"], "output_dir": str(tmp_path)}
    with pytest.raises(UsageError, match=r"layers\.0\.synapse\.weight and every other spiking layer is frozen"):
        bottega.train("classify/spiking", frozen)


def test_compile_with_model_plasticity_is_refused(tmp_path: Path) -> None:
    import bottega

    changes = {"model.plasticity": True, "training.compile": True, "output_dir": str(tmp_path)}
    with pytest.raises(UsageError, match=r"training\.compile: .*; or set model\.plasticity: false"):
        bottega.train("routing", changes)


def test_build_rule_from_recipe_options() -> None:
    from bottega.techniques.plasticity.apply import build_rule

    triplet = PlasticityOptions(rule="triplet", a3_plus=0.5, tau_y=3.0, tau_plus=2.0)
    assert build_rule(triplet) == STDPRule(a3_plus=0.5, a3_minus=0.0, tau_y=3.0, tau_plus=2.0)
    assert build_rule(PlasticityOptions()) == STDPRule()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
