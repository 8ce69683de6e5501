"""What the state-space layer promises: the fast form is the recurrence, cuts and packing change nothing, and the weights
are those of transformers' Mamba-2."""

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
from bottega.models.multitask import shared_layers
from bottega.models.ssm import scan
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.scan import scan_chunked, scan_recurrent, scan_step
from bottega.models.ssm.torch import SSMState, StateSpace

D, T = 24, 37
KEPT = ("A_log", "D", "dt_bias")


def inputs(
    *,
    rows: int = 2,
    length: int = T,
    heads: int = 4,
    size: int = 3,
    groups: int = 2,
    states: int = 5,
    dtype: torch.dtype = torch.float64,
    longest: float = 0.5,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """x, dt, A, B, C with time steps up to `longest` and rates up to 16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    dt = torch.rand(rows, length, heads, generator=generator, dtype=torch.float64) * longest
    A = -16 * torch.rand(heads, generator=generator, dtype=torch.float64)
    x = normal(rows, length, heads, size)
    return x, dt.to(dtype), A.to(dtype), normal(rows, length, groups, states), normal(rows, length, groups, states)


def some_state(x: Tensor, B: Tensor, *, seed: int = 1) -> Tensor:
    shape = (x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def far(one: Tensor, other: Tensor) -> float:
    """The largest difference, against the largest value."""
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-3)).item()


def small_shape(**changes: Any) -> SSMShape:
    fields: dict[str, Any] = {"hidden_size": D, "head_size": 8, "state_size": 5, "num_groups": 2, "chunk_size": 8}
    return SSMShape(**{**fields, **changes})


def small_layer(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> StateSpace:
    """Wide initial weights, so that some heads forget within a few tokens and some within hundreds."""
    layer = StateSpace(small_shape(**changes))
    initialise(layer, seed, std=0.2, residual_layers=1)
    return layer.to(dtype)


def some_x(rows: int = 2, length: int = T, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
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
    stated=st.booleans(),
    cut=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_matrix_products_are_the_recurrence(
    rows: int,
    length: int,
    chunk: int,
    groups: int,
    heads: int,
    size: int,
    states: int,
    stated: bool,
    cut: bool,
    seed: int,
) -> None:
    shape: dict[str, Any] = {"rows": rows, "length": length, "heads": heads * groups, "size": size, "groups": groups}
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        given = inputs(**shape, states=states, dtype=dtype, seed=seed)
        named: dict[str, Any] = {"state": some_state(given[0], given[3])} if stated else {}
        if cut:
            named["resets"] = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.15
        fast, slow = scan_chunked(*given, chunk=chunk, **named), scan_recurrent(*given, **named)
        assert far(fast[0], slow[0]) < bound
        assert far(fast[1], slow[1]) < bound


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_every_length_around_a_chunk(length: int) -> None:
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        given = inputs(length=length, dtype=dtype, longest=0.1)
        fast, slow = scan_chunked(*given, chunk=64), scan_recurrent(*given)
        assert fast[0].shape == slow[0].shape
        assert far(fast[0], slow[0]) < bound
        assert far(fast[1], slow[1]) < bound


def test_what_was_forgotten_leaves_no_trace_in_the_digits() -> None:
    """Sums in float32 lost 1e-3 here: a decay from one token to the next is the difference of two sums near -10,000."""
    x, dt, A, B, C = inputs(length=64, dtype=torch.float32, longest=0.01)
    dt[:, 5] = 1000.0
    assert far(scan_chunked(x, dt, A, B, C, chunk=64)[0][:, 6:], scan_recurrent(x, dt, A, B, C)[0][:, 6:]) < 1e-5


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("stated", [False, True])
def test_states_pass_through_groups_of_groups(cut: bool, stated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "GROUP", 3)
    given = inputs(length=85, longest=0.05)
    named: dict[str, Any] = {"state": some_state(given[0], given[3])} if stated else {}
    if cut:
        named["resets"] = torch.rand(2, 85, generator=torch.Generator().manual_seed(0)) < 0.02
    fast, slow = scan_chunked(*given, chunk=2, **named), scan_recurrent(*given, **named)
    assert far(fast[0], slow[0]) < 1e-10
    assert far(fast[1], slow[1]) < 1e-10


def test_gradients_are_those_of_the_recurrence() -> None:
    resets = torch.zeros(2, T, dtype=torch.bool)
    resets[0, [5, 16, 17]] = True
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        given = inputs(dtype=dtype)
        state = some_state(given[0], given[3])
        found = []
        for form in (lambda *a, **k: scan_chunked(*a, chunk=8, **k), scan_recurrent):
            leaves = [t.clone().requires_grad_() for t in (*given, state)]
            y, last = form(*leaves[:5], state=leaves[5], resets=resets)
            found.append(torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves))
        for fast, slow in zip(*found, strict=True):
            assert far(fast, slow) < bound


def test_gradients_are_those_of_finite_differences() -> None:
    given = inputs(rows=1, length=7, heads=2, size=2, groups=1, states=2)
    leaves = [t.requires_grad_() for t in (*given, some_state(given[0], given[3]))]
    resets = torch.tensor([[False, False, True, False, False, False, False]])
    assert torch.autograd.gradcheck(lambda *a: scan_chunked(*a[:5], chunk=3, state=a[5], resets=resets), leaves)


def test_gradients_of_the_layer_are_those_of_finite_differences() -> None:
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
def test_a_sequence_can_be_cut_anywhere(cut: int) -> None:
    layer, x = small_layer(), some_x()
    whole, after = layer(x, state=layer.empty(2, "cpu", torch.float64))
    first, state = layer(x[:, :cut], state=layer.empty(2, "cpu", torch.float64))
    second, end = layer(x[:, cut:], state=state)
    assert far(torch.cat((first, second), 1), whole) < 1e-10
    assert far(end.conv, after.conv) < 1e-10
    assert far(end.ssm, after.ssm) < 1e-10
    assert far(whole, layer(x)[0]) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("conv_size", [1, 2, 4])
def test_step_by_step_is_the_whole(dtype: torch.dtype, conv_size: int) -> None:
    layer, x = small_layer(dtype=dtype, conv_size=conv_size), some_x(dtype=dtype)
    state = layer.empty(2, "cpu", dtype)
    sizes, outputs = [t.shape for t in state], []
    for t in range(T):
        y, state = layer(x[:, t : t + 1], state=state)
        outputs.append(y)
    assert [t.shape for t in state] == sizes
    assert sum(t[0].numel() for t in state) == layer.shape.state_numbers
    assert far(torch.cat(outputs, 1), layer(x)[0]) < (1e-10 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("place", [0, 7, 8, 20, T - 1])
def test_the_future_changes_nothing(place: int) -> None:
    layer, x = small_layer(dtype=torch.float32), some_x(dtype=torch.float32)
    changed = x.clone()
    changed[:, place] += 1.0
    one, other = layer(x)[0], layer(changed)[0]
    assert torch.equal(one[:, :place], other[:, :place])
    assert (one[:, place] != other[:, place]).any()
    assert place == T - 1 or far(one[:, -1], other[:, -1]) > 1e-5, "and the past is not forgotten at once"


@pytest.mark.parametrize("length", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_stays_bounded_however_long_it_reads(length: int) -> None:
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
    assert far(fast, stepped) < 1e-5
    assert far(last, state) < 1e-5


def test_extreme_time_steps_stay_finite() -> None:
    x, dt, A, B, C = inputs(dtype=torch.float32)
    dt[:, 3], dt[:, 9], dt[:, 20] = 0.0, 1e4, 1e-8
    leaves = [t.requires_grad_() for t in (x, dt, A, B, C)]
    y, last = scan_chunked(*leaves, chunk=8)
    for gradient in torch.autograd.grad(y.sum() + last.sum(), leaves):
        assert torch.isfinite(gradient).all()
    assert torch.isfinite(y).all()


def test_each_document_alone_is_each_document_packed() -> None:
    layer, x = small_layer(), some_x()
    # Borders within a chunk, at one, and of documents shorter than the convolution; a number may come back.
    documents = torch.tensor([[3] * 5 + [4] * 3 + [5] * 8 + [6] + [5] + [7] * 19, [0] * T])
    packed = layer(x, documents=documents)[0]
    first = 0
    for length in (5, 3, 8, 1, 1, 19):
        alone = layer(x[:1, first : first + length])[0]
        assert far(packed[:1, first : first + length], alone) < 1e-10
        first += length
    assert far(packed[1:], layer(x[1:])[0]) < 1e-10


def test_one_document_does_not_feel_another_at_all() -> None:
    layer, x = small_layer(dtype=torch.float32), some_x(dtype=torch.float32)
    documents = torch.tensor([[0] * 13 + [1] * (T - 13)] * 2)
    changed = x.clone()
    changed[:, :13] *= -3.0
    one, other = (layer(t, documents=documents)[0] for t in (x, changed))
    assert far(one[:, 13:], other[:, 13:]) < 1e-6
    assert far(one[:, :13], other[:, :13]) > 0.1


def test_the_state_of_a_row_is_the_one_behind_its_last_token() -> None:
    layer, lengths = small_layer(), torch.tensor([T, 1, 0, 8, 20])
    x = some_x(rows=5)
    empty = layer.empty(5, "cpu", torch.float64)
    start = SSMState(empty.conv + 0.5, empty.ssm - 0.25)
    y, state = layer(x, state=start, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        mine = SSMState(start.conv[row : row + 1], start.ssm[row : row + 1])
        if length:
            alone, mine = layer(x[row : row + 1, :length], state=mine)
            assert far(y[row : row + 1, :length], alone) < 1e-10
        assert far(state.conv[row : row + 1], mine.conv) < 1e-10
        assert far(state.ssm[row : row + 1], mine.ssm) < 1e-10


@pytest.mark.parametrize("length", [1, 5])
def test_a_row_of_no_new_token_keeps_its_state(length: int) -> None:
    layer = small_layer()
    _, before = layer(some_x(), state=layer.empty(2, "cpu", torch.float64))
    _, after = layer(some_x(length=length, seed=1), state=before, lengths=torch.tensor([0, length]))
    assert torch.equal(after.conv[0], before.conv[0])
    assert far(after.ssm[0], before.ssm[0]) < 1e-12
    assert not torch.equal(after.ssm[1], before.ssm[1])


def test_rows_do_not_feel_each_other() -> None:
    layer, x = small_layer(), some_x(rows=3)
    assert far(layer(x)[0][1:2], layer(x[1:2])[0]) < 1e-12


def test_half_precision_stays_near() -> None:
    layer, x = small_layer(dtype=torch.float32), some_x(length=200, dtype=torch.float32)
    exact = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(x)[0]
        _, state = layer(x, state=layer.empty(2, "cpu", torch.bfloat16))
    assert rough.dtype is torch.bfloat16
    assert state.conv.dtype is torch.bfloat16
    assert state.ssm.dtype is torch.float32
    # A number of bfloat16 is off by 2^-9 at most; a handful of roundings stands behind each value.
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 4 * 2**-9
    rough.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_decays_are_never_of_half_precision() -> None:
    """exp(-0.001) is 1 in bfloat16: a head that is to forget over 1,000 tokens would never."""
    length = 2000
    x, B, C = torch.ones(1, length, 1, 1), torch.ones(1, length, 1, 1), torch.ones(1, length, 1, 1)
    dt, A = torch.full((1, length, 1), 1e-3), torch.tensor([-1.0])
    exact = scan_recurrent(x, dt, A, B, C)[0]
    x, B, C = x.bfloat16(), B.bfloat16(), C.bfloat16()
    for y in (scan_chunked(x, dt, A, B, C, chunk=64)[0], scan_recurrent(x, dt, A, B, C)[0]):
        assert far(y.float(), exact) < 0.01


def test_on_the_meta_device_it_has_shapes_and_no_memory() -> None:
    with torch.device("meta"):
        layer = StateSpace(small_shape())
        x = torch.zeros(2, T, D)
    y, state = layer(x, state=layer.empty(2, "meta", torch.float32))
    assert y.shape == x.shape
    assert [t.shape for t in state] == [t.shape for t in layer.empty(2, "cpu", torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_to_one_graph(packed: bool) -> None:
    torch.compiler.reset()
    layer, x = small_layer(), some_x()
    documents = torch.arange(T)[None].repeat(2, 1) // 9 if packed else None
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    found = []
    for form in (compiled, layer):
        y = form(x, documents=documents)[0]
        found.append((y, *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))))
    assert all(far(one, other) < 1e-12 for one, other in zip(*found, strict=True))


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


def test_heads_begin_as_in_mamba_2() -> None:
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
    again = nn.ModuleDict({"mixer": StateSpace(layer.shape), "other": nn.Linear(3, 3)})
    initialise(again, 3, residual_layers=8)
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), again["mixer"].parameters(), strict=True))
    initialise(again, 4, residual_layers=8)
    assert not torch.equal(layer.dynamics.A_log, again["mixer"].dynamics.A_log)


def test_every_parameter_sits_in_a_layer_that_can_be_shared() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"layers": nn.ModuleList([StateSpace(small_shape())]), "score": nn.Linear(D, 2)})

    plan = shared_layers({"one": model(), "two": model()})
    assert set(plan) == {f"layers.0.{name}" for name in ("in_proj", "conv1d", "dynamics", "norm", "out_proj")}


def of_transformers(kind: str, groups: int) -> tuple[nn.Module, StateSpace]:
    """One of its models with a single layer, and ours with the weights of that layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": groups, "expand": 2}
    config = transformers.Mamba2Config(num_hidden_layers=1, vocab_size=11, chunk_size=8, **sizes)
    model = getattr(transformers, kind)(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(0.3 * rng.standard_normal(parameter.shape).astype(np.float32)))
    theirs = getattr(model, "backbone", model).layers[0].mixer
    mine = StateSpace(SSMShape(hidden_size=32, head_size=8, state_size=16, num_groups=groups, chunk_size=5))
    mine.load_state_dict({f"dynamics.{k}" if k in KEPT else k: v for k, v in theirs.state_dict().items()})
    return model, mine


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_computes_what_transformers_computes(groups: int) -> None:
    model, mine = of_transformers("Mamba2Model", groups)
    for length in (1, 7, 8, 50):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert far(mine(x)[0], model.layers[0].mixer(x)) < 1e-5


def test_generates_what_transformers_generates() -> None:
    """With its cache, so that the steps agree too and not only the whole."""
    model, mine = of_transformers("Mamba2ForCausalLM", 2)
    trunk, tokens = model.backbone, torch.randint(0, 11, (2, 14), generator=torch.Generator().manual_seed(0))

    def logits(state: SSMState, tokens: Tensor) -> tuple[Tensor, SSMState]:
        x = trunk.embeddings(tokens)
        mixed, state = mine(trunk.layers[0].norm(x), state=state)
        return model.lm_head(trunk.norm_f(x + mixed)), state

    with torch.no_grad():
        out = model(tokens[:, :9], use_cache=True)
        read, state = logits(mine.empty(2, "cpu", torch.float32), tokens[:, :9])
        assert far(read, out.logits) < 1e-5
        for t in range(9, 14):
            out = model(tokens[:, t : t + 1], cache_params=out.cache_params, use_cache=True)
            read, state = logits(state, tokens[:, t : t + 1])
            assert far(read, out.logits) < 1e-5
