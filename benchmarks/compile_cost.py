"""What compiling costs and saves for each kind of model: the table of `src/bottega/engines/compile_choice.py`.

    python benchmarks/compile_cost.py --jobs 8 --record cost.json    # one GPU and 16 cores: about three minutes
    python benchmarks/compile_cost.py --cases multitask,routing/mind,audio,video --modes auto    # undisturbed

Each case is trained for 60 steps in three processes, with `training.compile` true, false and auto, each with an empty cache
of the compiler, and otherwise as its recipe says. The data is prepared before. Steps are timed between two logs, without the wait for data. What compiling
takes is the time of the whole training beyond its median step, less the same without compiling. Rows are printed as they
are complete; at the end the lines of the table follow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

CASES = {
    "multitask": (None, "multitask"),
    "routing/mind": (None, "routing/mind"),
    "audio": (None, "audio"),
    "video": (None, "video"),
    "image": ("dit", "image"),
    "language": ("decoder", "language"),
    "language-124m": (
        None,
        "language model.size=null model.hidden_size=768 model.num_layers=12 model.num_heads=6 model.intermediate_size=2048 "
        "model.context=1024 data.sequence_length=1024 batch_size=16",
    ),
    "language-ssm": (
        "ssm",
        "language model.kind=ssm model.size=null model.hidden_size=128 model.num_layers=4 model.state_size=48 "
        "model.ssm_head_size=32",
    ),
    "unet": ("unet", "image model.backbone=unet model.stages=2"),
    "classify/transformer": ("encoder", "classify/transformer"),
    "classify/cnn": ("text-cnn", "classify/cnn"),
    "classify/image": ("convnet", "classify/image"),
    "classify/spiking": ("spiking", "classify/spiking"),
    "routing": ("routing", "routing model.plasticity=false"),
    "recall": ("recall", "recall"),
    "align": ("clip", "align"),
    "image_vae/digits": ("autoencoder", "image_vae/digits"),
}
"""Case -> the kind of model in the table that it measures, if any, and the words of its command. The slowest first."""
MODES = ("true", "false", "auto")
LOG_EVERY = 5


def run_bottega(folder: Path, words: list[str], *, caches: Path | None = None, timeout: float) -> tuple[float, str]:
    """Run a command; return its seconds and, if it failed, the last line that it printed."""
    environment = dict(os.environ)
    if caches is not None:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    started = time.perf_counter()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "bottega", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return timeout, f"not finished after {timeout:.0f} s"
    lines = result.stderr.strip().splitlines() or ["no message"]
    return (
        time.perf_counter() - started,
        "" if result.returncode == 0 else f"exit {result.returncode}: {lines[-1][:160]}",
    )


def measure(folder: Path, case: str, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a case in one mode; return the seconds of the command, of all steps and of the median step, and the notes on it."""
    name = f"{case.replace('/', '-')}-{mode}"
    length = [f"max_steps={arguments.steps}", *(["num_epochs=null"] if "routing" in case else [])]
    words = [*CASES[case][1].split(), *length, f"compile={mode}", f"device={arguments.device}", f"name={name}"]
    seconds, problem = run_bottega(
        folder,
        ["train", *words, f"logging.every={LOG_EVERY}", "--fresh"],
        caches=folder / "caches" / name,
        timeout=arguments.timeout,
    )
    if problem:
        return {"problem": problem, "seconds": seconds}
    run = folder / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in lines if row["kind"] == "train"]
    windows = [row["step_seconds"] * (1 - row["data_wait"]) for row in rows]
    log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    return {
        "seconds": seconds,
        "training": LOG_EVERY * sum(row["step_seconds"] for row in rows),
        "step": statistics.median(windows[2:]),
        "notes": [line.partition("training.compile: ")[2] for line in log if "training.compile: " in line],
    }


