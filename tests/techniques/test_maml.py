"""Meta-learning: gradients in closed form and by finite differences, invariances of runs, and adaptation to new classes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bottega
import small_media
import small_run
import small_texts
from bottega.analysis.compare import compare
from bottega.analysis.ledger import list_step_samples
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, DataError, Diverged, UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.trainer import evaluate
from bottega.core.types import Batch, Loss, Models
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.engines.torch.devices import move_batch
from bottega.models.build import build_models
from bottega.run.compose import build_engine, build_loader, build_training_plan, set_learning_rate_schedule
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from bottega.techniques.maml.torch import Maml, ReboundModel
from bottega.techniques.training_plan import TrainingPlan
from small_run import differing_tensors

F, S, Q = 3, 4, 5
METHODS = ("maml", "fomaml", "reptile", "none")


class LeastSquares(Task):
    """Least squares in double precision: every gradient has a closed form."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(lambda config: nn.Linear(F, 1, bias=False).double())}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"loss": float(len(batch["y"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        wrong = models["model"](batch["x"]).squeeze(-1) - batch["y"]
        return Loss(terms={"loss": (wrong.square().sum(), 1.0)})


def draw_episodes(count: int = 3, *, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: {
            "x": torch.from_numpy(rng.standard_normal((count, n, F))),
            "y": torch.from_numpy(rng.standard_normal((count, n))),
        }
        for name, n in (("support", S), ("query", Q))
    }


def build_noise(count: int) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def compute_meta_gradient(task: Maml, model: nn.Module, batch: Batch) -> np.ndarray:
    """Return the gradient of sum / count, as the engine computes it."""
    model.train()
    host = {part: {name: value.numpy() for name, value in fields.items()} for part, fields in batch.items()}
    total, _ = task.loss({"model": model}, batch, build_noise(len(batch["support"]["y"]))).terms["loss"]
    model.zero_grad()
    (total / task.counts(host)["loss"]).backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])


