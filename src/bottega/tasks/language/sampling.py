"""Token-by-token generation with a language model, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.decoder.torch import DecoderCache, Transformer


@dataclass
class _Row:
    """One text being generated. `window` holds the tokens in the context; `is_cached` says whether the cache has them."""

    tokens: list[int]
    window: list[int]
    is_cached: bool = False
    has_stopped: bool = False


def generate_tokens(
    model: Transformer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt until all have stopped; None for a prompt that has produced `stop_token` before.

    Prompts may differ in length and do not influence each other. Tokens are sampled with the Gumbel-max trick, with noise
    that depends on the seed, the index of the new token and the row, so a seed gives the same text on any device up to
    rounding; temperature 0 is greedy. When a text exceeds the context, its last half is read again from position 0 and the
    rest is dropped; a model without attention has no such limit.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_tokens {max_new_tokens}: expected 1 or more")
    _check_options(
        prompts, model.shape.vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, penalty=repetition_penalty
    )
    in_context = slice(-model.shape.context, None) if model.shape.has_attention else slice(None)
    rows = [_Row(list(prompt), list(prompt)[in_context]) for prompt in prompts]

    def pick_tokens(logits: Tensor, index: int) -> list[int]:
        logits = apply_repetition_penalty(logits, [row.tokens for row in rows], penalty=repetition_penalty)
        noise = Noise(seed, index, torch.arange(len(rows), device=device), xp=torch)
        return sample_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p).tolist()

    return _generate_stream(
        model, rows, pick_tokens, max_new_tokens=max_new_tokens, stop_token=stop_token, device=device
    )


def _generate_stream(
    model: Transformer,
    rows: list[_Row],
    pick_tokens: Callable[[Tensor, int], list[int]],
    *,
    max_new_tokens: int,
    stop_token: int | None,
    device: torch.device | str,
) -> Iterator[list[int | None]]:
    context = model.shape.context
    max_length = min(context, max(len(row.window) for row in rows) + max_new_tokens)
    device_type = torch.device(device).type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else model.head_weight.dtype
    cache = DecoderCache.empty(model.shape, batch_size=len(rows), length=max_length, device=device, dtype=dtype)
    was_training = model.training
    model.eval()
    try:
        for index in range(max_new_tokens):
            with torch.no_grad():
                next_tokens = pick_tokens(_compute_next_logits(model, rows, cache, device=device), index)
            yield [_append_token(row, token, stop_token) for row, token in zip(rows, next_tokens, strict=True)]
            if all(row.has_stopped for row in rows):
                return
    finally:
        model.train(was_training)


def _append_token(row: _Row, token: int, stop_token: int | None) -> int | None:
    if row.has_stopped:
        return None
    row.tokens.append(token)
    row.window.append(token)
    row.has_stopped = token == stop_token
    return token


def _compute_next_logits(
    model: Transformer, rows: list[_Row], cache: DecoderCache, *, device: torch.device | str
) -> Tensor:
    """Return the float32 logits of the token after each row, (rows, vocabulary), and extend the cache."""
    context = model.shape.context
    for row in rows:
        if model.shape.has_attention and len(row.window) > context:
            row.window, row.is_cached = row.window[-max(1, context // 2) :], False
    last_hidden = torch.empty(len(rows), model.shape.hidden_size, device=device)
    uncached = [i for i, row in enumerate(rows) if not row.is_cached]
    if len(uncached) < len(rows):
        # All rows take the step together. The result is not used for stopped rows and for rows to be prefilled; the
        # prefill comes later, because the state of a state-space model cannot forget a token.
        last_tokens = torch.tensor([[row.window[-1]] for row in rows], device=device)
        positions = [len(row.window) - 1 for row in rows]
        hidden = model.hidden(last_tokens, cache=cache, position=positions)[:, 0].float()
        cached = [i for i in range(len(rows)) if i not in set(uncached)]
        last_hidden[cached] = hidden[cached]
    if uncached:
        last_hidden[uncached] = _prefill(model, rows, uncached, cache, device=device)
    for row in rows:
        row.is_cached = True
    return model.logits(last_hidden.to(model.head_weight.dtype)).float()


def _prefill(
    model: Transformer, rows: list[_Row], indices: list[int], cache: DecoderCache, *, device: torch.device | str
) -> Tensor:
    """Read the windows of the rows `indices` from position 0; return the hidden state of each one's last token, (indices, width).

    Short rows are padded on the right, where causal attention does not look. The keys and values of padding are overwritten
    in the cache before a later token sees them, and padding does not enter the state of a state-space model.
    """
    windows = [rows[i].window for i in indices]
    length = max(map(len, windows))
    tokens = torch.tensor([window + [0] * (length - len(window)) for window in windows], device=device)
    is_whole_batch = len(indices) == len(rows)
    dtype = cache.layers[0][0].dtype
    prefill_cache = (
        cache
        if is_whole_batch
        else DecoderCache.empty(model.shape, batch_size=len(indices), length=length, device=device, dtype=dtype)
    )
    prefill_cache.reset()
    hidden = model.hidden(tokens, cache=prefill_cache, lengths=list(map(len, windows)))
    if not is_whole_batch:
        cache.update_rows(prefill_cache, indices, length=length)
    ends = torch.tensor([len(window) - 1 for window in windows], device=device)
    return hidden[torch.arange(len(indices), device=device), ends].float()


def apply_repetition_penalty(logits: Tensor, previous_tokens: list[list[int]], *, penalty: float) -> Tensor:
    """Lower the logits of the tokens that each row already has, prompt included (Keskar et al., 2019)."""
    if penalty == 1.0:
        return logits
    is_repeated = torch.zeros_like(logits, dtype=torch.bool)
    for row, tokens in zip(is_repeated, previous_tokens, strict=True):
        row[torch.tensor(sorted(set(tokens)), device=logits.device)] = True
    return torch.where(is_repeated, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample_tokens(
    logits: Tensor, noise: Noise, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Sample one token for each row of logits, (rows, vocabulary) -> (rows,)."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        min_logit = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < min_logit, -torch.inf)
    if top_p is not None and top_p < 1.0:
        sorted_logits, order = logits.sort(dim=-1, descending=True)
        probabilities = sorted_logits.softmax(dim=-1)
        # A token stays while the tokens before it sum to less than top_p, so the first one always stays.
        is_dropped = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(is_dropped).scatter(1, order, is_dropped), -torch.inf)
    gumbel = -torch.log(-torch.log(noise.uniform("gumbel", (logits.shape[-1],))))
    return (logits + gumbel).argmax(dim=-1)


def _check_options(
    prompts: list[list[int]],
    vocab_size: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    penalty: float,
) -> None:
    """Raise a UsageError for the first invalid option or prompt."""
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {i} is empty; give at least one token, such as the end-of-text token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(
                f"prompt {i} has a token outside 0..{vocab_size - 1}; encode it with the tokenizer of this run"
            )
    if not prompts:
        raise UsageError("no prompts; give at least one")
    if temperature < 0:
        raise UsageError(
            f"temperature {temperature}: expected 0 or more; 0 is greedy, 1 is the model's own distribution"
        )
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k {top_k}: expected 1 or more; remove it to sample from all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p {top_p}: expected a number above 0 and at most 1")
    if penalty <= 0:
        raise UsageError(f"repetition_penalty {penalty}: expected a number above 0; 1 is off, 1.1 is mild")
