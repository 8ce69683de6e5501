"""One step of the torch engine: the exact mean under any split, clipping, weight averages, frozen groups, precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.errors import OutOfMemory, UsageError
from bottega.core.noise import Noise
from bottega.core.trainer import evaluate
from bottega.core.types import Batch, Loss, Models
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.torch import ranks
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.sums import sum_terms
from bottega.models.build import build_models
from toy_task import F, Toy, copy_state, engine, loader, save_checkpoint, source, train_steps, training

OPTIMIZERS = ["adamw", "adam", "sgd", "muon", "lion", "adafactor"]


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, atol: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=atol, err_msg=name)


def weights(of: Any) -> dict[str, np.ndarray]:
    return {name.partition("/")[2]: array for name, array in copy_state(of).items() if name.startswith("model")}


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_gradients_do_not_depend_on_the_micro_batch_split(micro: int) -> None:
    unsplit, split = engine(), engine(micro=micro)
    batch = loader(of=unsplit).batch(3)
    counts = unsplit.task.counts(batch)
    losses = []
    for torch_engine in (unsplit, split):
        loss, metrics = torch_engine.backward(3, move_batch(batch, torch_engine.device), counts, 8)
        losses.append((loss.item(), torch_engine.fetch(metrics)["absolute"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for (name, a), b in zip(unsplit.model.named_parameters(), split.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-6, atol=1e-6, msg=name)


class RareMetric(Toy):
    """A metric that counts nothing in some micro-batches, as one over rare tokens does."""

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss = super().loss(models, batch, rng)
        counted = (batch["index"] < 4).float()
        return Loss(loss.terms, {"rare": ((2.0 * counted).sum(), counted.sum())})


def test_metric_with_zero_count_in_a_micro_batch_stays_exact() -> None:
    for micro in (None, 4, 3, 1):
        torch_engine = engine(task=RareMetric(), micro=micro)
        batch = {**loader(of=torch_engine).batch(0), "index": np.arange(8)}
        reported = torch_engine.fetch(torch_engine.train_step(0, batch))
        assert reported["rare"] == 2.0
        assert reported["mean"] > 0  # several terms are reported by name


def test_loss_is_the_weighted_sum_of_per_term_means() -> None:
    """Each term is its sum over the batch divided by its own count; a mean of means would differ."""
    torch_engine = engine(task=Toy(noise=0.0))
    batch = loader(of=torch_engine).batch(0)
    reported = torch_engine.fetch(torch_engine.train_step(0, batch))["loss"]
    initial_model = build_models(Toy(noise=0.0), 0)["model"]
    with torch.no_grad():
        squared_error = ((initial_model(torch.from_numpy(batch["x"])).numpy() - batch["y"]) ** 2) * batch["mask"]
    per_example = squared_error.sum(1) / batch["mask"].sum(1)
    expected = squared_error.sum() / batch["mask"].sum() + 0.25 * per_example.mean()
    assert reported == pytest.approx(expected, rel=1e-5)
    assert abs(per_example.mean() * 1.25 - expected) > 1e-3, "the masks are too even to distinguish the two"


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("micro", [1, 3])
def test_weights_after_steps_do_not_depend_on_the_micro_batch_split(name: str, micro: int) -> None:
    options = training(optimizer={"name": name})
    unsplit, split = engine(options), engine(options, micro=micro)
    for torch_engine in (unsplit, split):
        train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    assert_close(weights(unsplit), weights(split), atol=2e-6)


def test_clipping_and_adamw_match_torch() -> None:
    options = training(max_grad_norm=0.05, weight_decay=0.1)
    ours = engine(options)
    reference = copy.deepcopy(ours.model)
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    batches = loader(of=ours)
    for step in range(5):
        batch = batches.batch(step)
        report = ours.fetch(ours.train_step(step, batch))
        rng = Noise(0, step, torch.arange(8), torch)
        loss = Toy().loss({"model": reference}, move_batch(batch, torch.device("cpu")), rng)
        adamw.zero_grad()
        sum_terms(loss.terms, Toy().counts(batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        for group in adamw.param_groups:
            group["lr"] = ours.rate(step)
        adamw.step()
        assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert report["grad_norm"] > 0.05, "nothing was clipped"
    assert_close(weights(ours), {name: p.detach().numpy() for name, p in reference.named_parameters()}, atol=1e-6)


def test_no_clipping_equals_clipping_at_a_huge_norm() -> None:
    unclipped, clipped = (
        engine(training(max_grad_norm=None, optimizer={"name": "sgd"})),
        engine(training(optimizer={"name": "sgd"}, max_grad_norm=1e9)),
    )
    for torch_engine in (unclipped, clipped):
        train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    assert_close(weights(unclipped), weights(clipped))


def test_weight_average_follows_its_formula() -> None:
    torch_engine = engine(training(ema=0.25))
    average = {name: p.detach().clone() for name, p in torch_engine.model.named_parameters()}
    batches = loader(of=torch_engine)
    for step, decay in enumerate((1 / 10, 2 / 11, 3 / 12, 0.25, 0.25)):
        train_steps(torch_engine, batches, step, step + 1)
        average = {n: decay * average[n] + (1 - decay) * p.detach() for n, p in torch_engine.model.named_parameters()}
    for name, tensor in torch_engine.state()["ema.safetensors"].items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7)
        assert tensor.grad_fn is None, "an average with a graph grows by a model each step"


def test_evaluation_and_sampling_use_averaged_weights_and_restore_the_others() -> None:
    torch_engine = engine(training(ema=0.9))
    batches = loader(of=torch_engine)
    train_steps(torch_engine, batches, 0, 4)
    before = copy_state(torch_engine)
    with torch_engine.sampling() as models:
        assert not models["model"].training
        for name, p in models["model"].named_parameters():
            assert torch.equal(p, torch_engine.state()["ema.safetensors"][name])
    plain = engine()
    plain.model.load_state_dict(torch_engine.state()["ema.safetensors"])
    with torch_engine.evaluating():
        sums_inside = torch_engine.eval_step(batches.batch(0)).sums
    for sums in (torch_engine.eval_step(batches.batch(0)).sums, sums_inside):
        assert sums["error"][1] == torch_engine.task.counts(batches.batch(0))["error"]
        assert torch.equal(sums["error"][0], plain.eval_step(batches.batch(0)).sums["error"][0])
    after = copy_state(torch_engine)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(RuntimeError), torch_engine.sampling():
        raise RuntimeError
    assert all(np.array_equal(before[name], array) for name, array in copy_state(torch_engine).items()), (
        "not restored after an error"
    )


def test_evaluation_noise_depends_on_the_sample_and_not_on_the_batch_size() -> None:
    """It also differs from the noise of training."""
    torch_engine = engine()
    expected = evaluate(torch_engine, iter_eval_batches(source(), 8))
    for size in (1, 7, 40):
        assert evaluate(torch_engine, iter_eval_batches(source(), size)) == pytest.approx(expected, rel=1e-6)
    batch = source().rows(np.arange(8), np.zeros(8, np.int64))
    training_metrics = torch_engine.fetch(engine().train_step(0, batch))
    sums = torch_engine.eval_step(batch).sums
    evaluation_loss = sum(
        weight * float(sums[name][0]) / sums[name][1] for name, weight in {"error": 1, "mean": 0.25}.items()
    )
    assert abs(evaluation_loss - training_metrics["loss"]) > 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_zero_scaled_groups_do_not_move(name: str) -> None:
    groups = [{"pattern": "first.*", "scale": "none"}, {"pattern": "head.*", "scale": 0.0}, {"pattern": ".*"}]
    torch_engine = engine(training(groups=groups, optimizer={"name": name}, ema=0.9))
    before = weights(torch_engine)
    train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    after = weights(torch_engine)
    unchanged = {key for key in before if np.array_equal(before[key], after[key])}
    assert unchanged == {key for key in before if key.startswith(("first", "head"))}
    assert not any(
        key.startswith(("optimizer.safetensors/first", "ema.safetensors/first")) for key in copy_state(torch_engine)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_group_with_a_later_start_is_frozen_until_then_and_resumes_bit_exact(name: str, tmp_path: Path) -> None:
    """Its optimizer moments stay 0 until the start."""
    groups = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 3}]
    options = training(groups=groups, optimizer={"name": name})

    def build() -> Any:
        torch_engine = engine(options)
        torch_engine.set_schedule(torch_engine.rate, total=8, steps_per_epoch=5)
        return torch_engine

    torch_engine = build()
    initial_weights = weights(torch_engine)
    train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    path = save_checkpoint(torch_engine, tmp_path, 3)
    for key, array in copy_state(torch_engine).items():
        parameter = key.partition("/")[2]
        if parameter.startswith(("first", "norm")):
            if key.startswith("model"):
                np.testing.assert_array_equal(array, initial_weights[parameter])
            elif not parameter.endswith(("row_var", "col_var", "variance")):
                assert not array.any(), key
        elif key.startswith("model"):
            assert not np.array_equal(array, initial_weights[parameter]), key
    train_steps(torch_engine, loader(of=torch_engine), 3, 6)
    assert not np.array_equal(weights(torch_engine)["first.weight"], initial_weights["first.weight"])
    resumed = build()
    resumed.load(path)
    train_steps(resumed, loader(of=resumed), 3, 6)
    for key, array in copy_state(torch_engine).items():
        np.testing.assert_array_equal(copy_state(resumed)[key], array, err_msg=key)


def test_group_scale_multiplies_the_learning_rate() -> None:
    scaled = engine(training(groups=[{"pattern": ".*", "scale": 0.5}], optimizer={"name": "sgd"}))
    expected = engine(training(optimizer={"name": "sgd"}, learning_rate=5e-3))
    for torch_engine in (scaled, expected):
        train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    assert_close(weights(scaled), weights(expected), atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_reduces_the_loss(name: str) -> None:
    rate = 1e-3 if name == "lion" else 1e-1 if name == "adafactor" else 1e-2
    torch_engine = engine(
        training(optimizer={"name": name}, learning_rate=rate), task=Toy(noise=0.0), rate=lambda step: rate
    )
    losses = [report["loss"] for report in train_steps(torch_engine, loader(of=torch_engine), 0, 60)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_bfloat16_trains_on_a_cpu_and_keeps_float32_weights() -> None:
    exact, rounded = (engine(training(mixed_precision=kind)) for kind in ("fp32", "bf16"))
    a, b = (train_steps(torch_engine, loader(of=torch_engine), 0, 30) for torch_engine in (exact, rounded))
    assert all(p.dtype is torch.float32 for p in rounded.model.parameters())
    assert b[-1]["loss"] != a[-1]["loss"], "computed in the same precision"
    assert b[-1]["loss"] == pytest.approx(a[-1]["loss"], rel=0.1)
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        engine(training(mixed_precision="fp16"))


def test_dropout_is_a_function_of_seed_step_and_micro_batch() -> None:
    def run(seed: int = 0, disturb: bool = False) -> list[float]:
        torch_engine = engine(task=Toy(dropout=0.5), seed=seed, micro=4)
        if disturb:
            torch.rand(100)
        return [report["loss"] for report in train_steps(torch_engine, loader(of=torch_engine), 0, 3)]

    assert run() == run(disturb=True)
    assert run() != run(seed=1)


def test_dropout_differs_at_every_step() -> None:
    torch_engine = engine(task=Toy(dropout=0.5, noise=0.0), rate=lambda step: 0.0)
    batch = loader(of=torch_engine).batch(0)
    assert len({torch_engine.fetch(torch_engine.train_step(step, batch))["loss"] for step in range(5)}) == 5


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_the_deterministic_flag_reaches_torch(deterministic: None) -> None:
    engine()
    assert not torch.are_deterministic_algorithms_enabled()
    engine(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


class MemoryHungry(Toy):
    """A forward pass of more than `fits` examples runs out of memory."""

    fits: int = 3

    def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
        loss = super().loss(models, batch, rng)
        if len(batch["x"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


def test_auto_halves_the_micro_batch_and_changes_nothing_else() -> None:
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})
    full, halved = engine(options, task=MemoryHungry(fits=8)), engine(options, task=MemoryHungry(fits=3))
    reports = [train_steps(torch_engine, loader(of=torch_engine), 0, 3) for torch_engine in (full, halved)]
    assert (full.micro_batch_size, halved.micro_batch_size) == (8, 2)
    assert_close(weights(full), weights(halved))
    assert [r["absolute"] for r in reports[1]] == pytest.approx([r["absolute"] for r in reports[0]], rel=1e-5)


class LateOutOfMemory(Toy):
    """Out of memory in the second micro-batch of a step: the gradients of the first must not count twice."""

    def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
        if len(batch["x"]) > 2 and int(rng.positions[0]) >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(models, batch, rng)


def test_step_that_runs_out_of_memory_half_way_starts_over() -> None:
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})
    expected, restarted = engine(options), engine(options, task=LateOutOfMemory(), micro=4)
    for torch_engine in (expected, restarted):
        train_steps(torch_engine, loader(of=torch_engine), 0, 2)
    assert restarted.micro_batch_size == 2
    assert_close(weights(expected), weights(restarted))


@pytest.mark.parametrize(("micro", "setting", "hint"), [(4, 4, "set it to auto"), (None, "auto", "smaller model")])
def test_out_of_memory_without_a_remedy_exits_with_code_7(micro: int | None, setting: Any, hint: str) -> None:
    torch_engine = engine(training(micro_batch_size=setting), task=MemoryHungry(fits=0), micro=micro)
    with pytest.raises(OutOfMemory, match=hint) as caught:
        torch_engine.train_step(0, loader(of=torch_engine).batch(0))
    assert caught.value.code == 7
    assert all(p.grad is None for p in torch_engine.model.parameters())


def test_out_of_memory_in_an_evaluation_names_its_batch_size() -> None:
    torch_engine = engine(task=MemoryHungry(fits=2))
    with pytest.raises(OutOfMemory, match=r"evaluation\.batch_size"):
        torch_engine.eval_step(loader(of=torch_engine).batch(0))


def test_rows_are_gathered_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    monkeypatch.setattr(ranks, "gather_rows", lambda rows, weight: gathered.append(len(rows)) or dict(rows))

    class WithRows(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            return super().loss(models, batch, rng)._replace(rows={"x": batch["x"]})

    torch_engine = engine(task=WithRows())
    batch = loader(of=torch_engine).batch(0)
    with_rows, without_rows = torch_engine.eval_step(batch), torch_engine.eval_step(batch, with_rows=False)
    assert set(with_rows.rows) == {"x"}
    assert without_rows.rows == {}
    assert gathered == [1, 0]
    assert without_rows.sums.keys() == with_rows.sums.keys()
    assert all(torch.equal(without_rows.sums[name][0], with_rows.sums[name][0]) for name in with_rows.sums)


def test_several_ranks_size_the_micro_batch_before_hooks_run() -> None:
    torch_engine = engine(training(micro_batch_size="auto"), task=MemoryHungry(fits=3))
    sizes: list[int | None] = []
    batch = loader(of=torch_engine).batch(0)
    torch_engine.world_size = 2

    def measure(step: int, batch: Batch) -> None:
        sizes.append(torch_engine.micro_batch_size)
        torch_engine.model.eval()

    torch_engine.add_hook(measure)
    torch_engine.train_step(0, batch)
    assert sizes == [2]
    assert torch_engine.model.training


def test_hooks_are_called_in_their_order_before_each_step_until_they_are_removed() -> None:
    torch_engine = engine()
    batches, calls = loader(of=torch_engine), list[str]()
    torch_engine.add_hook(lambda step, batch: calls.append(f"first {step}"))
    torch_engine.add_hook(lambda step, batch: calls.append(f"second {step} of {len(batch['x'])}"))
    train_steps(torch_engine, batches, 3, 5)
    assert calls == ["first 3", "second 3 of 8", "first 4", "second 4 of 8"]
    torch_engine.remove_hooks()
    train_steps(torch_engine, batches, 5, 6)
    assert len(calls) == 4


def test_eval_step_accepts_a_different_task_for_the_same_models() -> None:
    class Doubled(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            out = super().loss(models, batch, rng)
            return out._replace(terms={name: (2 * total, weight) for name, (total, weight) in out.terms.items()})

    torch_engine = engine()
    batch = loader(of=torch_engine).batch(0)
    plain, doubled, again = (
        torch_engine.eval_step(batch),
        torch_engine.eval_step(batch, task=Doubled()),
        torch_engine.eval_step(batch),
    )
    assert torch.equal(2 * plain.sums["error"][0], doubled.sums["error"][0])
    assert torch.equal(plain.sums["error"][0], again.sums["error"][0])


def test_resetting_the_average_copies_the_weights() -> None:
    torch_engine = engine(training(ema=0.9))
    with torch.no_grad():
        torch_engine.model.head.weight.fill_(3.0)
    assert not torch.equal(torch_engine.state()["ema.safetensors"]["head.weight"], torch_engine.model.head.weight)
    torch_engine.reset_weight_average()
    assert torch.equal(torch_engine.state()["ema.safetensors"]["head.weight"], torch_engine.model.head.weight)


def test_parameters_report_shape_size_and_trainability() -> None:
    torch_engine = engine(training(groups=[{"pattern": "first.*", "scale": None}, {"pattern": ".*", "starts": 2}]))
    parameters = torch_engine.parameters()
    assert list(parameters) == [name for name, _ in torch_engine.model.named_parameters()]
    assert (parameters["first.weight"].shape, parameters["first.weight"].size) == ((8, F), 8 * F)
    assert {name for name, p in parameters.items() if not p.is_trainable} == {"first.weight", "first.bias"}
    assert torch_engine.num_active_parameters() == sum(p.size for p in parameters.values())


def test_sample_order_depends_on_the_step_number_alone() -> None:
    torch_engine = engine()
    straight = train_steps(torch_engine, loader(source(), of=torch_engine), 0, 4)
    other = engine()
    separate = [train_steps(other, loader(source(), of=other), step, step + 1)[0] for step in range(4)]
    assert separate == straight


@pytest.mark.filterwarnings("ignore")  # raised by the compiler itself
def test_compiled_model_trains_parameters_unfrozen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler specialises on requires_grad, and omits the gradients of parameters frozen at compile time."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    groups = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 2}]
    final_weights = []
    for compiled in (True, False):
        torch_engine = engine(training(groups=groups, compile=compiled, optimizer={"name": "sgd"}))
        torch_engine.set_schedule(torch_engine.rate, total=8, steps_per_epoch=5)
        train_steps(torch_engine, loader(of=torch_engine), 0, 4)
        final_weights.append(weights(torch_engine))
    torch.compiler.reset()
    assert_close(*final_weights)
