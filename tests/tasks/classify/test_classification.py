"""Text classifiers, multi-label targets and losses: sums over micro-batches, reference values from torch, dropout and metrics."""

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
    "word dropout": {"word_dropout": 0.3, "unknown": UNKNOWN},
    "multi_label": {"multi_label": True},
    "multi_label, weights, focal": {"multi_label": True, "class_weights": WEIGHTS, "objective": "focal"},
    "encoder": {"shape": ENCODER, "class_weights": WEIGHTS},
}


def host_batch(rows: int = 6, *, length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = np.arange(length) < rng.integers(1, length + 1, rows)[:, None]
    return {
        "input_ids": np.where(mask, rng.integers(2, 40, (rows, length)), 0).astype(np.int32),
        "attention_mask": mask.astype(np.int32),
        "label": rng.integers(0, 3, rows).astype(np.int32),
        "labels": (rng.random((rows, 3)) < 0.5).astype(np.float32),
    }


def to_tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def slice_rows(batch: dict[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    return {name: array[start:stop] for name, array in batch.items()}


def noise(start: int, stop: int, *, step: int = 3) -> Noise:
    return Noise(0, step, torch.arange(start, stop), torch)


def gradient(
    classifier: Classification, models: dict[str, Any], batch: dict[str, np.ndarray], *cuts: int
) -> torch.Tensor:
    """Return the gradient of the batch mean, accumulated over the parts between the cuts."""
    ends = (0, *cuts, len(batch["label"]))
    parts = [(slice_rows(batch, a, b), noise(a, b)) for a, b in itertools.pairwise(ends)]
    count = sum(classifier.counts(part)["loss"] for part, _ in parts)
    models["model"].zero_grad()
    for part, rng in parts:
        (classifier.loss(models, to_tensors(part), rng).terms["loss"][0] / count).backward()
    return torch.cat([p.grad.flatten() for p in models["model"].parameters()])


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_exact_under_any_micro_batch_split(name: str) -> None:
    classifier, batch = task(**LOSSES[name]), host_batch()
    models = build_models(classifier, 0)
    expected = gradient(classifier, models, batch)
    assert expected.abs().max() > 1e-3
    for cuts in ((1, 2, 3, 4, 5), (1,), (4,), (2, 3)):
        torch.testing.assert_close(gradient(classifier, models, batch, *cuts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_does_not_count(name: str) -> None:
    classifier, batch = task(**LOSSES[name]), host_batch()
    models = build_models(classifier, 0)
    models["model"].eval()
    # Two more rows of weight 0, and columns beyond every text.
    wide = {**batch, "input_ids": np.pad(batch["input_ids"], ((0, 0), (0, 5)), constant_values=7)}
    wide["attention_mask"] = np.pad(batch["attention_mask"], ((0, 0), (0, 5)))
    filled = {key: np.concatenate([array, array[:2]]) for key, array in wide.items()}
    filled["weight"] = np.array([1.0] * 6 + [0.0] * 2, np.float32)
    assert classifier.counts(filled) == pytest.approx(classifier.counts(batch))
    output, expected = (classifier.loss(models, to_tensors(b), noise(0, len(b["label"]))) for b in (filled, batch))
    assert output.terms["loss"][0].item() == pytest.approx(expected.terms["loss"][0].item(), rel=1e-5)
    for key, (value, count) in expected.metrics.items():
        assert [x.item() for x in output.metrics[key]] == pytest.approx([value.item(), count.item()])


def mean_loss(classifier: Classification, models: dict[str, Any], batch: dict[str, np.ndarray]) -> float:
    total = classifier.loss(models, to_tensors(batch), noise(0, len(batch["label"]))).terms["loss"][0].item()
    return total / classifier.counts(batch)["loss"]


def compute_logits(models: dict[str, Any], batch: dict[str, np.ndarray]) -> torch.Tensor:
    return task().predict(models, to_tensors(batch))


def test_weighted_means_match_torch() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    labels, binary_labels = torch.from_numpy(batch["label"]).long(), torch.from_numpy(batch["labels"])
    logits, weights = compute_logits(models, batch), torch.tensor(WEIGHTS)
    expected = F.cross_entropy(logits, labels, weight=weights).item()
    assert mean_loss(task(class_weights=WEIGHTS), models, batch) == pytest.approx(expected, rel=1e-6)
    expected = F.binary_cross_entropy_with_logits(logits, binary_labels).item()
    assert mean_loss(task(multi_label=True), models, batch) == pytest.approx(expected, rel=1e-6)
    elements = F.binary_cross_entropy_with_logits(logits, binary_labels, weight=weights.expand(6, 3), reduction="sum")
    loss = mean_loss(task(multi_label=True, class_weights=WEIGHTS), models, batch)
    assert loss == pytest.approx(elements.item() / (6 * sum(WEIGHTS)), rel=1e-6)


def test_equal_weights_change_nothing() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    assert mean_loss(task(class_weights=(4.0, 4.0, 4.0)), models, batch) == pytest.approx(
        mean_loss(task(), models, batch)
    )


def test_focal_loss_matches_its_formula_and_gamma_zero_is_cross_entropy() -> None:
    """Lin et al. (2017): -(1 - p)^gamma log p."""
    batch, models = host_batch(), build_models(task(), 0)
    probability = compute_logits(models, batch).softmax(1)[torch.arange(6), torch.from_numpy(batch["label"]).long()]
    expected = (-((1 - probability) ** 1.5) * probability.log()).mean().item()
    assert mean_loss(task(objective="focal", gamma=1.5), models, batch) == pytest.approx(expected, rel=1e-5)
    positive = compute_logits(models, batch).sigmoid()
    probability = torch.where(torch.from_numpy(batch["labels"]) > 0, positive, 1 - positive)
    expected = (-((1 - probability) ** 1.5) * probability.log()).mean().item()
    assert mean_loss(task(objective="focal", gamma=1.5, multi_label=True), models, batch) == pytest.approx(
        expected, rel=1e-5
    )
    for multi_label in (False, True):
        plain = mean_loss(task(multi_label=multi_label), models, batch)
        assert mean_loss(task(objective="focal", gamma=0.0, multi_label=multi_label), models, batch) == pytest.approx(
            plain
        )


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_certain_prediction_has_a_finite_gradient(multi_label: bool, gamma: float) -> None:
    classifier, batch = task(objective="focal", gamma=gamma, multi_label=multi_label), host_batch()
    models = build_models(classifier, 0)
    batch["label"][:], batch["labels"][:] = 0, [1, 0, 0]
    with torch.no_grad():
        models["model"].head.bias.copy_(torch.tensor([200.0, -200.0, -200.0]))
    assert torch.isfinite(gradient(classifier, models, batch)).all()


def test_smoothing_of_multi_label_targets_moves_each_towards_one_half() -> None:
    batch, models = host_batch(), build_models(task(), 0)
    target = torch.from_numpy(batch["labels"]) * 0.8 + 0.1
    expected = F.binary_cross_entropy_with_logits(compute_logits(models, batch), target).item()
    assert mean_loss(task(multi_label=True, label_smoothing=0.2), models, batch) == pytest.approx(expected, rel=1e-6)


class Recorder(torch.nn.Module):
    """A model that records its token ids."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.input_ids = ids
        return torch.zeros(len(ids), 3)


def record_input_ids(model: Recorder, batch: dict[str, np.ndarray], rng: Noise, rate: float = 0.3) -> torch.Tensor:
    task(word_dropout=rate, unknown=UNKNOWN).loss({"model": model}, to_tensors(batch), rng)
    return model.input_ids


def test_word_dropout_applies_in_training_only_and_not_to_padding() -> None:
    model, batch = Recorder(), host_batch(400, length=20)
    ids, mask = torch.from_numpy(batch["input_ids"]).long(), torch.from_numpy(batch["attention_mask"]) > 0
    recorded = record_input_ids(model.train(), batch, noise(0, 400))
    dropped = recorded != ids
    assert (recorded[dropped] == UNKNOWN).all()
    assert not (dropped & ~mask).any()
    # About 4,200 words: three standard errors of the fraction are 0.02.
    assert (dropped.sum() / mask.sum()).item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(record_input_ids(model.eval(), batch, noise(0, 400)), ids)


def test_word_dropout_does_not_depend_on_micro_batches_or_padding() -> None:
    model, batch = Recorder(), host_batch(6, length=20)
    expected = record_input_ids(model, batch, noise(0, 6))
    assert torch.equal(
        torch.cat([record_input_ids(model, slice_rows(batch, a, a + 2), noise(a, a + 2)) for a in (0, 2, 4)]), expected
    )
    wide = {key: np.pad(batch[key], ((0, 0), (0, 100))) for key in ("input_ids", "attention_mask")}
    assert torch.equal(record_input_ids(model, {**batch, **wide}, noise(0, 6))[:, :20], expected)
    assert not torch.equal(record_input_ids(model, batch, noise(0, 6, step=4)), expected)


def test_multi_label_metrics_match_their_definitions() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1.0, -1, -1], [1, 1, -1], [-1, -1, 1]])

    batch = host_batch(3)
    batch["labels"] = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0]], np.float32)
    output = task(multi_label=True).loss({"model": Fixed()}, to_tensors(batch), noise(0, 3))
    assert [x.item() for x in output.metrics["exact_match"]] == [1, 3]
    assert [x.item() for x in output.metrics["label_accuracy"]] == pytest.approx([1 + 2 / 3, 3])
    assert "accuracy" not in output.metrics


@pytest.mark.parametrize("multi_label", [False, True])
def test_score_returns_the_classification_metrics(multi_label: bool) -> None:
    classifier, batch = task(multi_label=multi_label), host_batch(60)
    models = build_models(classifier, 0)
    rows = {
        name: array.numpy() for name, array in classifier.loss(models, to_tensors(batch), noise(0, 60)).rows.items()
    }
    key = "labels" if multi_label else "label"
    assert sorted(rows) == [key, "probability"]
    np.testing.assert_array_equal(rows[key], batch[key])
    if not multi_label:
        np.testing.assert_allclose(rows["probability"].sum(1), 1, rtol=1e-6)
    assert sorted(classifier.score(rows)) == ["auroc", "ece", "macro_f1", "weighted_f1"]


def test_image_classifiers_support_multi_label_and_weights() -> None:
    batch = {**host_batch(), "image": np.random.default_rng(0).standard_normal((6, 8, 8, 1)).astype(np.float32)}
    classifier = task(key="image", shape=IMAGES, multi_label=True, class_weights=WEIGHTS)
    models = build_models(classifier, 0)
    torch.testing.assert_close(
        gradient(classifier, models, batch), gradient(classifier, models, batch, 1, 4), rtol=1e-5, atol=1e-6
    )


def test_conflicting_options_are_refused() -> None:
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


def test_a_text_model_loads_pretrained_weights(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    for shape in (KIM, ENCODER):
        other = build_models(task(shape=shape), 1)["model"].state_dict()
        save_file(other, tmp_path / "model.safetensors")
        started = build_models(task(shape=shape, pretrained=str(tmp_path)), 0)["model"].state_dict()
        assert all(torch.equal(started[name], other[name]) for name in other)


@pytest.mark.parametrize("shape", [KIM, ENCODER], ids=["cnn", "transformer"])
def test_text_models_learn_a_keyword(shape: Any) -> None:
    classifier, rng = task(shape=shape), np.random.default_rng(0)
    models = build_models(classifier, 0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for step in range(60):
        batch = host_batch(16)
        batch["input_ids"] = rng.integers(5, 40, (16, 9)).astype(np.int32)
        batch["label"] = rng.integers(0, 3, 16).astype(np.int32)
        batch["input_ids"][np.arange(16), rng.integers(0, 9, 16)] = 2 + batch["label"]
        batch["attention_mask"][:] = 1
        output = classifier.loss(models, to_tensors(batch), noise(0, 16, step=step))
        optimizer.zero_grad()
        (output.terms["loss"][0] / 16).backward()
        optimizer.step()
    assert output.metrics["accuracy"][0].item() >= 15
