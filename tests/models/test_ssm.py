"""State-space layer: the chunked scan equals the recurrence, splits and packing change nothing, and the weights are
compatible with transformers' Mamba-2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from bottega.models.initial import initialise
from bottega.models.multitask import find_shared_layers
from bottega.models.ssm import scan
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.scan import scan_chunked, scan_recurrent, scan_step
from bottega.models.ssm.torch import SSMState, StateSpace

D, T = 24, 37
DYNAMICS = ("A_log", "D", "dt_bias")


def draw_inputs(
    *,
    rows: int = 2,
    length: int = T,
    heads: int = 4,
    size: int = 3,
    groups: int = 2,
    states: int = 5,
    dtype: torch.dtype = torch.float64,
    max_time_step: float = 0.5,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Draw x, dt, A, B, C with time steps up to `max_time_step` and decay rates up to 16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    dt = torch.rand(rows, length, heads, generator=generator, dtype=torch.float64) * max_time_step
    A = -16 * torch.rand(heads, generator=generator, dtype=torch.float64)
    x = normal(rows, length, heads, size)
    return x, dt.to(dtype), A.to(dtype), normal(rows, length, groups, states), normal(rows, length, groups, states)


def draw_state(x: Tensor, B: Tensor, *, seed: int = 1) -> Tensor:
    shape = (x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def small_shape(**changes: Any) -> SSMShape:
    fields: dict[str, Any] = {"hidden_size": D, "head_size": 8, "state_size": 5, "num_groups": 2, "chunk_size": 8}
    return SSMShape(**{**fields, **changes})


def small_layer(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> StateSpace:
    """Build a layer with wide initial weights, so that some heads forget within a few tokens and some within hundreds."""
    layer = StateSpace(small_shape(**changes))
    initialise(layer, seed, std=0.2, residual_layers=1)
    return layer.to(dtype)


def draw_x(rows: int = 2, length: int = T, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, D, generator=generator, dtype=torch.float64).to(dtype)


@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 70),
    chunk=st.integers(1, 20),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.integers(1, 5),
    states=st.integers(1, 6),
    has_state=st.booleans(),
    has_resets=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_chunked_scan_equals_the_recurrence(
    rows: int,
    length: int,
    chunk: int,
    groups: int,
    heads: int,
    size: int,
    states: int,
    has_state: bool,
    has_resets: bool,
    seed: int,
) -> None:
    shape: dict[str, Any] = {"rows": rows, "length": length, "heads": heads * groups, "size": size, "groups": groups}
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        scan_inputs = draw_inputs(**shape, states=states, dtype=dtype, seed=seed)
        options: dict[str, Any] = {"state": draw_state(scan_inputs[0], scan_inputs[3])} if has_state else {}
        if has_resets:
            options["resets"] = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.15
        fast, slow = scan_chunked(*scan_inputs, chunk=chunk, **options), scan_recurrent(*scan_inputs, **options)
        assert relative_error(fast[0], slow[0]) < bound
        assert relative_error(fast[1], slow[1]) < bound


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_chunked_scan_at_lengths_around_the_chunk_size(length: int) -> None:
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        scan_inputs = draw_inputs(length=length, dtype=dtype, max_time_step=0.1)
        fast, slow = scan_chunked(*scan_inputs, chunk=64), scan_recurrent(*scan_inputs)
        assert fast[0].shape == slow[0].shape
        assert relative_error(fast[0], slow[0]) < bound
        assert relative_error(fast[1], slow[1]) < bound


def test_large_decay_does_not_lose_precision() -> None:
    """Float32 sums lost 1e-3 here: the decay between adjacent tokens is the difference of two sums near -10,000."""
    x, dt, A, B, C = draw_inputs(length=64, dtype=torch.float32, max_time_step=0.01)
    dt[:, 5] = 1000.0
    assert (
        relative_error(scan_chunked(x, dt, A, B, C, chunk=64)[0][:, 6:], scan_recurrent(x, dt, A, B, C)[0][:, 6:])
        < 1e-5
    )


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_states_pass_through_nested_groups(has_resets: bool, has_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_CHUNKS_PER_PRODUCT", 3)
    scan_inputs = draw_inputs(length=85, max_time_step=0.05)
    options: dict[str, Any] = {"state": draw_state(scan_inputs[0], scan_inputs[3])} if has_state else {}
    if has_resets:
        options["resets"] = torch.rand(2, 85, generator=torch.Generator().manual_seed(0)) < 0.02
    fast, slow = scan_chunked(*scan_inputs, chunk=2, **options), scan_recurrent(*scan_inputs, **options)
    assert relative_error(fast[0], slow[0]) < 1e-10
    assert relative_error(fast[1], slow[1]) < 1e-10


def test_chunked_gradients_equal_the_recurrence() -> None:
    resets = torch.zeros(2, T, dtype=torch.bool)
    resets[0, [5, 16, 17]] = True
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        scan_inputs = draw_inputs(dtype=dtype)
        state = draw_state(scan_inputs[0], scan_inputs[3])
        gradients = []
        for run_scan in (lambda *a, **k: scan_chunked(*a, chunk=8, **k), scan_recurrent):
            leaves = [t.clone().requires_grad_() for t in (*scan_inputs, state)]
            y, last = run_scan(*leaves[:5], state=leaves[5], resets=resets)
            gradients.append(torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves))
        for fast, slow in zip(*gradients, strict=True):
            assert relative_error(fast, slow) < bound


def test_scan_gradients_match_finite_differences() -> None:
    scan_inputs = draw_inputs(rows=1, length=7, heads=2, size=2, groups=1, states=2)
    leaves = [t.requires_grad_() for t in (*scan_inputs, draw_state(scan_inputs[0], scan_inputs[3]))]
    resets = torch.tensor([[False, False, True, False, False, False, False]])
    assert torch.autograd.gradcheck(lambda *a: scan_chunked(*a[:5], chunk=3, state=a[5], resets=resets), leaves)


def test_layer_gradients_match_finite_differences() -> None:
    layer = StateSpace(SSMShape(hidden_size=4, head_size=4, state_size=2, chunk_size=3, time_step_max=1.0)).double()
    initialise(layer, 0, std=0.5, residual_layers=1)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    documents = torch.tensor([[0, 0, 0, 1, 1]])

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer, named, (x,), {"documents": documents})[0]

    assert torch.autograd.gradcheck(run, (x, *(p.detach().requires_grad_() for p in layer.parameters())))


@pytest.mark.parametrize("cut", [1, 2, 7, 8, 9, 20, T - 1])
def test_sequence_can_be_split_at_any_position(cut: int) -> None:
    layer, x = small_layer(), draw_x()
    full, after = layer(x, state=layer.empty(2, "cpu", torch.float64))
    first, state = layer(x[:, :cut], state=layer.empty(2, "cpu", torch.float64))
    second, end = layer(x[:, cut:], state=state)
    assert relative_error(torch.cat((first, second), 1), full) < 1e-10
    assert relative_error(end.conv, after.conv) < 1e-10
    assert relative_error(end.ssm, after.ssm) < 1e-10
    assert relative_error(full, layer(x)[0]) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("conv_size", [1, 2, 4])
def test_stepwise_decoding_equals_the_full_pass(dtype: torch.dtype, conv_size: int) -> None:
    layer, x = small_layer(dtype=dtype, conv_size=conv_size), draw_x(dtype=dtype)
    state = layer.empty(2, "cpu", dtype)
    sizes, outputs = [t.shape for t in state], []
    for t in range(T):
        y, state = layer(x[:, t : t + 1], state=state)
        outputs.append(y)
    assert [t.shape for t in state] == sizes
    assert sum(t[0].numel() for t in state) == layer.shape.num_state_values
    assert relative_error(torch.cat(outputs, 1), layer(x)[0]) < (1e-10 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("position", [0, 7, 8, 20, T - 1])
def test_later_tokens_do_not_change_earlier_outputs(position: int) -> None:
    layer, x = small_layer(dtype=torch.float32), draw_x(dtype=torch.float32)
    changed = x.clone()
    changed[:, position] += 1.0
    original, modified = layer(x)[0], layer(changed)[0]
    assert torch.equal(original[:, :position], modified[:, :position])
    assert (original[:, position] != modified[:, position]).any()
    assert position == T - 1 or relative_error(original[:, -1], modified[:, -1]) > 1e-5, (
        "the past is not forgotten immediately"
    )


@pytest.mark.parametrize("length", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_output_stays_bounded_over_long_sequences(length: int) -> None:
    """|y| cannot exceed what the slowest head sums up: with |x|, |B|, |C| <= 1 that is dt N / (1 - exp(dt A))."""
    generator = torch.Generator().manual_seed(0)
    heads, size, states = 2, 1, 2
    x, B, C = (
        2 * torch.rand(1, length, *s, generator=generator) - 1 for s in ((heads, size), (1, states), (1, states))
    )
    dt, A = torch.full((1, length, heads), 0.01), torch.tensor([-0.01, -16.0])
    bound = states * 0.01 / (1 - math.exp(-0.01 * 0.01))
    state, outputs = torch.zeros(1, heads, size, states), []
    with torch.no_grad():
        for x_t, dt_t, B_t, C_t in zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True):
            y, state = scan_step(x_t, dt_t, A, B_t, C_t, state=state)
            outputs.append(y)
        stepped = torch.stack(outputs, 1)
        fast, last = scan_chunked(x, dt, A, B, C, chunk=64)
    assert torch.isfinite(stepped).all()
    assert stepped.abs().max() <= bound
    assert relative_error(fast, stepped) < 1e-5
    assert relative_error(last, state) < 1e-5


def test_extreme_time_steps_stay_finite() -> None:
    x, dt, A, B, C = draw_inputs(dtype=torch.float32)
    dt[:, 3], dt[:, 9], dt[:, 20] = 0.0, 1e4, 1e-8
    leaves = [t.requires_grad_() for t in (x, dt, A, B, C)]
    y, last = scan_chunked(*leaves, chunk=8)
    for gradient in torch.autograd.grad(y.sum() + last.sum(), leaves):
        assert torch.isfinite(gradient).all()
    assert torch.isfinite(y).all()


def test_packed_documents_equal_separate_documents() -> None:
    layer, x = small_layer(), draw_x()
    # Boundaries inside and at the edge of a chunk, documents shorter than the convolution, and a repeated document id.
    documents = torch.tensor([[3] * 5 + [4] * 3 + [5] * 8 + [6] + [5] + [7] * 19, [0] * T])
    packed = layer(x, documents=documents)[0]
    first = 0
    for length in (5, 3, 8, 1, 1, 19):
        alone = layer(x[:1, first : first + length])[0]
        assert relative_error(packed[:1, first : first + length], alone) < 1e-10
        first += length
    assert relative_error(packed[1:], layer(x[1:])[0]) < 1e-10


def test_documents_are_independent() -> None:
    layer, x = small_layer(dtype=torch.float32), draw_x(dtype=torch.float32)
    documents = torch.tensor([[0] * 13 + [1] * (T - 13)] * 2)
    changed = x.clone()
    changed[:, :13] *= -3.0
    original, modified = (layer(t, documents=documents)[0] for t in (x, changed))
    assert relative_error(original[:, 13:], modified[:, 13:]) < 1e-6
    assert relative_error(original[:, :13], modified[:, :13]) > 0.1


def test_state_is_taken_after_the_last_token_of_each_row() -> None:
    layer, lengths = small_layer(), torch.tensor([T, 1, 0, 8, 20])
    x = draw_x(rows=5)
    empty = layer.empty(5, "cpu", torch.float64)
    start = SSMState(empty.conv + 0.5, empty.ssm - 0.25)
    y, state = layer(x, state=start, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        row_state = SSMState(start.conv[row : row + 1], start.ssm[row : row + 1])
        if length:
            alone, row_state = layer(x[row : row + 1, :length], state=row_state)
            assert relative_error(y[row : row + 1, :length], alone) < 1e-10
        assert relative_error(state.conv[row : row + 1], row_state.conv) < 1e-10
        assert relative_error(state.ssm[row : row + 1], row_state.ssm) < 1e-10


@pytest.mark.parametrize("length", [1, 5])
def test_row_of_length_zero_preserves_its_state(length: int) -> None:
    layer = small_layer()
    _, before = layer(draw_x(), state=layer.empty(2, "cpu", torch.float64))
    _, after = layer(draw_x(length=length, seed=1), state=before, lengths=torch.tensor([0, length]))
    assert torch.equal(after.conv[0], before.conv[0])
    assert relative_error(after.ssm[0], before.ssm[0]) < 1e-12
    assert not torch.equal(after.ssm[1], before.ssm[1])


def test_rows_are_independent() -> None:
    layer, x = small_layer(), draw_x(rows=3)
    assert relative_error(layer(x)[0][1:2], layer(x[1:2])[0]) < 1e-12


def test_bf16_is_close_to_float32() -> None:
    layer, x = small_layer(dtype=torch.float32), draw_x(length=200, dtype=torch.float32)
    exact = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low_precision = layer(x)[0]
        _, state = layer(x, state=layer.empty(2, "cpu", torch.bfloat16))
    assert low_precision.dtype is torch.bfloat16
    assert state.conv.dtype is torch.bfloat16
    assert state.ssm.dtype is torch.float32
    # Rounding to bfloat16 is off by 2^-9 at most, and each value is rounded a few times.
    error = (low_precision.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 4 * 2**-9
    low_precision.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_decays_are_computed_in_float32() -> None:
    """exp(-0.001) is 1 in bfloat16: a head that forgets over 1,000 tokens would never do so."""
    length = 2000
    x, B, C = torch.ones(1, length, 1, 1), torch.ones(1, length, 1, 1), torch.ones(1, length, 1, 1)
    dt, A = torch.full((1, length, 1), 1e-3), torch.tensor([-1.0])
    exact = scan_recurrent(x, dt, A, B, C)[0]
    x, B, C = x.bfloat16(), B.bfloat16(), C.bfloat16()
    for y in (scan_chunked(x, dt, A, B, C, chunk=64)[0], scan_recurrent(x, dt, A, B, C)[0]):
        assert relative_error(y.float(), exact) < 0.01


def test_meta_device_gives_shapes() -> None:
    with torch.device("meta"):
        layer = StateSpace(small_shape())
        x = torch.zeros(2, T, D)
    y, state = layer(x, state=layer.empty(2, "meta", torch.float32))
    assert y.shape == x.shape
    assert [t.shape for t in state] == [t.shape for t in layer.empty(2, "cpu", torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_layer_compiles_to_one_graph(packed: bool) -> None:
    torch.compiler.reset()
    layer, x = small_layer(), draw_x()
    documents = torch.arange(T)[None].repeat(2, 1) // 9 if packed else None
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    outputs = []
    for module in (compiled, layer):
        y = module(x, documents=documents)[0]
        outputs.append((y, *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))))
    assert all(relative_error(actual, expected) < 1e-12 for actual, expected in zip(*outputs, strict=True))


@pytest.mark.parametrize("changes", [{}, {"num_groups": 1}, {"expand": 4, "conv_size": 2}, {"state_size": 16}])
def test_parameters_are_counted_in_closed_form(changes: dict[str, Any]) -> None:
    layer = StateSpace(small_shape(**changes))
    assert layer.shape.num_parameters() == sum(p.numel() for p in layer.parameters())
    assert layer.shape.flops_per_token() > 6 * layer.shape.num_parameters()


def test_impossible_shapes_name_the_remedy() -> None:
    with pytest.raises(ValidationError, match=r"head_size 10 does not divide the 48 channels.*try head_size 8"):
        small_shape(head_size=10)
    with pytest.raises(ValidationError, match=r"num_groups 4 does not divide the 6 heads.*try num_groups 3"):
        small_shape(num_groups=4)
    with pytest.raises(ValidationError, match=r"time_step_min 0.5 is above time_step_max 0.1"):
        small_shape(time_step_min=0.5)
    for name in ("hidden_size", "state_size", "conv_size", "chunk_size", "expand"):
        with pytest.raises(ValidationError, match=name):
            small_shape(**{name: 0})


def test_heads_are_initialised_as_in_mamba_2() -> None:
    holder = nn.ModuleDict({"mixer": StateSpace(SSMShape(hidden_size=1024, head_size=8, state_size=4))})
    initialise(holder, 3, residual_layers=8)
    layer = holder["mixer"]
    rates = layer.dynamics.A_log.detach().exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, abs=0.9)  # 256 heads: three standard errors of a uniform mean
    steps = nn.functional.softplus(layer.dynamics.dt_bias.detach()).log()
    assert steps.exp().min() >= 0.999e-3
    assert steps.exp().max() <= 0.1001
    assert steps.mean().item() == pytest.approx(math.log(0.01), abs=0.26)
    assert (layer.dynamics.D == 1).all()
    assert (layer.norm.weight == 1).all()
    assert layer.conv1d.weight.abs().max().item() == pytest.approx(0.5, abs=0.01)
    assert layer.out_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    rebuilt = nn.ModuleDict({"mixer": StateSpace(layer.shape), "other": nn.Linear(3, 3)})
    initialise(rebuilt, 3, residual_layers=8)
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), rebuilt["mixer"].parameters(), strict=True))
    initialise(rebuilt, 4, residual_layers=8)
    assert not torch.equal(layer.dynamics.A_log, rebuilt["mixer"].dynamics.A_log)


def test_every_parameter_sits_in_a_layer_that_can_be_shared() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"layers": nn.ModuleList([StateSpace(small_shape())]), "score": nn.Linear(D, 2)})

    plan = find_shared_layers({"one": model(), "two": model()})
    assert set(plan) == {f"layers.0.{name}" for name in ("in_proj", "conv1d", "dynamics", "norm", "out_proj")}


def build_transformers_pair(kind: str, groups: int) -> tuple[nn.Module, StateSpace]:
    """Build a single-layer transformers model, and our layer with its weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": groups, "expand": 2}
    config = transformers.Mamba2Config(num_hidden_layers=1, vocab_size=11, chunk_size=8, **sizes)
    model = getattr(transformers, kind)(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(0.3 * rng.standard_normal(parameter.shape).astype(np.float32)))
    theirs = getattr(model, "backbone", model).layers[0].mixer
    ours = StateSpace(SSMShape(hidden_size=32, head_size=8, state_size=16, num_groups=groups, chunk_size=5))
    ours.load_state_dict({f"dynamics.{k}" if k in DYNAMICS else k: v for k, v in theirs.state_dict().items()})
    return model, ours


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_layer_matches_transformers(groups: int) -> None:
    model, ours = build_transformers_pair("Mamba2Model", groups)
    for length in (1, 7, 8, 50):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert relative_error(ours(x)[0], model.layers[0].mixer(x)) < 1e-5


def test_cached_decoding_matches_transformers() -> None:
    model, ours = build_transformers_pair("Mamba2ForCausalLM", 2)
    trunk, tokens = model.backbone, torch.randint(0, 11, (2, 14), generator=torch.Generator().manual_seed(0))

    def logits(state: SSMState, tokens: Tensor) -> tuple[Tensor, SSMState]:
        x = trunk.embeddings(tokens)
        mixed, state = ours(trunk.layers[0].norm(x), state=state)
        return model.lm_head(trunk.norm_f(x + mixed)), state

    with torch.no_grad():
        out = model(tokens[:, :9], use_cache=True)
        output_logits, state = logits(ours.empty(2, "cpu", torch.float32), tokens[:, :9])
        assert relative_error(output_logits, out.logits) < 1e-5
        for t in range(9, 14):
            out = model(tokens[:, t : t + 1], cache_params=out.cache_params, use_cache=True)
            output_logits, state = logits(state, tokens[:, t : t + 1])
            assert relative_error(output_logits, out.logits) < 1e-5
