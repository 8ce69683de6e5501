"""DiT-B/4 at 32 x 32 x 4 latents in bf16 on one GPU: ours compared with a plain implementation, eager and compiled.

The contestants run in one process, interleaved in short windows of steps to share clock and thermal effects, and medians
are compared. All draw noise and times, compute the flow-matching loss and take a fused AdamW step.

    python benchmarks/gpu_dit.py [--batch 256] [--rounds 5] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.config.training import Optimizer, Training
from bottega.engines.torch.engine import TorchEngine
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.tasks.generation.task import Generation

SIDE, CHANNELS, PATCH, WIDTH, LAYERS, HEADS, CLASSES = 32, 4, 4, 768, 12, 12, 1000


class PlainBlock(nn.Module):
    """A DiT block as in the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1[:, None]) + shift1[:, None]
        batch, tokens, _ = h.shape
        q, k, v = self.qkv(h).reshape(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, WIDTH)
        x = x + gate1[:, None] * self.proj(h)
        h = self.norm2(x) * (1 + scale2[:, None]) + shift2[:, None]
        return x + gate2[:, None] * self.mlp(h)


class PlainDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, WIDTH) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.out = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        angles = t[:, None] * 1000 * rates
        c = self.time(torch.cat((angles.cos(), angles.sin()), 1)) + self.label(y)
        h = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.ada(c).chunk(2, dim=1)
        h = self.out(self.norm(h) * (1 + scale[:, None]) + shift[:, None])
        n = SIDE // PATCH
        h = h.reshape(-1, n, n, PATCH, PATCH, CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", h).reshape(-1, CHANNELS, SIDE, SIDE)


def build_plain(batch: int, *, compiled: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = PlainDiT().cuda()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    x = torch.randn(batch, CHANNELS, SIDE, SIDE, device="cuda")
    y = torch.randint(0, CLASSES, (batch,), device="cuda")

    def step() -> None:
        t = torch.sigmoid(torch.randn(batch, device="cuda"))
        noise = torch.randn_like(x)
        noisy = (1 - t)[:, None, None, None] * x + t[:, None, None, None] * noise
        labels = torch.where(torch.rand(batch, device="cuda") < 0.1, CLASSES, y)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = called(noisy, t, labels)
        F.mse_loss(out.float(), noise - x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_ours(batch: int, *, ema: float | None = None) -> Callable[[], None]:
    backbone = DiTShape(
        grid=(SIDE, SIDE),
        channels=CHANNELS,
        patch=(PATCH, PATCH),
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
    )
    condition = ConditionShape(kind="class", size=CLASSES, hidden_size=WIDTH)
    task = Generation(key="image", shape=GeneratorShape(backbone=backbone, condition=condition))
    training = Training(compile=True, max_steps=1, optimizer=Optimizer(name="adamw"), weight_decay=0.0, ema=ema)
    engine = TorchEngine(task, training, rate=lambda step: 1e-4, device="cuda")
    rng = np.random.default_rng(0)
    data = {
        "image": rng.standard_normal((batch, SIDE, SIDE, CHANNELS), dtype=np.float32),
        "label": rng.integers(0, CLASSES, batch).astype(np.int32),
    }
    number = iter(range(1 << 30))

    def step() -> None:
        engine.train_step(next(number), data)

    return step


def time_step(step: Callable[[], None], steps: int) -> float:
    """Return the mean seconds of a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def matmul_rate() -> float:
    """Return the FLOP/s of a large bf16 product on this device, an upper bound."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize()
    return 30 * 2 * 8192**3 / (time.perf_counter() - start)


def flops_per_image() -> float:
    """Return the FLOPs of forward and backward: six per weight and token, plus attention."""
    tokens = (SIDE // PATCH) ** 2
    per_token = LAYERS * (4 + 8) * WIDTH**2 + 2 * WIDTH * PATCH * PATCH * CHANNELS
    per_image = LAYERS * 6 * WIDTH**2 + 2 * WIDTH**2
    return 6 * (tokens * per_token + per_image) + 12 * LAYERS * WIDTH * tokens**2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="compare the two compiled contestants only")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    contestants: dict[str, Any] = {
        **({} if arguments.quick else {"plain eager": build_plain(arguments.batch, compiled=False)}),
        "plain compiled": build_plain(arguments.batch, compiled=True),
        "ours": build_ours(arguments.batch),
        **({} if arguments.quick else {"ours with ema": build_ours(arguments.batch, ema=0.999)}),
    }
    for step in contestants.values():
        time_step(step, 10)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, step in contestants.items():
            seconds[name].append(time_step(step, arguments.steps))
    peak = matmul_rate()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "batch": arguments.batch}
    result["matmul_tflops"] = round(peak / 1e12, 1)
    for name, times in seconds.items():
        rate = arguments.batch / median(times)
        fraction = rate * flops_per_image() / peak
        result[name] = {"images_per_second": round(rate), "share_of_matmul": round(fraction, 3)}
        print(f"{name:<16}{rate:>10,.0f} images/s  {fraction:6.1%} of the matmul rate")
    own = result["ours"]["images_per_second"]
    result["over_compiled"] = round(own / result["plain compiled"]["images_per_second"], 3)
    if not arguments.quick:
        result["over_eager"] = round(own / result["plain eager"]["images_per_second"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
