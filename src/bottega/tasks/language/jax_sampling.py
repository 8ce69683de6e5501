"""Token-by-token generation with a language model in JAX: the tokens of `sampling.generate_tokens`, up to rounding.

A block of tokens is one jitted loop on the device, with the keys and values of earlier tokens in a cache of fixed size.

B rows   T tokens of a window   N steps of a block   V vocabulary
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.errors import UsageError
from bottega.core.noise import derive_key
from bottega.engines.host_memory import get_available_memory
from bottega.models.decoder.jax import LayerCache, Transformer
from bottega.models.jax_layers import forward_context, get_compute_dtype, join_model, split_model
from bottega.models.jax_noise import JaxNoise
from bottega.tasks.language.generated_text import NextTokens, TextRow, check_cache_memory, check_prompts, needs_reading
from bottega.tasks.language.token_choice import TokenChoice

Array = Any
BLOCK_STEPS = 16
"""Steps that the device takes before the host reads their tokens."""
MIN_LENGTH = 64
"""Lengths of windows and caches are powers of two from here on, so that few programs are compiled."""


class DecodingState(NamedTuple):
    """What a step reads and changes, on the device."""

    cache: tuple[LayerCache, ...]
    tokens: Array
    """Last token of each row (B), which the next step reads."""
    positions: Array
    """Its position (B)."""
    has_stopped: Array
    is_repeated: Array
    """Tokens that each row has, (B, V); (B, 0) without a penalty."""


@dataclass(frozen=True)
class Options:
    """Options of a generation that a program is compiled for."""

    choice: TokenChoice
    stop_token: int | None
    dtype: Any


def generate_tokens_of_run(
    model: Transformer,
    prompts: list[list[int]],
    *,
    device: Any,
    mixed_precision: str,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
) -> Iterator[NextTokens]:
    """Yield the next token of each prompt until all have stopped; None for a prompt that has stopped before.

    As in torch, tokens are sampled with the Gumbel-max trick, with noise that depends on the seed, the index of the new token and
    the row. When a text exceeds the context, its last half is read again from position 0 and the rest is dropped. The precision is
    that of the surrounding `forward_context`.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_tokens {max_new_tokens}: expected 1 or more")
    check_prompts(prompts, model.shape.vocab_size)
    choice = TokenChoice(temperature, top_k, top_p, repetition_penalty)
    choice.check()
    rows = [TextRow.start(prompt, model.shape) for prompt in prompts]
    length = min(model.shape.context, _round_up(max(len(row.window) for row in rows) + max_new_tokens))
    dtype = get_compute_dtype()
    _check_memory(model, len(rows), length, dtype, device)
    return _generate(model, rows, Options(choice, stop_token, dtype), length, max_new_tokens, seed)


def _check_memory(model: Transformer, num_rows: int, length: int, dtype: Any, device: Any) -> None:
    shape = model.shape
    num_values = 2 * shape.num_layers * num_rows * length * shape.num_kv_heads * shape.head_size
    statistics = None if device.platform == "cpu" else device.memory_stats()

    def find_free() -> int:
        return int(statistics["bytes_limit"] - statistics["bytes_in_use"]) if statistics else get_available_memory()

    check_cache_memory(
        num_values * jnp.dtype(dtype).itemsize,
        find_free,
        what=f"{num_rows:,} texts of {length:,} tokens",
        device=str(device.platform),
    )


def _generate(
    model: Transformer, rows: list[TextRow], options: Options, length: int, max_new_tokens: int, seed: int
) -> Iterator[NextTokens]:
    graph, weights = split_model(model)
    state: DecodingState | None = None
    num_generated = 0
    while num_generated < max_new_tokens:
        if state is None or needs_reading(rows, model.shape):
            state, logits = _read_windows(graph, weights, rows, length, options)
            keys = _derive_keys(seed, num_generated, 1)
            state, chosen = _choose_first(state, logits, keys, options)
            num_steps = 1
        else:
            longest = max(len(row.window) for row in rows if not row.has_stopped)
            num_steps = min(BLOCK_STEPS, max_new_tokens - num_generated, model.shape.context - longest + 1)
            keys = _derive_keys(seed, num_generated, BLOCK_STEPS)
            state, chosen = _take_steps(graph, weights, state, keys, np.int32(num_steps), options)
        for tokens in np.asarray(chosen)[:num_steps].tolist():
            next_tokens = [row.append(token, options.stop_token) for row, token in zip(rows, tokens, strict=True)]
            if any(token is not None for token in next_tokens):
                yield next_tokens
        num_generated += num_steps
        if all(row.has_stopped for row in rows):
            return


def _derive_keys(seed: int, first: int, count: int) -> np.ndarray:
    return np.array([derive_key(seed, index, "gumbel") for index in range(first, first + count)], np.uint32)


