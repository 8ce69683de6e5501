"""What alignment minimises and what it reports, against its definition."""

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
from bottega.tasks.align.config import AlignModel, clip_shape
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
TASK = Alignment(shape=clip_shape(MODEL, image_size=8, tokens=20, bos=18, eos=19, padding=19), negatives=3)
RNG = Noise(0, 0, torch.arange(4), torch)


class Said(NamedTuple):
    scores: torch.Tensor
    images: torch.Tensor
    texts: torch.Tensor


def scored(scores: list[list[float]]) -> Any:
    """A model that says this of any pairs."""
    found = torch.tensor(scores)
    return lambda *asked: Said(found, torch.zeros(len(found), 2), torch.zeros(len(found), 2))


def batch_of(counts: list[list[bool]], weight: list[float] | None = None) -> dict[str, Any]:
    size = len(counts)
    found = {"image": torch.zeros(size, 8, 8, 3), "texts": torch.zeros(size, 4, 6, dtype=torch.int32)}
    found |= {"caption": torch.zeros(size, 4, dtype=torch.int64), "counts": torch.tensor(counts)}
    return found if weight is None else {**found, "weight": torch.tensor(weight)}


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
def test_the_loss_asks_of_each_pair_that_counts_whether_it_belongs(drawn: list[Any]) -> None:
    batch = batch_of([[True, *kept] for _, kept, _ in drawn], [weight for *_, weight in drawn])
    found = TASK.loss({"model": scored([s for s, _, _ in drawn])}, batch, RNG)
    wanted = right = 0.0
    for scores, kept, weight in drawn:
        chances = [1 / (1 + math.exp(-s)) for s in scores]
        others = [-math.log1p(-p) for p, counts in zip(chances[1:], kept, strict=True) if counts]
        wanted += weight * (-math.log(chances[0]) + sum(others)) / 4
        rivals = [s for s, counts in zip(scores[1:], kept, strict=True) if counts]
        right += weight * all(scores[0] > rival for rival in rivals)
    assert found.terms["loss"][0].item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert [part.item() for part in found.metrics["accuracy"]] == [right, sum(weight for *_, weight in drawn)]
    host = {name: value.numpy() for name, value in batch.items()}
    assert TASK.counts(host) == {"loss": sum(weight for *_, weight in drawn)}


def real_batch() -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(0)
    captions = np.full((5, 6), 19)
    captions[:, 0] = 18
    captions[:, 1:4] = draw.integers(0, 18, (5, 3))
    number = draw.integers(0, 5, (4, 4))
    counts = number != number[:, :1]
    counts[:, 0] = True
    return {
        "image": torch.from_numpy(draw.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)),
        "texts": torch.from_numpy(captions[number].astype(np.int32)),
        "caption": torch.from_numpy(number),
        "counts": torch.from_numpy(counts),
    }


def gradients(model: Any, batches: list[Batch]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        TASK.loss({"model": model}, batch, RNG).terms["loss"][0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cut", [1, 3])
def test_gradients_are_the_same_under_any_split(cut: int) -> None:
    model, batch = build_models(TASK, 0)["model"].eval(), real_batch()
    parts = [{n: v[:cut] for n, v in batch.items()}, {n: v[cut:] for n, v in batch.items()}]
    whole, split = gradients(model, [batch]), gradients(model, parts)
    for name, wanted in whole.items():
        torch.testing.assert_close(split[name], wanted, atol=1e-5, rtol=1e-4, msg=name)
    assert all(found.abs().max() > 0 for name, found in whole.items() if not name.endswith("k_proj.bias"))


def test_a_few_steps_learn_which_caption_is_whose() -> None:
    model, batch = build_models(TASK, 0)["model"].train(), real_batch()
    batch["counts"] = batch["counts"].clone()
    learner = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = TASK.loss({"model": model}, batch, RNG).terms["loss"][0]
        learner.zero_grad()
        loss.backward()
        learner.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_recall_is_over_all_distinct_captions_of_the_data() -> None:
    words = np.eye(3, dtype=np.float32)
    number = np.array([7, 8, 9, 7])
    seen = np.array([[1, 0, 0], [0, 0.4, 0.6], [0, 0, 1], [0.9, 0.1, 0]], np.float32)
    found = TASK.score({"picture": seen, "words": words[number - 7], "caption": number})
    assert found == {"caption_recall": 0.75}
