"""What tests of decoders have in common: the tokens they write, the same without a cache, and who counts compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.models.decoder.torch import Transformer
from bottega.tasks.language.sampling import generate_tokens


def texts(model: Transformer, prompts: list[list[int]], **settings: Any) -> list[list[int | None]]:
    return [list(row) for row in zip(*generate_tokens(model, prompts, **settings), strict=True)]


def greedy_by_reading_again(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """What `generate` documents, without a cache: with attention the last half of the context once it is full, and
    everything without."""
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
    """Its blocks by a compiler that does nothing; the list grows with each graph."""
    compilations: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    compile_ = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: compile_(f, backend=backend, **options))
        model.compile_blocks()
    return compilations