def summarise(results: dict[str, dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Return the seconds of compiling, the steps of both modes, their factor and the number of steps from which it pays."""
    summary: dict[str, Any] = {f"run_{mode}": result["seconds"] for mode, result in results.items()}
    compiled, eager = results.get("true", {}), results.get("false", {})
    if "step" not in compiled or "step" not in eager:
        return summary
    extra = [result["training"] - num_steps * result["step"] for result in (compiled, eager)]
    seconds, saved = extra[0] - extra[1], eager["step"] - compiled["step"]
    summary |= {"compile_seconds": seconds, "eager_step": eager["step"], "compiled_step": compiled["step"]}
    summary |= {"factor": compiled["step"] / eager["step"], "break_even": seconds / saved if saved > 0 else None}
    return summary


COLUMNS = (
    *(("compile_seconds", "compile s", "{:.1f}"), ("eager_step", "eager ms", "{:.1f}")),
    *(
        ("compiled_step", "compiled ms", "{:.1f}"),
        ("factor", "factor", "{:.2f}"),
        ("break_even", "break-even", "{:,.0f}"),
    ),
    *(("run_true", "true s", "{:.1f}"), ("run_false", "false s", "{:.1f}"), ("run_auto", "auto s", "{:.1f}")),
)
"""Key of a summary, the title of its column, and its format; steps are printed in milliseconds."""


def print_row(case: str, summary: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """Print a row of the table, and below it what failed or was not as asked."""
    cells = []
    for key, title, form in COLUMNS:
        value = summary.get(key)
        cells.append(f"{'-' if value is None else form.format(1000 * value if 'ms' in title else value):>13}")
    print(f"{case:<20}{''.join(cells)}", flush=True)
    for mode, result in results.items():
        notes = [result["problem"]] if "problem" in result else result["notes"] if mode != "auto" else []
        for note in notes:
            print(f"    compile={mode}: {note}", flush=True)


def main() -> None:
    """Measure the cases in parallel, and print a table and the lines of the table of costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names of cases, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="values of training.compile, separated by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; they slow each other down")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a process is ended")
    parser.add_argument("--record", metavar="FILE", help="write all values as JSON, after each row")
    arguments = parser.parse_args()
    cases, modes = arguments.cases.split(","), arguments.modes.split(",")
    # By default each process starts as many compilers as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, (os.cpu_count() or 2) // arguments.jobs)))
    results: dict[str, dict[str, dict[str, Any]]] = {case: {} for case in cases}
    summaries: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(temporary)
        prepare = {c: ["prepare", *CASES[c][1].split()] for c in cases}
        for case, (_, problem) in zip(
            cases, pool.map(lambda c: run_bottega(folder, prepare[c], timeout=arguments.timeout), cases), strict=True
        ):
            if problem:
                print(f"{case}: preparing its data: {problem}", flush=True)
        print(f"data prepared after {time.perf_counter() - started:.0f} s\n", flush=True)
        print(f"{'case':<20}{''.join(f'{title:>13}' for _, title, _ in COLUMNS)}", flush=True)
        jobs = {pool.submit(measure, folder, case, mode, arguments): (case, mode) for case in cases for mode in modes}
        for job in as_completed(jobs):
            case, mode = jobs[job]
            with lock:
                results[case][mode] = job.result()
                if len(results[case]) < len(modes):
                    continue
                summaries[case] = summarise(results[case], arguments.steps)
                print_row(case, summaries[case], {mode: results[case][mode] for mode in modes})
                if arguments.record:
                    record = {"steps": arguments.steps, "summaries": summaries, "results": results}
                    Path(arguments.record).write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\nafter {time.perf_counter() - started:.0f} s; for COSTS:", flush=True)
    for case, summary in summaries.items():
        kind = CASES[case][0]
        if kind is not None and "factor" in summary:
            values = f"{summary['compile_seconds']:.0f}.0, {summary['factor']:.2f}, {summary['eager_step']:.4f}"
            print(f'        "{kind}": CompileCost({values}),')


if __name__ == "__main__":
    main()
