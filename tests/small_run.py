"""A small language run to train, kill and resume in a test, in this process or through the command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from bottega.core import checkpoint
from warm_process import WarmCommand

SMALL: dict[str, Any] = {
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_size": 8,
    "model.intermediate_size": 32,
    "model.context": 16,
    "data.sequence_length": 16,
    "training.max_steps": 8,
    "training.batch_size": 4,
    "training.optimizer.name": "adamw",
    "training.learning_rate": 1e-3,
    "training.scheduler.warmup_steps": 2,
    "evaluation.every": 4,
    "checkpoint.every": 4,
    "samples.every": None,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}


def write_text(path: Path, *, seed: int = 0, words: int = 600) -> Path:
    """Write lines of five random words each; the text has 17 distinct characters, including the line break."""
    rng = random.Random(seed)
    chosen = [rng.choice(("alpha", "beta", "gamma", "delta", "zeta", "theta")) for _ in range(words)]
    lines = (" ".join(chosen[i : i + 5]) for i in range(0, words, 5))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings(output: Path, text: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "output_dir": str(output), "data.train.path": str(text), **changes}


def train(output: Path, text: Path, **changes: Any) -> Any:
    """Run `bottega.train` in this process. Pass keys with dots as `**{"training.max_steps": 4}`."""
    import bottega

    return bottega.train("language/shakespeare", settings(output, text, **changes))


def train_arguments(output: Path, text: Path, *more: str, **changes: Any) -> list[str]:
    """Return the command line of the same run."""
    keys = [
        f"{k}={'null' if v is None else json.dumps(v) if isinstance(v, bool) else v}"
        for k, v in settings(output, text, **changes).items()
    ]
    return ["train", "language/shakespeare", *keys, *more]


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "bottega", *arguments]


def environment(**more: str) -> dict[str, str]:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def run_bottega(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cold: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command in a subprocess: a fork of a warm process, or with `cold` a new Python."""
    variables = environment(**(env or {}))
    if cold:
        return subprocess.run(
            command(arguments), env=variables, capture_output=True, text=True, timeout=200, check=False, **options
        )
    process = WarmCommand(arguments, env=variables, **options)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def read_tensors(run: Path, which: str = "last") -> dict[str, np.ndarray]:
    """Verify a checkpoint and return its tensors as `file/name` -> array."""
    folder = checkpoint.read_link(run / "checkpoints", which)
    assert folder is not None, f"{run} has no {which} checkpoint"
    manifest = checkpoint.verify(folder)
    files = [name for name in manifest.files if name.endswith(".safetensors")]
    return {f"{file}/{name}": array for file in files for name, array in load_file(folder / file).items()}


def differing_tensors(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names that only one of them has or whose bytes differ."""
    unmatched = sorted(set(a) ^ set(b))
    return unmatched + [
        name for name in a if name in b and (a[name].dtype, a[name].tobytes()) != (b[name].dtype, b[name].tobytes())
    ]


def read_logged_steps(run: Path, kind: str = "train") -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["kind"] == kind]


class Running:
    """A command in the background; `until` waits for logged steps. `cold` or a launcher starts a new Python."""

    def __init__(
        self, run: Path, arguments: Sequence[str], *, launcher: Sequence[str] = (), cold: bool = False
    ) -> None:
        self.metrics = run / "metrics.jsonl"
        self.process: subprocess.Popen[str] | WarmCommand
        if launcher or cold:
            command_line = [sys.executable, *launcher, "-m", "bottega", *arguments]
            self.process = subprocess.Popen(command_line, env=environment(), stderr=subprocess.PIPE, text=True)
        else:
            self.process = WarmCommand(arguments, env=environment())

    def has(self, steps: int) -> bool:
        assert self.process.poll() is None, self.process.communicate()[1]
        return self.metrics.exists() and self.metrics.read_text().count("\n") >= steps

    def until(self, steps: int) -> None:
        deadline = time.monotonic() + 200
        while not self.has(steps):
            assert time.monotonic() < deadline, "training did not start"
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        try:
            _, err = self.process.communicate(timeout=200)
        finally:
            self.process.kill()
        return self.process.returncode, err
