"""Speed of generation: text and diffusion samples, with and without CUDA graphs, and transformers' generate on the same weights.

The contestants run in one process, interleaved in rounds to share clock and thermal effects; medians are compared, and each
table is printed as soon as it is measured. The plain loop is the one before decoding steps and graphs. On a GPU everything
is computed in bfloat16, and the tokens of both loops are compared in float32.

    python benchmarks/generation_speed.py                  # one GPU: 124M, 1 and 32 streams; two diffusion transformers
    python benchmarks/generation_speed.py --device cpu     # the nano model, 1 and 8 streams
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.models import cuda_graph
from bottega.models.decoder.config import SIZES, TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.dit import torch as dit
from bottega.models.folders.pretrained import export_transformers
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.generator.torch import Generator
from bottega.models.initial import initialise
from bottega.tasks.generation import solvers
from bottega.tasks.generation.guidance import guide
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.task import Generation
from bottega.tasks.language.sampling import generate_tokens, generate_tokens_plainly

PROMPT_TOKENS, TEMPERATURE, GUIDANCE, SOLVER_STEPS = 16, 0.8, 2.0, 10
DIT_SHAPES = {
    "image recipe (4 x 128, 8 x 8)": ((8, 8), (2, 2), 1, 128, 4, 4, (20,)),
    "DiT-B/4 (12 x 768, 32 x 32)": ((32, 32), (4, 4), 4, 768, 12, 12, (4, 16, 64, 256)),
}
"""Grid, patch, channels, width, layers, heads, and batch sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {"device": describe_device(device), "torch": torch.__version__}
    results["text"] = measure_text(device, options.rounds)
    if device.type == "cuda":
        results["equal_tokens"] = compare_tokens(device)
        results["diffusion"] = measure_diffusion(device, options.rounds)
        results["fallbacks"] = cuda_graph._print_once.cache_info().currsize
    print(json.dumps(results))


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def report(text: str) -> None:
    print(text, flush=True)


def build_language_model(device: torch.device) -> Transformer:
    size, vocab_size = ("verse", 50304) if device.type == "cuda" else ("nano", 1024)
    model = Transformer(TransformerShape(**{**SIZES[size], "vocab_size": vocab_size}))
    initialise(model, 0, residual_layers=model.shape.num_layers)
    return model.to(device).eval()


def build_prompts(num_streams: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (num_streams, PROMPT_TOKENS), generator=generator).tolist()


