"""Validation loss on tiny Shakespeare at nanoGPT's two budgets, through the bundled recipes.

BOTTEGA_DATA=... python benchmarks/shakespeare.py          # the CPU budget: nanoGPT 1.88
BOTTEGA_DATA=... python benchmarks/shakespeare.py --gpu    # the GPU budget: nanoGPT 1.47
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import bottega

GOALS = {"language/shakespeare": 1.88, "language/shakespeare-gpu": 1.47}


def main() -> None:
    name = "language/shakespeare-gpu" if "--gpu" in sys.argv else "language/shakespeare"
    text = Path(os.environ["BOTTEGA_DATA"]) / "text-lm-tinyshakespeare" / "input.txt"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "data.train.path": str(text),
            "output_dir": folder,
            "logging.tensorboard": False,
            "samples.every": None,
        }
        start = time.monotonic()
        run = bottega.train(name, settings, quiet=False)
        losses = [row["loss"] for row in run.history() if row["kind"] == "eval"]
    best = min(losses)
    print(f"{name}: best validation loss {best:.4f} (nanoGPT {GOALS[name]}), {time.monotonic() - start:.0f} s")
    print(json.dumps({"bench": "shakespeare", "recipe": name, "best": best, "goal": GOALS[name], "steps": run.step}))


if __name__ == "__main__":
    main()
