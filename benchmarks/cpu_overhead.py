"""Our contestant in a benchmark of framework overhead: the time that `Trainer` adds to a step of a bare torch loop, on a CPU.

The benchmark that interleaves the others (bare loop, Accelerate, Lightning, HF Trainer) calls this one through its
`--extra`, with the task in BENCH_* variables; BENCH_DIR holds its models, optimizer settings and clock. Prints one JSON line
with microseconds and CPU time per step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

sys.path.insert(0, os.environ["BENCH_DIR"])
from common import GPT, MLP, Cfg, Clock

from bottega.config.training import Optimizer, Training
from bottega.core.callback import Callback, Progress
from bottega.core.model_spec import ModelSpec
from bottega.core.task import Task
from bottega.core.trainer import Cadences, Trainer
from bottega.core.types import Loss
from bottega.data.loading.loader import Loader
from bottega.data.sources.source import ArraySource
from bottega.engines.torch.engine import TorchEngine

BATCH = 8


def build_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shapes = {"tiny_gpt": Cfg(2, 2, 64, 64, 256), "gpt": Cfg(6, 6, 384, 256, 256)}
    return MLP(32) if name == "mlp" else GPT(shapes[name])


class BenchmarkTask(Task):
    """The benchmark's own model. It returns the mean loss, but a task returns the sum: the mean times the count."""

    name: str

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(build_model, self.name)}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"loss": batch["labels"].size}

    def loss(self, models: Any, batch: Any, rng: Any) -> Loss:
        mean = models["model"](batch["input_ids"], batch["labels"])["loss"]
        return Loss({"loss": (mean * batch["labels"].numel(), 1.0)})


class PrintLoss(Callback):
    """Prints the same output as the other contestants, at the same cadence."""

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        print({"step": progress.step, "loss": metrics["loss"]}, file=sys.stderr)


class TimedEngine(TorchEngine):
    clock: Clock

    def train_step(self, step: int, batch: Any, **options: Any) -> dict[str, Any]:
        out = super().train_step(step, batch, **options)
        self.clock.tick()
        return out


def build_source(name: str, count: int) -> ArraySource:
    random = np.random.default_rng(0)
    if name == "mlp":
        x = random.standard_normal((count * BATCH, 32)).astype(np.float32)
        return ArraySource({"input_ids": x, "labels": random.integers(0, 32, count * BATCH)})
    length = {"tiny_gpt": 64, "gpt": 256}[name]
    tokens = random.integers(0, 256, (min(count, 64) * BATCH, length + 1))
    return ArraySource({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})


def main() -> None:
    name = os.environ["BENCH_MODEL"]
    steps, warmup, window, threads = (int(os.environ[f"BENCH_{k}"]) for k in ("STEPS", "WARMUP", "WINDOW", "THREADS"))
    torch.set_num_threads(threads)
    training = Training(learning_rate=3e-4, weight_decay=0.1, optimizer=Optimizer(betas=(0.9, 0.95)), max_grad_norm=1.0)
    engine = TimedEngine(BenchmarkTask(name=name), training, rate=lambda step: 3e-4, device="cpu")
    engine.clock = clock = Clock(warmup, window)
    loader = Loader(build_source(name, warmup + steps), BATCH, seed=0)
    progress = Progress(total=warmup + steps)
    Trainer(
        engine=engine, batches=loader, progress=progress, cadences=Cadences(log=window), callbacks=[PrintLoss()]
    ).run()
    print(
        json.dumps(
            {
                "us_per_step": 1e6 * clock.step_s(),
                "cpu_us": 1e6 * clock.cpu_step_s(),
                "best_us": 1e6 * clock.step_s(min),
                "first_step_s": clock.first,
            }
        )
    )


if __name__ == "__main__":
    main()
