"""Our contestant in the GPT-2 124M throughput benchmark on one GPU: tokens/s, peak memory, time to the first step.

The benchmark of the other trainers calls this through its `--extra`, with the task in BENCH_* variables, and reads one JSON
line. The model is size `verse`, whose FLOPs per token are within 2 % of GPT-2's at the same shape. Any training key can be set:

    python benchmarks/gpu_language.py training.gradient_checkpointing=true deterministic=true
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import torch

STARTED = time.perf_counter()  # as for the others: after importing torch, before importing the framework

from bottega.config.training import Optimizer, Training
from bottega.core.callback import Progress
from bottega.core.trainer import Cadences, Trainer
from bottega.data.loading.loader import Loader
from bottega.data.sources.source import Source
from bottega.engines.torch.engine import TorchEngine
from bottega.models.decoder.config import SIZES, TransformerShape
from bottega.tasks.language.task import Language


class Windows(Source):
    """Rows of length + 1 tokens from the benchmark's file."""

    fingerprint = "benchmark"

    def __init__(self, path: str, length: int) -> None:
        self.tokens, self.length = np.memmap(path, dtype=np.uint16, mode="r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {"input_ids": self.tokens[index[:, None] * self.length + np.arange(self.length + 1)].astype(np.int32)}

    def describe(self, index: int, epoch: int) -> str:
        return f"window {index}"


class TimedEngine(TorchEngine):
    """Records the time of windows of steps, synchronising with the device at their boundaries only."""

    warmup: int
    window: int
    marks: list[float]
    first_step_seconds: float | None = None
    last_loss: float | None = None

    def train_step(self, step: int, batch: Any, **options: Any) -> dict[str, Any]:
        out = super().train_step(step, batch, **options)
        if self.first_step_seconds is None:
            torch.cuda.synchronize() if self.device.type == "cuda" else None
            self.first_step_seconds = time.perf_counter() - STARTED
        if step + 1 >= self.warmup and (step + 1 - self.warmup) % self.window == 0:
            torch.cuda.synchronize() if self.device.type == "cuda" else None
            self.marks.append(time.perf_counter())
        return out

    def fetch(self, metrics: Any) -> dict[str, float]:
        host = super().fetch(metrics)
        self.last_loss = host.get("loss", self.last_loss)
        return host


def main() -> None:
    options = {
        k: int(os.environ[f"BENCH_{k}"]) for k in ("BATCH", "T", "VOCAB", "LAYERS", "D", "WARMUP", "STEPS", "WINDOW")
    }
    overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
    dims = {**SIZES["verse"], "num_layers": options["LAYERS"], "context": options["T"], "vocab_size": options["VOCAB"]}
    if options["D"] != 768:
        dims |= {
            "hidden_size": options["D"],
            "head_size": 32,
            "num_heads": options["D"] // 32,
            "num_kv_heads": options["D"] // 32,
        }
        dims["intermediate_size"] = options["D"] * 8 // 3
    shape = TransformerShape(**dims)
    settings = {k.removeprefix("training."): json.loads(v) for k, v in overrides.items() if k.startswith("training.")}
    settings.setdefault(
        "compile", os.environ["BENCH_DEVICE"].startswith("cuda")
    )  # there is no run whose length decides
    training = Training(learning_rate=3e-4, optimizer=Optimizer(betas=(0.9, 0.95)), mixed_precision="bf16", **settings)
    engine = TimedEngine(
        Language(shape=shape),
        training,
        rate=lambda step: 3e-4,
        device=os.environ["BENCH_DEVICE"],
        deterministic=overrides.get("deterministic") == "true",
    )
    engine.warmup, engine.window, engine.marks = options["WARMUP"], options["WINDOW"], []
    loader = Loader(Windows(os.environ["BENCH_TOKENS"], options["T"]), options["BATCH"], seed=0, prefetch=2)
    progress = Progress(total=options["WARMUP"] + options["STEPS"])
    Trainer(engine=engine, batches=loader, progress=progress, cadences=Cadences(log=options["WINDOW"])).run()
    step = median(b - a for a, b in zip(engine.marks, engine.marks[1:], strict=False)) / options["WINDOW"]
    print(
        json.dumps(
            {
                "tokens_per_s": options["BATCH"] * options["T"] / step,
                "ms_per_step": 1e3 * step,
                "first_step_s": engine.first_step_seconds,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if engine.device.type == "cuda" else None,
                "loss": engine.last_loss,
                "batch": options["BATCH"],
                "flops_ratio": shape.flops_per_token() / float(os.environ["BENCH_FLOPS_PER_TOKEN"]),
            }
        )
    )


if __name__ == "__main__":
    main()
