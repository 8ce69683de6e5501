"""Personalised generation as a task: trainable parameters, conditions, loss and sampling."""

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
def open_task(folder: Any) -> tuple[Personalize, Models, dict[str, Tensor]]:
    recipe = load_recipe(["personalize", small_personal.settings(folder)]).recipe
    workload: Any = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    batch = next(iter_eval_batches(workload.data.validation(), COUNT))
    rows = {name: torch.from_numpy(value) for name, value in batch.items() if name != "index"}
    rows |= {
        name: torch.from_numpy(value)
        for name, value in workload.condition_tokenizer.encode_texts("negative", [""] * COUNT).items()
    }
    return workload.task, build_models(workload.task, 0), rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("personal")


@pytest.fixture
def task(folder: Any) -> Personalize:
    return open_task(folder)[0]


@pytest.fixture
def models(folder: Any) -> Models:
    """Newly initialised soft prompts that a test may change; the frozen models are shared."""
    from bottega.models.frozen.soft_prompts import build_soft_prompts

    task, built, _ = open_task(folder)
    return {**built, "model": build_soft_prompts(task.shape, 0, token_scale=0.5)}


@pytest.fixture
def batch(folder: Any) -> dict[str, Tensor]:
    return open_task(folder)[2]


def noise(count: int = COUNT, first: int = 0) -> Noise:
    return Noise(0, 3, torch.arange(first, first + count), torch)


def loss(task: Personalize, models: Models, batch: dict[str, Tensor], rng: Noise | None = None) -> Tensor:
    return task.loss(models, batch, rng or noise()).terms["loss"][0]


def copy_task(task: Personalize, **fields: Any) -> Personalize:
    return task.model_copy(update=fields)


