"""The classification task: sums over micro-batches, padding, reference values of the loss, and learning.

Texts, multi-label targets and other losses are tested in test_classification.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.models.convnet.config import ConvNetShape
from bottega.tasks.classify.task import Classification

SHAPE = ConvNetShape(grid=(8, 8), channels=1, num_labels=4, hidden_size=8, dropout=0.0)
TASK = Classification(key="image", shape=SHAPE)
RNG = Noise(0, 0, np.arange(4))


def host_batch(rows: int = 4, **more: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((rows, 8, 8, 1)).astype(np.float32)
    return {"image": images, "label": (np.arange(rows) % 4).astype(np.int32), **more}


def to_tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def loss(models: dict[str, Any], batch: dict[str, np.ndarray], task: Classification = TASK) -> Any:
    return task.loss(models, to_tensors(batch), RNG)


def test_sums_do_not_depend_on_the_micro_batches() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    parts = [{name: array[i : i + 1] for name, array in batch.items()} for i in range(4)]
    assert sum(TASK.counts(part)["loss"] for part in parts) == TASK.counts(batch)["loss"] == 4
    total = loss(models, batch)
    split = [loss(models, part) for part in parts]
    assert sum(s.terms["loss"][0].item() for s in split) == pytest.approx(total.terms["loss"][0].item(), rel=1e-6)
    assert sum(s.metrics["accuracy"][0].item() for s in split) == total.metrics["accuracy"][0].item()


def test_padding_rows_do_not_count_even_if_they_are_nan() -> None:
    models, batch = build_models(TASK, 0), host_batch(2)
    single = {name: array[:1] for name, array in batch.items()}
    padded = {**batch, "weight": np.array([1.0, 0.0], np.float32)}
    padded["image"] = np.concatenate([batch["image"][:1], np.full_like(batch["image"][1:], np.nan)])
    assert TASK.counts(padded) == TASK.counts(single) == {"loss": 1.0}
    output, expected = loss(models, padded), loss(models, single)
    assert output.terms["loss"][0].item() == pytest.approx(expected.terms["loss"][0].item(), rel=1e-6)
    assert output.metrics["accuracy"][1].item() == 1


def test_a_zero_head_has_the_loss_of_uniform_predictions() -> None:
    models = build_models(TASK, 0)
    torch.nn.init.zeros_(models["model"].head.weight)
    assert loss(models, host_batch()).terms["loss"][0].item() == pytest.approx(4 * math.log(4), rel=1e-6)


def test_accuracy_counts_the_largest_logit() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    logits = models["model"](to_tensors(batch)["image"])
    batch["label"] = logits.argmax(dim=1).numpy().astype(np.int32)
    correct, count = loss(models, batch).metrics["accuracy"]
    assert (correct.item(), count.item()) == (4, 4)
    batch["label"] = logits.argmin(dim=1).numpy().astype(np.int32)
    assert loss(models, batch).metrics["accuracy"][0].item() == 0
    assert not correct.requires_grad


def test_label_smoothing_matches_its_formula() -> None:
    """Szegedy et al. (2016): (1 - e) H(onehot, p) + e H(uniform, p)."""
    models, batch = build_models(TASK, 0), host_batch()
    smooth = loss(models, batch, Classification(key="image", shape=SHAPE, label_smoothing=0.2)).terms["loss"][0]
    uniform = -models["model"](to_tensors(batch)["image"]).log_softmax(1).mean(1).sum()
    assert smooth.item() == pytest.approx((0.8 * loss(models, batch).terms["loss"][0] + 0.2 * uniform).item(), rel=1e-5)


def test_under_autocast_the_loss_is_float32() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    plain = loss(models, batch).terms["loss"][0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = loss(models, batch).terms["loss"][0]
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(plain.item(), rel=0.05)
    total.backward()
    assert all(torch.isfinite(p.grad).all() for p in models["model"].parameters() if p.grad is not None)


def test_build_is_a_function_of_the_seed_and_can_start_from_a_folder(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    first, again, other = (build_models(TASK, seed)["model"].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    save_file(other, tmp_path / "model.safetensors")
    started = build_models(Classification(key="image", shape=SHAPE, pretrained=str(tmp_path)), 0)["model"].state_dict()
    assert all(torch.equal(started[name], other[name]) for name in other)


@pytest.mark.parametrize(("key", "grid"), [("image", (8, 8)), ("mel", (16, 8)), ("video", (4, 8, 8))])
def test_classifiers_of_each_medium_learn_the_bright_region(key: Any, grid: tuple[int, ...]) -> None:
    shape = ConvNetShape(grid=grid, channels=1, num_labels=4, hidden_size=8)
    task = Classification(key=key, shape=shape)
    models, rng = build_models(task, 0), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for _ in range(40):
        x = rng.standard_normal((16, *grid, 1)).astype(np.float32)
        label = rng.integers(0, 4, 16).astype(np.int32)
        for row, quarter in enumerate(label):
            x[row, ..., 2 * quarter : 2 * quarter + 2, :] += 2
        output = task.loss(models, to_tensors({key: x, "label": label}), RNG)
        optimizer.zero_grad()
        (output.terms["loss"][0] / 16).backward()
        optimizer.step()
    assert output.metrics["accuracy"][0].item() >= 15
