"""Token-by-token generation with a language model, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.cuda_graph import report_failed_capture
from bottega.models.decoder.step import supports_decode_step
from bottega.models.decoder.torch import Transformer
from bottega.models.device import uses_bfloat16
from bottega.tasks.language.decoding import GenerationPlan, GraphDecoder, generate_on_host
from bottega.tasks.language.generated_text import NextTokens, TextRow, check_prompts
from bottega.tasks.language.text_rows import choose_decoding_dtype, compute_next_logits, create_cache
from bottega.tasks.language.token_choice import TokenChoice, to_gumbel

MIN_GRAPH_TOKENS = 8
"""New tokens from which steps on a GPU are captured; a capture takes as long as a few steps."""


def generate_tokens(model: Transformer, prompts: list[list[int]], **options: Any) -> Iterator[NextTokens]:
    """Yield the next token of each prompt until all have stopped; None for a prompt that has produced `stop_token` before.

    Prompts may differ in length and do not influence each other; of one longer than the context, the last `context` tokens
    are read. Tokens are sampled with the Gumbel-max trick, with noise that depends on the seed, the index of the new token
    and the row, so a seed gives the same text on any device up to rounding; temperature 0 is greedy. When a text exceeds
    the context, its last half is read again from position 0 and the rest is dropped; a model without attention has no such
    limit. Options are those of `plan_generation`.

    On a GPU the steps are CUDA graphs, and tokens arrive in blocks of up to 32. The weights must not change until the end.
    """
    plan = plan_generation(model, prompts, **options)
    is_fast = plan.device.type in ("cpu", "cuda") and supports_decode_step(model)
    return _in_evaluation_mode(model, _generate_fast(plan) if is_fast else _generate_plainly(plan))


def generate_tokens_of_run(
    model: Transformer, prompts: list[list[int]], *, device: torch.device | str, mixed_precision: str, **options: Any
) -> Iterator[NextTokens]:
    """Yield the tokens of `generate_tokens`, computed in bfloat16 on a GPU unless the run was trained in another precision.

    A step on a GPU mostly reads the weights, which are then half as many bytes.
    """

    def in_precision() -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=uses_bfloat16(device, mixed_precision))

    with in_precision():
        stream = generate_tokens(model, prompts, device=device, **options)

    def run() -> Iterator[NextTokens]:
        with in_precision():
            yield from stream

    return run()


def generate_tokens_plainly(model: Transformer, prompts: list[list[int]], **options: Any) -> Iterator[NextTokens]:
    """Yield the tokens of `generate_tokens` from calls of the model, one for each token: its reference and its fallback."""
    return _in_evaluation_mode(model, _generate_plainly(plan_generation(model, prompts, **options)))


def plan_generation(
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
) -> GenerationPlan:
    """Check the options of a generation and allocate its cache; raise UsageError or OutOfMemory."""
    if max_new_tokens < 1:
        raise UsageError(f"max_tokens {max_new_tokens}: expected 1 or more")
    check_prompts(prompts, model.shape.vocab_size)
    choice = TokenChoice(temperature, top_k, top_p, repetition_penalty)
    choice.check()
    rows = [TextRow.start(prompt, model.shape) for prompt in prompts]
    length = min(model.shape.context, max(len(row.window) for row in rows) + max_new_tokens)
    dtype = choose_decoding_dtype(model, device)
    return GenerationPlan(
        model=model,
        rows=rows,
        cache=create_cache(model.shape, num_rows=len(rows), length=length, device=device, dtype=dtype),
        choice=choice,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop_token=stop_token,
        device=torch.device(device),
        dtype=dtype,
    )


def _in_evaluation_mode(model: Transformer, stream: Iterator[NextTokens]) -> Iterator[NextTokens]:
    was_training = model.training
    model.eval()
    try:
        yield from stream
    finally:
        model.train(was_training)


def _generate_fast(plan: GenerationPlan) -> Iterator[NextTokens]:
    if plan.device.type == "cpu" or plan.max_new_tokens < MIN_GRAPH_TOKENS:
        yield from generate_on_host(plan)
        return
    decoder = GraphDecoder(plan)
    try:
        yield from decoder.generate()
    finally:
        decoder.release()
    if decoder.failure is not None:
        report_failed_capture("text is generated", decoder.failure)
        yield from _generate_plainly(plan, first_index=decoder.num_generated)


def _generate_plainly(plan: GenerationPlan, *, first_index: int = 0) -> Iterator[NextTokens]:
    rows, vocab_size = plan.rows, plan.model.shape.vocab_size
    for row in rows:
        row.is_cached = False
    for index in range(first_index, plan.max_new_tokens):
        with torch.no_grad():
            logits = compute_next_logits(plan.model, rows, plan.cache, device=plan.device)
            noise = Noise(plan.seed, index, torch.arange(len(rows), device=plan.device), xp=torch)
            gumbel = None if plan.choice.is_greedy else to_gumbel(noise.uniform("gumbel", (vocab_size,)))
            next_tokens = plan.choice.choose(logits, gumbel, plan.find_repeated_tokens()).tolist()
        yield plan.append(next_tokens)
        if plan.is_finished:
            return
