"""Size of a report and the time it takes to write and to open: runs of a thousand to a million steps, in headless Chromium.

    python benchmarks/report_size.py [--steps 1000000] [--every 10] [--rounds 5]

"Open" is from the navigation until the first chart is drawn and the page is idle, as a person waits for it. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from bottega.reporting.write import write_run_report


def write_run(folder: Path, *, steps: int, every: int) -> None:
    """Write a run directory with 20 metrics a log, an evaluation every hundred logs, and statistics of 24 modules."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(
        f"task: language\nevaluation: {{metric: loss}}\ntraining: {{max_steps: {steps}}}\n"
    )
    names = [
        "learning_rate",
        "grad_norm",
        "samples_per_second",
        "units_per_second",
        "step_seconds",
        "data_wait",
        "cpu_percent",
        "ram_gib",
        "disk_free_gib",
        "gpu_memory_gib",
        "gpu_percent",
        "gpu_power_watts",
        "gpu_temperature_celsius",
        "matmul_share",
        "loss_spikes",
        "skipped_steps",
        "grad_norm_spread",
        "disk_read_mib_per_second",
        "ram_percent",
    ]
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "modules.jsonl").open("w") as modules:
        for number, step in enumerate(range(every, steps + 1, every)):
            row = {name: 1 + math.sin(number * 0.37 + i) for i, name in enumerate(names)}
            row |= {
                "step": step,
                "kind": "train",
                "samples": 32 * step,
                "loss": 3 / (1 + number / 1000) + 0.1 * math.sin(number),
            }
            metrics.write(json.dumps(row) + "\n")
            if number % 100 == 0:
                metrics.write(
                    json.dumps({"step": step, "kind": "eval", "samples": 32 * step, "loss": row["loss"]}) + "\n"
                )
                statistics_ = {
                    f"layers.{i}": {"gradient_norm": row["loss"], "update_ratio": 1e-3, "dead_fraction": 0.0}
                    for i in range(24)
                }
                modules.write(
                    json.dumps({"step": step, "kind": "modules", "samples": 32 * step, "modules": statistics_}) + "\n"
                )


def measure_opening(report: Path, *, rounds: int) -> float:
    """Return the median seconds from the navigation to a drawn and idle page."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    seconds = []
    with sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            page.goto(report.as_uri(), wait_until="load")
            page.wait_for_selector("[data-chart='sections/loss/0'] svg", state="attached")
            page.evaluate("() => new Promise((done) => requestIdleCallback(done))")
            seconds.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--every", type=int, default=10, help="steps between two logs")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'steps':>10}{'log, MB':>10}{'page, MB':>10}{'write, s':>10}{'open, s':>10}")
    for steps in options.steps:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            write_run(run, steps=steps, every=options.every)
            start = time.perf_counter()
            report = write_run_report(run)
            written = time.perf_counter() - start
            size = (run / "metrics.jsonl").stat().st_size
            opened = measure_opening(report, rounds=options.rounds)
            print(f"{steps:>10,}{size / 1e6:>10.1f}{report.stat().st_size / 1e6:>10.2f}{written:>10.2f}{opened:>10.2f}")


if __name__ == "__main__":
    main()
