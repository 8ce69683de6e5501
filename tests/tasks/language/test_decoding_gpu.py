"""Generation by CUDA graphs gives the tokens of the plain loop in float32, frees its memory, and never uses old weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from bottega.core.noise import Noise
from bottega.models import cuda_graph
from bottega.models.decoder import step
from bottega.models.decoder.step import DecodeStep
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.tasks.language import step_graphs
from bottega.tasks.language.gumbel import GumbelNoise, draw_uniform, find_uniform_kernel
from bottega.tasks.language.sampling import generate_tokens, generate_tokens_plainly
from bottega.tasks.language.token_choice import to_gumbel
from decoders import KINDS, V, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [2, 7]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3},
}


def small_gpu_model(name: str, **changes: Any) -> Transformer:
    if "context" not in changes:
        changes["context"] = 160  # two lengths of captured steps
    return small_model(name, **changes).to("cuda").eval()


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Collect captures that fail, because the plain loop takes over silently."""
    failures: list[Exception] = []
    monkeypatch.setattr(
        "bottega.tasks.language.sampling.report_failed_capture", lambda activity, error: failures.append(error)
    )
    return failures


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_plain_loop(name: str, settings: dict[str, Any], failures: list[Exception]) -> None:
    model = small_gpu_model(name)
    settings = {"max_new_tokens": 200, "device": "cuda", **settings}
    graphed = list(generate_tokens(model, PROMPTS, **settings))
    assert not failures
    assert graphed == list(generate_tokens_plainly(model, PROMPTS, **settings))
    stop = graphed[40][1]
    stopped = list(generate_tokens(model, PROMPTS, stop_token=stop, **settings))
    assert stopped == list(generate_tokens_plainly(model, PROMPTS, stop_token=stop, **settings))
    assert any(None in tokens for tokens in stopped) or len(stopped) < 200
    assert not failures


@pytest.mark.parametrize("changes", [{"num_kv_heads": 2}, {"num_kv_heads": 1}, {"qk_norm": False}])
def test_tokens_of_other_attention(changes: dict[str, Any], failures: list[Exception]) -> None:
    model = small_gpu_model("transformer", num_heads=4, head_size=8, **changes)
    settings: dict[str, Any] = {"max_new_tokens": 200, "device": "cuda", "seed": 2}
    assert list(generate_tokens(model, PROMPTS, **settings)) == list(
        generate_tokens_plainly(model, PROMPTS, **settings)
    )
    assert not failures


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_is_captured(name: str, failures: list[Exception]) -> None:
    model = small_gpu_model(name)
    with torch.autocast("cuda", torch.bfloat16):
        tokens = list(generate_tokens(model, PROMPTS, max_new_tokens=32, device="cuda", temperature=0.8))
    assert len(tokens) == 32
    assert not failures


