"""Predictions in a sampler: joined passes of guidance, and captured evaluations, give the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.models.decoder.step import DecodeStep
from bottega.models.decoder.torch import DecoderCache
from bottega.tasks.generation import prediction
from bottega.tasks.generation.code_decoding import CodeRequest, draw_by_graphs, draw_by_steps
from bottega.tasks.generation.guidance import guide
from bottega.tasks.generation.solvers import sample
from bottega.tasks.generation.torch import encode_condition
from bottega.tasks.language import step_graphs
from bottega.tasks.language.gumbel import GumbelNoise
from bottega.tasks.language.token_choice import TokenChoice
from decoders import V, small_model
from eager_graph import EagerGraph
from small_generator import CONDITIONS, build_conditions, build_generation, build_random_models, draw_samples


@pytest.mark.parametrize("kind", CONDITIONS[1:])
@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 3.0])
def test_joined_passes_of_guidance_equal_separate_ones(kind: str, guidance: float) -> None:
    generation = build_generation(kind)
    model = build_random_models(generation)["model"]
    batch, drop = build_conditions(5), torch.ones(5, dtype=torch.bool)
    conditions = [encode_condition(generation, {"model": model}, batch, drop=value) for value in (~drop, drop)]
    x, time = torch.randn(5, 4, 4, 1, generator=torch.Generator().manual_seed(0)), torch.full((5,), 400.0)
    batch_sizes: list[int] = []

    def call_model(x: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        batch_sizes.append(len(x))
        return model(x, time, **condition)

    with torch.no_grad():
        joined, separate = (
            guide(call_model, *conditions, guidance=guidance, joins_passes=joins)(x, time) for joins in (True, False)
        )
    torch.testing.assert_close(joined, separate, atol=1e-5, rtol=1e-5)
    assert batch_sizes == ([10, 5, 5] if guidance in (0.5, 3.0) else [5, 5])


@pytest.mark.parametrize("method", ["euler", "heun", "dpm"])
@pytest.mark.parametrize("objective", ["flow", "noise", "v"])
def test_captured_predictions_give_the_same_samples(
    method: Any, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heun and dpm keep the prediction of one evaluation while the next overwrites the captured output."""
    monkeypatch.setattr(prediction, "CapturedGraph", EagerGraph)
    generation = build_generation("none", objective=objective)
    model = build_random_models(generation)["model"]
    start = Noise(0, 0, torch.arange(4), torch).normal("start", (4, 4, 1))
    output = torch.empty_like(start)  # at a fixed address, as in a graph
    with torch.no_grad():
        captured = prediction._CapturedPrediction(lambda x, time: output.copy_(model(x, time)), start)
        samples = sample(captured, start, generation.path, steps=5, method=method)
        assert torch.equal(samples, sample(model, start, generation.path, steps=5, method=method))


def test_evaluations_are_counted() -> None:
    generation = build_generation("none")
    models = build_random_models(generation)
    for method in ("euler", "heun", "dpm"):
        calls: list[int] = []
        handle = models["model"].register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        draw_samples(generation, models, method=method)
        handle.remove()
        assert len(calls) == prediction.count_evaluations(method, 6)


def test_a_failed_capture_is_reported_and_the_plain_prediction_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("capture is not possible")

    monkeypatch.setattr(prediction, "CapturedGraph", fail)
    start = torch.zeros(2, 4, 4, 1).as_subclass(OnGpu)
    calls: list[float] = []

    def predict(x: Tensor, time: Tensor) -> Tensor:
        calls.append(float(time[0]))
        return x + time[0]

    with prediction.captured_prediction(predict, start, num_evaluations=10) as chosen:
        for time in (1.0, 2.0, 3.0):
            assert torch.equal(
                chosen(torch.ones(2, 4, 4, 1), torch.full((2,), time)), torch.full((2, 4, 4, 1), 1 + time)
            )
    assert calls == [1.0, 2.0, 3.0]
    assert "samples are drawn without a CUDA graph" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["transformer", "hybrid"])
@pytest.mark.parametrize("guidance", [None, 2.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_steps_draw_the_same_codes(
    name: str, guidance: float | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "CapturedGraph", EagerGraph)
    monkeypatch.setattr(step_graphs, "MIN_ATTENDED_POSITIONS", 8)
    model = small_model(name).eval()
    first_tokens = torch.tensor([V - 1, V - 2, V - 3, V - 1, V - 1, V - 1])[: 3 if guidance is None else 6]
    choice, num_codes, done = TokenChoice(temperature, top_k=20), V - 3, []

    def build_request() -> CodeRequest:
        noise = GumbelNoise(4, rows=torch.tensor([7, 3, 9]), vocab_size=num_codes, device="cpu")
        return CodeRequest(
            first_tokens,
            length=30,
            choice=choice,
            noise=None if temperature == 0 else noise,
            num_codes=num_codes,
            guidance=guidance,
            progress=lambda step, total: done.append(step),
        )

    caches = [DecoderCache.empty(model.shape, batch_size=len(first_tokens)) for _ in range(2)]
    with torch.no_grad():
        by_model = draw_by_steps(
            build_request(),
            lambda tokens, position: model(tokens[:, None], cache=caches[0], position=position)[:, 0],
        )
        decode = DecodeStep(model, caches[1], dtype=torch.float32, for_graph=True)
        by_graphs = draw_by_graphs(build_request(), decode, caches[1])
    assert torch.equal(by_model, by_graphs)
    assert by_model.shape == (3, 30)
    assert int(by_model.max()) < num_codes
    assert done == [*range(1, 31), 16, 30]
