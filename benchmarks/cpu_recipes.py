"""Processor time of a training step of bundled recipes on a CPU, beside a bare loop of the same model; as ratios.

    python benchmarks/cpu_recipes.py                                  # language, classify/cnn, image
    python benchmarks/cpu_recipes.py --recipes language --rounds 5

`bottega train` and the bare loop run in processes of their own, with one thread and two lengths; the difference of their processor
times, divided by that of the steps, is the time of a step: start-up, which is the same for both lengths, drops out. Rounds
are interleaved, medians are reported. Evaluations, checkpoints and samples are off, the log is written as usual. The bare loop reads the
same samples, draws noise with torch, and clips and updates as the recipe says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

QUIET = (
    "device=cpu evaluation.every=null checkpoint.every=null samples.every=null logging.tensorboard=false "
    "logging.report=false needs={} --fresh --quiet"
)
LENGTHS = {"language": (20, 80), "classify/cnn": (50, 250), "image": (40, 200)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default=",".join(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", nargs=2, metavar=("RECIPE", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        run_bare_loop(arguments.bare[0], int(arguments.bare[1]))
        return
    print(f"{'recipe':<16}{'bare, ms':>10}{'ours, ms':>10}{'ratio':>8}", flush=True)
    report = {}
    for recipe in arguments.recipes.split(","):
        times: dict[str, list[float]] = {"bare": [], "ours": []}
        for _ in range(arguments.rounds):
            for kind in times:
                times[kind].append(measure_step(kind, recipe))
        bare, ours = (statistics.median(times[kind]) for kind in ("bare", "ours"))
        report[recipe] = {"bare": times["bare"], "ours": times["ours"], "ratio": ours / bare}
        print(f"{recipe:<16}{1e3 * bare:>10.1f}{1e3 * ours:>10.1f}{ours / bare:>8.3f}", flush=True)
    print(json.dumps({"bench": "cpu_recipes", **report}))


def measure_step(kind: str, recipe: str) -> float:
    """Return the processor seconds of one step."""
    short, long = LENGTHS[recipe]
    seconds = [measure_processor_time(kind, recipe, steps) for steps in (short, long)]
    return (seconds[1] - seconds[0]) / (long - short)


def measure_processor_time(kind: str, recipe: str, steps: int) -> float:
    """Return the processor seconds of a process that trains `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bottega", "train", recipe, f"max_steps={steps}", f"output_dir={folder}"]
        if kind == "bare":
            command = [sys.executable, os.path.abspath(__file__), "--bare", recipe, str(steps)]
        else:
            command += QUIET.split()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def run_bare_loop(recipe_name: str, steps: int) -> None:
    """Train the model of a recipe with a plain torch loop."""
    import numpy as np
    import torch

    from bottega.models.build import build_models
    from bottega.tasks.recipes import check_recipe, parse_overrides
    from bottega.tasks.registry import open_workload

    recipe: Any = check_recipe(*parse_overrides([recipe_name, "device=cpu", "needs={}"])).recipe
    workload: Any = open_workload(recipe, progress=lambda *_: None)
    source, options = workload.data.training(), recipe.training
    model: Any = build_models(workload.task, 0)["model"].train()
    parameters = list(model.parameters())
    optimizer = build_bare_optimizer(model, options)
    average = [p.detach().clone() for p in parameters] if options.ema else None
    rng, order = np.random.default_rng(0), np.empty(0, np.int64)
    for _ in range(steps):
        if len(order) < options.batch_size:
            order = rng.permutation(len(source))
        index, order = order[: options.batch_size], order[options.batch_size :]
        batch = {name: torch.from_numpy(rows) for name, rows in source.rows(index, np.zeros_like(index)).items()}
        loss = LOSSES[recipe_name](model, batch, workload.task)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        for step in optimizer:
            step.step()
            step.zero_grad(set_to_none=True)
        if average is not None:
            torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - options.ema)


def build_bare_optimizer(model: Any, options: Any) -> list[Any]:
    """Return the optimizers of a bare loop: torch's own classes."""
    import torch

    rate, decay, betas = options.learning_rate, options.weight_decay, options.optimizer.betas
    parameters = list(model.named_parameters())
    hidden = [p for name, p in parameters if p.dim() == 2 and "embed" not in name and "head" not in name]
    is_muon = options.optimizer.name == "muon"
    others = [p for _, p in parameters if not is_muon or all(p is not h for h in hidden)]
    optimizers: list[Any] = [torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=decay, fused=True)]
    if is_muon:
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=rate,
                weight_decay=decay,
                momentum=options.optimizer.momentum,
                nesterov=options.optimizer.nesterov,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def compute_language_loss(model: Any, batch: Any, task: Any) -> Any:
    """Return the mean cross-entropy of the next tokens."""
    ids = batch["input_ids"].long()
    return model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()


def compute_classification_loss(model: Any, batch: Any, task: Any) -> Any:
    """Return the mean cross-entropy of the classes, with word dropout as the recipe has."""
    import torch
    import torch.nn.functional as F

    ids = batch["input_ids"].long()
    ids = torch.where(torch.rand(ids.shape) < task.word_dropout, task.unknown, ids)
    output = model(ids, batch["attention_mask"] > 0)
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, batch["label"].long())


def compute_flow_loss(model: Any, batch: Any, task: Any) -> Any:
    """Return the mean squared error of the velocity, with the condition dropped as the recipe has."""
    import torch

    clean = batch["image"].reshape(-1, *task.shape.sample)
    clean = clean.float() / 127.5 - 1 if clean.dtype is torch.uint8 else clean
    noise, t = torch.randn_like(clean), torch.sigmoid(torch.randn(len(clean)))
    level = t.view(-1, 1, 1, 1)
    drop = torch.rand(len(clean)) < task.condition_dropout
    predicted = model((1 - level) * clean + level * noise, 1000 * t, label=batch["label"], drop=drop)
    return (predicted - (noise - clean)).square().mean()


LOSSES = {
    "language": compute_language_loss,
    "classify/cnn": compute_classification_loss,
    "image": compute_flow_loss,
}

if __name__ == "__main__":
    main()