@pytest.mark.parametrize("name", ["transformer", "ssm", "hybrid"])
def test_a_bfloat16_step_is_close_to_the_model(name: str) -> None:
    """To 5 %: eight bits of precision over four layers. With experts, rounding may choose another one."""
    model, lengths = small_gpu_model(name), [11, 4, 7]
    tokens = torch.randint(0, V, (3, 12), generator=torch.Generator().manual_seed(0)).cuda()
    caches = [DecoderCache.empty(model.shape, batch_size=3, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for cache in caches:
            model.hidden(tokens[:, :-1], cache=cache, lengths=lengths)
        expected = model(tokens[:, -1:], cache=caches[0], position=lengths)[:, 0].float()
        decode = DecodeStep(model, caches[1], dtype=torch.bfloat16, for_graph=True)
        logits = decode(tokens[:, -1], torch.tensor(lengths, device="cuda"), 128)
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in KINDS),
        ("transformer", {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}),
        ("transformer", {"num_heads": 4, "num_kv_heads": 1, "head_size": 6}),
        ("transformer", {"qk_norm": False}),
        ("transformer", {"hidden_size": 320, "intermediate_size": 1300, "num_heads": 4, "head_size": 80}),
    ],
)
def test_kernels_of_a_step_compute_what_torch_does(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lengths = small_gpu_model(name, **changes), [11, 4, 7]
    tokens = torch.randint(0, V, (3, 16), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for find_kernels in (step._find_kernels, lambda device: None):
        monkeypatch.setattr(step, "_find_kernels", find_kernels)
        cache = DecoderCache.empty(model.shape, batch_size=3, device="cuda")
        with torch.no_grad():
            model.hidden(tokens[:, :11], cache=cache, lengths=lengths)
            decode = DecodeStep(model, cache, dtype=torch.float32, for_graph=True)
            positions = torch.tensor(lengths, device="cuda")
            logits = [decode(tokens[:, 11 + i], positions + i, 128) for i in range(4)]
        assert (decode._kernels is None) == (len(results) == 1)
        results.append((torch.stack(logits), *(tensor for layer in cache.layers for tensor in layer)))
    for by_kernels, by_torch in zip(*results, strict=True):
        torch.testing.assert_close(by_kernels, by_torch, atol=1e-4, rtol=1e-4)


def test_many_rows_use_the_grouped_kernel_of_experts(failures: list[Exception]) -> None:
    model = small_gpu_model("moe")
    with torch.autocast("cuda", torch.bfloat16):
        tokens = list(generate_tokens(model, [[i % 50] for i in range(96)], max_new_tokens=16, device="cuda"))
    assert len(tokens) == 16
    assert not failures


def test_weights_changed_between_two_generations_are_used(failures: list[Exception]) -> None:
    model = small_gpu_model("transformer")
    settings: dict[str, Any] = {"max_new_tokens": 40, "device": "cuda", "seed": 1}
    before = list(generate_tokens(model, PROMPTS, **settings))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(0, 50, (4, 32), device="cuda")
    for _ in range(3):
        model(tokens, tokens).div(tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = list(generate_tokens(model, PROMPTS, **settings))
    assert model.training
    assert after == list(generate_tokens_plainly(model, PROMPTS, **settings))
    assert after != before
    assert not failures


@pytest.mark.parametrize("stage", ["capture", "second capture"])
def test_the_plain_loop_takes_over_where_a_capture_fails(
    stage: str, monkeypatch: pytest.MonkeyPatch, failures: list[Exception]
) -> None:
    model = small_gpu_model("hybrid")
    settings: dict[str, Any] = {"max_new_tokens": 200, "device": "cuda", "seed": 1}
    plain = list(generate_tokens_plainly(model, PROMPTS, **settings))
    graph_class, num_captured = cuda_graph.CapturedGraph, 0

    def capture(function: Any, **options: Any) -> Any:
        nonlocal num_captured
        num_captured += 1
        fails = stage == "capture" or num_captured > 1

        def run() -> None:
            function()
            if fails and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not permitted")

        return graph_class(run, **options)

    monkeypatch.setattr(step_graphs, "CapturedGraph", capture)
    assert list(generate_tokens(model, PROMPTS, **settings)) == plain
    assert len(failures) == 1
    assert torch.ones(1, device="cuda").item() == 1, "the device is usable after the failed capture"


def test_memory_is_freed_also_when_the_stream_is_closed_early() -> None:
    model = small_gpu_model("transformer", vocab_size=5000)
    settings: dict[str, Any] = {"max_new_tokens": 100, "device": "cuda"}
    list(generate_tokens(model, PROMPTS, **settings))  # libraries allocate their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    stream = generate_tokens(model, PROMPTS, **settings)
    next(stream)
    next(stream)
    stream.close()
    del stream
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_kernel_of_noise_draws_the_numbers_of_the_reference() -> None:
    assert find_uniform_kernel() is not draw_uniform, "the kernel must have been chosen"
    keys = torch.randint(-(2**31), 2**31, (5, 2), dtype=torch.int64).to(torch.int32).cuda()
    rows = torch.tensor([0, 1, 2**31 - 1, -5], dtype=torch.int32, device="cuda")
    for count in (1, 61, 50304):
        assert torch.equal(find_uniform_kernel()(keys, rows, count), draw_uniform(keys, rows, count))
    noise = GumbelNoise(9, rows=[3, 4], vocab_size=777, device="cuda")
    for index in (0, 1, 100):
        expected = Noise(9, index, torch.tensor([3, 4], device="cuda"), torch).uniform("gumbel", (777,))
        assert torch.equal(noise.take(index), to_gumbel(expected))
