"""Generation by decoding steps gives the tokens of the plain loop, for every kind of decoder and every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bottega.core.errors import OutOfMemory
from bottega.core.noise import Noise
from bottega.models import cuda_graph
from bottega.models.decoder.step import DecodeStep, supports_decode_step
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.tasks.language import decoding, gumbel, sampling, step_graphs, text_rows
from bottega.tasks.language.decoding import GraphDecoder
from bottega.tasks.language.gumbel import GumbelNoise
from bottega.tasks.language.sampling import generate_tokens, generate_tokens_plainly, plan_generation
from bottega.tasks.language.token_choice import to_gumbel
from decoders import KINDS, V, small_model
from eager_graph import EagerGraph

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [2, 7]]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in KINDS},
    "grouped queries": ("transformer", {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}),
    "one key-value head": ("hybrid", {"num_heads": 4, "num_kv_heads": 1, "head_size": 8}),
    "no norm of queries and keys": ("transformer", {"qk_norm": False}),
    "own head": ("transformer", {"tie_embeddings": False}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3},
    "greedy with a penalty": {"temperature": 0.0, "repetition_penalty": 2.0},
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    kind, changes = SHAPES[request.param]
    return small_model(kind, **changes).eval()


def require_same_tokens(model: Transformer, prompts: list[list[int]], **settings: Any) -> list[list[int | None]]:
    fast = list(generate_tokens(model, prompts, **settings))
    assert fast == list(generate_tokens_plainly(model, prompts, **settings))
    return fast


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_of_the_plain_loop_beyond_the_context(model: Transformer, settings: dict[str, Any]) -> None:
    """Four prompts of different lengths fill the context of 32 at different steps, some of them twice."""
    tokens = require_same_tokens(model, PROMPTS, max_new_tokens=60, **settings)
    assert len(tokens) == 60
    assert len({tuple(row) for row in zip(*tokens, strict=True)}) > 1, "equal rows would not show a mixed-up batch"


def test_tokens_are_those_of_the_plain_loop_after_rows_have_stopped(model: Transformer) -> None:
    free = list(generate_tokens(model, PROMPTS, max_new_tokens=50, seed=2))
    for stop in {free[3][0], free[10][1], free[20][2]}:
        stopped = require_same_tokens(model, PROMPTS, max_new_tokens=50, seed=2, stop_token=stop)
        assert any(None in tokens for tokens in stopped) or len(stopped) < 50


def test_the_model_is_called_only_to_read_prompts_and_full_contexts(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the comparisons above would compare the plain loop with itself."""
    calls: list[Any] = []
    compute = text_rows.compute_next_logits
    monkeypatch.setattr(decoding, "compute_next_logits", lambda *args, **kw: calls.append(1) or compute(*args, **kw))
    list(generate_tokens(model, [[1, 2]] * 2, max_new_tokens=60, temperature=0.0))
    assert len(calls) == (3 if model.shape.has_attention else 1)


def generate_by_graphs(model: Transformer, prompts: list[list[int]], **settings: Any) -> list[list[int | None]]:
    """Generate as on a GPU: in blocks, with the operations of a step that can be captured."""
    decoder = GraphDecoder(plan_generation(model.eval(), prompts, **settings))
    tokens = list(decoder.generate())
    decoder.release()
    assert decoder.failure is None
    return tokens


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_blocks_of_steps_give_the_tokens_of_the_plain_loop(
    model: Transformer, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "CapturedGraph", EagerGraph)
    monkeypatch.setattr(step_graphs, "MIN_ATTENDED_POSITIONS", 8)  # steps of 16 and of 32 positions are captured
    monkeypatch.setattr(decoding, "MAX_BLOCK_STEPS", 5)
    plain = list(generate_tokens_plainly(model, PROMPTS, max_new_tokens=60, **settings))
    EagerGraph.captured = 0
    assert generate_by_graphs(model, PROMPTS, max_new_tokens=60, **settings) == plain
    assert EagerGraph.captured == (2 if model.shape.has_attention else 1)
    for stop in {plain[3][0], plain[10][1], plain[20][2]}:
        stopped = list(generate_tokens_plainly(model, PROMPTS, max_new_tokens=50, stop_token=stop, **settings))
        assert generate_by_graphs(model, PROMPTS, max_new_tokens=50, stop_token=stop, **settings) == stopped


def test_a_block_of_noise_fits_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "CapturedGraph", EagerGraph)
    expected = generate_by_graphs(HYBRID, PROMPTS, max_new_tokens=20, seed=3)
    monkeypatch.setattr(gumbel, "MAX_CPU_NUMBERS", 3 * len(PROMPTS) * V)
    assert generate_by_graphs(HYBRID, PROMPTS, max_new_tokens=20, seed=3) == expected


