"""One decoding step of a language model: the next logits of one new token per row, with as few operations as possible.

It computes the same as `Transformer.hidden` and `Transformer.logits` for one token: bit for bit on a CPU, apart from products
of merged matrices. A step of the nano model on a CPU takes 0.3 ms where the modules take 1.2 ms, most of it Python; on a GPU
the step touches no value on the host, so it can be captured as a CUDA graph.

B rows   D hidden size   H query heads   K key-value heads   h head size   S positions in the cache   V vocabulary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.attention import Attention, RMSNorm, attend
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import MLP, Block, DecoderCache, Transformer
from bottega.models.experts.dispatch import Stacks, can_use_grouped_mm, dispatch_on_device, dispatch_sorted, run_grouped
from bottega.models.experts.torch import Experts, FeedForward
from bottega.models.losses.linear_cross_entropy import cap_logits
from bottega.models.ssm.torch import SSMState, StateSpace

MAX_COPIED_BYTES = 2**30
"""Maximum size of the copied weights on a CPU; a larger model spends its time in the products, and merging saves little."""
MIN_GROUPED_TOKENS = 64
"""Tokens from which the grouped kernel is used for experts; below, computing all experts takes no longer."""
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes in which torch's modules store hooks."""

Projection = Callable[[Tensor], Tensor]
AddNorm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(x, delta) -> x + delta, and its norm."""


@dataclass(frozen=True, slots=True)
class _TokenPositions:
    """Where the new tokens are: their rotary angles, their positions in the cache, and the keys that they attend to."""

    cos: Tensor
    """(h) or (B, 1, h), or with kernels (S, h) of all positions; `sin` likewise, with the sign of the rotation."""
    sin: Tensor
    position: int | Tensor
    rows: Tensor
    stop: int
    mask: Tensor | None
    tokens: Tensor
    """(B)."""


class DecodeStep:
    """The decoding step of a model over a cache, with weights as they were at its construction.

    Matrices with the same input are merged, and weights are copied in the computation dtype, where that takes little memory;
    otherwise the model's own are used. Layers that a technique has changed, such as LoRA's, are called as they are.
    """

    def __init__(self, model: Transformer, cache: DecoderCache, *, dtype: torch.dtype, for_graph: bool = False) -> None:
        """`dtype` is that of the products; it differs from the model's only under autocast, which the caller keeps enabled.

        With `for_graph` a step never waits for the device and takes positions as a tensor only.
        """
        weight = model.head_weight
        copies = _can_copy_weights(model, dtype)
        self._kernels = _find_kernels(weight.device) if for_graph else None
        blocks = [block for block in model.model.layers if isinstance(block, Block)]
        self.shape = model.shape
        self._layers = [
            _DecoderLayer(
                block,
                layer_cache,
                model.shape,
                dtype=dtype,
                copies=copies,
                for_graph=for_graph,
                kernels=self._kernels,
            )
            for block, layer_cache in zip(blocks, cache.layers, strict=True)
        ]
        self._head = weight.detach().to(dtype) if copies else weight.detach()
        self._embed = model.model.embed_tokens
        self._stream_dtype = torch.bfloat16 if dtype is torch.bfloat16 else self._embed.weight.dtype
        self._norm = _prepare_norm(model.model.norm, self._kernels)
        self._cos = model.cos
        half = model.shape.head_size // 2
        self._sin = torch.cat((-model.sin[:, :half], model.sin[:, half:]), dim=-1)
        self._rows = torch.arange(cache.num_rows, device=weight.device)
        self._slots = torch.arange(cache.length, device=weight.device)
        self._dtype, self._for_graph = dtype, for_graph

    def __call__(self, tokens: Tensor, position: int | Tensor, stop: int) -> Tensor:
        """Return the float32 logits (B, V) after `tokens` (B), and write the tokens to the cache.

        `position` is the position of the tokens, one for all rows or (B); positions before `stop` are attended to, except
        those after a row's own. A model without attention uses neither.
        """
        positions = self._build_positions(tokens, position, stop)
        x: Tensor = self._embed(tokens).to(self._stream_dtype)
        delta: Tensor | None = None
        for layer in self._layers:
            x, delta = layer(x, delta, positions)
        # The model rounds the hidden state to the dtype of its own head, and autocast does the rest.
        return cap_logits(F.linear(self._norm(x, delta)[1], self._head), self.shape.logit_softcap).float()

    def _build_positions(self, tokens: Tensor, position: int | Tensor, stop: int) -> _TokenPositions:
        if not self.shape.has_attention:
            return _TokenPositions(
                self._cos, self._sin, 0, self._rows, 0, None, tokens
            )  # positions may exceed the tables
        if isinstance(position, int):
            return _TokenPositions(self._cos[position], self._sin[position], position, self._rows, stop, None, tokens)
        cos, sin = self._cos, self._sin
        if self._kernels is None:
            cos, sin = cos[position][:, None], sin[position][:, None]
        mask = (self._slots[:stop] <= position[:, None])[:, None, None]
        if self._for_graph:
            # Added to the scores: a mask of booleans would be converted in every layer.
            mask = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return _TokenPositions(cos, sin, position, self._rows, stop, mask, tokens)


def supports_decode_step(model: nn.Module) -> bool:
    """Return whether `DecodeStep` computes what the model's forward does: our modules, in which nothing has set hooks."""
    expected: tuple[type[nn.Module], ...] = (Attention, Block, MLP, RMSNorm, Experts, FeedForward, StateSpace)
    return isinstance(model, Transformer) and all(
        not any(getattr(module, table) for table in HOOK_TABLES)
        and not (isinstance(module, expected) and type(module) not in expected)
        for module in model.modules()
    )


