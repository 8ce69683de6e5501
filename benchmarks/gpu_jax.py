"""The JAX engine beside a plain jitted step and the torch engine: tokens/s of a language model of the shape of GPT-2 124M.

    python benchmarks/gpu_jax.py                       # one GPU, bf16, 64 x 1,024 tokens a step
    python benchmarks/gpu_jax.py --device cpu --tiny   # does it run?

Each contestant has a process of its own, rounds are interleaved, the first steps are not timed, and medians of windows and then
of rounds are compared. The plain step is what one would write by hand: the same architecture with unrolled layers, cuDNN attention,
cross-entropy in checkpointed chunks, and optax's AdamW with clipping. Prints a line a run, a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CONTESTANTS = ("plain", "jax", "torch")
WARMUP, WINDOW, NUM_WINDOWS, NUM_CHUNKS = 5, 10, 4, 16
RATE = 3e-4


def build_shape(tiny: bool) -> Any:
    from bottega.models.decoder.config import shape_for_size

    return shape_for_size("nano" if tiny else "verse", vocab_size=512 if tiny else 50304)


def make_batch(shape: Any, batch_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, shape.vocab_size, (batch_size, shape.context + 1)).astype(np.int32)


def build_engine_step(engine_name: str, shape: Any, batch: np.ndarray, device: str) -> tuple[Callable[[int], Any], Any]:
    """Return a function that trains one step, and one that waits for the device and returns the loss."""
    from bottega.config.training import Optimizer, Training
    from bottega.engines.backend import open_backend
    from bottega.tasks.language.task import Language

    training = Training(
        learning_rate=RATE,
        optimizer=Optimizer(betas=(0.9, 0.95)),
        mixed_precision="bf16",
        compile=device.startswith("cuda"),
    )
    engine = open_backend(engine_name).build_engine(
        Language(shape=shape), training, rate=lambda step: RATE, device=device
    )
    return lambda step: engine.train_step(step, {"input_ids": batch}), lambda metrics: engine.fetch(metrics)["loss"]


def build_plain_step(shape: Any, batch: np.ndarray) -> tuple[Callable[[int], Any], Any]:
    """Return a hand-written jitted step; its parameters are a dict of stacked arrays."""
    import jax
    import jax.numpy as jnp
    import optax

    width, inner, heads, size = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.head_size
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def draw(*sides: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), sides, jnp.float32)

    count = shape.num_layers
    params = {
        "embed": draw(shape.vocab_size, width),
        "q": draw(count, width, heads * size),
        "k": draw(count, width, heads * size),
        "v": draw(count, width, heads * size),
        "o": draw(count, heads * size, width),
        "gate": draw(count, width, inner),
        "up": draw(count, width, inner),
        "down": draw(count, inner, width),
        "norm1": jnp.ones((count, width)),
        "norm2": jnp.ones((count, width)),
        "q_norm": jnp.ones((count, size)),
        "k_norm": jnp.ones((count, size)),
        "norm": jnp.ones(width),
    }
    angles = np.arange(shape.context)[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)[None]
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None] for f in (np.cos, np.sin))

    def normalise(x: Any, weight: Any) -> Any:
        values = x.astype(jnp.float32)
        return (values * jax.lax.rsqrt(jnp.mean(values * values, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def apply_block(x: Any, p: Any) -> Any:
        h = normalise(x, p["norm1"])
        q, k, v = ((h @ p[name].astype(h.dtype)).reshape(*h.shape[:2], heads, size) for name in "qkv")
        q, k = rotate(normalise(q, p["q_norm"])), rotate(normalise(k, p["k_norm"]))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        x = x + mixed.reshape(*h.shape[:2], -1) @ p["o"].astype(h.dtype)
        h = normalise(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"].astype(h.dtype)) * (h @ p["up"].astype(h.dtype))) @ p["down"].astype(
            h.dtype
        )

    def compute_loss(p: Any, ids: Any) -> Any:
        embed = p["embed"].astype(jnp.bfloat16)
        x = embed[ids[:, :-1]]
        layers = {name: value for name, value in p.items() if name not in ("embed", "norm")}
        for i in range(count):
            x = apply_block(x, jax.tree.map(lambda value, i=i: value[i], layers))
        x, targets = normalise(x, p["norm"]), ids[:, 1:]

        @jax.checkpoint
        def add_chunk(total: Any, chunk: Any) -> Any:
            logits = (chunk[0] @ embed.T).astype(jnp.float32)
            own = jnp.take_along_axis(logits, chunk[1][:, None], -1)[:, 0]
            return total + jnp.sum(jax.nn.logsumexp(logits, -1) - own), None

        chunks = x.reshape(NUM_CHUNKS, -1, width), targets.reshape(NUM_CHUNKS, -1)
        return jax.lax.scan(add_chunk, jnp.float32(0), chunks)[0] / targets.size

    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, b1=0.9, b2=0.95, weight_decay=0.1))

    def compute_step(p: Any, state: Any, ids: Any) -> Any:
        loss, gradients = jax.value_and_grad(compute_loss)(p, ids)
        updates, state = transform.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, loss

    donated = jax.jit(compute_step, donate_argnums=(0, 1))
    held = {"params": params, "state": transform.init(params)}

    def train(step: int) -> Any:
        held["params"], held["state"], loss = donated(held["params"], held["state"], batch)
        return loss

    return train, float


def run_contestant(name: str, device: str, tiny: bool, batch_size: int) -> dict[str, Any]:
    """Train and time one contestant in this process."""
    shape = build_shape(tiny)
    batch = make_batch(shape, batch_size)
    start = time.perf_counter()
    train, finish = build_plain_step(shape, batch) if name == "plain" else build_engine_step(name, shape, batch, device)
    loss = finish(train(0))
    first = time.perf_counter() - start
    for step in range(1, WARMUP):
        loss = finish(train(step))
    seconds, step = [], WARMUP
    for _ in range(NUM_WINDOWS):
        begin = time.perf_counter()
        for _ in range(WINDOW):
            out = train(step)
            step += 1
        loss = finish(out)
        seconds.append((time.perf_counter() - begin) / WINDOW)
    return {
        "tokens_per_s": batch_size * shape.context / statistics.median(seconds),
        "first_step_s": first,
        "peak_gib": find_peak_gib(name, device),
        "loss": loss,
    }


def find_peak_gib(name: str, device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    if name == "torch":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    import jax

    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30


def print_table(rows: dict[str, list[dict[str, Any]]]) -> None:
    medians = {name: statistics.median(row["tokens_per_s"] for row in runs) for name, runs in rows.items()}
    print(f"\n{'contestant':<12}{'tokens/s':>12}{'of plain':>10}{'of torch':>10}{'peak GiB':>10}{'first step, s':>15}")
    for name, runs in rows.items():
        peak = runs[0]["peak_gib"]
        ratios = [f"{medians[name] / medians[other]:.2f}" if other in medians else "" for other in ("plain", "torch")]
        firsts = f"{runs[0]['first_step_s']:.1f} {runs[-1]['first_step_s']:.1f}"
        print(
            f"{name:<12}{medians[name]:>12,.0f}{ratios[0]:>10}{ratios[1]:>10}{'' if peak is None else f'{peak:.1f}':>10}{firsts:>15}"
        )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, help="sequences in a step; default 64, or 4 with --tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    batch_size = arguments.batch or (4 if arguments.tiny else 64)
    if arguments.contestant:
        print(json.dumps(run_contestant(arguments.contestant, arguments.device, arguments.tiny, batch_size)))
        return
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only.split(",")}
    for _ in range(arguments.rounds):
        for name, runs in rows.items():
            command = [sys.executable, __file__, *words, "--contestant", name]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
            if done.returncode:
                raise SystemExit(f"{name}:\n{done.stderr[-3000:]}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name:<8} {runs[-1]['tokens_per_s']:>12,.0f} tokens/s  loss {runs[-1]['loss']:.3f}", flush=True)
    print_table(rows)
    print(json.dumps({"bench": "gpu_jax", "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
