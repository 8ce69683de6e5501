"""A plain GPT-2 training loop with the settings of nanoGPT, as a baseline for time_to_loss.py; it prints one JSON line.

    python benchmarks/plain_gpt2.py --words 'language ...' --steps 500 --learning-rate 1e-3 --seed 0

Learned positions, layer norms, GELU of four times the width, tied embeddings, no biases and no dropout; AdamW (0.9, 0.95) with
a weight decay of 0.1 on matrices, clipping at 1, linear warm-up and a cosine to a tenth; bf16 and torch.compile on a GPU.
Tokens are those of the recipe in `--words`, windows are drawn at random, and all of its validation windows are evaluated.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.data.text.tokens import TokenWindows
from bottega.tasks.recipes import check_recipe, parse_overrides
from bottega.tasks.registry import open_workload

EVALUATION_ROWS = 64


class Block(nn.Module):
    """Attention and MLP of GPT-2, each after a layer norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT2(nn.Module):
    """GPT-2; returns the mean cross-entropy of the targets."""

    def __init__(self, *, vocab_size: int, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, std=0.02 / (math.sqrt(2 * num_layers) if name.endswith(("proj.weight", "down.weight")) else 1)
                )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def get_rate(step: int, *, peak: float, steps: int, warmup: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", required=True, help="words of `bottega train language` that name data and shape")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=10)
    arguments = parser.parse_args()
    recipe: Any = check_recipe(*parse_overrides(shlex.split(arguments.words))).recipe
    workload: Any = open_workload(recipe, progress=lambda *_: None)
    device = "cuda" if recipe.device == "cuda" else "cpu"
    print(json.dumps(train(workload, recipe, device, arguments)))


def train(workload: Any, recipe: Any, device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train; return the validation loss by step, and the seconds of all steps without evaluations and compilation."""
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    shape, context = workload.shape, workload.sequence_length
    model = GPT2(
        vocab_size=shape.vocab_size,
        context=context,
        width=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=max(1, shape.hidden_size // 64),
    ).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    compute_loss: Any = torch.compile(model) if device == "cuda" else model
    autocast: Any = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    tokens = workload.data.training().table.values("tokens")
    validation = workload.data.validation()
    rng, batch_size = np.random.default_rng(arguments.seed), recipe.training.batch_size
    warmup = max(1, round(0.1 * arguments.steps))

    def draw_batch() -> Tensor:
        starts = rng.integers(0, len(tokens) - context - 1, batch_size)
        rows = np.stack([tokens[i : i + context + 1] for i in starts]).astype(np.int64)
        return torch.from_numpy(rows).to(device, non_blocking=True)

    every = max(1, arguments.steps // arguments.evaluations)
    losses, seconds, start = [], 0.0, read_clock(device)
    for step in range(arguments.steps):
        rate = get_rate(step, peak=arguments.learning_rate, steps=arguments.steps, warmup=warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = draw_batch()
        with autocast:
            loss = compute_loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == min(2, arguments.steps - 1):  # the first steps compile
            start = read_clock(device)
        if (step + 1) % every == 0 or step + 1 == arguments.steps:
            seconds += read_clock(device) - start
            losses.append((step + 1, evaluate(model, validation, device, autocast)))
            start = read_clock(device)
    seconds *= arguments.steps / max(1, arguments.steps - 3)
    return {"losses": losses, "seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}


def read_clock(device: str) -> float:
    """Return the time after all work on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, source: TokenWindows, device: str, autocast: Any) -> float:
    """Return the mean loss over all validation windows."""
    total = torch.zeros((), device=device, dtype=torch.float64)
    for start in range(0, len(source), EVALUATION_ROWS):
        index = np.arange(start, min(start + EVALUATION_ROWS, len(source)))
        rows = torch.from_numpy(source.rows(index, np.zeros_like(index))["input_ids"].astype(np.int64)).to(device)
        with autocast:
            total += model(rows[:, :-1], rows[:, 1:]).double() * len(index)
    return float(total / len(source))


if __name__ == "__main__":
    main()
