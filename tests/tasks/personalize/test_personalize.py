"""Personalised generation as a task: what trains, what it is conditioned on, and how pictures are drawn."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import small_personal
from bottega.core.noise import Noise
from bottega.core.types import Models
from bottega.data.loading.loader import iter_eval_batches
from bottega.models.build import build_models
from bottega.tasks import registry
from bottega.tasks.personalize.config import ConditionWeights
from bottega.tasks.personalize.task import Personalize
from bottega.tasks.recipes import load_recipe

COUNT = 6


@cache
def opened(folder: Any) -> tuple[Personalize, Models, dict[str, Tensor]]:
    recipe = load_recipe(["personalize", small_personal.settings(folder)]).recipe
    workload: Any = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    batch = next(iter_eval_batches(workload.data.validation(), COUNT))
    rows = {name: torch.from_numpy(value) for name, value in batch.items() if name != "index"}
    rows |= {
        name: torch.from_numpy(v)
        for name, v in workload.condition_tokenizer.encode_texts("negative", [""] * COUNT).items()
    }
    return workload.task, build_models(workload.task, 0), rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("personal")


@pytest.fixture
def task(folder: Any) -> Personalize:
    return opened(folder)[0]


@pytest.fixture
def models(folder: Any) -> Models:
    """New trained tokens, of which a test may do what it likes; the frozen models are shared."""
    from bottega.models.frozen.soft_prompts import build_soft_prompts

    task, built, _ = opened(folder)
    return {**built, "model": build_soft_prompts(task.shape, 0, token_scale=0.5)}


@pytest.fixture
def batch(folder: Any) -> dict[str, Tensor]:
    return opened(folder)[2]


def noise(count: int = COUNT, first: int = 0) -> Noise:
    return Noise(0, 3, torch.arange(first, first + count), torch)


def loss(task: Personalize, models: Models, batch: dict[str, Tensor], rng: Noise | None = None) -> Tensor:
    return task.loss(models, batch, rng or noise()).terms["loss"][0]


def changed(task: Personalize, **fields: Any) -> Personalize:
    return task.model_copy(update=fields)


def drawn(task: Personalize, models: Models, batch: dict[str, Tensor], **how: Any) -> Tensor:
    with torch.no_grad():
        asked = {"weights": ConditionWeights(), "steps": 2, "method": "euler", **how}
        return task.sample(models, batch, noise(len(batch["prompt"])), **asked)


def test_only_the_soft_prompts_learn(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    loss(task, models, batch).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in models["model"].parameters())
    frozen = [p for name in ("language_model", "image_model") for p in models[name].parameters()]
    assert all(p.grad is None for p in frozen)
    assert sum(p.numel() for p in models["model"].parameters()) == task.shape.num_parameters


def test_the_loss_is_a_sum_over_rows_whatever_the_split(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    task = changed(task, keyword_dropout=0.5)
    whole = loss(task, models, batch)
    parts = [
        loss(task, models, {n: v[at : at + 2] for n, v in batch.items()}, noise(2, first=at))
        for at in range(0, COUNT, 2)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-5, atol=0)
    assert task.counts(batch) == {"loss": COUNT}


def test_a_row_that_fills_up_a_batch_counts_nowhere(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    weight = torch.tensor([1.0] * (COUNT - 1) + [0.0])
    some = loss(task, models, {n: v[:-1] for n, v in batch.items()}, noise(COUNT - 1))
    torch.testing.assert_close(loss(task, models, {**batch, "weight": weight}), some, rtol=1e-5, atol=0)
    assert task.counts({"image": batch["image"], "weight": weight}) == {"loss": COUNT - 1}


def test_the_trained_model_is_only_called(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    """So that it can be wrapped: what joins gradients over ranks sees all parameters used in one call."""
    seen: list[int] = []

    def wrapped(*inputs: Any) -> Tensor:
        seen.append(1)
        return models["model"](*inputs)

    assert loss(task, {**models, "model": wrapped}, batch) == loss(task, models, batch)
    assert seen == [1]


@pytest.mark.parametrize("part", ["soft", "keywords", "target"])
def test_each_part_of_the_condition_has_its_weight(
    task: Personalize, models: Models, batch: dict[str, Tensor], part: str
) -> None:
    with torch.no_grad():
        alone = {name: 1.0 if name == part else 0.0 for name in ("soft", "keywords", "target")}
        once = task.build_condition(models, batch, ConditionWeights(**alone)).tokens
        twice = task.build_condition(models, batch, ConditionWeights(**{**alone, part: 2.0})).tokens
        torch.testing.assert_close(twice, 2 * once)
        every = task.build_condition(models, batch, ConditionWeights()).tokens
        without = task.build_condition(models, batch, ConditionWeights(**{part: 0.0})).tokens
    assert without.shape[1] == every.shape[1] - once.shape[1], "0 leaves it out"
    sizes = {"soft": task.shape.num_image_tokens, "keywords": 16, "target": 16}
    assert once.shape == (COUNT, sizes[part], task.shape.text_size)


def test_soft_tokens_depend_on_the_history(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        own = task.soft_tokens(models, batch)
        others = task.soft_tokens(models, {n: v.roll(1, 0) for n, v in batch.items()})
    torch.testing.assert_close(others.roll(-1, 0), own, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(own[0], own[1], atol=1e-3)


def test_dropped_keywords_are_those_of_an_empty_text(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    other = {**batch, "preference_0": batch["preference_0"].roll(1, 0)}
    kept, dropped = changed(task, keyword_dropout=0.0), changed(task, keyword_dropout=1.0)
    assert loss(kept, models, other) != loss(kept, models, batch)
    assert loss(dropped, models, other) == loss(dropped, models, batch)
    empty = torch.tensor(task.empty[0]).expand_as(batch["preference_0"])
    torch.testing.assert_close(loss(kept, models, {**batch, "preference_0": empty}), loss(dropped, models, batch))


def test_min_snr_weighs_down_what_is_nearly_clean(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    capped = changed(task, path=task.path.model_copy(update={"min_snr": 0.1}))
    assert loss(capped, models, batch) < 0.9 * loss(task, models, batch)


def test_trained_tokens_are_used_where_they_weigh_something(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    from bottega.models.frozen.soft_prompts import build_soft_prompts

    others = {**models, "model": build_soft_prompts(task.shape, 1, token_scale=0.5)}
    assert not torch.equal(drawn(task, models, batch), drawn(task, others, batch))
    unused = ConditionWeights(soft=0.0)
    torch.testing.assert_close(drawn(task, models, batch, weights=unused), drawn(task, others, batch, weights=unused))


class Counted:
    """The image model, counting what it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def predict(self, *inputs: Any, **named: Any) -> Tensor:
        self.calls += 1
        return self.inner.predict(*inputs, **named)