def reference_gradient(method: str, w: np.ndarray, batch: Batch, *, steps: int, rate: float) -> np.ndarray:
    """Return the mean over episodes. The gradient of a mean square is 2/n X'(Xw - y), its Hessian 2/n X'X."""
    gradients = []
    for number in range(len(batch["support"]["x"])):
        parts = {n: (batch[n]["x"][number].numpy(), batch[n]["y"][number].numpy()) for n in ("support", "query")}
        both = tuple(np.concatenate(pair) for pair in zip(parts["support"], parts["query"], strict=True))
        x, y = both if method in ("reptile", "none") else parts["support"]
        adapted, jacobian = w, np.eye(len(w))
        for _ in range(0 if method == "none" else steps):
            jacobian = (np.eye(len(w)) - rate * 2 / len(y) * x.T @ x) @ jacobian
            adapted = adapted - rate * 2 / len(y) * x.T @ (x @ adapted - y)
        if method == "reptile":
            gradients.append(w - adapted)
            continue
        qx, qy = both if method == "none" else parts["query"]
        slope = 2 / len(qy) * qx.T @ (qx @ adapted - qy)
        gradients.append(jacobian.T @ slope if method == "maml" else slope)
    return np.mean(gradients, axis=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_match_the_closed_form(method: Any, steps: int) -> None:
    task, batch = Maml(inner=LeastSquares(), method=method, inner_steps=steps, inner_rate=0.1), draw_episodes()
    model = build_models(task, 0)["model"]
    w = model.weight.detach().numpy().ravel().copy()
    gradient = compute_meta_gradient(task, model, batch)
    np.testing.assert_allclose(
        gradient, reference_gradient(method, w, batch, steps=steps, rate=0.1), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_array_equal(model.weight.detach().numpy().ravel(), w)


def test_evaluation_reports_each_inner_step_and_keeps_the_weights() -> None:
    task, batch = Maml(inner=LeastSquares(), method="reptile", inner_steps=2, inner_rate=0.1), draw_episodes(1)
    model = build_models(task, 0)["model"].eval()
    with torch.no_grad():
        out = task.loss({"model": model}, batch, build_noise(1))
    x, y, qx, qy = (batch[part][name][0].numpy() for part in ("support", "query") for name in ("x", "y"))
    w = model.weight.detach().numpy().ravel()
    for name in ("loss_before", "loss_1", "loss_2"):
        total, count = out.metrics[name]
        assert (float(total), count) == (pytest.approx(((qx @ w - qy) ** 2).sum()), Q)
        w = w - 0.1 * 2 / S * x.T @ (x @ w - y)
    assert float(out.terms["loss"][0]) == float(out.metrics["loss_2"][0])
    assert out.rows == {}
    assert task.score({}) == {}


def test_only_trainable_weights_are_adapted_and_a_plain_batch_uses_the_inner_task() -> None:
    task = Maml(
        inner=LeastSquares(), method="fomaml", inner_steps=1, inner_rate=0.1, select_adapted=lambda names: names[2:]
    )
    model = nn.Sequential(nn.Linear(F, F), nn.Linear(F, 1)).double()
    adapted: list[set[str]] = []

    class Spy(LeastSquares):
        def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
            if isinstance(models["model"], ReboundModel):
                adapted.append(set(models["model"]._weights))
            return super().loss(models, batch, rng)

    spying = task.model_copy(update={"inner": Spy()})
    spying.loss({"model": model}, draw_episodes(2), build_noise(2))
    assert adapted == [{"model.1.weight", "model.1.bias"}] * 4
    plain = {name: value[0] for name, value in draw_episodes()["query"].items()}
    assert spying.loss({"model": model}, plain, build_noise(Q)) == Spy().loss({"model": model}, plain, build_noise(Q))
    assert spying.counts({name: value.numpy() for name, value in plain.items()}) == {"loss": Q}
    assert len(adapted) == 4


def test_noise_depends_on_episode_example_part_and_step_but_not_on_the_split() -> None:
    drawn: dict[float, int] = {}

    class Noisy(LeastSquares):
        def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
            for value in rng.normal("x").tolist():
                drawn[value] = drawn.get(value, 0) + 1
            return super().loss(models, batch, rng)

    task = Maml(inner=Noisy(), method="fomaml", inner_steps=3, inner_rate=0.1)
    model, batch = build_models(task, 0)["model"], draw_episodes(2)
    task.loss({"model": model}, batch, build_noise(2))
    assert len(drawn) == 2 * (3 * S + Q)
    assert set(drawn.values()) == {1}
    for number in range(2):
        episode = {part: {n: v[number : number + 1] for n, v in fields.items()} for part, fields in batch.items()}
        task.loss({"model": model}, episode, Noise(0, 0, torch.arange(number, number + 1), torch))
    assert set(drawn.values()) == {2}
    model.eval()
    with torch.no_grad():
        drawn.clear()
        task.loss({"model": model}, batch, build_noise(2))
    assert sorted(drawn.values()) == [1] * 2 * 3 * S + [4] * 2 * Q, "the query draws the same noise after each step"


# Real tasks

OPTIONS: dict[str, dict[str, Any]] = {
    "language": {"shots": 2, "queries": 2},
    "classify": {"shots": 2, "queries": 2, "ways": 2},
    "classify/image": {"shots": 2, "queries": 2},
    "image": {"shots": 2, "queries": 2},
}


def maml(name: str, method: str, **changes: Any) -> list[dict[str, Any]]:
    options = {"method": method, "inner_steps": 2, "inner_rate": 0.05, **OPTIONS[name], **changes}
    return [{"name": "maml", "options": options}]


def settings(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    if name == "language":
        text = small_run.write_text(folder / "text.txt", words=1200)
        return "language/shakespeare", {**small_run.settings(folder, text), "data.validation.split": 0.2}
    if name == "classify":
        return "classify", {**small_texts.settings(folder), "model.dropout": 0.0}
    values = {**small_media.image(folder), "data.validation.split": 0.4}
    if name == "image":
        return "image", values
    shared = {key: value for key, value in values.items() if not key.startswith(("model.", "samples."))}
    return "classify/image", {**shared, "model.hidden_size": 8, "model.dropout": 0.0}


class Subject:
    """Workload, plan, engine and loader of a run, without the training loop."""

    def __init__(
        self, name: str, folder: Path, method: str, *, options: Mapping[str, Any] = {}, **changes: Any
    ) -> None:
        recipe_name, values = settings(name, folder)
        values = {**values, "techniques": maml(name, method, **options), "training.batch_size": 4, **changes}
        recipe = load_recipe([recipe_name, values]).recipe
        self.workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
        self.plan: TrainingPlan = build_training_plan(recipe, self.workload)
        self.engine = build_engine(recipe, self.plan.task)
        self.loader: Loader = build_loader(recipe, self.plan.training, self.engine, self.plan.order)
        set_learning_rate_schedule(recipe, self.engine, total=8, steps_per_epoch=round(self.loader.steps_per_epoch))

    def advance(self, start: int, stop: int) -> list[dict[str, float]]:
        return [self.engine.fetch(self.engine.train_step(s, self.loader.batch(s))) for s in range(start, stop)]

    def state(self) -> dict[str, np.ndarray]:
        return {
            f"{file}/{name}": array.copy()
            for file, arrays in self.engine.snapshot().files().items()
            for name, array in arrays.items()
        }


TASKS = tuple(OPTIONS)
TASKS_AND_METHODS = (
    ("language", "maml"),
    ("classify", "maml"),
    ("classify/image", "fomaml"),
    ("image", "reptile"),
    ("image", "none"),
)
"""Every task and every method, but not all of their pairs."""


def compute_meta_loss(subject: Subject) -> torch.Tensor:
    """Return the mean loss of the first batch."""
    engine, batch = subject.engine, subject.loader.batch(0)
    rng = Noise(0, 0, torch.arange(4), torch)
    total, _ = engine.task.loss({"model": engine.model.train()}, move_batch(batch, engine.device), rng).terms["loss"]
    return total / engine.task.counts(batch)["loss"]


def compute_gradients(subject: Subject) -> list[torch.Tensor]:
    gradients = torch.autograd.grad(
        compute_meta_loss(subject), list(subject.engine.model.parameters()), allow_unused=True
    )
    zeros = (torch.zeros_like(p) for p in subject.engine.model.parameters())
    return [zero if gradient is None else gradient for zero, gradient in zip(zeros, gradients, strict=True)]


@pytest.mark.parametrize("name", TASKS)
def test_maml_gradient_of_a_real_model_matches_finite_differences(name: str, tmp_path: Path) -> None:
    """Compared along the gradient itself. The first-order gradient is further off, so the second-order term is correct."""
    options = {"inner_rate": 2.0 if name == "language" else 0.3, "inner_steps": 1}
    second, first = (Subject(name, tmp_path, method, options=options) for method in ("maml", "fomaml"))
    full_gradient, first_order_gradient = compute_gradients(second), compute_gradients(first)
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in full_gradient]))
    # Norms after zero-initialised weights are strongly curved, and the image classifier has some.
    losses, epsilon = [], 1e-4 if name == "classify/image" else 2e-3
    for offset in (epsilon, -epsilon):
        with torch.no_grad():
            for parameter, gradient in zip(second.engine.model.parameters(), full_gradient, strict=True):
                parameter.add_(gradient / norm, alpha=offset)
        losses.append(float(compute_meta_loss(second).detach()))
        with torch.no_grad():
            for parameter, gradient in zip(second.engine.model.parameters(), full_gradient, strict=True):
                parameter.sub_(gradient / norm, alpha=offset)
    measured = (losses[0] - losses[1]) / (2 * epsilon)
    assert float(norm) == pytest.approx(measured, rel=0.02)
    projection = sum(float((a * b).sum()) for a, b in zip(first_order_gradient, full_gradient, strict=True)) / float(
        norm
    )
    assert abs(projection - measured) > 0.04 * measured