class _DecoderLayer:
    """One layer: attention over its cache or a state space, then an MLP, experts or nothing."""

    def __init__(
        self,
        block: Block,
        cache: tuple[Tensor, Tensor] | SSMState,
        shape: TransformerShape,
        *,
        dtype: torch.dtype,
        copies: bool,
        for_graph: bool,
        kernels: Any | None,
    ) -> None:
        self._input_norm = _prepare_norm(block.input_layernorm, kernels)
        self._mixer: Callable[[Tensor, _TokenPositions], Tensor] = (
            _StateSpaceStep(block.mixer, cache, dtype=dtype, copies=copies)
            if isinstance(cache, SSMState)
            else _AttentionStep(block, cache, shape, dtype=dtype, copies=copies, for_graph=for_graph, kernels=kernels)
        )
        self._mlp: Projection | None = None
        if block.mlp is not None:
            self._mlp = _prepare_mlp(block.mlp, dtype=dtype, copies=copies, for_graph=for_graph, kernels=kernels)
            self._mlp_norm = _prepare_norm(block.post_attention_layernorm, kernels)

    def __call__(self, x: Tensor, delta: Tensor | None, positions: _TokenPositions) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the output that is still to be added to it, from those of the layer before."""
        x, normed = self._input_norm(x, delta)
        mixed = self._mixer(normed, positions)
        if self._mlp is None:
            return x, mixed
        x, normed = self._mlp_norm(x, mixed)
        return x, self._mlp(normed)


class _AttentionStep:
    """Attention of one token per row over the cache, with merged projections."""

    def __init__(
        self,
        block: Block,
        cache: tuple[Tensor, Tensor],
        shape: TransformerShape,
        *,
        dtype: torch.dtype,
        copies: bool,
        for_graph: bool,
        kernels: Any | None,
    ) -> None:
        self._kernels = kernels
        attention = block.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._project = _prepare_projection(projections, dtype=dtype, copies=copies)
        self._project_out = _prepare_projection([attention.o_proj], dtype=dtype, copies=copies)
        self._value_embed = attention.value_embed
        self._keys, self._values = cache
        self._num_heads, self._num_kv_heads, self._head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
        self._epsilon, self._for_graph = shape.norm_epsilon, for_graph
        self._norm_weight: Tensor | None = None
        if attention.qk_norm:
            # One norm for queries and keys, and their weights afterwards: the same roundings in half the operations.
            weights = (attention.q_norm.weight, attention.k_norm.weight)
            counts = (shape.num_heads, shape.num_kv_heads)
            self._norm_weight = torch.cat(
                [weight.detach().float().expand(count, -1) for weight, count in zip(weights, counts, strict=True)]
            )

    def __call__(self, x: Tensor, positions: _TokenPositions) -> Tensor:
        heads = self._project(x).unflatten(-1, (-1, self._head_size))
        v = heads[:, self._num_heads + self._num_kv_heads :]
        if self._value_embed is not None:
            v = v + self._value_embed(positions.tokens).view_as(v).to(v.dtype)
        q = (
            self._update_cache(heads, v, positions)
            if self._kernels is None
            else self._update_cache_by_kernel(heads, v, positions)
        )
        keys, values = self._keys.narrow(2, 0, positions.stop), self._values.narrow(2, 0, positions.stop)
        if keys.dtype is not v.dtype:
            keys, values = keys.to(v.dtype), values.to(v.dtype)
        if self._for_graph:
            # Queries that share keys are rows of one product, where torch would repeat the keys or compute in float32.
            q = q.unflatten(1, (self._num_kv_heads, -1))
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=positions.mask)
        else:
            attended = attend(q.unsqueeze(2), keys, values, mask=positions.mask, is_causal=False, dropout=0.0)
        return self._project_out(attended.flatten(1))

    def _update_cache_by_kernel(self, heads: Tensor, v: Tensor, positions: _TokenPositions) -> Tensor:
        assert self._kernels is not None
        queries: Tensor = self._kernels.rotate_and_store(
            heads,
            v,
            self._norm_weight,
            cos=positions.cos,
            sin=positions.sin,
            positions=positions.position,
            key_cache=self._keys,
            value_cache=self._values,
            num_heads=self._num_heads,
            epsilon=self._epsilon,
        )
        return queries

    def _update_cache(self, heads: Tensor, v: Tensor, positions: _TokenPositions) -> Tensor:
        """Normalise and rotate queries and keys, write keys and values to the cache, and return the queries (B, H, h)."""
        rotated = heads[:, : self._num_heads + self._num_kv_heads]
        if self._norm_weight is not None:
            rotated = torch.rms_norm(rotated.float(), (self._head_size,), None, self._epsilon) * self._norm_weight
            # The modules round here and once more after the rotation.
            rotated = rotated if self._for_graph else rotated.to(v.dtype)
        # Equal to `apply_rotary`; the sign of the rotation is in `positions.sin`.
        rotated = (rotated * positions.cos + rotated.roll(self._head_size // 2, -1) * positions.sin).to(v.dtype)
        q, k = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        if isinstance(positions.position, int):
            self._keys.select(2, positions.position).copy_(k)
            self._values.select(2, positions.position).copy_(v)
        else:
            self._keys[positions.rows, :, positions.position] = k.to(self._keys.dtype)
            self._values[positions.rows, :, positions.position] = v.to(self._values.dtype)
        return q


class _StateSpaceStep:
    """A state space that takes one token per row into its state."""

    def __init__(self, mixer: StateSpace, state: SSMState, *, dtype: torch.dtype, copies: bool) -> None:
        self._mixer, self._state = mixer, state
        self._project = _prepare_projection([mixer.in_proj], dtype=dtype, copies=copies)
        self._project_out = _prepare_projection([mixer.out_proj], dtype=dtype, copies=copies)

    def __call__(self, x: Tensor, positions: _TokenPositions) -> Tensor:
        mixed, new_state = self._mixer.mix(self._project(x)[:, None], state=self._state)
        assert new_state is not None, "a state was passed"
        for old, new in zip(self._state, new_state, strict=True):
            old.copy_(new)
        return self._project_out(mixed[:, 0])


def _prepare_mlp(
    mlp: nn.Module, *, dtype: torch.dtype, copies: bool, for_graph: bool, kernels: Any | None
) -> Projection:
    if isinstance(mlp, Experts):
        return _prepare_experts(mlp, dtype=dtype, copies=copies, for_graph=for_graph, kernels=kernels)
    assert isinstance(mlp, MLP | FeedForward)
    project_down = _prepare_projection([mlp.down_proj], dtype=dtype, copies=copies)
    if mlp.gate_proj is None:
        project_up = _prepare_projection([mlp.up_proj], dtype=dtype, copies=copies)
        if isinstance(mlp, MLP):
            return lambda x: project_down(F.relu(project_up(x)).square())
        return lambda x: project_down(F.gelu(project_up(x)))
    project = _prepare_projection([mlp.gate_proj, mlp.up_proj], dtype=dtype, copies=copies)
    if kernels is not None:
        return lambda x: project_down(kernels.gate(project(x)))

    def apply_mlp(x: Tensor) -> Tensor:
        gate, up = project(x).chunk(2, dim=-1)
        return project_down(F.silu(gate) * up)

    return apply_mlp


def _prepare_experts(
    experts: Experts, *, dtype: torch.dtype, copies: bool, for_graph: bool, kernels: Any | None
) -> Projection:
    stack = experts.experts
    shared = None
    if experts.shared is not None:
        shared = _prepare_mlp(experts.shared, dtype=dtype, copies=copies, for_graph=for_graph, kernels=kernels)
    target = dtype if copies and for_graph else stack.up_proj.dtype  # without a copy, each step converts the weights
    gate_proj = None if stack.gate_proj is None else stack.gate_proj.detach().to(target)
    stacks: Stacks = (gate_proj, stack.up_proj.detach().to(target), stack.down_proj.detach().to(target))

    def apply_experts(x: Tensor) -> Tensor:
        chosen, gates = experts.route(x)
        if for_graph:
            converted: Any = tuple(None if weight is None else weight.to(dtype) for weight in stacks)
            uses_grouped = len(x) >= MIN_GROUPED_TOKENS and can_use_grouped_mm(x, stack.down_proj)
            dispatch = functools.partial(dispatch_sorted, run=run_grouped) if uses_grouped else dispatch_on_device
            out = dispatch(x.to(dtype), chosen, gates, converted)
        else:
            out = stack(x, chosen, gates)
        return out if shared is None else out + shared(x)

    return apply_experts


def _prepare_norm(norm: RMSNorm, kernels: Any | None) -> AddNorm:
    shape, weight, epsilon = norm.weight.shape, norm.weight.detach().float(), norm.epsilon
    if kernels is not None:
        return lambda x, delta: kernels.add_and_normalise(x, delta, weight, epsilon=epsilon)

    def add_and_normalise(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        if x.dtype is torch.float32:
            return x, torch.rms_norm(x, shape, weight, epsilon)
        return x, torch.rms_norm(x.float(), shape, weight, epsilon).to(x.dtype)

    return add_and_normalise


def _prepare_projection(layers: Sequence[nn.Linear], *, dtype: torch.dtype, copies: bool) -> Projection:
    """Return a function with the outputs of `layers` after one another, as one product if they are plain."""
    if not copies or any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], dim=-1)
    weights = [layer.weight.detach().to(dtype) for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return lambda x: F.linear(x, weight)


def _find_kernels(device: torch.device) -> Any | None:
    """Return the module of Triton kernels; None where there is no Triton or no GPU."""
    if device.type != "cuda":
        return None
    try:
        from bottega.models.decoder import step_kernels
    except ImportError:
        return None
    return step_kernels


def _can_copy_weights(model: Transformer, dtype: torch.dtype) -> bool:
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if model.head_weight.is_cuda:
        return num_bytes < 0.5 * torch.cuda.mem_get_info(model.head_weight.device)[0]
    return num_bytes < MAX_COPIED_BYTES
