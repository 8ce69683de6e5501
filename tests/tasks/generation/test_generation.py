"""The generation task: its loss, sample counts, condition dropout, guidance and sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.config.training import Training
from bottega.core.noise import Noise, numpy_generator
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.data.sources.source import ArraySource
from bottega.engines.torch.engine import TorchEngine
from bottega.models.build import build_models
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.solvers import sample
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.torch import encode_condition

CONDITIONS = ["none", "class", "vector", "text"]
WORDS = 5


def task(kind: Any = "class", *, path: NoisePath | None = None, frames: bool = False, **options: Any) -> Generation:
    sides: dict[str, Any] = {"grid": (4, 4), "patch": (2, 2)}
    if frames:
        sides = {"grid": (2, 4, 4), "patch": (1, 2, 2), "attention": "factorised"}
    text: dict[str, Any] = {"vocab_size": 7, "text_size": 12, "text_layers": 1, "max_tokens": WORDS}
    is_text = kind == "text"
    backbone = DiTShape(
        channels=1, hidden_size=24, num_layers=2, num_heads=2, context_size=12 if is_text else None, **sides
    )
    condition = ConditionShape(kind=kind, size=0 if is_text else 3, hidden_size=24, **(text if is_text else {}))
    shape = GeneratorShape(backbone=backbone, condition=condition)
    return Generation(key="image", shape=shape, path=path or NoisePath(), empty_text=(0,) * WORDS, **options)


def source(count: int = 11, *, frames: bool = False) -> ArraySource:
    """Samples with every kind of condition."""
    generator = np.random.default_rng(0)
    label = np.arange(count) % 3
    image = generator.standard_normal((count, *((2, 4, 4) if frames else (4, 4)), 1), dtype=np.float32) / 4
    return ArraySource(
        {
            "image": image + label.reshape(-1, *(1,) * (image.ndim - 1)).astype(np.float32) - 1,
            "label": label.astype(np.int32),
            "condition": generator.standard_normal((count, 3), dtype=np.float32),
            "input_ids": (1 + np.arange(count)[:, None] % 3 + np.zeros((1, WORDS), np.int64)).astype(np.int32),
            "attention_mask": (np.arange(WORDS) < 1 + label[:, None]).astype(np.int32),
        }
    )


def rows(index: Any, data: ArraySource | None = None) -> dict[str, Any]:
    index = np.asarray(index)
    batch = (data or source()).rows(index, np.zeros_like(index))
    return {name: torch.from_numpy(value) for name, value in batch.items()}


def engine(generation: Generation, *, rate: float = 1e-2, **options: Any) -> TorchEngine:
    training = Training(max_steps=100, batch_size=8, learning_rate=rate, mixed_precision="fp32", **options)
    return TorchEngine(generation, training, rate=lambda step: rate, device="cpu")


def randomise_models(generation: Generation) -> dict[str, Any]:
    """Build models with random parameters, since several are initialised to zero."""
    models = build_models(generation, 0)
    with torch.no_grad():
        for name, p in models["model"].named_parameters():
            p.copy_(torch.from_numpy(0.2 * numpy_generator(7, name).standard_normal(p.shape, dtype=np.float32)))
    return models


class RecordingModel(nn.Module):
    """A model that records its inputs and returns a fixed output."""

    def __init__(self, answer: Tensor | None = None) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.answer = answer

    def forward(self, x: Tensor, time: Tensor, **condition: Any) -> Tensor:
        self.calls.append({"x": x, "time": time, **condition})
        return torch.zeros_like(x) if self.answer is None else self.answer


def rng(count: int, *, step: int = 0) -> Noise:
    return Noise(0, step, torch.arange(count), torch)


def compute_loss(generation: Generation, models: Any, batch: Any, noise: Noise) -> float:
    return generation.loss(models, batch, noise).terms["loss"][0].item()


@pytest.mark.parametrize(
    "path", [NoisePath(), NoisePath(objective="noise"), NoisePath(objective="v")], ids=lambda p: p.objective
)
def test_the_initial_loss_is_that_of_predicting_zero(path: NoisePath) -> None:
    """The prediction is exactly 0, so the loss is the target's mean square: 1 for noise, 1 + the data's for the flow."""
    generation = task(path=path, condition_dropout=0.0)
    data = source(512)
    batch = rows(np.arange(512), data)
    mean = compute_loss(generation, build_models(generation, 0), batch, rng(512)) / 512
    squares = float((data.arrays["image"] ** 2).mean())
    expected = {"flow": 1 + squares, "noise": 1.0, "v": None}[path.objective]
    if expected is not None:
        assert mean == pytest.approx(expected, rel=0.03)
    else:
        assert min(1, squares) < mean < max(1, squares), "v lies between the noise and the data"


def test_the_model_input_lies_on_the_noise_path() -> None:
    generation, spy, batch, random = task(), RecordingModel(), rows(np.arange(8)), rng(8)
    total = compute_loss(generation, {"model": spy}, batch, random)
    noise, t = random.normal("noise", (4, 4, 1)), torch.sigmoid(random.normal("time"))
    (inputs,) = spy.calls
    level = t.view(-1, 1, 1, 1)
    torch.testing.assert_close(inputs["x"], (1 - level) * batch["image"] + level * noise)
    torch.testing.assert_close(inputs["time"], 1000 * t)
    assert total == pytest.approx((noise - batch["image"]).square().flatten(1).mean(1).sum().item(), rel=1e-6)


def test_the_exact_target_has_zero_loss() -> None:
    generation, batch, random = task(), rows(np.arange(8)), rng(8)
    spy = RecordingModel(random.normal("noise", (4, 4, 1)) - batch["image"])
    assert compute_loss(generation, {"model": spy}, batch, random) == 0


@pytest.mark.parametrize("kind", CONDITIONS)
def test_the_loss_of_a_sample_does_not_depend_on_its_batch_or_position(kind: str) -> None:
    generation = task(kind, condition_dropout=0.5)
    models = randomise_models(generation)
    losses = [compute_loss(generation, models, rows([i]), Noise(0, -1, torch.tensor([i]), torch)) for i in range(11)]
    shuffled = [7, 2, 10, 0, 5]
    total = compute_loss(generation, models, rows(shuffled), Noise(0, -1, torch.tensor(shuffled), torch))
    assert total == pytest.approx(sum(losses[i] for i in shuffled), rel=1e-6)


@pytest.mark.parametrize("kind", CONDITIONS)
def test_evaluation_is_deterministic_for_any_batch_size_and_order(kind: str) -> None:
    trained = engine(task(kind))
    loader = Loader(source(), 8, seed=0)
    for step in range(3):
        trained.train_step(step, loader.batch(step))
    expected = evaluate(trained, iter_eval_batches(source(), 4))
    assert evaluate(trained, iter_eval_batches(source(), 4)) == expected
    backwards = list(iter_eval_batches(source(), 3))[::-1]
    assert evaluate(trained, iter(backwards)) == pytest.approx(expected, rel=1e-6)


def test_a_one_dimensional_grid_uses_mel_bands_as_channels() -> None:
    """The data is [b, frames, bands, 1]; noise and loss are equal for both grids."""
    spectrum = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 6, 4, 1), dtype=np.float32))
    losses = []
    for sides in ({"grid": (6,), "patch": (2,), "channels": 4}, {"grid": (6, 4), "patch": (2, 4), "channels": 1}):
        backbone = DiTShape(hidden_size=24, num_layers=1, num_heads=2, **sides)  # type: ignore[arg-type]
        shape = GeneratorShape(backbone=backbone, condition=ConditionShape(kind="none"))
        generation = Generation(key="mel", shape=shape)
        losses.append(compute_loss(generation, build_models(generation, 0), {"mel": spectrum}, rng(5)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_noise_differs_between_steps_and_evaluation() -> None:
    generation, models, batch = task(), build_models(task(), 0), rows(np.arange(4))
    losses = {compute_loss(generation, models, batch, rng(4, step=step)) for step in (-1, 0, 1, 2)}
    assert len(losses) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
def test_conditions_are_dropped_at_the_configured_rate(dropout: float) -> None:
    generation, spy, count = task(condition_dropout=dropout), RecordingModel(), 4000
    compute_loss(generation, {"model": spy}, rows(np.arange(count), source(count)), rng(count))
    fraction = spy.calls[0]["drop"].float().mean().item()
    # Four standard deviations of a fraction of 4,000.
    assert fraction == pytest.approx(dropout, abs=4 * (dropout * (1 - dropout) / count) ** 0.5)


def test_a_dropped_caption_is_replaced_by_the_empty_one() -> None:
    generation, spy = task("text", condition_dropout=0.5), RecordingModel()
    batch = rows(np.arange(11))
    compute_loss(generation, {"model": spy}, batch, rng(11))
    dropped = rng(11).uniform("drop") < 0.5
    assert 0 < dropped.sum() < 11
    (inputs,) = spy.calls
    assert (inputs["input_ids"][dropped] == 0).all()
    assert inputs["mask"][dropped].tolist() == [[True] + [False] * (WORDS - 1)] * int(dropped.sum())
    assert torch.equal(inputs["input_ids"][~dropped], batch["input_ids"][~dropped].long())
    assert torch.equal(inputs["mask"][~dropped], batch["attention_mask"][~dropped] > 0)


def test_rows_with_weight_zero_do_not_count() -> None:
    generation, batch = task(), rows(np.arange(6))
    models = randomise_models(generation)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    padded = {**batch, "image": torch.where(weight.view(-1, 1, 1, 1) > 0, batch["image"], 1e6), "weight": weight}
    indices = torch.tensor([0, 2, 3, 5])
    without_padding = compute_loss(generation, models, rows(indices.numpy()), Noise(0, 0, indices, torch))
    assert compute_loss(generation, models, padded, rng(6)) == pytest.approx(without_padding, rel=1e-6)
    assert generation.counts({name: value.numpy() for name, value in padded.items()}) == {"loss": 4.0}
    assert generation.counts({name: value.numpy() for name, value in batch.items()}) == {"loss": 6.0}


@pytest.mark.parametrize("objective", ["noise", "v"])
def test_min_snr_weighs_each_sample(objective: Any) -> None:
    plain = task(path=NoisePath(objective=objective), condition_dropout=0.0)
    capped = task(path=NoisePath(objective=objective, min_snr=5.0), condition_dropout=0.0)
    models, weights = randomise_models(plain), []
    for i in range(40):
        random = Noise(0, 0, torch.tensor([i]), torch)
        batch = rows([i % 11])
        weights.append(compute_loss(capped, models, batch, random) / compute_loss(plain, models, batch, random))
        alpha, sigma = plain.path.levels(plain.path.draw_times(random))
        snr = (alpha**2 / sigma**2).item()
        assert weights[-1] == pytest.approx(min(snr, 5) / (snr if objective == "noise" else snr + 1), rel=1e-4)
    assert min(weights) < 0.5 < max(weights)


@pytest.mark.parametrize("frames", [False, True], ids=["image", "video"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_the_gradient_reaches_every_parameter(kind: str, frames: bool) -> None:
    """From the third step on: zero-initialised layers block the gradient of the layers before them at first."""
    generation = task(kind, frames=frames, condition_dropout=0.5)
    trained = engine(generation, optimizer={"name": "sgd"}, rate=0.5)
    data = source(frames=frames)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    loader = Loader(data, 8, seed=0)
    for step in range(3):
        trained.train_step(step, loader.batch(step))
    unchanged = [name for name, p in trained.model.named_parameters() if torch.equal(p, before[name])]
    # A key's bias adds the same to all logits of a query, and softmax is invariant to that.
    assert [name for name in unchanged if not name.endswith(("to_k.bias", "k_proj.bias"))] == []


@pytest.mark.parametrize(
    "path", [NoisePath(), NoisePath(objective="noise"), NoisePath(objective="v")], ids=lambda p: p.objective
)
def test_eight_samples_are_overfitted(path: NoisePath) -> None:
    trained = engine(task(path=path), rate=5e-3)
    batch = source(8).rows(np.arange(8), np.zeros(8, np.int64))
    losses = [trained.fetch(trained.train_step(step, batch))["loss"] for step in range(150)]
    assert np.mean(losses[-30:]) < 0.7 * np.mean(losses[:10])


# Samples


def sample_rows(generation: Generation, models: Any, indices: Any, **options: Any) -> Tensor:
    indices = np.asarray(indices)
    with torch.no_grad():
        return generation.draw(models, rows(indices), Noise(3, 0, torch.from_numpy(indices), torch), steps=4, **options)


@pytest.mark.parametrize("method", ["euler", "heun", "dpm"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_sample_does_not_depend_on_its_batch(kind: str, method: Any) -> None:
    generation = task(kind)
    models = randomise_models(generation)
    guidance = 1.0 if kind == "none" else 2.0
    batched = sample_rows(generation, models, range(8), method=method, guidance=guidance)
    assert batched.shape == (8, 4, 4, 1)
    for i in range(8):
        single = sample_rows(generation, models, [i], method=method, guidance=guidance)
        torch.testing.assert_close(single[0], batched[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["class", "vector", "text"])
def test_guidance_combines_conditional_and_unconditional_predictions_linearly(kind: str) -> None:
    """1 is exactly the conditional model, 0 exactly the unconditional one, and other values extrapolate linearly."""
    generation = task(kind)
    models = randomise_models(generation)
    random, drop_all = Noise(3, 0, torch.arange(3), torch), torch.ones(3, dtype=torch.bool)

    def sample_with(indices: list[int], guidance: float) -> Tensor:
        with torch.no_grad():
            return generation.draw(models, rows(indices), random, steps=3, guidance=guidance)

    def reference(guidance: float) -> Tensor:
        conditional, unconditional = (
            encode_condition(generation, models, rows([0, 1, 2]), drop=drop) for drop in (~drop_all, drop_all)
        )

        def predict(x: Tensor, time: Tensor) -> Tensor:
            a, b = models["model"](x, time, **conditional), models["model"](x, time, **unconditional)
            return a if guidance == 1 else b if guidance == 0 else b + guidance * (a - b)

        with torch.no_grad():
            return sample(predict, random.normal("start", (4, 4, 1)), generation.path, steps=3)

    for guidance in (0.0, 1.0, 2.5):
        assert torch.equal(sample_with([0, 1, 2], guidance), reference(guidance))
    assert not torch.allclose(sample_with([0, 1, 2], 1.0), sample_with([0, 1, 2], 0.0), atol=1e-3)
    assert torch.equal(sample_with([1, 2, 0], 0.0), sample_with([0, 1, 2], 0.0)), "guidance 0 ignores the condition"


def test_guidance_of_one_needs_a_single_forward() -> None:
    generation, spy = task(), RecordingModel()
    sample_rows(generation, {"model": spy}, range(3), method="euler")
    assert len(spy.calls) == 4
    assert not any(call["drop"].any() for call in spy.calls)


def test_a_trained_model_samples_the_requested_class() -> None:
    """The classes are images around -1, 0 and 1."""
    trained = engine(task(), rate=5e-3, ema=0.98)
    loader = Loader(source(96), 32, seed=0)
    for step in range(250):
        trained.train_step(step, loader.batch(step))
    labels = np.arange(60) % 3
    batch = {"label": torch.from_numpy(labels)}
    with trained.sampling() as models:
        for method in ("euler", "heun", "dpm"):
            images = trained.task.draw(models, batch, rng(60), steps=8, method=method)
            means = [images[labels == label].mean().item() for label in range(3)]
            assert means == pytest.approx([-1, 0, 1], abs=0.2), method
