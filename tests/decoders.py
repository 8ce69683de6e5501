"""Helpers for tests of decoders: generation with and without a cache, and a count of compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.models.decoder.torch import Transformer
from bottega.tasks.language.sampling import generate_tokens


def generate_rows(model: Transformer, prompts: list[list[int]], **settings: Any) -> list[list[int | None]]:
    return [list(row) for row in zip(*generate_tokens(model, prompts, **settings), strict=True)]


def generate_without_cache(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Generate greedily without a cache. With attention, a full context is truncated to its last half."""
    model.eval()
    window, new, context = list(prompt), [], model.shape.context
    with torch.no_grad():
        for _ in range(count):
            if model.shape.has_attention and len(window) > context:
                window = window[-(context // 2) :]
            new.append(int(model(torch.tensor([window]))[0, -1].argmax()))
            window.append(new[-1])
    return new


def compile_and_count(model: Transformer) -> list[Any]:
    """Compile the blocks with a no-op backend; return a list that grows with each compiled graph."""
    compilations: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    compile_ = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: compile_(f, backend=backend, **options))
        model.compile_blocks()
    return compilations