def measure_text(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return the tokens/s of each contestant by number of streams."""
    model = build_language_model(device)
    is_cuda = device.type == "cuda"
    # The slow contestants generate less on a GPU; on a CPU all stay within the context of 128.
    contestants: dict[str, tuple[Callable[[list[list[int]], int], None], int]] = {
        "plain loop": (run_ours(generate_tokens_plainly, model, device), 48 if is_cuda else 100),
        "bottega": (run_ours(generate_tokens, model, device), 480 if is_cuda else 100),
    }
    try:
        contestants["transformers"] = (run_transformers(model, device), 48 if is_cuda else 100)
    except ImportError as error:
        report(f"transformers is left out: {error}")
    report(f"{describe_device(device)}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, tokens/s")
    results = {}
    for num_streams in (1, 32) if is_cuda else (1, 8):
        prompts = build_prompts(num_streams, model.shape.vocab_size)
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range(rounds + 1):  # the first loads kernels and is not counted
            for name, (run, num_tokens) in contestants.items():
                seconds = measure_seconds(partial(run, prompts, num_tokens), device)
                if round_number:
                    speeds[name].append(num_streams * num_tokens / seconds)
        medians = {name: median(values) for name, values in speeds.items()}
        results[str(num_streams)] = medians
        for name, value in medians.items():
            spread = (max(speeds[name]) - min(speeds[name])) / value
            ratio = f"{value / medians['plain loop']:6.1f} x the plain loop"
            report(f"  {num_streams:3d} streams  {name:14s} {value:10,.0f}  {ratio}  (spread {spread:.2f})")
    return results


def run_ours(function: Any, model: Transformer, device: torch.device) -> Callable[[list[list[int]], int], None]:
    def run(prompts: list[list[int]], num_tokens: int) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            tokens = list(function(model, prompts, max_new_tokens=num_tokens, temperature=TEMPERATURE, device=device))
        assert len(tokens) == num_tokens

    return run


def run_transformers(model: Transformer, device: torch.device) -> Callable[[list[list[int]], int], None]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        export_transformers(model.state_dict(), model.shape, folder)
        other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    @torch.no_grad()
    def run(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts, device=device)
        out = other.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + num_tokens

    return run


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_tokens(device: torch.device) -> bool:
    """Return whether both loops give the same tokens in float32, for prompts of different lengths."""
    model = build_language_model(device)
    prompts = [prompt[: 4 + 3 * i] for i, prompt in enumerate(build_prompts(4, model.shape.vocab_size))]
    are_equal = True
    for temperature in (0.0, TEMPERATURE):
        settings: dict[str, Any] = {"max_new_tokens": 48, "temperature": temperature, "device": device}
        rows = [list(f(model, prompts, **settings)) for f in (generate_tokens, generate_tokens_plainly)]
        are_equal &= rows[0] == rows[1]
    report(f"same tokens as the plain loop in float32: {are_equal}")
    return are_equal


def measure_diffusion(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return the samples/s of a solver before and now, by model and batch size."""
    report(f"diffusion transformers, guidance {GUIDANCE:g}, {SOLVER_STEPS} steps of Heun, samples/s")
    results = {}
    for label, (grid, patch, channels, width, layers, heads, batch_sizes) in DIT_SHAPES.items():
        backbone = DiTShape(
            grid=grid, patch=patch, channels=channels, hidden_size=width, num_layers=layers, num_heads=heads
        )
        condition = ConditionShape(kind="class", size=10, hidden_size=width)
        task = Generation(key="image", shape=GeneratorShape(backbone=backbone, condition=condition))
        model = Generator(task.shape).to(device).eval()
        for batch_size in batch_sizes:
            batch = {"label": torch.arange(batch_size, device=device) % 10}
            noise = Noise(0, 0, torch.arange(batch_size, device=device), torch)
            contestants = {
                name: partial(function, task, model, batch, noise)
                for name, function in (("plain", draw_plainly), ("now", draw))
            }
            speeds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for round_number in range(rounds + 1):
                for contestant, run in contestants.items():
                    seconds = measure_seconds(run, device)
                    if round_number:
                        speeds[contestant].append(batch_size / seconds)
            plain, now = (median(values) for values in speeds.values())
            results[f"{label}, batch {batch_size}"] = {"plain": plain, "now": now}
            report(f"  {label:32s} batch {batch_size:3d}  plain {plain:9,.1f}  now {now:9,.1f}  {now / plain:5.2f} x")
    return results


@torch.no_grad()
def draw(task: Generation, model: Generator, batch: dict[str, Tensor], noise: Noise) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return task.draw({"model": model}, batch, noise, steps=SOLVER_STEPS, guidance=GUIDANCE)


@torch.no_grad()
def draw_plainly(task: Generation, model: Generator, batch: dict[str, Tensor], noise: Noise) -> Tensor:
    """Draw as before: two passes per evaluation, weights converted in each, and no kernels of our own."""
    start = noise.normal("start", task.shape.sample)
    drop = torch.ones(len(start), dtype=torch.bool, device=start.device)
    condition, dropped = ({"label": batch["label"], "drop": value} for value in (~drop, drop))
    predict = guide(model, condition, dropped, guidance=GUIDANCE, joins_passes=False)
    with torch.autocast("cuda", torch.bfloat16), mock.patch.object(dit, "_find_kernels", return_value=None):
        return solvers.sample(predict, start, NoisePath(), steps=SOLVER_STEPS)


if __name__ == "__main__":
    main()
