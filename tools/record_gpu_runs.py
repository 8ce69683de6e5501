"""Record runs with an idle GPU and with little memory left for tests/diagnosis: `python tools/record_gpu_runs.py --seeds 1 2`

For each seed and each of the two illnesses, trains a run that is ill on purpose, diagnoses it, appends the advised override and
trains again, until the finding is gone. The files that `bottega diagnose` reads are stored under tests/diagnosis/gpu, or in the
folder of `--out`. The GPU must be free: its use and its memory are what is recorded. About two minutes a seed on one H200.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from record_healthy_runs import store_run

TARGET = Path(__file__).resolve().parents[1] / "tests" / "diagnosis" / "gpu"
UNUSED_FILES = ("modules.jsonl", "command.txt", "data.json")
"""Files that the rules of the machine do not read."""


@dataclass(frozen=True)
class Illness:
    """A run that is ill on purpose, and the names under which it and the runs that follow the advice are stored."""

    finding: str
    words: str
    names: tuple[str, ...]


COMMON = (
    "training.optimizer.name=adamw data.train.path=texts.txt data.train.kind=auto samples.every=null checkpoint.every=null "
    "logging.tensorboard=false logging.report=false"
)
ILLNESSES = (
    Illness(
        "idle-gpu",
        f"language {COMMON} max_steps=120 batch_size=32 compile=true micro_batch_size=1 evaluation.every=60 evaluation.max_batches=2 "
        "evaluation.batch_size=null logging.every=10",
        ("micro-batch-of-1", "batch-of-32", "batch-of-512"),
    ),
    Illness(
        "memory-pressure",
        f"language {COMMON} max_steps=5 batch_size=55500 compile=true evaluation.every=5 evaluation.max_batches=1 evaluation.batch_size=64 "
        "logging.every=1",
        ("full-memory", "half-memory"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[illness.finding for illness in ILLNESSES], help="one of the two illnesses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=TARGET, help="folder for the records")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_texts(folder / "texts.txt")
        for seed in arguments.seeds:
            for illness in (i for i in ILLNESSES if arguments.only in (None, i.finding)):
                follow_advice(illness, seed, folder, arguments.out.resolve())


def write_texts(path: Path) -> None:
    """Write texts of random words, of more than the 14 million tokens that one batch of the second illness has."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    path.write_text("\n".join(" ".join(rng.choices(words, k=100)) for _ in range(75_000)), encoding="utf-8")


def follow_advice(illness: Illness, seed: int, folder: Path, target: Path) -> None:
    """Train, diagnose and train again as advised; store each run, and print what was found in it."""
    overrides: dict[str, str] = {}
    for base in illness.names:
        name = f"{base}-seed-{seed}" if seed else base
        words = {**dict(word.split("=", 1) for word in illness.words.split()[1:]), "seed": str(seed), **overrides}
        settings = [f"{key}={value}" for key, value in words.items()]
        run_bottega(folder, "train", illness.words.split()[0], *settings, f"name={name}", "--fresh", "--quiet")
        report = json.loads(run_bottega(folder, "diagnose", f"runs/{name}", "--json"))["runs"][0]
        store_run(folder / "runs" / name, target / name, illness.words)
        for unused in UNUSED_FILES:
            (target / name / unused).unlink(missing_ok=True)
        shutil.rmtree(target / name / "evaluation", ignore_errors=True)
        finding = next((finding for finding in report["findings"] if finding["name"] == illness.finding), None)
        print(f"{name}: {finding['evidence'] + '; ' + finding['override'] if finding else 'not found'}", flush=True)
        if finding is None:
            return
        overrides |= shorten(finding["override"])
    print(f"{illness.finding}, seed {seed}: still there after {len(illness.names)} runs", flush=True)


def shorten(override: str) -> dict[str, str]:
    """Return the settings of an override under the short names that the commands above use."""
    return {key.removeprefix("training."): value for key, value in (word.split("=", 1) for word in override.split())}


def run_bottega(folder: Path, *words: str) -> str:
    """Run a command in a folder; return what it prints to standard output."""
    command = [sys.executable, "-m", "bottega", *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr[-3000:]}")
    return result.stdout


if __name__ == "__main__":
    main()
