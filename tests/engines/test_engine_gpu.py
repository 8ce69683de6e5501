"""The torch engine on a GPU: compilation, half precision, fused noise, profiles, batches that do not fit in memory."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
import small_texts
from bottega.core.errors import OutOfMemory
from bottega.core.noise import Noise
from bottega.engines.torch.engine import TorchEngine
from bottega.engines.torch.noise import FusedNoise
from bottega.measurements import CACHED
from small_run import differing_tensors, read_tensors, settings, train, write_text
from toy_task import Toy, loader, training

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.history() if row["kind"] == "train"]


RECIPES: dict[str, Any] = {
    "language/shakespeare": lambda folder: settings(folder, write_text(folder / "text.txt")),
    "image": small_media.image,
    "audio": small_media.audio,
    "video": small_media.video,
    "classify": small_texts.settings,
    "classify/cnn": lambda folder: small_texts.settings(folder, "cnn"),
}


EXACT = {"classify/cnn": {"model.dropout": 0.0, "model.word_dropout": 0.0}}
"""Overrides that turn dropout off: it draws different numbers in other precisions and in compiled models."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_losses_match_eager_ones(recipe: str, tmp_path: Path) -> None:
    values = {
        **RECIPES[recipe](tmp_path),
        "device": "cuda",
        "training.mixed_precision": "fp32",
        "evaluation.every": None,
    }
    values |= EXACT.get(recipe, {"model.dropout": 0.0})
    runs = [bottega.train(recipe, {**values, "training.compile": on, "name": f"compile-{on}"}) for on in (True, False)]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_precision_stays_near_float32(recipe: str, precision: str, tmp_path: Path) -> None:
    values = {**RECIPES[recipe](tmp_path), "device": "cuda", "training.compile": False, "evaluation.every": None}
    values |= EXACT.get(recipe, {"model.dropout": 0.0})
    runs = [bottega.train(recipe, {**values, "training.mixed_precision": p, "name": p}) for p in (precision, "fp32")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=5e-2)


def test_the_loss_scale_is_halved_until_gradients_are_finite(tmp_path: Path) -> None:
    """Steps that overflow are skipped; the run continues with finite weights."""
    text = write_text(tmp_path / "text.txt")
    values = {"device": "cuda", "training.mixed_precision": "fp16", "training.compile": False, "evaluation.every": None}
    run = train(tmp_path, text, **values, **{"training.max_steps": 12, "training.learning_rate": 3e-3})
    assert np.isfinite(losses(run)).all()
    assert losses(run)[-1] < losses(run)[0]


def test_fused_noise_matches_numpy() -> None:
    positions = torch.arange(5, 12, device="cuda")
    for step in (0, 1, 7):
        fused, plain = FusedNoise(1, step, positions, torch), Noise(1, step, np.arange(5, 12), np)
        np.testing.assert_array_equal(fused.uniform("u", (3,)).cpu().numpy(), plain.uniform("u", (3,)))
        np.testing.assert_allclose(fused.normal("n", (3,)).cpu().numpy(), plain.normal("n", (3,)), rtol=0, atol=1e-6)


LARGER_SIZES = {
    "model.hidden_size": 256,
    "model.intermediate_size": 4096,
    "model.context": 256,
    "data.sequence_length": 256,
}
"""A model whose batches need hundreds of megabytes."""


def test_a_batch_that_does_not_fit_is_split(tmp_path: Path) -> None:
    """The GPU memory of the process is limited; the global batch size is unchanged."""
    text = write_text(tmp_path / "text.txt", words=6000)
    values = {
        "device": "cuda",
        "training.batch_size": 64,
        "training.max_steps": 2,
        "training.compile": False,
        **LARGER_SIZES,
    }
    values |= {"evaluation.every": None, "training.mixed_precision": "fp32", "checkpoint.every": 2}
    unsplit = train(tmp_path, text, name="unsplit", **values)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
    try:
        run = train(tmp_path, text, name="split", **values, **{"training.micro_batch_size": "auto"})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    progress = json.loads((run.path / "checkpoints" / "last" / "progress.json").read_text())
    assert 1 <= progress["micro_batch_size"] < 64
    assert losses(run) == pytest.approx(losses(unsplit), rel=1e-4)


