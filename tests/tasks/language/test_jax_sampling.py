"""Generation in JAX gives the tokens of torch for the same weights and seed."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from bottega.core.errors import OutOfMemory, UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.models import build, jax_build
from bottega.models.decoder.config import TransformerShape
from bottega.tasks.language import generated_text, jax_sampling
from bottega.tasks.language.sampling import generate_tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [3]]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    shape = TransformerShape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        intermediate_size=48,
        vocab_size=61,
        context=24,
    )
    initial = Initial("bottega.models.decoder.{framework}:initialise_decoder", {"residual_layers": 2})
    spec = ModelSpec("bottega.models.decoder.{framework}:Transformer", shape, initial=initial, is_filled=True)
    return build.build_model(spec, 0), jax_build.build_model(spec, 0)


def generate(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int | None]]:
    return list(
        jax_sampling.generate_tokens_of_run(
            model, prompts, device=jax.devices()[0], mixed_precision="fp32", **{"max_new_tokens": 40, **options}
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.5, "stop_token": 5},
    ],
    ids=["greedy", "top-k and top-p", "repetition penalty", "stop token"],
)
def test_tokens_are_those_of_torch_also_past_the_context(models: tuple[Any, Any], options: dict[str, Any]) -> None:
    expected = list(generate_tokens(models[0], PROMPTS, max_new_tokens=40, **options))
    assert generate(models[1], PROMPTS, **options) == expected


def test_a_row_does_not_depend_on_the_others(models: tuple[Any, Any]) -> None:
    together = generate(models[1], PROMPTS, temperature=0.0, max_new_tokens=8)
    alone = generate(models[1], PROMPTS[:1], temperature=0.0, max_new_tokens=8)
    assert [row[0] for row in together] == [row[0] for row in alone]


def test_invalid_options_are_refused_before_anything_is_generated(models: tuple[Any, Any]) -> None:
    for options, message in (
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"top_p": 2.0}, "top_p"),
    ):
        with pytest.raises(UsageError, match=message):
            generate(models[1], PROMPTS, **options)
    with pytest.raises(UsageError, match=r"outside 0\.\.60"):
        generate(models[1], [[99]])


def test_a_cache_larger_than_the_memory_is_refused(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_sampling, "get_available_memory", lambda: 1000)
    monkeypatch.setattr(generated_text, "MIN_CHECKED_BYTES", 0)
    with pytest.raises(OutOfMemory, match="3 texts of 24 tokens need a cache"):
        generate(models[1], PROMPTS)