@pytest.mark.parametrize("name", ["transformer", "ssm", "hybrid"])
def test_the_plain_loop_takes_over_where_a_capture_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second capture fails, after tokens have been generated, and leaves a state that its warm-up has changed."""

    class FailingGraph(EagerGraph):
        def __init__(self, function: Any, **options: Any) -> None:
            function()
            if EagerGraph.captured or name == "ssm":
                raise RuntimeError("operation not permitted when stream is capturing")
            super().__init__(function, **options)

    EagerGraph.captured = 0
    cuda_graph._print_once.cache_clear()
    monkeypatch.setattr(step_graphs, "CapturedGraph", FailingGraph)
    monkeypatch.setattr(step_graphs, "MIN_ATTENDED_POSITIONS", 16)
    monkeypatch.setattr(decoding, "MAX_BLOCK_STEPS", 5)
    model = small_model(name)
    plan = plan_generation(model, PROMPTS, max_new_tokens=40, seed=1)
    monkeypatch.setattr(sampling, "generate_on_host", lambda plan: pytest.fail("not the path of a GPU"))
    object.__setattr__(plan, "device", torch.device("cuda"))  # chooses the path
    decoder_class = sampling.GraphDecoder

    def build_decoder(plan: Any) -> GraphDecoder:
        object.__setattr__(plan, "device", torch.device("cpu"))
        return decoder_class(plan)

    monkeypatch.setattr(sampling, "GraphDecoder", build_decoder)
    tokens = list(sampling._generate_fast(plan))
    assert tokens == list(generate_tokens_plainly(model, PROMPTS, max_new_tokens=40, seed=1))
    assert EagerGraph.captured == (0 if name == "ssm" else 1)
    assert capsys.readouterr().err.count("text is generated without a CUDA graph") == 1


@given(
    prompts=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=40), min_size=1, max_size=5),
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, V + 2),
    top_p=st.none() | st.floats(0.01, 1.0),
    penalty=st.sampled_from([1.0, 0.5, 1.7]),
    stop_token=st.none() | st.integers(0, V - 1),
)
def test_tokens_are_those_of_the_plain_loop_for_any_request(
    prompts: list[list[int]],
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    penalty: float,
    stop_token: int | None,
) -> None:
    require_same_tokens(
        HYBRID,
        prompts,
        max_new_tokens=30,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=penalty,
        stop_token=stop_token,
    )


HYBRID = small_model("hybrid", num_layers=2, num_heads=4, num_kv_heads=2, head_size=8)


@given(seed=st.integers(0, 2**64), first=st.integers(0, 10**6), rows=st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_noise_drawn_ahead_is_the_noise_of_each_token(seed: int, first: int, rows: list[int]) -> None:
    noise = GumbelNoise(seed, rows=rows[:4], vocab_size=7, device="cpu")
    for index in (first, first + 1, first + 70, first + 3):
        uniform = Noise(seed, index, torch.tensor(rows[:4]), torch).uniform("gumbel", (7,))
        assert torch.equal(noise.take(index), to_gumbel(uniform))


def test_a_step_equals_the_model_for_one_token(model: Transformer) -> None:
    tokens = torch.randint(0, V, (3, 12), generator=torch.Generator().manual_seed(0))
    caches = [DecoderCache.empty(model.shape, batch_size=3) for _ in range(2)]
    lengths = [11, 4, 7]
    with torch.no_grad():
        for cache in caches:
            model.hidden(tokens[:, :-1], cache=cache, lengths=lengths)
        expected = model(tokens[:, -1:], cache=caches[0], position=lengths)[:, 0]
        logits = DecodeStep(model, caches[1], dtype=torch.float32)(tokens[:, -1], torch.tensor(lengths), 12)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for first, second in zip(layer, other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_changed_layers_are_called_as_they_are(model: Transformer) -> None:
    """LoRA and adapters change the class of linear layers; weights that are merged or copied would leave them out."""
    changed = [module for module in model.modules() if type(module) is nn.Linear]
    before = list(generate_tokens(model, PROMPTS, max_new_tokens=20, seed=1))
    for module in changed:
        module.__class__ = _ScaledLinear
    try:
        after = require_same_tokens(model, PROMPTS, max_new_tokens=20, seed=1)
    finally:
        for module in changed:
            module.__class__ = nn.Linear
    assert after != before


class _ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def test_weights_changed_between_two_generations_are_used(model: Transformer) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "seed": 1}
    before = require_same_tokens(model, PROMPTS, **settings)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    try:
        assert require_same_tokens(model, PROMPTS, **settings) != before
    finally:
        model.load_state_dict(saved)


def test_a_model_with_hooks_is_generated_from_plainly() -> None:
    model, calls = small_model("transformer"), []
    assert supports_decode_step(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert not supports_decode_step(model)
    list(generate_tokens(model, PROMPTS, max_new_tokens=5))
    handle.remove()
    assert len(calls) == 5


def test_large_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("moe-sigmoid")
    expected = require_same_tokens(model, PROMPTS, max_new_tokens=10)
    monkeypatch.setattr("bottega.models.decoder.step.MAX_COPIED_BYTES", 0)
    assert require_same_tokens(model, PROMPTS, max_new_tokens=10) == expected


def test_a_cache_larger_than_memory_is_refused_with_its_size() -> None:
    model = small_model("transformer", context=2**20, num_heads=4, num_kv_heads=4, head_size=64)
    with pytest.raises(
        OutOfMemory, match=r"100,000 texts of 1,000,002 tokens need a cache of [\d,.]+ GiB, and cpu has"
    ):
        generate_tokens(model, [[1, 2]] * 100_000, max_new_tokens=1_000_000)
