"""Quality and training time of the bundled media recipes, as one line of JSON for each.

    python benchmarks/media.py digits                         # five minutes on two CPU cores
    python benchmarks/media.py tones clips
    python benchmarks/media.py fashion --data fashion-mnist/  # one GPU
    python benchmarks/media.py spoken --data recordings.tar.xz

Time is the full training time: data, compilation, validation, checkpoints and samples included. The judge is trained
separately, when the samples are evaluated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import bottega
from bottega.analysis.generation_scores import Reference, collect_samples
from bottega.analysis.judge_model import JudgeModel
from bottega.tasks.recipes import load_recipe, parse_overrides

RECIPES = {
    "digits": "image",
    "tones": "audio",
    "clips": "video",
    "fashion": "image/fashion",
    "spoken": "audio/spoken-digits",
}
HELD_OUT = {"fashion": "test", "spoken": "test"}
COUNTS = {"fashion": 10_000}


def blur(images: np.ndarray, sigma: float) -> np.ndarray:
    """Blur uint8 images [n, h, w, c] with a Gaussian of `sigma` pixels, edges repeated."""
    radius = max(1, round(4 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    values = images.astype(np.float32)
    for axis in (1, 2):
        pads = [(radius, radius) if i == axis else (0, 0) for i in range(4)]
        padded = np.pad(values, pads, mode="edge")
        size = values.shape[axis]
        values = sum(k * np.take(padded, np.arange(i, i + size), axis=axis) for i, k in enumerate(kernel))
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def blur_distances(run: Path, split: str) -> dict[str, float]:
    """Return the judge-Frechet distance of blurred real held-out images, by sigma."""
    saved = bottega.load(run)
    judge = JudgeModel.open_judge(saved, saved.workload, [], quiet=True)
    assert judge is not None
    held_out = collect_samples(saved.workload, [saved.workload.read_raw(split)])
    training = collect_samples(
        saved.workload, [saved.workload.read_raw(table) for table in saved.workload.data.prepared.training_tables]
    )
    reference = Reference(saved.workload, judge, held_out, training)
    return {
        f"blur {sigma}": reference.frechet_distance_to_training(blur(held_out.samples, sigma))
        for sigma in (0.4, 0.5, 0.6)
    }


def train_and_evaluate(name: str, settings: list[str], output: str) -> dict[str, Any]:
    sources, overrides = parse_overrides([RECIPES[name], *settings])
    recipe = load_recipe(sources, [*overrides, ("output_dir", output, "benchmark")]).recipe
    start = time.perf_counter()
    run = bottega.train(recipe.to_plain_dict(), quiet=False)
    seconds = time.perf_counter() - start
    split = HELD_OUT.get(name, "validation")
    result = bottega.evaluate(run.path, split=split, count=COUNTS.get(name))
    report = {"name": name, "train_seconds": round(seconds, 1), "steps": run.step, **result}
    if name == "fashion":
        report["blurred"] = blur_distances(run.path, split)
    report["over_real"] = {
        measure: round(value / result["real"][measure], 4)
        for measure, value in result["metrics"].items()
        if measure.endswith("accuracy") and result["real"].get(measure)
    }
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=RECIPES)
    parser.add_argument("--data", help="path of the fashion or spoken dataset")
    parser.add_argument("--output", default="runs")
    arguments, settings = parser.parse_known_args()
    for name in arguments.names:
        data = [f"--data={arguments.data}"] if arguments.data else []
        print(json.dumps(train_and_evaluate(name, [*data, *settings], arguments.output), default=float), flush=True)


if __name__ == "__main__":
    main()
