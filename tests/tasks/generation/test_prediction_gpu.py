"""Captured evaluations and captured steps of codes on a GPU: equal samples in float32, current weights, and a safe fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bottega.core.noise import Noise
from bottega.models.cuda_graph import CapturedGraph
from bottega.models.decoder.torch import Transformer
from bottega.models.generator.config import CodeGeneratorShape, CodesBackbone, ConditionShape
from bottega.tasks.generation import code_language, prediction
from bottega.tasks.generation.code_language import CodeLanguage, FrozenCodes
from decoders import small_model
from small_generator import CONDITIONS, build_generation, build_random_models, draw_samples

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Collect captures that fail, because plain calls take over silently."""
    failures: list[Exception] = []
    for module in (prediction, code_language):
        monkeypatch.setattr(module, "report_failed_capture", lambda activity, error: failures.append(error))
    return failures


def draw_plainly(generation: Any, models: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> torch.Tensor:
    """Draw with separate passes of guidance and without graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(prediction, "MIN_GRAPH_EVALUATIONS", 10**9)
        patch.setattr("bottega.tasks.generation.torch.MAX_JOINED_ROWS", 0)
        return draw_samples(generation, models, **options)


@pytest.mark.parametrize("method", ["euler", "heun", "dpm"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_samples_are_those_of_plain_calls(
    kind: str, method: str, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = build_generation(kind)
    models = build_random_models(generation, "cuda")
    for guidance in (1.0,) if kind == "none" else (0.0, 1.0, 2.5):
        samples = draw_samples(generation, models, method=method, guidance=guidance)
        expected = draw_plainly(generation, models, monkeypatch, method=method, guidance=guidance)
        torch.testing.assert_close(samples, expected, atol=1e-4, rtol=1e-4)
    assert not failures


@pytest.mark.parametrize("kind", CONDITIONS)
def test_bfloat16_is_captured(kind: str, failures: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    generation = build_generation(kind)
    models = build_random_models(generation, "cuda")
    guidance = 1.0 if kind == "none" else 2.0
    with torch.autocast("cuda", torch.bfloat16):
        samples = draw_samples(generation, models, method="euler", guidance=guidance)
        expected = draw_plainly(generation, models, monkeypatch, method="euler", guidance=guidance)
    assert not failures
    assert (samples - expected).norm() < 0.1 * expected.norm(), "eight bits of precision, six steps"


def test_changed_weights_are_used(failures: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    generation = build_generation("class")
    models = build_random_models(generation, "cuda")
    before = draw_samples(generation, models)
    with torch.no_grad():
        for parameter in models["model"].parameters():
            parameter.mul_(1.2)
    after = draw_samples(generation, models)
    torch.testing.assert_close(after, draw_plainly(generation, models, monkeypatch), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(after, before, atol=1e-2)
    assert not failures


def test_plain_calls_take_over_where_a_capture_fails(
    failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = build_generation("class")
    models = build_random_models(generation, "cuda")
    expected = draw_plainly(generation, models, monkeypatch, guidance=2.0)

    def capture(function: Any, **options: Any) -> CapturedGraph:
        def fail_in_capture() -> None:
            function()
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not permitted")

        return CapturedGraph(fail_in_capture, **options)

    monkeypatch.setattr(prediction, "CapturedGraph", capture)
    torch.testing.assert_close(draw_samples(generation, models, guidance=2.0), expected, atol=1e-4, rtol=1e-4)
    assert len(failures) == 1


@pytest.mark.parametrize("name", ["transformer", "hybrid", "moe"])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_codes_are_those_of_single_steps(
    name: str, guidance: float, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Transformer = small_model(name).to("cuda").eval()
    backbone = CodesBackbone(
        grid=(4, 6), channels=1, codes=(4, 6), num_codes=model.shape.vocab_size - 3, transformer=model.shape
    )
    shape = CodeGeneratorShape(backbone=backbone, condition=ConditionShape(kind="class", size=2))
    language = CodeLanguage(key="image", shape=shape, latents=FrozenCodes(folder="none"))
    batch = {"label": torch.tensor([0, 1, 1], device="cuda")}
    noise = Noise(5, 0, torch.arange(3, device="cuda"), torch)
    codes = language.draw_codes(model, batch, noise, guidance=guidance, top_k=20)
    assert not failures
    monkeypatch.setattr(code_language, "supports_decode_step", lambda model: False)
    assert torch.equal(codes, language.draw_codes(model, batch, noise, guidance=guidance, top_k=20))
