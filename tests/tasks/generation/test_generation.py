"""The task of generation: what its loss is, what counts, what is dropped, and what guidance does."""

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

CONDITIONS = ["none", "class", "vector", "text"]
WORDS = 5


def task(kind: Any = "class", *, path: NoisePath | None = None, frames: bool = False, **options: Any) -> Generation:
    sides: dict[str, Any] = {"grid": (4, 4), "patch": (2, 2)}
    if frames:
        sides = {"grid": (2, 4, 4), "patch": (1, 2, 2), "attention": "factorised"}
    text: dict[str, Any] = {"vocab_size": 7, "text_size": 12, "text_layers": 1, "max_tokens": WORDS}
    words = kind == "text"
    backbone = DiTShape(
        channels=1, hidden_size=24, num_layers=2, num_heads=2, context_size=12 if words else None, **sides
    )
    condition = ConditionShape(kind=kind, size=0 if words else 3, hidden_size=24, **(text if words else {}))
    shape = GeneratorShape(backbone=backbone, condition=condition)
    return Generation(key="image", shape=shape, path=path or NoisePath(), empty_text=(0,) * WORDS, **options)


def source(count: int = 11, *, frames: bool = False) -> ArraySource:
    """Everything that a model can be asked for at once."""
    draw = np.random.default_rng(0)
    label = np.arange(count) % 3
    image = draw.standard_normal((count, *((2, 4, 4) if frames else (4, 4)), 1), dtype=np.float32) / 4
    return ArraySource(
        {
            "image": image + label.reshape(-1, *(1,) * (image.ndim - 1)).astype(np.float32) - 1,
            "label": label.astype(np.int32),
            "condition": draw.standard_normal((count, 3), dtype=np.float32),
            "input_ids": (1 + np.arange(count)[:, None] % 3 + np.zeros((1, WORDS), np.int64)).astype(np.int32),
            "attention_mask": (np.arange(WORDS) < 1 + label[:, None]).astype(np.int32),
        }
    )


def rows(index: Any, data: ArraySource | None = None) -> dict[str, Any]:
    index = np.asarray(index)
    batch = (data or source()).rows(index, np.zeros_like(index))
    return {name: torch.from_numpy(value) for name, value in batch.items()}


def engine(of: Generation, *, rate: float = 1e-2, **options: Any) -> TorchEngine:
    training = Training(max_steps=100, batch_size=8, learning_rate=rate, mixed_precision="fp32", **options)
    return TorchEngine(of, training, rate=lambda step: rate, device="cpu")


def awake(of: Generation) -> dict[str, Any]:
    """Models of which no parameter is at the zero it begins at."""
    models = build_models(of, 0)
    with torch.no_grad():
        for name, p in models["model"].named_parameters():
            p.copy_(torch.from_numpy(0.2 * numpy_generator(7, name).standard_normal(p.shape, dtype=np.float32)))
    return models


class Spy(nn.Module):
    """Remembers what it was asked, and answers with what it is told to."""

    def __init__(self, answer: Tensor | None = None) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.answer = answer

    def forward(self, x: Tensor, time: Tensor, **asked: Any) -> Tensor:
        self.asked.append({"x": x, "time": time, **asked})
        return torch.zeros_like(x) if self.answer is None else self.answer


def rng(count: int, *, step: int = 0) -> Noise:
    return Noise(0, step, torch.arange(count), torch)


def loss_of(of: Generation, models: Any, batch: Any, noise: Noise) -> float:
    return of.loss(models, batch, noise).terms["loss"][0].item()


@pytest.mark.parametrize(
    "path", [NoisePath(), NoisePath(objective="noise"), NoisePath(objective="v")], ids=lambda p: p.objective
)
def test_the_first_loss_is_that_of_saying_nothing(path: NoisePath) -> None:
    """It predicts exactly 0, so the loss is the mean square of the target: 1 for noise, 1 + the data's for the flow."""
    of = task(path=path, condition_dropout=0.0)
    data = source(512)
    batch = rows(np.arange(512), data)
    mean = loss_of(of, build_models(of, 0), batch, rng(512)) / 512
    squares = float((data.arrays["image"] ** 2).mean())
    expected = {"flow": 1 + squares, "noise": 1.0, "v": None}[path.objective]
    if expected is not None:
        assert mean == pytest.approx(expected, rel=0.03)
    else:
        assert min(1, squares) < mean < max(1, squares), "v lies between the noise and the data"


def test_what_the_model_is_shown_lies_on_the_path() -> None:
    of, spy, batch, draw = task(), Spy(), rows(np.arange(8)), rng(8)
    total = loss_of(of, {"model": spy}, batch, draw)
    noise, t = draw.normal("noise", (4, 4, 1)), torch.sigmoid(draw.normal("time"))
    (asked,) = spy.asked
    level = t.view(-1, 1, 1, 1)
    torch.testing.assert_close(asked["x"], (1 - level) * batch["image"] + level * noise)
    torch.testing.assert_close(asked["time"], 1000 * t)
    assert total == pytest.approx((noise - batch["image"]).square().flatten(1).mean(1).sum().item(), rel=1e-6)


