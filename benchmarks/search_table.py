"""Train classify/cnn at every point of a fixed grid and record the learning curves, for benchmarks/search_quality.py to replay.

    python benchmarks/search_table.py --workers 16 --out benchmarks/search_table.json.gz

288 runs of 100 steps, evaluated every 10; about 40 minutes on one core.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

GRID: dict[str, list[Any]] = {
    "training.learning_rate": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "model.dropout": [0.0, 0.25, 0.5, 0.75],
    "training.weight_decay": [0.0, 0.01, 0.1],
    "training.batch_size": [16, 32],
    "training.label_smoothing": [0.0, 0.1],
}
STEPS, EVERY = 100, 10


def train_point(keys: dict[str, Any], folder: str) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import bottega

    settings = {
        **keys,
        "training.max_steps": STEPS,
        "training.scheduler.warmup_steps": 10,
        "evaluation.every": EVERY,
        "checkpoint.every": None,
        "logging.tensorboard": False,
        "logging.every": STEPS,
        "device": "cpu",
        "cpu_threads": 1,
        "output_dir": folder,
    }
    run = bottega.train("classify/cnn", settings)
    rows = [row for row in run.history() if row["kind"] == "eval"]
    return {
        "keys": keys,
        "curve": [[row["step"], round(row["accuracy"], 5), round(row["loss"] or 99.0, 4)] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only this many points, to try the script")
    parser.add_argument("--out", default="benchmarks/search_table.json.gz")
    arguments = parser.parse_args()
    points = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())][: arguments.limit]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        train_point({**points[0], "training.max_steps": 1}, folder)  # prepares the data once
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(train_point, point, folder): point for point in points}
            for number, future in enumerate(as_completed(futures), start=1):
                try:
                    results.append(future.result())
                except Exception as error:  # a diverged run is a result, too
                    results.append({"keys": futures[future], "curve": [], "reason": str(error)[:200]})
                if number % 16 == 0:
                    print(f"{number} of {len(points)}", flush=True)
    results.sort(key=lambda result: json.dumps(result["keys"]))
    table = {"recipe": "classify/cnn", "metric": "accuracy", "steps": STEPS, "grid": GRID, "runs": results}
    with gzip.GzipFile(Path(arguments.out), "wb", mtime=0) as file:
        file.write(json.dumps(table, separators=(",", ":")).encode())
    best = max((row[1] for result in results for row in result["curve"]), default=None)
    print(f"{len(results)} runs, best accuracy {best}, {Path(arguments.out).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
