"""Helpers for tests of decoders: small models of every kind, generation with and without a cache, and a count of compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import resolve_shape_fields
from bottega.models.decoder.torch import Transformer
from bottega.models.initial import initialise
from bottega.tasks.language.sampling import generate_tokens

V = 61
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer-speedrun": {"activation": "relu2", "logit_softcap": 3.0, "value_embeddings": True},
    "moe": {"num_experts": 4, "intermediate_size": 48},
    "moe-sigmoid": {"num_experts": 4, "intermediate_size": 48, "gate": "sigmoid", "shared_experts": 1},
    "moe-spiking": {"num_experts": 4, "intermediate_size": 48, "router": "spiking", "experts_per_token": 1},
    "ssm": {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8},
    "ssm-experts": {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8, "num_experts": 3, "experts_every": 2},
    "hybrid": {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8, "attention_every": 2},
}


def small_shape(name: str, **changes: Any) -> TransformerShape:
    kind: Any = name.partition("-")[0]
    settings = {"num_layers": 4, "hidden_size": 32, **KINDS[name], **changes}
    return TransformerShape(**{"vocab_size": V, "context": 32, **resolve_shape_fields(kind, None, settings)})


def small_model(name: str, *, seed: int = 0, **changes: Any) -> Transformer:
    """Build a model with wide initial weights, so that every layer affects the output."""
    shape = small_shape(name, **changes)
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    initialise(model, seed, std=0.2, residual_layers=shape.num_layers)
    return model


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
