"""Text from a language model, token by token, as a function of the seed."""

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
    """One text that grows. `window` is the part the model still sees, `read` whether the cache holds its beginning."""

    tokens: list[int]
    window: list[int]
    read: bool = False
    stopped: bool = False


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
    """Yield one token for each prompt as it comes; None for a prompt that has met `stop_token` (which is yielded).

    Prompts may differ in length, and no row sees another. The noise is f(seed, index of the new token, row), added to
    the logits (Gumbel-max), so a seed gives the same text on any device up to rounding; temperature 0 takes the most
    likely token. When a text fills the context, its last half is read again from position 0 and the rest forgotten; a
    model without attention has no such limit, and reads on.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_tokens {max_new_tokens}: at least one token is asked for")
    _check(
        prompts, model.shape.vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, penalty=repetition_penalty
    )
    seen = slice(-model.shape.context, None) if model.shape.has_attention else slice(None)
    rows = [_Row(list(prompt), list(prompt)[seen]) for prompt in prompts]

    def pick(logits: Tensor, index: int) -> list[int]:
        logits = apply_repetition_penalty(logits, [row.tokens for row in rows], penalty=repetition_penalty)
        noise = Noise(seed, index, torch.arange(len(rows), device=device), xp=torch)
        return sample_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p).tolist()

    return _stream(model, rows, pick, max_new_tokens=max_new_tokens, stop_token=stop_token, device=device)


def _stream(
    model: Transformer,
    rows: list[_Row],
    pick: Callable[[Tensor, int], list[int]],
    *,
    max_new_tokens: int,
    stop_token: int | None,
    device: torch.device | str,
) -> Iterator[list[int | None]]:
    context = model.shape.context
    longest = min(context, max(len(row.window) for row in rows) + max_new_tokens)
    kind = torch.device(device).type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.head_weight.dtype
    cache = DecoderCache.empty(model.shape, batch=len(rows), length=longest, device=device, dtype=dtype)
    training = model.training
    model.eval()
    try:
        for index in range(max_new_tokens):
            with torch.no_grad():
                chosen = pick(_next_logits(model, rows, cache, device=device), index)
            yield [_grow(row, token, stop_token) for row, token in zip(rows, chosen, strict=True)]
            if all(row.stopped for row in rows):
                return
    finally:
        model.train(training)


def _grow(row: _Row, token: int, stop_token: int | None) -> int | None:
    if row.stopped:
        return None
    row.tokens.append(token)
    row.window.append(token)
    row.stopped = token == stop_token
    return token


def _next_logits(model: Transformer, rows: list[_Row], cache: DecoderCache, *, device: torch.device | str) -> Tensor:
    """Float32 logits [rows, V] of the token after each row; the cache then holds all that was read."""
    context = model.shape.context
    for row in rows:
        if model.shape.has_attention and len(row.window) > context:
            row.window, row.read = row.window[-max(1, context // 2) :], False
    last = torch.empty(len(rows), model.shape.hidden_size, device=device)
    fresh = [i for i, row in enumerate(rows) if not row.read]
    if len(fresh) < len(rows):
        # All rows step together. Those that stopped read their last token once more, which nobody asks for; so do those
        # that are to be read anew, and that comes after, because a state cannot take a token back.
        steps = torch.tensor([[row.window[-1]] for row in rows], device=device)
        places = [len(row.window) - 1 for row in rows]
        hidden = model.hidden(steps, cache=cache, position=places)[:, 0].float()
        others = [i for i in range(len(rows)) if i not in set(fresh)]
        last[others] = hidden[others]
    if fresh:
        last[fresh] = _prefill(model, rows, fresh, cache, device=device)
    for row in rows:
        row.read = True
    return model.logits(last.to(model.head_weight.dtype)).float()


def _prefill(
    model: Transformer, rows: list[_Row], chosen: list[int], cache: DecoderCache, *, device: torch.device | str
) -> Tensor:
    """Read whole windows from position 0; the hidden state of each one's last token.

    Short rows are filled up on the right: what stands there is later than every real token, so none of them sees it. Of
    keys and values it is overwritten in the cache before a later token could; into a state it never enters.
    """
    windows = [rows[i].window for i in chosen]
    length = max(map(len, windows))
    tokens = torch.tensor([window + [0] * (length - len(window)) for window in windows], device=device)
    whole = len(chosen) == len(rows)
    size = cache.layers[0][0].dtype
    part = (
        cache if whole else DecoderCache.empty(model.shape, batch=len(chosen), length=length, device=device, dtype=size)
    )
    part.reset()
    hidden = model.hidden(tokens, cache=part, lengths=list(map(len, windows)))
    if not whole:
        cache.update_rows(part, chosen, length=length)
    ends = torch.tensor([len(window) - 1 for window in windows], device=device)
    return hidden[torch.arange(len(chosen), device=device), ends].float()


def apply_repetition_penalty(logits: Tensor, seen: list[list[int]], *, penalty: float) -> Tensor:
    """Make what was already said less likely (Keskar et al., 2019); the prompt counts as said."""
    if penalty == 1.0:
        return logits
    said = torch.zeros_like(logits, dtype=torch.bool)
    for mark, tokens in zip(said, seen, strict=True):
        mark[torch.tensor(sorted(set(tokens)), device=logits.device)] = True
    return torch.where(said, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample_tokens(
    logits: Tensor, noise: Noise, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """One token for each row of logits [rows, V]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        # A token stays while those before it hold less than top_p together, so the first one always stays.
        dropped = chances.cumsum(dim=-1) - chances >= top_p
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
    gumbel = -torch.log(-torch.log(noise.uniform("gumbel", (logits.shape[-1],))))
    return (logits + gumbel).argmax(dim=-1)


def _check(
    prompts: list[list[int]],
    vocab_size: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    penalty: float,
) -> None:
    """The first wrong setting, by name, before anything is computed."""
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {i} is empty: a text starts from at least one token, such as the start token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(
                f"prompt {i} holds a token outside 0..{vocab_size - 1}: it was made with another tokenizer"
            )
    if not prompts:
        raise UsageError("no prompts: give at least one")
    if temperature < 0:
        raise UsageError(f"temperature {temperature} is negative: 0 is greedy, 1 the model's own distribution")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k {top_k} keeps nothing: use 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p {top_p} is not in (0, 1]")
    if penalty <= 0:
        raise UsageError(f"repetition_penalty {penalty} is not positive: 1 is none, 1.1 is mild")
