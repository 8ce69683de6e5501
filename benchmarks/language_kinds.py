"""Tiny Shakespeare with every kind of language model: at equal parameters and steps, and experts against dense at equal active
parameters. Runs are interleaved over seeds, so that a slow phase of the machine affects all of them.

BOTTEGA_DATA=... python benchmarks/language_kinds.py                  # the CPU budget: 0.8 M parameters, 2,000 steps of 12 x 64
BOTTEGA_DATA=... python benchmarks/language_kinds.py --device cuda    # the same models, 64 x 128 characters a step
BOTTEGA_DATA=... python benchmarks/language_kinds.py --tiny           # check that it runs
  --seeds N   --steps N   --kinds transformer,ssm   --rates 1e-3,2e-3  (for every kind, instead of its own)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import bottega
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import resolve_shape_fields

WIDTH, VOCABULARY = 128, 65
ATTENTION = {"num_heads": 4, "num_kv_heads": 4, "head_size": 32}
SSM = {"state_size": 48, "ssm_head_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {"kind": "transformer", "num_layers": 4, "intermediate_size": 344, **ATTENTION},
    "ssm": {"kind": "ssm", "num_layers": 7, **SSM},
    "hybrid": {"kind": "hybrid", "num_layers": 4, "intermediate_size": 248, **ATTENTION, **SSM},
    "moe": {"kind": "moe", "num_layers": 4, "num_experts": 4, "expert_size": 86, **ATTENTION},
    "moe-active": {"kind": "moe", "num_layers": 4, "num_experts": 8, "expert_size": 172, **ATTENTION},
}
"""The last has as many active parameters as the transformer; the others have as many in total."""
RATES = {"transformer": 3e-3, "ssm": 4e-3, "hybrid": 3e-3, "moe": 3e-3, "moe-active": 3e-3}
BUDGETS: dict[str, dict[str, Any]] = {
    "cpu": {"model.context": 64, "training.batch_size": 12, "training.max_steps": 2000},
    "cuda": {"model.context": 128, "training.batch_size": 64, "training.max_steps": 2000},
    "tiny": {"model.context": 32, "training.batch_size": 4, "training.max_steps": 6},
}


def build_shape(name: str, budget: dict[str, Any]) -> TransformerShape:
    settings = {"hidden_size": WIDTH, **{key: value for key, value in KINDS[name].items() if key != "kind"}}
    fields = resolve_shape_fields(KINDS[name]["kind"], None, settings)
    return TransformerShape(vocab_size=VOCABULARY, context=budget["model.context"], **fields)


def build_settings(
    name: str, budget: dict[str, Any], *, seed: int, rate: float, device: str, folder: str
) -> dict[str, Any]:
    # The recipe's dimensions are those of the transformer; unset those that other kinds do not use.
    unset = dict.fromkeys(("num_heads", "num_kv_heads", "head_size", "intermediate_size"), None)
    model = {f"model.{key}": value for key, value in {**unset, "hidden_size": WIDTH, **KINDS[name]}.items()}
    steps = budget["training.max_steps"]
    return {
        **budget,
        **model,
        "data.train.path": str(Path(os.environ["BOTTEGA_DATA"]) / "text-lm-tinyshakespeare" / "input.txt"),
        "training.learning_rate": rate,
        "training.scheduler.warmup_steps": min(100, steps // 4),
        "evaluation.every": max(1, steps // 8),
        "evaluation.max_batches": 2 if steps < 50 else 8 if steps < 1000 else None,
        "checkpoint.every": None,
        "samples.every": None,
        "logging.every": 10 if steps >= 50 else 1,
        "logging.tensorboard": False,
        "logging.resources": False,
        "output_dir": folder,
        "device": device,
        "seed": seed,
        "name": f"{name}-{rate:g}-{seed}",
    }


def train_and_measure(name: str, budget: dict[str, Any], **options: Any) -> dict[str, Any]:
    start = time.monotonic()
    run = bottega.train("language/shakespeare", build_settings(name, budget, **options), quiet=True)
    rows = run.history()
    speeds = [row["units_per_second"] for row in rows if row["kind"] == "train"]
    best = min((row for row in rows if row["kind"] == "eval"), key=lambda row: row["loss"])
    metrics = {
        "loss": best["loss"],
        "tokens_per_second": statistics.median(speeds[len(speeds) // 2 :]),
        "seconds": time.monotonic() - start,
        **{key: best[key] for key in ("load_entropy", "load_max") if key in best},
    }
    print(f"{name} seed {options['seed']} rate {options['rate']:g}: {metrics}", flush=True)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kinds")
    parser.add_argument("--rates")
    options = parser.parse_args()
    budget = dict(BUDGETS["tiny" if options.tiny else options.device])
    if options.steps:
        budget["training.max_steps"] = options.steps
    names = [name for name in KINDS if options.kinds is None or name in options.kinds.split(",")]
    rates = {name: [float(r) for r in options.rates.split(",")] if options.rates else [RATES[name]] for name in names}
    results: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if options.tiny else options.seeds):
            for name in names:
                for rate in rates[name]:
                    metrics = train_and_measure(
                        name, budget, seed=seed, rate=rate, device=options.device, folder=folder
                    )
                    results.setdefault((name, rate), []).append(metrics)
    print("\n| kind | validation loss | deviation | rate | parameters | active | tokens/s | load entropy |")
    print("|---|---|---|---|---|---|---|---|")
    table = []
    for (name, rate), runs in results.items():
        shape, losses = build_shape(name, budget), [run["loss"] for run in runs]
        row = {
            "kind": name,
            "loss": statistics.mean(losses),
            "deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "rate": rate,
            "parameters": shape.num_parameters(),
            "active": shape.num_active_parameters(),
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs),
            "load_entropy": statistics.mean(run.get("load_entropy", float("nan")) for run in runs),
            "losses": losses,
        }
        load_entropy = f"{row['load_entropy']:.3f}" if shape.experts is not None else ""
        print(
            f"| {name} | {row['loss']:.4f} | {row['deviation']:.4f} | {rate:g} | {row['parameters']:,} | {row['active']:,} | "
            f"{row['tokens_per_second']:,.0f} | {load_entropy} |"
        )
        table.append({**row, "load_entropy": row["load_entropy"] if shape.experts is not None else None})
    print(json.dumps({"bench": "language_kinds", "device": options.device, "budget": budget, "rows": table}))


if __name__ == "__main__":
    main()
