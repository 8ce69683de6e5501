"""A mixture-of-experts layer on one GPU compared with the dense layer of equal FLOPs per token, forward and backward.

The dense SwiGLU is as wide as the active experts of a token together (top_k x expert_size), so both have equal FLOPs. They
are interleaved in short windows to share clock and thermal effects, and medians are compared. Weights are bfloat16, or
float32 under autocast as in a training run, where the weights of all experts are cast in each forward.

    python benchmarks/gpu_moe.py [--experts 8 16 64] [--tokens 16384 65536] [--rounds 7] [--steps 10]

`--tiny` checks that it runs on any machine in seconds; its numbers are meaningless.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bottega.models.experts.config import ExpertsShape
from bottega.models.experts.torch import Experts, FeedForward
from bottega.models.initial import initialise

MIN_RATIO = 0.6
"""Required fraction of the dense layer's tokens per second."""
LENGTH = 2048
"""Tokens per row."""


def build_step(
    layer: nn.Module, x: Tensor, *, called: Callable[..., Any], autocast: bool, has_routing_losses: bool
) -> Callable[[], None]:
    """Return a function that runs one forward and backward; `has_routing_losses` adds the two router losses of a run."""
    upstream = torch.randn_like(x) / x.numel()

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            result = called(x)
        out, losses = (result[0], [result[1].balance + 1e-3 * result[1].z]) if has_routing_losses else (result, [])
        gradients = [upstream.to(out.dtype), *(torch.full_like(loss, 1e-6) for loss in losses)]
        torch.autograd.backward([out, *losses], gradients)

    return step


def try_compile(
    layer: nn.Module, build: Callable[[Callable[..., Any]], Callable[[], None]], *, enabled: bool
) -> tuple[Callable[[], None], bool]:
    """Return the step that `build` makes of the layer, and whether the layer is compiled as one graph.

    If it does not compile, the reason is printed and the step is eager.
    """
    if enabled:
        step = build(torch.compile(layer, fullgraph=True, dynamic=False))
        try:
            step()
        except Exception as error:
            print(f"{type(layer).__name__} does not compile here and runs eagerly: {str(error).splitlines()[0]}")
        else:
            return step, True
    return build(layer), False


def time_step(step: Callable[[], None], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare_layers(
    shape: ExpertsShape, tokens: int, *, rounds: int, steps: int, device: torch.device, autocast: bool
) -> dict[str, Any]:
    torch._dynamo.reset()
    with torch.device("meta"):
        layers = {
            "experts": Experts(shape),
            "dense": FeedForward(shape.hidden_size, shape.top_k * shape.expert_size, activation=shape.activation),
        }
    contestants, is_compiled = {}, {}
    for name, layer in layers.items():
        layer.to_empty(device=device)
        initialise(layer, 0, residual_layers=1)
        layer.to(torch.float32 if autocast else torch.bfloat16)
        x = torch.randn(tokens // LENGTH or 1, min(tokens, LENGTH), shape.hidden_size, device=device)
        x = x.bfloat16().requires_grad_()

        def build(called: Callable[..., Any], layer: Any = layer, x: Tensor = x) -> Callable[[], None]:
            return build_step(layer, x, called=called, autocast=autocast, has_routing_losses=isinstance(layer, Experts))

        contestants[name], is_compiled[name] = try_compile(layer, build, enabled=device.type == "cuda")
    for step in contestants.values():
        time_step(step, 3, device)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            seconds[name].append(time_step(step, steps, device))
    medians = {name: median(times) for name, times in seconds.items()}
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        load = layers["experts"](x)[1].load
    flops = 6 * tokens * 3 * shape.hidden_size * shape.top_k * shape.expert_size
    return {
        "num_experts": shape.num_experts,
        "tokens": tokens,
        "weights": "float32" if autocast else "bfloat16",
        "compiled": all(is_compiled.values()),
        "experts_ms": round(1e3 * medians["experts"], 3),
        "dense_ms": round(1e3 * medians["dense"], 3),
        "experts_tflops": round(flops / medians["experts"] / 1e12, 1),
        "dense_tflops": round(flops / medians["dense"] / 1e12, 1),
        "load_entropy": round(float(torch.special.entr(load / load.sum()).sum()) / math.log(shape.num_experts), 3),
        "over_dense": round(medians["dense"] / medians["experts"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=1408, help="width of an expert")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes; runs on a CPU if there is no GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        parser.error("torch finds no GPU; use --tiny to check that it runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.tiny:
        arguments.experts, arguments.tokens, arguments.hidden, arguments.size = [4], [256], 64, 32
        arguments.rounds, arguments.steps = 3, 2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # as in a mixed-precision run
    rows = []
    print("experts   tokens  weights    experts ms   dense ms   TFLOP/s of each    load   over dense")
    for autocast in (False, True):
        for experts in arguments.experts:
            for tokens in arguments.tokens:
                shape = ExpertsShape(
                    hidden_size=arguments.hidden,
                    expert_size=arguments.size,
                    num_experts=experts,
                    top_k=arguments.top_k,
                )
                row = compare_layers(
                    shape, tokens, rounds=arguments.rounds, steps=arguments.steps, device=device, autocast=autocast
                )
                rows.append(row)
                print(
                    f"{experts:>7} {tokens:>8}  {row['weights']:<9}{row['experts_ms']:>12.3f}{row['dense_ms']:>11.3f}"
                    f"{row['experts_tflops']:>10.1f}{row['dense_tflops']:>9.1f}{row['load_entropy']:>8.3f}"
                    f"{row['over_dense']:>12.3f}"
                )
    worst = min(row["over_dense"] for row in rows if row["weights"] == "bfloat16")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result = {"device": name, "torch": torch.__version__, "hidden": arguments.hidden, "size": arguments.size}
    print(
        json.dumps(
            {
                **result,
                "top_k": arguments.top_k,
                "rows": rows,
                "worst": worst,
                "bar": MIN_RATIO,
                "ok": worst >= MIN_RATIO,
            }
        )
    )


if __name__ == "__main__":
    main()
