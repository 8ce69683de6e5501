"""One kernel draws what 130 do: the same words, and floats that agree to their last bits."""

from __future__ import annotations

import pytest
import torch

from bottega.core.noise import Noise
from bottega.engines.torch import noise
from bottega.engines.torch.noise import FusedNoise, make_noise


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiler takes seconds for each form; what it is handed is what is tested."""
    seen: list[str] = []

    def keep(function, **_):  # type: ignore[no-untyped-def]
        seen.append(function.__code__.co_name)
        return function

    noise._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", keep)
    yield seen  # type: ignore[misc]
    noise._compiled.cache_clear()


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_it_draws_what_the_plain_one_draws(shape: tuple[int, ...]) -> None:
    places = torch.arange(5, 12)
    for step in (0, 1, 7):
        fused, plain = FusedNoise(1, step, places, torch), Noise(1, step, places, torch)
        assert torch.equal(fused.uniform("u", shape), plain.uniform("u", shape))
        torch.testing.assert_close(fused.normal("n", shape), plain.normal("n", shape))


def test_each_form_has_code_of_its_own(uncompiled: list[str]) -> None:
    """The compiler counts how often it has seen a piece of code, and gives up at eight."""
    for rows in (2, 3, 4):
        for count in (1, 2, 3, 4):
            for step in (0, 1):
                FusedNoise(0, step, torch.arange(rows), torch).normal("n", (count,))
    assert len(uncompiled) == len(set(uncompiled)) == 12


def test_only_where_it_pays() -> None:
    assert type(make_noise(0, 0, torch.arange(2), fused=False)) is Noise
    assert type(make_noise(0, 0, torch.arange(2), fused=True)) is FusedNoise
