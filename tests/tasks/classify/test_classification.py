"""Texts, several labels and the losses of classifiers: exact under any split, equal to known numbers, seen by a score."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.models.convnet.config import ConvNetShape
from bottega.models.text_classifier.config import EncoderShape, KimShape
from bottega.tasks.classify.task import Classification

KIM = KimShape(vocab_size=40, num_labels=3, embed_size=8, num_filters=6, filter_sizes=(2, 3), dropout=0.0)
ENCODER = EncoderShape(vocab_size=40, num_labels=3, hidden_size=16, num_layers=2, num_heads=2, dropout=0.0)
IMAGES = ConvNetShape(grid=(8, 8), channels=1, num_labels=3, hidden_size=8, dropout=0.0)
WEIGHTS = (0.5, 3.0, 1.25)
UNKNOWN = 1


def task(**changes: Any) -> Classification:
    return Classification(**{"key": "text", "shape": KIM, **changes})


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "focal": {"objective": "focal", "gamma": 2.0},
    "weights": {"class_weights": WEIGHTS},
    "weights, focal, smooth": {"class_weights": WEIGHTS, "objective": "focal", "label_smoothing": 0.1},
    "words": {"word_dropout": 0.3, "unknown": UNKNOWN},
    "several": {"multi_label": True},
    "several, weights, focal": {"multi_label": True, "class_weights": WEIGHTS, "objective": "focal"},
    "encoder": {"shape": ENCODER, "class_weights": WEIGHTS},
}


def host_batch(rows: int = 6, *, length: int = 9) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    mask = np.arange(length) < draw.integers(1, length + 1, rows)[:, None]
    return {
        "input_ids": np.where(mask, draw.integers(2, 40, (rows, length)), 0).astype(np.int32),
        "attention_mask": mask.astype(np.int32),
        "label": draw.integers(0, 3, rows).astype(np.int32),
        "labels": (draw.random((rows, 3)) < 0.5).astype(np.float32),
    }


def on_device(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def cut(batch: dict[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    return {name: array[start:stop] for name, array in batch.items()}


def noise(start: int, stop: int, *, step: int = 3) -> Noise:
    return Noise(0, step, torch.arange(start, stop), torch)


def gradient(one: Classification, models: dict[str, Any], batch: dict[str, np.ndarray], *cuts: int) -> torch.Tensor:
    """Of the mean over the whole batch, from the parts between the cuts, as an engine has it."""
    ends = (0, *cuts, len(batch["label"]))
    parts = [(cut(batch, a, b), noise(a, b)) for a, b in itertools.pairwise(ends)]
    count = sum(one.counts(part)["loss"] for part, _ in parts)
    models["model"].zero_grad()
    for part, rng in parts:
        (one.loss(models, on_device(part), rng).terms["loss"][0] / count).backward()
    return torch.cat([p.grad.flatten() for p in models["model"].parameters()])


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_exact_under_any_split(name: str) -> None:
    one, batch = task(**LOSSES[name]), host_batch()
    models = build_models(one, 0)
    whole = gradient(one, models, batch)
    assert whole.abs().max() > 1e-3
    for cuts in ((1, 2, 3, 4, 5), (1,), (4,), (2, 3)):
        torch.testing.assert_close(gradient(one, models, batch, *cuts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_fills_up_a_batch_counts_nowhere(name: str) -> None:
    one, batch = task(**LOSSES[name]), host_batch()
    models = build_models(one, 0)
    models["model"].eval()
    # Two rows more, of weight 0, and columns that no text reaches.
    wide = {**batch, "input_ids": np.pad(batch["input_ids"], ((0, 0), (0, 5)), constant_values=7)}
    wide["attention_mask"] = np.pad(batch["attention_mask"], ((0, 0), (0, 5)))
    filled = {key: np.concatenate([array, array[:2]]) for key, array in wide.items()}
    filled["weight"] = np.array([1.0] * 6 + [0.0] * 2, np.float32)
    assert one.counts(filled) == pytest.approx(one.counts(batch))
    found, wanted = (one.loss(models, on_device(b), noise(0, len(b["label"]))) for b in (filled, batch))
    assert found.terms["loss"][0].item() == pytest.approx(wanted.terms["loss"][0].item(), rel=1e-5)
    for key, (value, count) in wanted.metrics.items():
        assert [x.item() for x in found.metrics[key]] == pytest.approx([value.item(), count.item()])


def mean(one: Classification, models: dict[str, Any], batch: dict[str, np.ndarray]) -> float:
    total = one.loss(models, on_device(batch), noise(0, len(batch["label"]))).terms["loss"][0].item()
    return total / one.counts(batch)["loss"]


def logits_of(models: dict[str, Any], batch: dict[str, np.ndarray]) -> torch.Tensor:
    return task().predict(models, on_device(batch))


def test_the_mean_with_weights_is_that_of_torch() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    labels, several = torch.from_numpy(batch["label"]).long(), torch.from_numpy(batch["labels"])
    logits, weights = logits_of(models, batch), torch.tensor(WEIGHTS)
    wanted = F.cross_entropy(logits, labels, weight=weights).item()
    assert mean(task(class_weights=WEIGHTS), models, batch) == pytest.approx(wanted, rel=1e-6)
    wanted = F.binary_cross_entropy_with_logits(logits, several).item()
    assert mean(task(multi_label=True), models, batch) == pytest.approx(wanted, rel=1e-6)
    elements = F.binary_cross_entropy_with_logits(logits, several, weight=weights.expand(6, 3), reduction="sum")
    found = mean(task(multi_label=True, class_weights=WEIGHTS), models, batch)
    assert found == pytest.approx(elements.item() / (6 * sum(WEIGHTS)), rel=1e-6)


def test_equal_weights_change_nothing() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    assert mean(task(class_weights=(4.0, 4.0, 4.0)), models, batch) == pytest.approx(mean(task(), models, batch))


def test_focal_by_its_formula_and_without_a_power_plain() -> None:
    """Lin et al. (2017): -(1 - p)^gamma log p."""
    batch, models = host_batch(), build_models(task(), 0)
    chance = logits_of(models, batch).softmax(1)[torch.arange(6), torch.from_numpy(batch["label"]).long()]
    wanted = (-((1 - chance) ** 1.5) * chance.log()).mean().item()
    assert mean(task(objective="focal", gamma=1.5), models, batch) == pytest.approx(wanted, rel=1e-5)
    yes = logits_of(models, batch).sigmoid()
    chance = torch.where(torch.from_numpy(batch["labels"]) > 0, yes, 1 - yes)
    wanted = (-((1 - chance) ** 1.5) * chance.log()).mean().item()
    assert mean(task(objective="focal", gamma=1.5, multi_label=True), models, batch) == pytest.approx(wanted, rel=1e-5)
    for several in (False, True):
        plain = mean(task(multi_label=several), models, batch)
        assert mean(task(objective="focal", gamma=0.0, multi_label=several), models, batch) == pytest.approx(plain)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_certain_answer_has_a_finite_slope(several: bool, gamma: float) -> None:
    one, batch = task(objective="focal", gamma=gamma, multi_label=several), host_batch()
    models = build_models(one, 0)
    batch["label"][:], batch["labels"][:] = 0, [1, 0, 0]
    with torch.no_grad():
        models["model"].head.bias.copy_(torch.tensor([200.0, -200.0, -200.0]))
    assert torch.isfinite(gradient(one, models, batch)).all()


def test_smoothing_of_several_labels_moves_each_towards_one_half() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    target = torch.from_numpy(batch["labels"]) * 0.8 + 0.1
    wanted = F.binary_cross_entropy_with_logits(logits_of(models, batch), target).item()
    assert mean(task(multi_label=True, label_smoothing=0.2), models, batch) == pytest.approx(wanted, rel=1e-6)


class Recorder(torch.nn.Module):
    """Keeps the words that it is shown."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.seen = ids
        return torch.zeros(len(ids), 3)


