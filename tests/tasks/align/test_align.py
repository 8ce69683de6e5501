"""The alignment task: its loss and metrics against their definitions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.models.build import build_models
from bottega.tasks.align.config import AlignModel, build_clip_shape
from bottega.tasks.align.task import Alignment

MODEL = AlignModel(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    patch_size=4,
    text_hidden_size=16,
    text_num_layers=1,
    max_tokens=6,
    projection_size=8,
)
TASK = Alignment(shape=build_clip_shape(MODEL, image_size=8, vocab_size=20, bos=18, eos=19, padding=19), negatives=3)
RNG = Noise(0, 0, torch.arange(4), torch)


class PairOutput(NamedTuple):
    scores: torch.Tensor
    images: torch.Tensor
    texts: torch.Tensor


def fixed_model(scores: list[list[float]]) -> Any:
    """Return a model that gives these scores (images, texts) to any batch."""
    tensor = torch.tensor(scores)
    return lambda *args: PairOutput(tensor, torch.zeros(len(tensor), 2), torch.zeros(len(tensor), 2))


def build_batch(counts: list[list[bool]], weight: list[float] | None = None) -> dict[str, Any]:
    size = len(counts)
    batch = {"image": torch.zeros(size, 8, 8, 3), "texts": torch.zeros(size, 4, 6, dtype=torch.int32)}
    batch |= {"caption": torch.zeros(size, 4, dtype=torch.int64), "counts": torch.tensor(counts)}
    return batch if weight is None else {**batch, "weight": torch.tensor(weight)}


rows = st.lists(
    st.tuples(
        st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=5,
)


@given(rows)
def test_the_loss_is_binary_cross_entropy_over_the_counted_pairs(examples: list[Any]) -> None:
    batch = build_batch([[True, *counted] for _, counted, _ in examples], [weight for *_, weight in examples])
    output = TASK.loss({"model": fixed_model([s for s, _, _ in examples])}, batch, RNG)
    expected = correct = 0.0
    for scores, counted, weight in examples:
        probabilities = [1 / (1 + math.exp(-s)) for s in scores]
        others = [-math.log1p(-p) for p, counts in zip(probabilities[1:], counted, strict=True) if counts]
        expected += weight * (-math.log(probabilities[0]) + sum(others)) / 4
        rivals = [s for s, counts in zip(scores[1:], counted, strict=True) if counts]
        correct += weight * all(scores[0] > rival for rival in rivals)
    assert output.terms["loss"][0].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [part.item() for part in output.metrics["accuracy"]] == [correct, sum(weight for *_, weight in examples)]
    host = {name: value.numpy() for name, value in batch.items()}
    assert TASK.counts(host) == {"loss": sum(weight for *_, weight in examples)}


def real_batch() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    captions = np.full((5, 6), 19)
    captions[:, 0] = 18
    captions[:, 1:4] = rng.integers(0, 18, (5, 3))
    indices = rng.integers(0, 5, (4, 4))
    counts = indices != indices[:, :1]
    counts[:, 0] = True
    return {
        "image": torch.from_numpy(rng.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)),
        "texts": torch.from_numpy(captions[indices].astype(np.int32)),
        "caption": torch.from_numpy(indices),
        "counts": torch.from_numpy(counts),
    }


def compute_gradients(model: Any, batches: list[Batch]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        TASK.loss({"model": model}, batch, RNG).terms["loss"][0].backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("cut", [1, 3])
def test_gradients_are_the_same_under_any_micro_batch_split(cut: int) -> None:
    model, batch = build_models(TASK, 0)["model"].eval(), real_batch()
    parts = [{n: v[:cut] for n, v in batch.items()}, {n: v[cut:] for n, v in batch.items()}]
    unsplit, split = compute_gradients(model, [batch]), compute_gradients(model, parts)
    for name, expected in unsplit.items():
        torch.testing.assert_close(split[name], expected, atol=1e-5, rtol=1e-4, msg=name)
    assert all(gradient.abs().max() > 0 for name, gradient in unsplit.items() if not name.endswith("k_proj.bias"))


def test_a_few_steps_fit_the_captions() -> None:
    model, batch = build_models(TASK, 0)["model"].train(), real_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = TASK.loss({"model": model}, batch, RNG).terms["loss"][0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_recall_is_over_all_distinct_captions_of_the_data() -> None:
    text_embeddings = np.eye(3, dtype=np.float32)
    captions = np.array([7, 8, 9, 7])
    image_embeddings = np.array([[1, 0, 0], [0, 0.4, 0.6], [0, 0, 1], [0.9, 0.1, 0]], np.float32)
    metrics = TASK.score(
        {"image_embedding": image_embeddings, "text_embedding": text_embeddings[captions - 7], "caption": captions}
    )
    assert metrics == {"caption_recall": 0.75}
