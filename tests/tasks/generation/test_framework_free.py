"""Workloads of generation open without a framework, so that an engine of either can train them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
OPEN = """
import sys
from pathlib import Path

import numpy as np

import small_media
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.tasks.recipes import load_recipe
from bottega.tasks.registry import open_workload

task, folder, has_latents = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
values = {"task": task, "engine": "jax", **getattr(small_media, task)(folder)}
if has_latents:
    shape = AutoencoderShape(channels=1, latent_channels=2, widths=(4, 4), scaling_factor=0.5)
    export_autoencoder({"encoder.conv_in.bias": np.zeros(4, np.float32)}, shape, folder / "vae")
    values |= {"model.vae": str(folder / "vae"), "data.normalise": "symmetric"}
workload = open_workload(load_recipe([values]).recipe, progress=lambda *report: None)
workload.task.specs()
print(sorted({"torch", "jax", "flax", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("task", "has_latents"), [("image", False), ("audio", False), ("video", False), ("image", True)]
)
def test_workloads_open_without_a_framework(task: str, has_latents: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    words = [sys.executable, "-c", OPEN, task, str(tmp_path), json.dumps(has_latents).capitalize()]
    process = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"
