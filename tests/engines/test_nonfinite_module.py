"""The first module with a non-finite output is named, also where blocks are checkpointed or compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bottega.engines.torch.engine import TorchEngine
from bottega.engines.torch.inspection import find_nonfinite_module
from bottega.tasks.language.task import Language
from decoders import V, small_shape
from toy_task import training

BAD_LAYER = "model.layers.2.self_attn.k_proj"


def build_engine(**changes: Any) -> TorchEngine:
    engine = TorchEngine(
        Language(shape=small_shape("transformer")), training(**changes), rate=lambda step: 1e-3, device="cpu"
    )
    with torch.no_grad():
        engine.model.get_submodule(BAD_LAYER).weight.fill_(float("nan"))
    return engine


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("attribute", [None, "compiled", "compiled_block"])
def test_the_first_module_is_named(gradient_checkpointing: bool, attribute: str | None) -> None:
    engine = build_engine(gradient_checkpointing=gradient_checkpointing)
    batch = {"input_ids": np.random.default_rng(0).integers(0, V, (4, 9))}

    block, forms = engine.model.get_submodule("model.layers.2"), []
    if attribute is not None:
        setattr(block, attribute, "compiled form")
        block.register_forward_pre_hook(lambda module, inputs: forms.append(getattr(module, attribute)))
    assert find_nonfinite_module(engine, 0, batch) == BAD_LAYER
    if attribute is not None:
        assert set(forms) == {None}, "hooks inside a compiled form would not fire"
        assert getattr(block, attribute) == "compiled form"
