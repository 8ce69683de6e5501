"""Fused noise equals plain noise: the same uniforms, and normals that agree to their last bits."""

from __future__ import annotations

import pytest
import torch

from bottega.core.noise import Noise
from bottega.engines.torch import noise
from bottega.engines.torch.noise import FusedNoise, make_noise


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the compiler, which takes seconds for each shape, and record the names of the functions it receives."""
    names: list[str] = []

    def record(function, **_):  # type: ignore[no-untyped-def]
        names.append(function.__code__.co_name)
        return function

    noise._compile_draw.cache_clear()
    monkeypatch.setattr(torch, "compile", record)
    yield names  # type: ignore[misc]
    noise._compile_draw.cache_clear()


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_fused_noise_matches_plain_noise(shape: tuple[int, ...]) -> None:
    positions = torch.arange(5, 12)
    for step in (0, 1, 7):
        fused, plain = FusedNoise(1, step, positions, torch), Noise(1, step, positions, torch)
        assert torch.equal(fused.uniform("u", shape), plain.uniform("u", shape))
        torch.testing.assert_close(fused.normal("n", shape), plain.normal("n", shape))


def test_each_shape_is_compiled_as_a_separate_function(uncompiled: list[str]) -> None:
    """The compiler stops recompiling one code object after eight variants."""
    for rows in (2, 3, 4):
        for count in (1, 2, 3, 4):
            for step in (0, 1):
                FusedNoise(0, step, torch.arange(rows), torch).normal("n", (count,))
    assert len(uncompiled) == len(set(uncompiled)) == 12


def test_make_noise_is_fused_only_on_request() -> None:
    assert type(make_noise(0, 0, torch.arange(2), fused=False)) is Noise
    assert type(make_noise(0, 0, torch.arange(2), fused=True)) is FusedNoise
