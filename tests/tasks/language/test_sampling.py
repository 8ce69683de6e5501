"""Token generation: cached decoding matches full forwards, does not depend on the batch, and is a function of the seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.initial import initialise
from bottega.tasks.language.sampling import generate_tokens
from bottega.tasks.language.token_choice import TokenChoice, find_repeated_tokens, penalise_repetition, to_gumbel
from decoders import generate_rows, generate_without_cache

V, CONTEXT = 40, 16
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = TransformerShape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        intermediate_size=48,
        vocab_size=V,
        context=CONTEXT,
        dropout=0.1,
    )
    model = Transformer(shape)
    initialise(model, 0, std=0.3, residual_layers=2)
    return model


def test_cached_greedy_decoding_matches_full_forwards_beyond_the_context(model: Transformer) -> None:
    """Rows of 3, 8 and 1 tokens fill the context at different steps; 40 new tokens fill it several times."""
    result = generate_rows(model, PROMPTS, max_new_tokens=40, temperature=0)
    assert result == [generate_without_cache(model, prompt, 40) for prompt in PROMPTS]
    assert len({tuple(row) for row in result}) == 3, "the rows must differ for the comparison to mean anything"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(model: Transformer, temperature: float) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "top_p": 0.9}
    batched = generate_rows(model, PROMPTS, **settings)
    assert generate_rows(model, PROMPTS[:1], **settings)[0] == batched[0]
    assert generate_rows(model, [PROMPTS[0], [7] * 12, [1, 2]], **settings)[0] == batched[0]


def test_tokens_are_a_function_of_the_seed(model: Transformer) -> None:
    first, again, other = (generate_rows(model, PROMPTS, max_new_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    same_prompt = generate_rows(model, [PROMPTS[0]] * 2, max_new_tokens=20)
    assert same_prompt[0] != same_prompt[1], "rows draw their own noise"


def test_a_row_stops_at_its_stop_token(model: Transformer) -> None:
    free = generate_rows(model, PROMPTS, max_new_tokens=20, seed=3)
    stop = free[0][4]
    stopped = generate_rows(model, PROMPTS, max_new_tokens=20, seed=3, stop_token=stop)
    for row, complete in zip(stopped, free, strict=True):
        end = complete.index(stop) + 1 if stop in complete else len(complete)
        assert row == (complete[:end] + [None] * 20)[: len(row)]
    assert None in stopped[0]
    single = generate_rows(model, PROMPTS[:1], max_new_tokens=20, seed=3, stop_token=stop)
    assert single[0] == free[0][: free[0].index(stop) + 1], "generation ends when all rows have stopped"


def test_generation_restores_the_training_mode(model: Transformer) -> None:
    model.train()
    stream = generate_tokens(model, PROMPTS, max_new_tokens=5)
    next(stream)
    stream.close()
    assert model.training
    model.eval()
    generate_rows(model, PROMPTS, max_new_tokens=2)
    assert not model.training


def test_a_prompt_longer_than_the_context_keeps_its_end(model: Transformer) -> None:
    long = [i % V for i in range(50)]
    settings: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0}
    assert generate_rows(model, [long], **settings) == generate_rows(model, [long[-CONTEXT:]], **settings)


def draw_frequencies(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return the token frequencies of 20,000 draws from one row of logits."""
    noise = Noise(0, 0, torch.arange(20000), xp=torch)
    gumbel = to_gumbel(noise.uniform("gumbel", (logits.shape[-1],)))
    chosen = TokenChoice(**settings).choose(logits.expand(20000, -1), gumbel, None)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / 20000


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log()[None]
    # The standard deviation of a frequency over 20,000 draws is at most 0.0036; this is four of them.
    assert (draw_frequencies(logits) - probabilities).abs().max() < 0.015
    assert (draw_frequencies(logits, temperature=0.5) - (2 * logits[0]).softmax(0)).abs().max() < 0.015
    assert (draw_frequencies(logits, top_k=2) - torch.tensor([0.625, 0.375, 0, 0])).abs().max() < 0.015
    assert (draw_frequencies(logits, top_p=0.6) - torch.tensor([0.625, 0.375, 0, 0])).abs().max() < 0.015
    assert draw_frequencies(logits, top_p=0.01).tolist() == [1, 0, 0, 0]


def test_repetition_penalty_applies_to_each_row_separately() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    result = penalise_repetition(logits, find_repeated_tokens([[0, 1], [2, 2]], logits), penalty=2.0)
    assert result.tolist() == [[1.0, -4.0, 1.0], [2.0, -2.0, 0.5]]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[V]], {}, "outside 0..39"),
        ([[1]], {"temperature": -1.0}, "temperature -1.0: expected a finite number of 0 or more"),
        ([[1]], {"temperature": math.nan}, "temperature nan: expected a finite number of 0 or more"),
        ([[1]], {"temperature": math.inf}, "temperature inf: expected a finite number of 0 or more"),
        ([[1]], {"top_k": 0}, "top_k 0: expected 1 or more"),
        ([[1]], {"top_p": 1.5}, "top_p 1.5: expected a number above 0 and at most 1"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty 0.0: expected a finite number above 0"),
        ([[1]], {"repetition_penalty": math.nan}, "repetition_penalty nan: expected a finite number above 0"),
    ],
)
def test_invalid_settings_are_refused_by_name(model: Transformer, prompts: Any, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_tokens(model, prompts, max_new_tokens=1, **settings)