def shown(model: Recorder, batch: dict[str, np.ndarray], rng: Noise, share: float = 0.3) -> torch.Tensor:
    task(word_dropout=share, unknown=UNKNOWN).loss({"model": model}, on_device(batch), rng)
    return model.seen


def test_words_are_dropped_while_training_alone_and_never_padding() -> None:
    model, batch = Recorder(), host_batch(400, length=20)
    ids, mask = torch.from_numpy(batch["input_ids"]).long(), torch.from_numpy(batch["attention_mask"]) > 0
    seen = shown(model.train(), batch, noise(0, 400))
    dropped = seen != ids
    assert (seen[dropped] == UNKNOWN).all()
    assert not (dropped & ~mask).any()
    # About 4,200 words: three standard errors of a share are 0.02.
    assert (dropped.sum() / mask.sum()).item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(shown(model.eval(), batch, noise(0, 400)), ids)


def test_which_words_are_dropped_is_free_of_splits_and_of_how_far_a_batch_is_filled_up() -> None:
    model, batch = Recorder(), host_batch(6, length=20)
    whole = shown(model, batch, noise(0, 6))
    assert torch.equal(torch.cat([shown(model, cut(batch, a, a + 2), noise(a, a + 2)) for a in (0, 2, 4)]), whole)
    wide = {key: np.pad(batch[key], ((0, 0), (0, 100))) for key in ("input_ids", "attention_mask")}
    assert torch.equal(shown(model, {**batch, **wide}, noise(0, 6))[:, :20], whole)
    assert not torch.equal(shown(model, batch, noise(0, 6, step=4)), whole)