def test_without_guidance_there_is_no_second_forward(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    calls = {}
    for guidance in (1.0, 3.0, 0.0):
        image = Counted(models["image_model"])
        drawn(task, {**models, "image_model": image}, batch, guidance=guidance)
        calls[guidance] = image.calls
    assert calls == {1.0: 2, 3.0: 4, 0.0: 2}
    plain = drawn(task, models, {n: v for n, v in batch.items() if not n.startswith("negative")})
    assert torch.equal(plain, drawn(task, models, batch, guidance=1.0)), "nor is there anything to lead away from"


def test_guidance_leads_away_from_the_negative_prompt(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    other = {**batch, "negative_0": batch["preference_0"]}
    assert not torch.equal(drawn(task, models, batch, guidance=3.0), drawn(task, models, other, guidance=3.0))
    nobody = drawn(task, models, batch, guidance=0.0)
    torch.testing.assert_close(
        nobody, drawn(task, models, {**batch, "prompt": batch["prompt"].roll(1, 0)}, guidance=0.0)
    )


def test_a_picture_does_not_depend_on_its_batch(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    alone = drawn(task, models, {name: value[:1] for name, value in batch.items()}, guidance=2.0)
    torch.testing.assert_close(alone[0], drawn(task, models, batch, guidance=2.0)[0], rtol=1e-4, atol=1e-4)
    assert alone.shape == (1, small_personal.SIDE, small_personal.SIDE, 3)


def test_image_tokens_may_begin_as_words(task: Personalize, models: Models) -> None:
    soft = build_models(changed(task, start_tokens=(5, 7, 9)), 0)["model"]
    words = models["language_model"].model.get_input_embeddings().weight
    assert torch.equal(soft.image_tokens, words[[5, 7]]), "as many as there are, in turn"
    torch.testing.assert_close(soft.mapping.weight, build_models(task, 0)["model"].mapping.weight)