@pytest.mark.usefixtures("compiled_at_once")
def test_a_profile_on_a_gpu_ranks_its_kernels(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    values = {"device": "cuda", "training.max_steps": 12, "evaluation.every": None, "deterministic": True}
    profiled = train(tmp_path, text, name="profiled", **values, **{"profile.steps": [6, 9]})
    report = json.loads((profiled.path / "profile" / "operations.json").read_text())
    assert report["device"] == f"cuda:0 {torch.cuda.get_device_name()}"
    assert {operation["device"] for operation in report["operations"]} == {"cuda"}
    assert sum(operation["share"] for operation in report["operations"]) <= 1 + 1e-9
    assert 0 < report["total_ms"] <= report["wall_ms"]
    trace = json.loads(gzip.decompress((profiled.path / "profile" / "trace.json.gz").read_bytes()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event["name"] for event in events if event["cat"] == "user_annotation" and event["name"][:5] == "step "]
    assert steps == ["step 6", "step 7", "step 8", "step 9"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    total = sum(event["dur"] for event in events if event["cat"] in on_device)
    assert report["total_ms"] == pytest.approx(total / 1000, rel=1e-3)  # every kernel once, no region
    plain = train(tmp_path, text, name="plain", **values)
    assert not differing_tensors(read_tensors(profiled.path), read_tensors(plain.path))


def test_memory_that_runs_out_is_reported_by_category(tmp_path: Path) -> None:
    """The GPU memory of the process is limited to less than a batch needs."""
    text = write_text(tmp_path / "text.txt", words=6000)
    values = {
        "device": "cuda",
        "training.batch_size": 96,
        "training.compile": False,
        "evaluation.every": None,
        **LARGER_SIZES,
    }
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allocated = torch.cuda.memory_allocated()  # by earlier tests
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
    try:
        with pytest.raises(
            OutOfMemory, match=r"weights .* optimizer .* activations and workspace .* MiB; lower"
        ) as caught:
            train(tmp_path, text, name="full", **values, **{"training.micro_batch_size": 96})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    memory = caught.value.memory
    assert memory is not None
    assert memory.total == total
    assert sum(memory.categories.values()) - memory.categories[CACHED] == memory.peak
    assert memory.categories["activations and workspace"] - allocated > 50 << 20
    assert json.loads((tmp_path / "full" / "memory.json").read_text())["categories"] == memory.categories


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_module_norms_are_unscaled_and_change_nothing(precision: str, tmp_path: Path) -> None:
    """The norms of all modules are that of the model, which the loss scale does not enter; weights stay equal bit for bit."""
    text = write_text(tmp_path / "text.txt")
    values = {"device": "cuda", "deterministic": True, "training.mixed_precision": precision}
    runs = [train(tmp_path, text, name=f"modules-{on}", **values, **{"logging.modules": on}) for on in (True, False)]
    norms = {row["step"]: row["grad_norm"] for row in runs[0].history() if row["kind"] == "train"}
    rows = [json.loads(line) for line in (runs[0].path / "modules.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1
    for row in rows:
        squares = sum((values["gradient_norm"] or np.nan) ** 2 for values in row["modules"].values())
        assert squares**0.5 == pytest.approx(norms[row["step"]] or np.nan, rel=1e-5, nan_ok=True)
    assert losses(runs[0]) == losses(runs[1])


def test_device_rate_and_sensors_are_in_the_metrics(tmp_path: Path) -> None:
    run = train(tmp_path, write_text(tmp_path / "text.txt"), device="cuda", **{"logging.resources": True})
    row = run.history()[0]
    assert 0 < row["matmul_share"] < 1
    assert json.loads((run.path / "environment.json").read_text())["matmul_rate"] > 1e12


def test_measuring_the_compute_leaves_no_trace_in_the_peak_memory() -> None:
    torch_engine = TorchEngine(Toy(), training(), rate=lambda step: 1e-3, device="cuda")
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert torch_engine.measure_compute(loader(of=torch_engine).batch(0))
    # Three matrices of 4096 rows in float32 are 192 MiB.
    assert torch.cuda.max_memory_allocated() < allocated + (1 << 25)
    assert torch.cuda.memory_reserved() < reserved + (1 << 26)