def test_the_right_answer_costs_nothing() -> None:
    of, batch, draw = task(), rows(np.arange(8)), rng(8)
    spy = Spy(draw.normal("noise", (4, 4, 1)) - batch["image"])
    assert loss_of(of, {"model": spy}, batch, draw) == 0


@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_samples_loss_does_not_depend_on_its_batch_or_its_place(kind: str) -> None:
    of = task(kind, condition_dropout=0.5)
    models = awake(of)
    whole = [loss_of(of, models, rows([i]), Noise(0, -1, torch.tensor([i]), torch)) for i in range(11)]
    shuffled = [7, 2, 10, 0, 5]
    together = loss_of(of, models, rows(shuffled), Noise(0, -1, torch.tensor(shuffled), torch))
    assert together == pytest.approx(sum(whole[i] for i in shuffled), rel=1e-6)


@pytest.mark.parametrize("kind", CONDITIONS)
def test_an_evaluation_is_the_same_twice_and_in_any_batches(kind: str) -> None:
    one = engine(task(kind))
    loader = Loader(source(), 8, seed=0)
    for step in range(3):
        one.train_step(step, loader.batch(step))
    usual = evaluate(one, iter_eval_batches(source(), 4))
    assert evaluate(one, iter_eval_batches(source(), 4)) == usual
    backwards = list(iter_eval_batches(source(), 3))[::-1]
    assert evaluate(one, iter(backwards)) == pytest.approx(usual, rel=1e-6)