@pytest.mark.parametrize(("name", "method"), TASKS_AND_METHODS)
def test_micro_batches_do_not_change_the_loss_or_the_update(name: str, method: str, tmp_path: Path) -> None:
    sgd = {"training.optimizer.name": "sgd", "training.learning_rate": 0.1}
    full, split = Subject(name, tmp_path, method, **sgd), Subject(name, tmp_path, method, **sgd)
    split.engine.micro_batch_size = 3
    a, b = full.advance(0, 2), split.advance(0, 2)
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-6)
    for key, value in full.state().items():
        np.testing.assert_allclose(split.state()[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(("name", "method"), TASKS_AND_METHODS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, method: str, tmp_path: Path) -> None:
    """Also after an evaluation, and with dropout and EMA weights."""
    changes = {"training.ema": 0.9, "training.micro_batch_size": 3, "model.dropout": 0.1}
    straight = Subject(name, tmp_path, method, **changes)
    reports = straight.advance(0, 4)
    first = Subject(name, tmp_path, method, **changes)
    assert first.advance(0, 2) == reports[:2]
    held_out = first.plan.validation
    assert held_out is not None
    means = evaluate(first.engine, iter_eval_batches(held_out, 4, limit=4))
    assert means["loss"] == means["loss_2"]
    assert all(map(np.isfinite, means.values()))
    assert set(means) <= set(first.plan.metrics)
    files = first.engine.snapshot().files()
    saved = checkpoint.write(tmp_path / "cut", step=2, files=files, progress={"step": 2}, fingerprint={})
    second = Subject(name, tmp_path, method, **changes)
    second.engine.load(saved)
    assert second.advance(2, 4) == reports[2:]
    assert differing_tensors(straight.state(), second.state()) == []


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_does_not_depend_on_what_is_unfrozen_so_far(method: str, tmp_path: Path) -> None:
    """A process started only to evaluate has unfrozen nothing; one in training perhaps half of the layers."""
    changes = {"training.unfreeze.layers_per": 2, "training.freeze": ["layers.0"], "training.batch_size": 2}
    first = Subject("classify", tmp_path, method, **changes)
    first.advance(0, 2)
    is_frozen = [name for name, p in first.engine.model.named_parameters() if not p.requires_grad]
    assert any(not name.startswith("layers.0.") for name in is_frozen), "some layers are still frozen"
    held_out = first.plan.validation
    assert held_out is not None
    before = evaluate(first.engine, iter_eval_batches(held_out, 4, limit=4))
    files = first.engine.snapshot().files()
    saved = checkpoint.write(tmp_path / "cut", step=2, files=files, progress={"step": 2}, fingerprint={})
    second = Subject("classify", tmp_path, method, **changes)
    second.engine.load(saved)
    assert evaluate(second.engine, iter_eval_batches(held_out, 4, limit=4)) == before
    assert second.advance(2, 5) == first.advance(2, 5)
    assert differing_tensors(first.state(), second.state()) == []
    adapted = first.engine.task._select_adapted_parameters(first.engine.model)
    assert {name for name, _ in first.engine.model.named_parameters() if name.startswith("layers.0.")}
    assert not any(name.startswith("layers.0.") for name in adapted), "permanently frozen layers are not adapted"
    assert set(is_frozen) & set(adapted)


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_is_independent_of_batch_size_and_ranks(name: str, tmp_path: Path) -> None:
    """Two ranks split five episodes: one rank is padded, and padding does not count."""
    subject = Subject(name, tmp_path, "fomaml")
    held_out = subject.plan.validation
    assert held_out is not None
    expected = evaluate(subject.engine, iter_eval_batches(held_out, 5, limit=5))
    assert evaluate(subject.engine, iter_eval_batches(held_out, 2, limit=5)) == pytest.approx(expected, rel=1e-5)
    rank_sums = [
        subject.engine.eval_step(next(iter_eval_batches(held_out, 5, data_rank=rank, data_size=2, limit=5))).sums
        for rank in range(2)
    ]
    for key, mean in expected.items():
        total, count = (sum(float(sums[key][i]) for sums in rank_sums) for i in range(2))
        assert total / count == pytest.approx(mean, rel=1e-5), key


@pytest.mark.parametrize("method", ["maml", "fomaml"])
def test_bf16_matches_fp32(method: str, tmp_path: Path) -> None:
    """Autocast caches its casts; a cached copy without a gradient would stop the inner steps."""
    exact, half = (
        Subject("classify", tmp_path, method, **{"training.mixed_precision": precision})
        for precision in ("fp32", "bf16")
    )
    assert [r["loss"] for r in half.advance(0, 2)] == pytest.approx([r["loss"] for r in exact.advance(0, 2)], rel=0.03)
    held_out = half.plan.validation
    assert held_out is not None
    means, expected = (evaluate(subject.engine, iter_eval_batches(held_out, 4, limit=8)) for subject in (half, exact))
    assert means == pytest.approx(expected, rel=0.1)
    assert means["loss_before"] != means["loss_1"] != means["loss_2"]


@pytest.mark.parametrize("name", TASKS)
def test_run_trains_and_evaluates_as_an_ordinary_run(name: str, tmp_path: Path) -> None:
    recipe, values = settings(name, tmp_path)
    values = {**values, "techniques": maml(name, "fomaml"), "evaluation.max_batches": 1, "name": "run"}
    values |= {"training.max_steps": 4, "evaluation.every": 2, "checkpoint.every": 2, "training.batch_size": 4}
    run = bottega.train(recipe, values)
    last = [row for row in run.history() if row["kind"] == "eval"][-1]
    assert last["loss"] == last["loss_2"]
    assert "loss_before" in last
    assert ("accuracy_before" in last) == name.startswith("classify")
    assert ("perplexity" in last) == (name == "language")
    ledger = list_step_samples(run.path, step=3, replay=True)
    assert ledger["described"][0].startswith(f"episode {ledger['samples'][0]}, epoch 0: task")
    assert np.isfinite(ledger["replay"]["loss"])
    means = bottega.evaluate(run.path, **({"count": 0} if name == "image" else {}))["metrics"]
    assert np.isfinite(means["loss"])
    assert "loss_before" not in means


def refusal_message(name: str, folder: Path, *, options: Mapping[str, Any] = {}, **changes: Any) -> str:
    with pytest.raises(BottegaError) as caught:
        Subject(name, folder, "maml", options=options, **changes)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError | DataError)
    return str(caught.value)


def test_invalid_episodes_are_refused_in_one_line(tmp_path: Path) -> None:
    def message_of(name: str, **changes: Any) -> str:
        return refusal_message(name, tmp_path, **changes)

    assert "data.train: 0 of 1 tasks have 5004 samples or more" in message_of(
        "language", options={"shots": 5000, "queries": 4}
    )
    assert (
        "an episode needs 9 classes with 4 samples each (2 shots and 2 queries), but only 3 of 3 classes have that many; "
        "lower ways, shots or queries"
    ) in message_of("classify", options={"ways": 9})
    assert "maml.ways is 1, but an episode needs at least two classes; set it to 2 or more" in message_of(
        "classify", options={"ways": 1}
    )
    assert "maml.ways is 2" in message_of("image", options={"ways": 2})
    assert "maml.ways is 2" in message_of("language", options={"ways": 2})
    assert "maml.by is label, but samples have no labels" in message_of("language", options={"by": "label"})
    assert "maml.by is source, but there is only one" in message_of("classify", options={"by": "source", "ways": None})
    assert "no field 'speaker'; choose from" in message_of("classify", options={"by": "speaker", "ways": None})
    unlabelled = {"data.train.path": str(_write_unlabelled_images(tmp_path)), "model.condition": "none"}
    assert "samples have no labels and only one source; add data.sources" in message_of("image", **unlabelled)
    assert "gradient_checkpointing" in message_of("image", **{"training.gradient_checkpointing": True})
    assert "loss.class_weights" in message_of("classify", **{"loss.class_weights": "balanced"})
    assert "mixed_precision" in message_of("classify", **{"training.mixed_precision": "fp16"})
    assert "data.curriculum" in message_of("classify", **{"data.curriculum": {"stages": [{"steps": 2}]}})


def _write_unlabelled_images(folder: Path) -> Path:
    path = folder / "unlabelled.npz"
    np.savez(path, image=np.random.default_rng(0).integers(0, 255, (36, 8, 8), dtype=np.uint8))
    return path


def test_episodes_can_group_by_source_region_or_field(tmp_path: Path) -> None:
    texts = [small_run.write_text(tmp_path / f"{n}.txt", seed=n, words=900) for n in range(3)]
    several = {"data.sources": [{"path": str(path)} for path in texts], "data.train.path": None}
    by_source = Subject("language", tmp_path, "fomaml", **several)
    assert "one of 3 tasks by source" in by_source.plan.notes[-1]
    by_region = Subject("language", tmp_path, "fomaml", options={"by": "region"})
    assert " tasks by region" in by_region.plan.notes[-1]
    by_field = Subject("image", tmp_path, "fomaml", options={"by": "caption"}, **{"model.condition": "none"})
    assert " tasks by caption" in by_field.plan.notes[-1]


def test_plain_training_uses_the_original_class_indices(tmp_path: Path) -> None:
    plain, meta = (Subject("classify", tmp_path, method).plan for method in ("none", "maml"))
    index = np.arange(20)
    labels = [plan.training.rows(index, 0 * index)["support"]["label"] for plan in (plain, meta)]
    assert labels[0].max() == 2
    assert labels[1].max() == 1
    held_out = [plan.validation.rows(index, 0 * index)["query"]["label"] for plan in (plain, meta)]  # type: ignore[union-attr]
    np.testing.assert_array_equal(*held_out)
    assert held_out[0].max() == 1


def test_with_lora_only_adapter_weights_are_trained(tmp_path: Path) -> None:
    lora = {"name": "lora", "options": {"rank": 2}}
    both = Subject("classify", tmp_path, "maml", techniques=[lora, *maml("classify", "maml")])
    before = {name: p.detach().clone() for name, p in both.engine.model.named_parameters()}
    both.advance(0, 2)
    for name, parameter in both.engine.model.named_parameters():
        assert torch.equal(parameter, before[name]) != both.engine.task.is_trainable(name), name
    assert "list it after lora" in refusal_message("classify", tmp_path, techniques=[*maml("classify", "maml"), lora])


@pytest.mark.slow
def test_two_ranks_match_one(tmp_path: Path) -> None:
    """Each rank has half of the episodes, and gradients are summed explicitly."""
    recipe, values = settings("classify", tmp_path)
    values |= {"techniques": maml("classify", "maml"), "training.optimizer.name": "sgd", "training.max_steps": 3}
    values |= {"evaluation.max_batches": 1, "checkpoint.every": 3, "evaluation.every": 3}
    alone = bottega.train(recipe, {**values, "name": "one"})
    arguments = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    result = subprocess.run(
        [*launch, "train", recipe, *arguments, "name=two", "--quiet"],
        env=small_run.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    a, b = small_run.read_tensors(alone.path), small_run.read_tensors(tmp_path / "two")
    for key, value in a.items():
        np.testing.assert_allclose(b[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


# Adaptation to digits absent from training, 3 at a time with 2 images each. The inner rate is the best of 0.03, 0.1 and
# 0.3 for plain training.
FEW_SHOT_DIGITS: dict[str, Any] = {
    "model.hidden_size": 8,
    "data.split": {"by": "group", "field": "label"},
    "data.validation.split": 0.4,
    "training.max_steps": 60,
    "training.batch_size": 4,
    "training.scheduler.warmup_steps": 10,
    "evaluation.every": 60,
    "evaluation.max_batches": 8,
    "evaluation.metric": "loss",
    "evaluation.mode": "min",
    "checkpoint.every": 60,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}


def test_throughput_counts_episodes_and_query_samples(tmp_path: Path) -> None:
    """As documented: episodes in metrics.jsonl, query samples in the log."""
    values = {**settings("classify", tmp_path)[1], "techniques": maml("classify", "fomaml")}
    for row in bottega.train("classify", {**values, "output_dir": str(tmp_path)}).history():
        if row["kind"] == "train":
            assert row["units_per_second"] == pytest.approx(2 * 2 * row["samples_per_second"])


def test_divergence_error_names_the_inner_rate(tmp_path: Path) -> None:
    values = {**settings("classify", tmp_path)[1], "output_dir": str(tmp_path)}
    values["techniques"] = maml("classify", "fomaml", inner_rate=1e38)
    with pytest.raises(
        Diverged, match=r"lower training\.learning_rate or techniques\.maml\.inner_rate, or inspect the"
    ):
        bottega.train("classify", values)


@pytest.mark.slow
def test_fomaml_adapts_faster_than_plain_training(tmp_path: Path) -> None:
    """Five seeds each, compared as by `bottega compare`: loss and accuracy after three inner steps."""
    few = {"ways": 3, "shots": 2, "queries": 5, "inner_steps": 3, "inner_rate": 0.03}
    for method in ("none", "fomaml"):
        for seed in range(5):
            values = {**FEW_SHOT_DIGITS, "output_dir": str(tmp_path), "name": f"{method}-s{seed}", "seed": seed}
            bottega.train(
                "classify/image", {**values, "techniques": [{"name": "maml", "options": {**few, "method": method}}]}
            )
    report = compare([str(tmp_path / f"{method}-s*") for method in ("none", "fomaml")])
    plain, meta = report["groups"]
    assert report["pairs"][0]["better"] == meta["label"], report["pairs"][0]["verdict"]
    assert meta["mean"] < 0.9 * plain["mean"]
    accuracies = compare([str(tmp_path / f"{method}-s*") for method in ("none", "fomaml")], metric="accuracy")["groups"]
    assert accuracies[1]["mean"] > accuracies[0]["mean"]
