"""Cost of the statistics per module: time of training steps with and without them, in interleaved windows of one log each.

A tiny GPT on the CPU, the shape of GPT-2 124M on a GPU. `--unlimited` inspects at every log, whatever it costs; else the limit
of 2 % decides, as in a run:

    python benchmarks/watch_cost.py [--windows 60] [--unlimited] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import numpy as np
import torch

from bottega.config.training import Training
from bottega.engines.torch.engine import TorchEngine
from bottega.models.decoder.config import SIZES, TransformerShape
from bottega.tasks.language.task import Language

STEPS_PER_LOG = 10  # the default of logging.every
SHAPES = {
    "cpu": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 172, "head_size": 32, "num_heads": 2, "num_kv_heads": 2},
    "cuda": {"num_layers": 12},
}  # fmt: skip
BATCHES = {"cpu": (8, 64, 256), "cuda": (32, 1024, 50304)}
"""Examples, tokens of each, and the size of the vocabulary."""


def build_engine(device: str) -> TorchEngine:
    _, length, vocabulary = BATCHES[device]
    shape = TransformerShape(**{**SIZES["verse"], **SHAPES[device], "context": length, "vocab_size": vocabulary})
    is_gpu = device == "cuda"
    training = Training(learning_rate=3e-4, mixed_precision="bf16" if is_gpu else "fp32", compile=is_gpu)
    return TorchEngine(Language(shape=shape), training, rate=lambda step: 3e-4, device=device)


def time_window(engine: TorchEngine, batch: dict[str, np.ndarray], first_step: int, *, inspect: bool) -> float:
    """Train until a log, and return the seconds of a step."""
    start = time.perf_counter()
    for step in range(first_step, first_step + STEPS_PER_LOG):
        is_log = step == first_step + STEPS_PER_LOG - 1
        metrics = engine.train_step(step, batch, module_statistics=inspect and is_log)
    engine.fetch(metrics)
    engine.fetch_inspection()
    return (time.perf_counter() - start) / STEPS_PER_LOG


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--unlimited", action="store_true")
    arguments = parser.parse_args()
    size, length, vocabulary = BATCHES[arguments.device]
    batch = {"input_ids": np.random.default_rng(0).integers(0, vocabulary, (size, length + 1)).astype(np.int32)}
    engines = {is_inspected: build_engine(arguments.device) for is_inspected in (False, True)}
    if arguments.unlimited:
        engines[True].inspector.budget.share = 1.0
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for window in range(arguments.windows + 2):
        for is_inspected in (False, True) if window % 2 else (True, False):
            measured = time_window(engines[is_inspected], batch, window * STEPS_PER_LOG, inspect=is_inspected)
            seconds[is_inspected] += [measured] if window >= 2 else []  # the first ones compile and allocate
    plain, inspected = median(seconds[False]), median(seconds[True])
    # Windows without an inspection count, too: the mean of the differences is what a run pays.
    mean_cost = sum(seconds[True]) / sum(seconds[False]) - 1
    print(
        json.dumps(
            {
                "device": arguments.device,
                "ms_per_step": round(1e3 * plain, 3),
                "ms_per_step_inspected": round(1e3 * inspected, 3),
                "ratio_of_medians": round(inspected / plain, 4),
                "mean_cost": round(mean_cost, 4),
                "inspection_ms": round(1e3 * STEPS_PER_LOG * (inspected - plain), 3),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None,
            }
        )
    )


if __name__ == "__main__":
    main()
