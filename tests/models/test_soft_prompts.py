"""Soft prompts: parameter counts, initial values by seed and name, and their scale."""

from __future__ import annotations

import pytest
import torch

from bottega.models.frozen.config import SoftPromptShape
from bottega.models.frozen.soft_prompts import SoftPrompts, build_soft_prompts

LLAMA_7B = SoftPromptShape(
    hidden_size=4096,
    num_layers=32,
    num_kv_heads=32,
    head_size=128,
    text_size=768,
    num_image_tokens=2,
    num_prefix_tokens=2,
)
TINY = SoftPromptShape(
    hidden_size=256,
    num_layers=3,
    num_kv_heads=2,
    head_size=4,
    text_size=64,
    num_image_tokens=2,
    num_prefix_tokens=5,
)


def _count_parameters(shape: SoftPromptShape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in SoftPrompts(shape).parameters())


def test_soft_prompts_of_llama_7b_have_the_published_number_of_parameters() -> None:
    assert _count_parameters(LLAMA_7B) == LLAMA_7B.num_parameters == 3_678_976


@pytest.mark.parametrize("prefixes", [0, 1, 3])
@pytest.mark.parametrize("projection", [None, 12])
def test_counts_of_parameters_and_prefixes_match_the_shape(prefixes: int, projection: int | None) -> None:
    shape = TINY.model_copy(update={"num_prefix_tokens": prefixes, "projection": projection})
    assert _count_parameters(shape) == shape.num_parameters
    assert len(build_soft_prompts(shape, 0).prefixes()) == (shape.num_layers if prefixes else 0)


def test_initial_values_depend_only_on_seed_and_name() -> None:
    first, repeated, other = (dict(build_soft_prompts(TINY, seed).named_parameters()) for seed in (3, 3, 4))
    without_prefixes = dict(build_soft_prompts(TINY.model_copy(update={"num_prefix_tokens": 0}), 3).named_parameters())
    for name, value in first.items():
        assert torch.equal(value, repeated[name])
        assert name.endswith("bias") or not torch.equal(value, other[name])
        assert name not in without_prefixes or torch.equal(value, without_prefixes[name])


@pytest.mark.parametrize("projection", [None, 200])
def test_initial_scales_of_tokens_outputs_and_prefixes(projection: int | None) -> None:
    shape = TINY.model_copy(update={"projection": projection, "num_prefix_tokens": 50, "head_size": 32})
    soft = build_soft_prompts(shape, 0, token_scale=0.3)
    hidden_states = torch.randn(512, 2, 256, generator=torch.Generator().manual_seed(0))
    assert soft(lambda _: hidden_states).std().item() == pytest.approx(1.0, rel=0.1)
    assert soft.image_tokens.std().item() == pytest.approx(0.3, rel=0.1)
    keys, values = zip(*soft.prefixes(), strict=True)
    for tensor in (*keys, *values):
        assert 0.005 < tensor.std().item() < 0.04  # far below the keys and values of a layer, which are about 1


@pytest.mark.parametrize("projection", [None, 6])
def test_every_layer_and_token_has_different_keys_and_values(projection: int | None) -> None:
    soft = build_soft_prompts(TINY.model_copy(update={"projection": projection}), 0)
    tensors = [tensor for keys_and_values in soft.prefixes() for tensor in keys_and_values]
    assert [tuple(tensor.shape) for tensor in tensors] == [(5, 8)] * 6
    assert all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])
    assert len({tensor[index].detach().numpy().tobytes() for tensor in tensors for index in range(5)}) == 30


def test_a_prefix_embedding_changes_the_keys_and_values_of_its_token_in_every_layer() -> None:
    soft = build_soft_prompts(TINY.model_copy(update={"projection": 6}), 0)
    before = torch.stack([torch.stack(keys_and_values) for keys_and_values in soft.prefixes()])
    with torch.no_grad():
        soft.prefix_embedding[3] += 1
    changed = torch.stack([torch.stack(keys_and_values) for keys_and_values in soft.prefixes()]) != before
    assert changed[:, :, 3].all()
    assert not changed[:, :, [0, 1, 2, 4]].any()


def test_prefixes_are_the_keys_and_values_of_the_parameter() -> None:
    soft = build_soft_prompts(TINY, 0)
    for layer, (keys, values) in enumerate(soft.prefixes()):
        assert torch.equal(keys, soft.prefix[layer, 0])
        assert torch.equal(values, soft.prefix[layer, 1])


@pytest.mark.parametrize("projection", [None, 6])
def test_the_mapping_is_applied_and_gradients_reach_every_parameter(projection: int | None) -> None:
    soft = build_soft_prompts(TINY.model_copy(update={"projection": projection}), 0)

    def compute_hidden_states(prompts: SoftPrompts) -> torch.Tensor:
        assert prompts is soft
        pooled = sum((keys * values).sum() for keys, values in prompts.prefixes())
        return prompts.image_tokens[None] * pooled

    soft(compute_hidden_states).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in soft.parameters())
    assert torch.equal(soft.mapping(compute_hidden_states(soft)), soft(compute_hidden_states))