def test_metrics_of_several_labels_by_hand() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1.0, -1, -1], [1, 1, -1], [-1, -1, 1]])

    batch = host_batch(3)
    batch["labels"] = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0]], np.float32)
    found = task(multi_label=True).loss({"model": Fixed()}, on_device(batch), noise(0, 3))
    assert [x.item() for x in found.metrics["exact_match"]] == [1, 3]
    assert [x.item() for x in found.metrics["label_accuracy"]] == pytest.approx([1 + 2 / 3, 3])
    assert "accuracy" not in found.metrics


@pytest.mark.parametrize("several", [False, True])
def test_rows_are_scored(several: bool) -> None:
    one, batch = task(multi_label=several), host_batch(60)
    models = build_models(one, 0)
    rows = {name: array.numpy() for name, array in one.loss(models, on_device(batch), noise(0, 60)).rows.items()}
    key = "labels" if several else "label"
    assert sorted(rows) == [key, "probability"]
    np.testing.assert_array_equal(rows[key], batch[key])
    if not several:
        np.testing.assert_allclose(rows["probability"].sum(1), 1, rtol=1e-6)
    assert sorted(one.score(rows)) == ["auroc", "ece", "macro_f1", "weighted_f1"]


def test_pictures_may_have_several_labels_and_weights_too() -> None:
    batch = {**host_batch(), "image": np.random.default_rng(0).standard_normal((6, 8, 8, 1)).astype(np.float32)}
    one = task(key="image", shape=IMAGES, multi_label=True, class_weights=WEIGHTS)
    models = build_models(one, 0)
    torch.testing.assert_close(gradient(one, models, batch), gradient(one, models, batch, 1, 4), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UsageError, match="2 weights for 3 classes"):
        task(class_weights=(1.0, 2.0))
    with pytest.raises(UsageError, match="must be 0 or more"):
        task(class_weights=(1.0, -1.0, 1.0))
    with pytest.raises(UsageError, match="an unknown token"):
        task(word_dropout=0.1)
    with pytest.raises(UsageError, match="needs text"):
        task(key="image", shape=IMAGES, word_dropout=0.1, unknown=1)
    with pytest.raises(ValueError, match="does not read image"):
        task(key="image")


def test_a_text_model_starts_from_a_folder(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    for shape in (KIM, ENCODER):
        other = build_models(task(shape=shape), 1)["model"].state_dict()
        save_file(other, tmp_path / "model.safetensors")
        started = build_models(task(shape=shape, pretrained=str(tmp_path)), 0)["model"].state_dict()
        assert all(torch.equal(started[name], other[name]) for name in other)


@pytest.mark.parametrize("shape", [KIM, ENCODER], ids=["cnn", "transformer"])
def test_it_learns_which_word_decides(shape: Any) -> None:
    one, draw = task(shape=shape), np.random.default_rng(0)
    models = build_models(one, 0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for step in range(60):
        batch = host_batch(16)
        batch["input_ids"] = draw.integers(5, 40, (16, 9)).astype(np.int32)
        batch["label"] = draw.integers(0, 3, 16).astype(np.int32)
        batch["input_ids"][np.arange(16), draw.integers(0, 9, 16)] = 2 + batch["label"]
        batch["attention_mask"][:] = 1
        found = one.loss(models, on_device(batch), noise(0, 16, step=step))
        optimizer.zero_grad()
        (found.terms["loss"][0] / 16).backward()
        optimizer.step()
    assert found.metrics["accuracy"][0].item() >= 15