def test_a_row_of_frames_takes_its_bands_as_channels() -> None:
    """The data have [b, frames, bands, 1]; the noise and the loss are the same numbers either way."""
    spectrum = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 6, 4, 1), dtype=np.float32))
    losses = []
    for sides in ({"grid": (6,), "patch": (2,), "channels": 4}, {"grid": (6, 4), "patch": (2, 4), "channels": 1}):
        backbone = DiTShape(hidden_size=24, num_layers=1, num_heads=2, **sides)  # type: ignore[arg-type]
        shape = GeneratorShape(backbone=backbone, condition=ConditionShape(kind="none"))
        of = Generation(key="mel", shape=shape)
        losses.append(loss_of(of, build_models(of, 0), {"mel": spectrum}, rng(5)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_training_noise_is_another_at_every_step_and_evaluations_have_their_own() -> None:
    of, models, batch = task(), build_models(task(), 0), rows(np.arange(4))
    losses = {loss_of(of, models, batch, rng(4, step=step)) for step in (-1, 0, 1, 2)}
    assert len(losses) == 4


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_conditions_are_dropped_as_often_as_the_recipe_says(share: float) -> None:
    of, spy, count = task(condition_dropout=share), Spy(), 4000
    loss_of(of, {"model": spy}, rows(np.arange(count), source(count)), rng(count))
    found = spy.asked[0]["drop"].float().mean().item()
    # Four deviations of a share of 4,000.
    assert found == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)


def test_a_dropped_caption_is_the_empty_one() -> None:
    of, spy = task("text", condition_dropout=0.5), Spy()
    batch = rows(np.arange(11))
    loss_of(of, {"model": spy}, batch, rng(11))
    dropped = rng(11).uniform("drop") < 0.5
    assert 0 < dropped.sum() < 11
    (asked,) = spy.asked
    assert (asked["input_ids"][dropped] == 0).all()
    assert asked["mask"][dropped].tolist() == [[True] + [False] * (WORDS - 1)] * int(dropped.sum())
    assert torch.equal(asked["input_ids"][~dropped], batch["input_ids"][~dropped].long())
    assert torch.equal(asked["mask"][~dropped], batch["attention_mask"][~dropped] > 0)


def test_rows_without_weight_count_nowhere() -> None:
    of, batch = task(), rows(np.arange(6))
    models = awake(of)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    broken = {**batch, "image": torch.where(weight.view(-1, 1, 1, 1) > 0, batch["image"], 1e6), "weight": weight}
    kept = torch.tensor([0, 2, 3, 5])
    alone = loss_of(of, models, rows(kept.numpy()), Noise(0, 0, kept, torch))
    assert loss_of(of, models, broken, rng(6)) == pytest.approx(alone, rel=1e-6)
    assert of.counts({name: value.numpy() for name, value in broken.items()}) == {"loss": 4.0}
    assert of.counts({name: value.numpy() for name, value in batch.items()}) == {"loss": 6.0}


@pytest.mark.parametrize("objective", ["noise", "v"])
def test_min_snr_weighs_each_sample(objective: Any) -> None:
    plain = task(path=NoisePath(objective=objective), condition_dropout=0.0)
    capped = task(path=NoisePath(objective=objective, min_snr=5.0), condition_dropout=0.0)
    models, weights = awake(plain), []
    for i in range(40):
        draw = Noise(0, 0, torch.tensor([i]), torch)
        one = rows([i % 11])
        weights.append(loss_of(capped, models, one, draw) / loss_of(plain, models, one, draw))
        alpha, sigma = plain.path.levels(plain.path.draw_times(draw))
        snr = (alpha**2 / sigma**2).item()
        assert weights[-1] == pytest.approx(min(snr, 5) / (snr if objective == "noise" else snr + 1), rel=1e-4)
    assert min(weights) < 0.5 < max(weights)


@pytest.mark.parametrize("frames", [False, True], ids=["picture", "clip"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_the_gradient_reaches_every_parameter(kind: str, frames: bool) -> None:
    """From the third step on: what begins at nothing lets nothing through, first to the blocks and then into them."""
    of = task(kind, frames=frames, condition_dropout=0.5)
    one = engine(of, optimizer={"name": "sgd"}, rate=0.5)
    data = source(frames=frames)
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    loader = Loader(data, 8, seed=0)
    for step in range(3):
        one.train_step(step, loader.batch(step))
    still = [name for name, p in one.model.named_parameters() if torch.equal(p, before[name])]
    # A key's bias adds the same to all that a query sees, which a softmax does not notice.
    assert [name for name in still if not name.endswith(("to_k.bias", "k_proj.bias"))] == []


@pytest.mark.parametrize(
    "path", [NoisePath(), NoisePath(objective="noise"), NoisePath(objective="v")], ids=lambda p: p.objective
)
def test_eight_samples_are_learnt(path: NoisePath) -> None:
    one = engine(task(path=path), rate=5e-3)
    batch = source(8).rows(np.arange(8), np.zeros(8, np.int64))
    losses = [one.fetch(one.train_step(step, batch))["loss"] for step in range(150)]
    assert np.mean(losses[-30:]) < 0.7 * np.mean(losses[:10])


# Samples


def drawn(of: Generation, models: Any, numbers: Any, **options: Any) -> Tensor:
    numbers = np.asarray(numbers)
    with torch.no_grad():
        return of.draw(models, rows(numbers), Noise(3, 0, torch.from_numpy(numbers), torch), steps=4, **options)


@pytest.mark.parametrize("method", ["euler", "heun", "dpm"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_sample_does_not_depend_on_its_batch(kind: str, method: Any) -> None:
    of = task(kind)
    models = awake(of)
    guidance = 1.0 if kind == "none" else 2.0
    together = drawn(of, models, range(8), method=method, guidance=guidance)
    assert together.shape == (8, 4, 4, 1)
    for i in range(8):
        alone = drawn(of, models, [i], method=method, guidance=guidance)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["class", "vector", "text"])
def test_guidance(kind: str) -> None:
    """1 is exactly the model as it is, 0 exactly the one that is asked for nothing; beyond lies a straight line."""
    of = task(kind)
    models = awake(of)
    draw, none = Noise(3, 0, torch.arange(3), torch), torch.ones(3, dtype=torch.bool)

    def found(numbers: list[int], guidance: float) -> Tensor:
        with torch.no_grad():
            return of.draw(models, rows(numbers), draw, steps=3, guidance=guidance)

    def by_hand(guidance: float) -> Tensor:
        told, plain = (of._condition(models, rows([0, 1, 2]), drop=drop) for drop in (~none, none))

        def predict(x: Tensor, time: Tensor) -> Tensor:
            a, b = models["model"](x, time, **told), models["model"](x, time, **plain)
            return a if guidance == 1 else b if guidance == 0 else b + guidance * (a - b)

        with torch.no_grad():
            return sample(predict, draw.normal("start", (4, 4, 1)), of.path, steps=3)

    for guidance in (0.0, 1.0, 2.5):
        assert torch.equal(found([0, 1, 2], guidance), by_hand(guidance))
    assert not torch.allclose(found([0, 1, 2], 1.0), found([0, 1, 2], 0.0), atol=1e-3)
    assert torch.equal(found([1, 2, 0], 0.0), found([0, 1, 2], 0.0)), "whatever is asked for"


def test_guidance_one_asks_once() -> None:
    of, spy = task(), Spy()
    drawn(of, {"model": spy}, range(3), method="euler")
    assert len(spy.asked) == 4
    assert not any(one["drop"].any() for one in spy.asked)


def test_a_trained_model_draws_the_class_it_is_asked_for() -> None:
    """The classes are squares around -1, 0 and 1; a quarter of the spread of the data around them is left."""
    one = engine(task(), rate=5e-3, ema=0.98)
    loader = Loader(source(96), 32, seed=0)
    for step in range(250):
        one.train_step(step, loader.batch(step))
    wanted = np.arange(60) % 3
    batch = {"label": torch.from_numpy(wanted)}
    with one.sampling() as models:
        for method in ("euler", "heun", "dpm"):
            made = one.task.draw(models, batch, rng(60), steps=8, method=method)
            means = [made[wanted == label].mean().item() for label in range(3)]
            assert means == pytest.approx([-1, 0, 1], abs=0.2), method