def sample_images(task: Personalize, models: Models, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.no_grad():
        arguments = {"weights": ConditionWeights(), "steps": 2, "method": "euler", **options}
        return task.sample(models, batch, noise(len(batch["prompt"])), **arguments)


def test_only_the_soft_prompts_are_trained(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    loss(task, models, batch).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in models["model"].parameters())
    frozen = [p for name in ("language_model", "image_model") for p in models[name].parameters()]
    assert all(p.grad is None for p in frozen)
    assert sum(p.numel() for p in models["model"].parameters()) == task.shape.num_parameters


def test_the_loss_is_a_sum_over_rows_whatever_the_micro_batch_split(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    task = copy_task(task, keyword_dropout=0.5)
    total = loss(task, models, batch)
    parts = [
        loss(task, models, {n: v[start : start + 2] for n, v in batch.items()}, noise(2, first=start))
        for start in range(0, COUNT, 2)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), total, rtol=1e-5, atol=0)
    assert task.counts(batch) == {"loss": COUNT}


def test_padding_rows_do_not_count(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    weight = torch.tensor([1.0] * (COUNT - 1) + [0.0])
    without_padding = loss(task, models, {n: v[:-1] for n, v in batch.items()}, noise(COUNT - 1))
    torch.testing.assert_close(loss(task, models, {**batch, "weight": weight}), without_padding, rtol=1e-5, atol=0)
    assert task.counts({"image": batch["image"], "weight": weight}) == {"loss": COUNT - 1}


def test_the_trained_model_is_called_once_per_loss(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    """DDP reduces gradients correctly only if all parameters are used in one call of the wrapped model."""
    calls: list[int] = []

    def wrapped(*inputs: Any) -> Tensor:
        calls.append(1)
        return models["model"](*inputs)

    assert loss(task, {**models, "model": wrapped}, batch) == loss(task, models, batch)
    assert calls == [1]


@pytest.mark.parametrize("part", ["soft", "keywords", "target"])
def test_each_part_of_the_condition_has_its_weight(
    task: Personalize, models: Models, batch: dict[str, Tensor], part: str
) -> None:
    with torch.no_grad():
        weights = {name: 1.0 if name == part else 0.0 for name in ("soft", "keywords", "target")}
        once = task.build_condition(models, batch, ConditionWeights(**weights)).tokens
        twice = task.build_condition(models, batch, ConditionWeights(**{**weights, part: 2.0})).tokens
        torch.testing.assert_close(twice, 2 * once)
        complete = task.build_condition(models, batch, ConditionWeights()).tokens
        without = task.build_condition(models, batch, ConditionWeights(**{part: 0.0})).tokens
    assert without.shape[1] == complete.shape[1] - once.shape[1], "weight 0 omits the part"
    sizes = {"soft": task.shape.num_image_tokens, "keywords": 16, "target": 16}
    assert once.shape == (COUNT, sizes[part], task.shape.text_size)


def test_soft_tokens_depend_on_the_history(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        tokens = task.compute_soft_tokens(models, batch)
        rolled = task.compute_soft_tokens(models, {n: v.roll(1, 0) for n, v in batch.items()})
    torch.testing.assert_close(rolled.roll(-1, 0), tokens, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tokens[0], tokens[1], atol=1e-3)


def test_dropped_keywords_equal_an_empty_text(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    other = {**batch, "preference_0": batch["preference_0"].roll(1, 0)}
    never, dropped = copy_task(task, keyword_dropout=0.0), copy_task(task, keyword_dropout=1.0)
    assert loss(never, models, other) != loss(never, models, batch)
    assert loss(dropped, models, other) == loss(dropped, models, batch)
    empty = torch.tensor(task.empty[0]).expand_as(batch["preference_0"])
    torch.testing.assert_close(loss(never, models, {**batch, "preference_0": empty}), loss(dropped, models, batch))


def test_min_snr_lowers_the_weight_of_low_noise_levels(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    capped = copy_task(task, path=task.path.model_copy(update={"min_snr": 0.1}))
    assert loss(capped, models, batch) < 0.9 * loss(task, models, batch)


def test_soft_tokens_matter_only_with_a_positive_weight(
    task: Personalize, models: Models, batch: dict[str, Tensor]
) -> None:
    from bottega.models.frozen.soft_prompts import build_soft_prompts

    others = {**models, "model": build_soft_prompts(task.shape, 1, token_scale=0.5)}
    assert not torch.equal(sample_images(task, models, batch), sample_images(task, others, batch))
    unused = ConditionWeights(soft=0.0)
    torch.testing.assert_close(
        sample_images(task, models, batch, weights=unused), sample_images(task, others, batch, weights=unused)
    )


class CountingModel:
    """The image model with a count of its calls."""

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
        image = CountingModel(models["image_model"])
        sample_images(task, {**models, "image_model": image}, batch, guidance=guidance)
        calls[guidance] = image.calls
    assert calls == {1.0: 2, 3.0: 4, 0.0: 2}
    plain = sample_images(task, models, {n: v for n, v in batch.items() if not n.startswith("negative")})
    assert torch.equal(plain, sample_images(task, models, batch, guidance=1.0)), "no negative prompt is needed"


def test_guidance_uses_the_negative_prompt(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    other = {**batch, "negative_0": batch["preference_0"]}
    assert not torch.equal(
        sample_images(task, models, batch, guidance=3.0), sample_images(task, models, other, guidance=3.0)
    )
    unconditional = sample_images(task, models, batch, guidance=0.0)
    torch.testing.assert_close(
        unconditional, sample_images(task, models, {**batch, "prompt": batch["prompt"].roll(1, 0)}, guidance=0.0)
    )


def test_an_image_does_not_depend_on_its_batch(task: Personalize, models: Models, batch: dict[str, Tensor]) -> None:
    single = sample_images(task, models, {name: value[:1] for name, value in batch.items()}, guidance=2.0)
    torch.testing.assert_close(single[0], sample_images(task, models, batch, guidance=2.0)[0], rtol=1e-4, atol=1e-4)
    assert single.shape == (1, small_personal.SIDE, small_personal.SIDE, 3)


def test_image_tokens_can_be_initialised_from_words(task: Personalize, models: Models) -> None:
    soft = build_models(copy_task(task, start_tokens=(5, 7, 9)), 0)["model"]
    embeddings = models["language_model"].model.get_input_embeddings().weight
    assert torch.equal(soft.image_tokens, embeddings[[5, 7]]), "the first words, one for each image token"
    torch.testing.assert_close(soft.mapping.weight, build_models(task, 0)["model"].mapping.weight)