def _read_windows(
    graph: Any, weights: Any, rows: list[TextRow], length: int, options: Options
) -> tuple[DecodingState, Array]:
    """Read the windows of all rows into a new cache; of one that exceeds the context, its last half."""
    shape = graph.shape
    for row in rows:
        if len(row.window) > shape.context:
            row.window = row.window[-max(1, shape.context // 2) :]
        row.is_cached = True
    num_tokens = min(length, _round_up(max(len(row.window) for row in rows)))
    tokens = np.zeros((len(rows), num_tokens), np.int32)
    is_repeated = np.zeros((len(rows), shape.vocab_size if options.choice.repetition_penalty != 1.0 else 0), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.window)] = row.window
        if is_repeated.size:
            is_repeated[i, row.tokens] = True
    lengths = np.array([len(row.window) for row in rows], np.int32)
    cache, logits = _prefill(graph, weights, tokens, lengths, length, options.dtype)
    has_stopped = np.array([row.has_stopped for row in rows])
    return DecodingState(cache, jnp.asarray(tokens[:, 0]), jnp.asarray(lengths - 1), has_stopped, is_repeated), logits


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _prefill(
    graph: Any, weights: Any, tokens: Array, lengths: Array, length: int, dtype: Any
) -> tuple[tuple[LayerCache, ...], Array]:
    """Return the cache of `length` positions with these tokens (B, T), and the logits (B, V) after the last one of each row.

    Padding on the right is not seen: its keys and values are overwritten before a later token may attend to them.
    """
    model, shape = join_model(graph, weights), graph.shape
    size = (len(tokens), length, shape.num_kv_heads, shape.head_size)
    cache = tuple((jnp.zeros(size, dtype), jnp.zeros(size, dtype)) for _ in range(shape.num_layers))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with forward_context(dtype=dtype):
        hidden, cache = model.decode(tokens, cache, positions)
        logits = model.compute_logits(hidden[jnp.arange(len(tokens)), lengths - 1])
    return cache, logits.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=3)
def _choose_first(state: DecodingState, logits: Array, keys: Array, options: Options) -> tuple[DecodingState, Array]:
    state, chosen = _choose(state, logits, keys[0], options)
    return state, chosen[None]


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _take_steps(
    graph: Any, weights: Any, state: DecodingState, keys: Array, num_steps: Array, options: Options
) -> tuple[DecodingState, Array]:
    """Take `num_steps` steps; return the tokens, (N, B), of which those after `num_steps` mean nothing."""
    model = join_model(graph, weights)

    def take_step(index: Array, carry: tuple[DecodingState, Array]) -> tuple[DecodingState, Array]:
        current, tokens = carry
        with forward_context(dtype=options.dtype):
            hidden, cache = model.decode(current.tokens[:, None], current.cache, current.positions[:, None])
            logits = model.compute_logits(hidden[:, 0]).astype(jnp.float32)
        current, chosen = _choose(current._replace(cache=cache), logits, keys[index], options)
        return current, tokens.at[index].set(chosen)

    tokens = jnp.zeros((len(keys), len(state.tokens)), jnp.int32)
    result: tuple[DecodingState, Array] = jax.lax.fori_loop(0, num_steps, take_step, (state, tokens))
    return result


def _choose(state: DecodingState, logits: Array, key: Array, options: Options) -> tuple[DecodingState, Array]:
    """Choose the next token of each row and advance the state."""
    choice, is_repeated = options.choice, state.is_repeated
    if choice.repetition_penalty != 1.0:
        penalised = jnp.where(logits > 0, logits / choice.repetition_penalty, logits * choice.repetition_penalty)
        logits = jnp.where(is_repeated, penalised, logits)
    if not choice.is_greedy:
        rng = JaxNoise(0, 0, jnp.arange(len(logits), dtype=jnp.uint32), keys={"gumbel": key})
        gumbel = -jnp.log(-jnp.log(rng.uniform("gumbel", (logits.shape[1],))))
        logits = filter_logits(logits, choice) + gumbel
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if choice.repetition_penalty != 1.0:
        is_repeated = is_repeated.at[jnp.arange(len(chosen)), chosen].set(True)
    positions = state.positions + ~state.has_stopped
    has_stopped = state.has_stopped
    if options.stop_token is not None:
        chosen = jnp.where(has_stopped, options.stop_token, chosen)
        has_stopped = has_stopped | (chosen == options.stop_token)
    return DecodingState(state.cache, chosen, positions, has_stopped, is_repeated), chosen


def filter_logits(logits: Array, choice: TokenChoice) -> Array:
    """Return logits divided by the temperature, with -inf for tokens that top-k or top-p leave out."""
    logits = logits / choice.temperature
    if choice.top_k is not None and choice.top_k < logits.shape[-1]:
        min_logit = jax.lax.top_k(logits, choice.top_k)[0][:, -1:]
        logits = jnp.where(logits < min_logit, -math.inf, logits)
    if choice.top_p is not None and choice.top_p < 1.0:
        order = jnp.argsort(-logits, axis=-1)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        # A token stays while the tokens before it sum to less than top_p, so the first one always stays.
        is_dropped = jnp.cumsum(probabilities, axis=-1) - probabilities >= choice.top_p
        rows = jnp.arange(len(logits))[:, None]
        logits = jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(is_dropped), -math.inf, logits)
    return logits


def _round_up(length: int) -> int:
    """Return the next power of two, at least MIN_LENGTH."""
    return max(MIN_LENGTH, 1 << (length - 1).bit_length())
