"""Record healthy runs for tests/diagnosis: `python tools/record_healthy_runs.py --runs FOLDER [--only NAME ...]`

Trains the runs listed below, one after the other, and stores the files that `bottega diagnose` reads under
tests/diagnosis/healthy/NAME: recipe.yaml, metrics.jsonl and modules.jsonl with fewer lines and digits, data.json,
environment.json, the metrics of each class, and the command. A run that is already finished in FOLDER is not trained again.
Runs that need a file of BOTTEGA_DATA, the folder of data sets, are skipped without it. All take about 40 minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "tests" / "diagnosis" / "healthy"
MAX_TRAIN_ROWS = 40
MAX_MODULE_ROWS = 6
UNUSED_FIELDS = re.compile(r"disk_|network_|per_second|system_cpu|matmul_share|grad_norm_spread|/")
"""Fields of a train row that no rule reads; those with a slash are of one part or source."""
UNUSED_KEYS = ("command", "git", "folder", "folder_from_run", "started", "platform", "packages")
"""Keys of environment.json that no rule reads, or that describe the machine."""

SHAKESPEARE = "$BOTTEGA_DATA/text-lm-tinyshakespeare/input.txt"
SST2 = "$BOTTEGA_DATA/text-cls-sst2"
FASHION = "$BOTTEGA_DATA/image-fashion-mnist"
SMALL_GENERATOR = "model.hidden_size=64 model.num_layers=2 needs={} samples.every=null"

RUNS: dict[str, str] = {
    "classify-image": "classify/image",
    "classify-image-seed-1": "classify/image seed=1",
    "classify-audio": "classify/audio",
    "classify-audio-seed-1": "classify/audio seed=1",
    "classify-spiking": "classify/spiking",
    "classify-spiking-seed-1": "classify/spiking seed=1",
    "classify-continual": "classify/continual",
    "classify-few-shot": "classify/few-shot",
    "classify-text": "classify",
    "classify-transformer": "classify/transformer training.max_steps=180 evaluation.every=30",
    "classify-wide": "classify/wide",
    "classify-cnn": "classify/cnn",
    "routing": "routing",
    "routing-seed-1": "routing seed=1",
    "routing-large": "routing/large",
    "routing-hard": "routing/synthetic-hard",
    "routing-continual": "routing/continual",
    "routing-few-shot": "routing/few-shot",
    "recall": "recall",
    "recall-lasting": "recall/lasting",
    "recall-lasting-seed-1": "recall/lasting seed=1",
    "image-vae": "image_vae/digits",
    "image-tokens": "image_tokens/digits",
    "language-stickers": "language/stickers",
    "image": f"image training.max_steps=800 evaluation.every=100 {SMALL_GENERATOR}",
    "audio": f"audio training.max_steps=300 evaluation.every=50 training.batch_size=32 {SMALL_GENERATOR}",
    "video": f"video training.max_steps=600 evaluation.every=100 {SMALL_GENERATOR}",
    "multitask": "multitask",
    "mind": "routing/mind",
    "classify-video": "classify/video",
    "classify-sst2": f"classify/sst2 --data {SST2}/train.tsv data.validation.path={SST2}/dev.tsv",
    "language-shakespeare": f"language/shakespeare --data {SHAKESPEARE} training.max_steps=1000 evaluation.every=100",
    "language-moe": f"language/shakespeare-moe --data {SHAKESPEARE} training.max_steps=500 evaluation.every=100 model.num_layers=2",
    "language-ssm": f"language/shakespeare-ssm --data {SHAKESPEARE} training.max_steps=500 evaluation.every=100 model.num_layers=2",
    "language": "language training.max_steps=400",
    "align": "align training.max_steps=800 evaluation.every=100",
    "image-fashion": f"image/fashion --data {FASHION} data.limit=6000 training.max_steps=400 evaluation.every=100 "
    f"training.batch_size=64 training.scheduler.warmup_steps=50 model.num_heads=4 {SMALL_GENERATOR}",
    "image-vae-stickers": "image_vae/stickers training.max_steps=500 evaluation.every=100",
    "personalize": "personalize training.max_steps=300 samples.every=null "
    + " ".join(
        f"'needs.{name}.settings={{training.max_steps: 300}}'" for name in ("clip", "diffusion", "language_model")
    ),
    "language-lora": "language/stickers techniques=[lora] training.max_steps=600",
}
"""Name -> words of `bottega train`. Bundled recipes, smaller or shorter where they take more than two minutes on a core."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder to train the runs in")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    arguments = parser.parse_args()
    for name in arguments.only:
        words = RUNS[name]
        if "BOTTEGA_DATA" in words and "BOTTEGA_DATA" not in os.environ:
            print(f"{name}: skipped, BOTTEGA_DATA is not set", flush=True)
            continue
        run = train_run(name, words, arguments.runs)
        size = store_run(run, TARGET / name, words)
        print(f"{name}: {size / 1e3:.0f} kB", flush=True)


def train_run(name: str, words: str, folder: Path) -> Path:
    """Train a run on one thread unless it is finished; return its directory."""
    command = [sys.executable, "-m", "bottega", "train", *shlex.split(os.path.expandvars(words)), "--quiet"]
    options = [f"name={name}", f"output_dir={folder}", "logging.tensorboard=false", "logging.report=false"]
    subprocess.run([*command, *options], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder / name


def store_run(run: Path, target: Path, words: str) -> int:
    """Store the files of a run that diagnosis reads, without paths and machine; return their size in bytes."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    (target / "command.txt").write_text(f"bottega train {words}\n")
    recipe = (run / "recipe.yaml").read_text()
    (target / "recipe.yaml").write_text(re.sub(r"(: )/\S*/", r"\1", recipe))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train_rows = thin([row for row in rows if row["kind"] == "train"], MAX_TRAIN_ROWS)
    selected = [row for row in rows if row["kind"] != "train" or row in train_rows]
    write_rows(target / "metrics.jsonl", [drop_fields(row) for row in selected])
    if (run / "modules.jsonl").is_file():
        modules = [json.loads(line) for line in (run / "modules.jsonl").read_text().splitlines()]
        write_rows(target / "modules.jsonl", thin(modules, MAX_MODULE_ROWS))
    environment = json.loads((run / "environment.json").read_text())
    (target / "environment.json").write_text(
        json.dumps({key: value for key, value in environment.items() if key not in UNUSED_KEYS}, indent=1) + "\n"
    )
    for name in ("data.json", "memory.json"):
        if (run / name).is_file():
            shutil.copy(run / name, target / name)
    store_class_metrics(run, target)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def store_class_metrics(run: Path, target: Path) -> None:
    """Store the metrics of each class of the best evaluation, without the confusion matrix, if the run is of a classifier."""
    path = Path("evaluation") / "validation" / "metrics.json"
    tables = json.loads((run / path).read_text()) if (run / path).is_file() else {}
    if "per_class" not in tables:
        return
    fields = {name: tables[name] for name in ("checkpoint", "split", "samples")}
    fields["per_class"] = {
        name: {metric: round(value, 4) for metric, value in metrics.items()}
        for name, metrics in tables["per_class"].items()
    }
    (target / path).parent.mkdir(parents=True)
    (target / path).write_text(json.dumps(fields, indent=1) + "\n")


def thin(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return at most `count` rows at equal distances, with the first and the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(index * (len(rows) - 1) / (count - 1))] for index in range(count)]


def drop_fields(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if row["kind"] != "train" or not UNUSED_FIELDS.search(name)}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines, with four significant digits."""
    path.write_text("".join(json.dumps(round_values(row)) + "\n" for row in rows))


def round_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round_values(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
