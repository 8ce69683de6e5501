"""One step of the torch engine: the exact mean under any split, clipping, averages, frozen rows, precision."""

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
from toy_task import F, Toy, advance, engine, loader, save, source, state, training

OPTIMIZERS = ["adamw", "adam", "sgd", "muon", "lion", "adafactor"]


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, atol: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=atol, err_msg=name)


def weights(of: Any) -> dict[str, np.ndarray]:
    return {name.partition("/")[2]: array for name, array in state(of).items() if name.startswith("model")}


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_gradients_are_those_of_the_whole_batch_under_any_split(micro: int) -> None:
    whole, split = engine(), engine(micro=micro)
    batch = loader(of=whole).batch(3)
    counts = whole.task.counts(batch)
    losses = []
    for one in (whole, split):
        loss, metrics = one.backward(3, move_batch(batch, one.device), counts, 8)
        losses.append((loss.item(), one.fetch(metrics)["absolute"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for (name, a), b in zip(whole.model.named_parameters(), split.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-6, atol=1e-6, msg=name)


class Halting(Toy):
    """A metric that counts nothing in some micro-batches, as one over rare tokens does."""

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        found = super().loss(models, batch, rng)
        counted = (batch["index"] < 4).float()
        return Loss(found.terms, {"rare": ((2.0 * counted).sum(), counted.sum())})


def test_a_micro_batch_that_counts_nothing_takes_no_count_away() -> None:
    for micro in (None, 4, 3, 1):
        one = engine(task=Halting(), micro=micro)
        batch = {**loader(of=one).batch(0), "index": np.arange(8)}
        reported = one.fetch(one.train_step(0, batch))
        assert reported["rare"] == 2.0
        assert reported["mean"] > 0  # terms are told by name where there are several


def test_the_mean_is_the_one_written_down_by_hand() -> None:
    """Each term is its sum over the whole batch by its own count; a mean of means would be another number."""
    one = engine(task=Toy(noise=0.0))
    batch = loader(of=one).batch(0)
    reported = one.fetch(one.train_step(0, batch))["loss"]
    fresh = build_models(Toy(noise=0.0), 0)["model"]
    with torch.no_grad():
        wrong = ((fresh(torch.from_numpy(batch["x"])).numpy() - batch["y"]) ** 2) * batch["mask"]
    per_example = wrong.sum(1) / batch["mask"].sum(1)
    by_hand = wrong.sum() / batch["mask"].sum() + 0.25 * per_example.mean()
    assert reported == pytest.approx(by_hand, rel=1e-5)
    assert abs(per_example.mean() * 1.25 - by_hand) > 1e-3, "the masks are ragged enough to tell"


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("micro", [1, 3])
def test_weights_after_steps_do_not_depend_on_the_split(name: str, micro: int) -> None:
    options = training(optimizer={"name": name})
    whole, split = engine(options), engine(options, micro=micro)
    for one in (whole, split):
        advance(one, loader(of=one), 0, 3)
    close(weights(whole), weights(split), atol=2e-6)


def test_clipping_and_adamw_are_torchs_own() -> None:
    options = training(max_grad_norm=0.05, weight_decay=0.1)
    ours = engine(options)
    theirs = copy.deepcopy(ours.model)
    matrices = [p for p in theirs.parameters() if p.dim() >= 2]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    batches = loader(of=ours)
    for step in range(5):
        batch = batches.batch(step)
        report = ours.fetch(ours.train_step(step, batch))
        rng = Noise(0, step, torch.arange(8), torch)
        out = Toy().loss({"model": theirs}, move_batch(batch, torch.device("cpu")), rng)
        adamw.zero_grad()
        sum_terms(out.terms, Toy().counts(batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        for group in adamw.param_groups:
            group["lr"] = ours.rate(step)
        adamw.step()
        assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert report["grad_norm"] > 0.05, "it had to be clipped"
    close(weights(ours), {name: p.detach().numpy() for name, p in theirs.named_parameters()}, atol=1e-6)


def test_without_clipping_the_gradient_is_taken_as_it_is() -> None:
    free, clipped = (
        engine(training(max_grad_norm=None, optimizer={"name": "sgd"})),
        engine(training(optimizer={"name": "sgd"}, max_grad_norm=1e9)),
    )
    for one in (free, clipped):
        advance(one, loader(of=one), 0, 2)
    close(weights(free), weights(clipped))


def test_the_average_follows_its_formula() -> None:
    one = engine(training(ema=0.25))
    average = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    batches = loader(of=one)
    for step, kept in enumerate((1 / 10, 2 / 11, 3 / 12, 0.25, 0.25)):
        advance(one, batches, step, step + 1)
        average = {n: kept * average[n] + (1 - kept) * p.detach() for n, p in one.model.named_parameters()}
    for name, tensor in one.state()["ema.safetensors"].items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7)
        assert tensor.grad_fn is None, "an average that remembers its making grows by a model a step"


def test_evaluation_and_samples_see_the_averaged_weights_and_give_the_others_back() -> None:
    one = engine(training(ema=0.9))
    batches = loader(of=one)
    advance(one, batches, 0, 4)
    before = state(one)
    with one.sampling() as models:
        assert not models["model"].training
        for name, p in models["model"].named_parameters():
            assert torch.equal(p, one.state()["ema.safetensors"][name])
    plain = engine()
    plain.model.load_state_dict(one.state()["ema.safetensors"])
    with one.evaluating():
        inside = one.eval_step(batches.batch(0)).sums
    for sums in (one.eval_step(batches.batch(0)).sums, inside):
        assert sums["error"][1] == one.task.counts(batches.batch(0))["error"]
        assert torch.equal(sums["error"][0], plain.eval_step(batches.batch(0)).sums["error"][0])
    after = state(one)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(RuntimeError), one.sampling():
        raise RuntimeError
    assert all(np.array_equal(before[name], array) for name, array in state(one).items()), "after an error as well"


def test_an_evaluation_draws_its_noise_for_the_sample_and_not_for_its_place() -> None:
    """And never what training draws: the noise of step 0 would be known already."""
    one = engine()
    usual = evaluate(one, iter_eval_batches(source(), 8))
    for size in (1, 7, 40):
        assert evaluate(one, iter_eval_batches(source(), size)) == pytest.approx(usual, rel=1e-6)
    batch = source().rows(np.arange(8), np.zeros(8, np.int64))
    trained = one.fetch(engine().train_step(0, batch))
    sums = one.eval_step(batch).sums
    measured = sum(weight * float(sums[name][0]) / sums[name][1] for name, weight in {"error": 1, "mean": 0.25}.items())
    assert abs(measured - trained["loss"]) > 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_rows_do_not_move_and_scaled_rows_move_less(name: str) -> None:
    groups = [{"pattern": "first.*", "scale": "none"}, {"pattern": "head.*", "scale": 0.0}, {"pattern": ".*"}]
    one = engine(training(groups=groups, optimizer={"name": name}, ema=0.9))
    before = weights(one)
    advance(one, loader(of=one), 0, 3)
    after = weights(one)
    still = {key for key in before if np.array_equal(before[key], after[key])}
    assert still == {key for key in before if key.startswith(("first", "head"))}
    assert not any(key.startswith(("optimizer.safetensors/first", "ema.safetensors/first")) for key in state(one))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_that_starts_later_stands_still_until_then_and_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """Its moments stay 0 as well, so that at its step it is as if it had just been met; and a resume in between is equal."""
    table = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 3}]
    options = training(groups=table, optimizer={"name": name})

    def built() -> Any:
        one = engine(options)
        one.set_schedule(one.rate, total=8, steps_per_epoch=5)
        return one

    one = built()
    begun = weights(one)
    advance(one, loader(of=one), 0, 3)
    saved = save(one, tmp_path, 3)
    for key, array in state(one).items():
        parameter = key.partition("/")[2]
        if parameter.startswith(("first", "norm")):
            if key.startswith("model"):
                np.testing.assert_array_equal(array, begun[parameter])
            elif not parameter.endswith(("row_var", "col_var", "variance")):
                assert not array.any(), key
        elif key.startswith("model"):
            assert not np.array_equal(array, begun[parameter]), key
    advance(one, loader(of=one), 3, 6)
    assert not np.array_equal(weights(one)["first.weight"], begun["first.weight"])
    again = built()
    again.load(saved)
    advance(again, loader(of=again), 3, 6)
    for key, array in state(one).items():
        np.testing.assert_array_equal(state(again)[key], array, err_msg=key)


def test_a_row_scales_the_rate() -> None:
    half = engine(training(groups=[{"pattern": ".*", "scale": 0.5}], optimizer={"name": "sgd"}))
    slow = engine(training(optimizer={"name": "sgd"}, learning_rate=5e-3))
    for one in (half, slow):
        advance(one, loader(of=one), 0, 2)
    close(weights(half), weights(slow), atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    rate = 1e-3 if name == "lion" else 1e-1 if name == "adafactor" else 1e-2
    one = engine(training(optimizer={"name": name}, learning_rate=rate), task=Toy(noise=0.0), rate=lambda step: rate)
    losses = [report["loss"] for report in advance(one, loader(of=one), 0, 60)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_bfloat16_trains_on_a_cpu_and_keeps_float32_weights() -> None:
    exact, rough = (engine(training(mixed_precision=kind)) for kind in ("fp32", "bf16"))
    a, b = (advance(one, loader(of=one), 0, 30) for one in (exact, rough))
    assert all(p.dtype is torch.float32 for p in rough.model.parameters())
    assert b[-1]["loss"] != a[-1]["loss"], "it was computed in another precision"
    assert b[-1]["loss"] == pytest.approx(a[-1]["loss"], rel=0.1)
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        engine(training(mixed_precision="fp16"))


def test_dropout_is_a_function_of_seed_step_and_micro_batch() -> None:
    def run(seed: int = 0, disturb: bool = False) -> list[float]:
        one = engine(task=Toy(dropout=0.5), seed=seed, micro=4)
        if disturb:
            torch.rand(100)
        return [report["loss"] for report in advance(one, loader(of=one), 0, 3)]

    assert run() == run(disturb=True)
    assert run() != run(seed=1)


def test_dropout_is_another_at_every_step() -> None:
    one = engine(task=Toy(dropout=0.5, noise=0.0), rate=lambda step: 0.0)
    batch = loader(of=one).batch(0)
    assert len({one.fetch(one.train_step(step, batch))["loss"] for step in range(5)}) == 5


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


class Greedy(Toy):
    """More than `fits` examples in one forward are out of memory, at some steps only after a part of them went well."""

    fits: int = 3

    def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
        out = super().loss(models, batch, rng)
        if len(batch["x"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out


def test_auto_halves_the_micro_batch_and_changes_nothing_else() -> None:
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})
    plenty, scarce = engine(options, task=Greedy(fits=8)), engine(options, task=Greedy(fits=3))
    reports = [advance(one, loader(of=one), 0, 3) for one in (plenty, scarce)]
    assert (plenty.micro_batch_size, scarce.micro_batch_size) == (8, 2)
    close(weights(plenty), weights(scarce))
    assert [r["absolute"] for r in reports[1]] == pytest.approx([r["absolute"] for r in reports[0]], rel=1e-5)


class Late(Toy):
    """Out of memory in the second micro-batch of a step: what the first one left must not count twice."""

    def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
        if len(batch["x"]) > 2 and int(rng.positions[0]) >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(models, batch, rng)


def test_a_step_that_ran_out_of_memory_half_way_starts_over() -> None:
    options = training(micro_batch_size="auto", optimizer={"name": "sgd"})
    usual, late = engine(options), engine(options, task=Late(), micro=4)
    for one in (usual, late):
        advance(one, loader(of=one), 0, 2)
    assert late.micro_batch_size == 2
    close(weights(usual), weights(late))


@pytest.mark.parametrize(("micro", "setting", "hint"), [(4, 4, "set it to auto"), (None, "auto", "smaller model")])
def test_out_of_memory_that_cannot_be_helped_has_its_own_code(micro: int | None, setting: Any, hint: str) -> None:
    one = engine(training(micro_batch_size=setting), task=Greedy(fits=0), micro=micro)
    with pytest.raises(OutOfMemory, match=hint) as caught:
        one.train_step(0, loader(of=one).batch(0))
    assert caught.value.code == 7
    assert all(p.grad is None for p in one.model.parameters())


def test_out_of_memory_in_an_evaluation_too() -> None:
    one = engine(task=Greedy(fits=2))
    with pytest.raises(OutOfMemory, match=r"evaluation\.batch_size"):
        one.eval_step(loader(of=one).batch(0))


def test_rows_that_nobody_looks_at_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    monkeypatch.setattr(ranks, "gather_rows", lambda rows, weight: gathered.append(len(rows)) or dict(rows))

    class Telling(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            return super().loss(models, batch, rng)._replace(rows={"x": batch["x"]})

    one = engine(task=Telling())
    batch = loader(of=one).batch(0)
    full, bare = one.eval_step(batch), one.eval_step(batch, with_rows=False)
    assert set(full.rows) == {"x"}
    assert bare.rows == {}
    assert gathered == [1, 0]
    assert bare.sums.keys() == full.sums.keys()
    assert all(torch.equal(bare.sums[name][0], full.sums[name][0]) for name in full.sums)


def test_several_ranks_know_what_fits_before_anything_is_done_with_a_batch() -> None:
    one = engine(training(micro_batch_size="auto"), task=Greedy(fits=3))
    found: list[int | None] = []
    batch = loader(of=one).batch(0)
    one.world = 2

    def measure(step: int, batch: Batch) -> None:
        found.append(one.micro_batch_size)
        one.model.eval()

    one.add_hook(measure)
    one.train_step(0, batch)
    assert found == [2]
    assert one.model.training


def test_hooks_are_called_in_their_order_before_each_step_until_they_are_removed() -> None:
    one = engine()
    batches, calls = loader(of=one), list[str]()
    one.add_hook(lambda step, batch: calls.append(f"first {step}"))
    one.add_hook(lambda step, batch: calls.append(f"second {step} of {len(batch['x'])}"))
    advance(one, batches, 3, 5)
    assert calls == ["first 3", "second 3 of 8", "first 4", "second 4 of 8"]
    one.remove_hooks()
    advance(one, batches, 5, 6)
    assert len(calls) == 4


def test_another_task_measures_with_the_same_models() -> None:
    class Doubled(Toy):
        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            out = super().loss(models, batch, rng)
            return out._replace(terms={name: (2 * total, weight) for name, (total, weight) in out.terms.items()})

    one = engine()
    batch = loader(of=one).batch(0)
    plain, doubled, again = one.eval_step(batch), one.eval_step(batch, task=Doubled()), one.eval_step(batch)
    assert torch.equal(2 * plain.sums["error"][0], doubled.sums["error"][0])
    assert torch.equal(plain.sums["error"][0], again.sums["error"][0])


def test_averages_begin_where_weights_were_written() -> None:
    one = engine(training(ema=0.9))
    with torch.no_grad():
        one.model.head.weight.fill_(3.0)
    assert not torch.equal(one.state()["ema.safetensors"]["head.weight"], one.model.head.weight)
    one.reset_weight_average()
    assert torch.equal(one.state()["ema.safetensors"]["head.weight"], one.model.head.weight)


def test_parameters_tell_shape_and_whether_they_ever_learn() -> None:
    one = engine(training(groups=[{"pattern": "first.*", "scale": None}, {"pattern": ".*", "starts": 2}]))
    found = one.parameters()
    assert list(found) == [name for name, _ in one.model.named_parameters()]
    assert (found["first.weight"].shape, found["first.weight"].size) == ((8, F), 8 * F)
    assert {name for name, p in found.items() if not p.is_trainable} == {"first.weight", "first.bias"}
    assert one.num_active_parameters() == sum(p.size for p in found.values())


def test_the_order_of_samples_is_seen_by_the_step_number_alone() -> None:
    one = engine()
    straight = advance(one, loader(source(), of=one), 0, 4)
    again = engine()
    separate = [advance(again, loader(source(), of=again), step, step + 1)[0] for step in range(4)]
    assert separate == straight


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_a_compiled_model_trains_what_is_unfrozen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes parameters for unchanged as long as their modules are, and leaves out gradients nobody wanted."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    table = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 2}]
    ends = []
    for compiled in (True, False):
        one = engine(training(groups=table, compile=compiled, optimizer={"name": "sgd"}))
        one.set_schedule(one.rate, total=8, steps_per_epoch=5)
        advance(one, loader(of=one), 0, 4)
        ends.append(weights(one))
    torch.compiler.reset()
    close(*ends)
