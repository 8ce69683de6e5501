"""A state-space layer compared with causal attention on one GPU: tokens/s of forward and backward as the context grows.

The number of tokens is constant, hence also the cost of the projections. The contestants are compiled, run in bf16 and are
interleaved in short windows of steps to share clock and thermal effects; medians are compared. A layer is the mixer alone;
`--models` also compares models of 24 layers with the same feed-forward. Attention has no rotary positions here, which
favours it.

    python benchmarks/gpu_ssm.py [--contexts 2048 ... 32768] [--tokens 32768] [--rounds 5] [--steps 10] [--models]
    python benchmarks/gpu_ssm.py --tiny        # check that it runs, on a CPU
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.initial import initialise
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.torch import StateSpace

Step = Callable[[], Tensor]


class CausalAttention(nn.Module):
    """Causal attention: four projections and the device's fastest kernel."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.head_size = head_size

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Scan(nn.Module):
    """A state-space layer without its final state."""

    def __init__(self, shape: SSMShape) -> None:
        super().__init__()
        self.mixer = StateSpace(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x)[0]


def build_layer_step(layer: nn.Module, width: int, *, rows: int, length: int, device: str, compiled: bool) -> Step:
    initialise(layer, 0, residual_layers=1)
    layer.to(device)
    called = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, length, width, device=device, generator=generator).bfloat16().requires_grad_()
    upstream = torch.randn(rows, length, width, device=device, generator=generator).bfloat16()

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            y = called(x)
        y.backward(upstream)
        layer.zero_grad(set_to_none=True)
        x.grad = None
        return y

    return step


def build_model_step(shape: TransformerShape, *, rows: int, device: str, compiled: bool) -> Step:
    model = Transformer(shape)
    initialise(model, 0, residual_layers=shape.num_layers)
    model.to(device)
    if compiled:
        model.compile_blocks()
    tokens = torch.randint(0, shape.vocab_size, (rows, shape.context + 1), device=device)

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(tokens[:, :-1], tokens[:, 1:])
            total = out if isinstance(out, Tensor) else out[0]
        (total / tokens[:, 1:].numel()).backward()
        model.zero_grad(set_to_none=True)
        return total

    return step


def build_model_shapes(context: int, arguments: argparse.Namespace) -> dict[str, TransformerShape]:
    width = arguments.model_width
    common: dict[str, Any] = {
        "num_layers": arguments.layers,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 64 * 64,
        "vocab_size": 32768 if not arguments.tiny else 64,
        "context": context,
        "num_heads": width // arguments.head_size,
        "num_kv_heads": width // arguments.head_size,
        "head_size": arguments.head_size,
    }
    ssm = SSMShape(hidden_size=width, state_size=arguments.state, chunk_size=arguments.chunk)
    return {
        "attention": TransformerShape(**common),
        "state space": TransformerShape(**common, mixers=("ssm",) * arguments.layers, ssm=ssm),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_step(step: Step, steps: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def measure_peak_gib(step: Step) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


def compare_steps(contestants: dict[str, Step], tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s of each contestant, and the peak allocation of one step."""
    for step in contestants.values():
        time_step(step, 3)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, step in contestants.items():
            seconds[name].append(time_step(step, arguments.steps))
    result: dict[str, Any] = {name: round(tokens / median(times)) for name, times in seconds.items()}
    result["ratio"] = round(result["state space"] / result["attention"], 3)
    result["gib"] = {name: measure_peak_gib(step) for name, step in contestants.items()}
    return result


def relative_error(step: Step, layer: nn.Module, *, rows: int, length: int, width: int, device: str) -> float:
    """Return the relative error of the compiled bf16 layer against eager float32: RMS of the difference over RMS of the
    values."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, length, width, device=device, generator=generator).bfloat16().float()
    output = step().detach().float()
    with torch.no_grad():
        exact = layer(x)
    return ((output - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


def compare_layers(context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rows, width = max(1, arguments.tokens // context), arguments.width
    options: dict[str, Any] = {"rows": rows, "length": context, "device": arguments.device}
    attention = CausalAttention(width, arguments.head_size)
    scan = Scan(SSMShape(hidden_size=width, state_size=arguments.state, chunk_size=arguments.chunk))
    compiled = not arguments.eager
    contestants = {
        "attention": build_layer_step(attention, width, **options, compiled=compiled),
        "state space": build_layer_step(scan, width, **options, compiled=compiled),
    }
    result = compare_steps(contestants, rows * context, arguments)
    return result | {"bf16_error": round(relative_error(contestants["state space"], scan, width=width, **options), 5)}


def compare_models(context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = max(1, arguments.tokens // context)
    steps = {
        name: build_model_step(shape, rows=rows, device=arguments.device, compiled=not arguments.eager)
        for name, shape in build_model_shapes(context, arguments).items()
    }
    return compare_steps(steps, rows * context, arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--head-size", type=int, default=128, help="head size of attention")
    parser.add_argument("--state", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", action="store_true", help="also compare full models")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--model-width", type=int, default=1024)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="small sizes that run on a CPU in seconds")
    arguments = parser.parse_args()
    arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.tiny:
        vars(arguments).update(contexts=[64, 128], tokens=128, width=64, head_size=32, state=16, chunk=16)
        vars(arguments).update(rounds=2, steps=2, layers=2, model_width=64, eager=True)
    torch.set_float32_matmul_precision("high")  # as the engine does in bf16
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "tokens": arguments.tokens}
    for level, measure in {"layer": compare_layers, **({"model": compare_models} if arguments.models else {})}.items():
        print(f"{level:<8}{'context':>8}{'attention':>14}{'state space':>14}{'ratio':>8}   tokens/s")
        result[level] = {}
        for context in arguments.contexts:
            torch.compiler.reset()  # one graph per length
            row = measure(context, arguments)
            result[level][context] = row
            print(f"{'':<8}{context:>8}{row['attention']:>14,}{row['state space']:>14,}{row['ratio']:>8.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
