"""Properties that hold for every engine and every task."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, build
from PIL import Image

import small_media
import two_ranks as two_ranks_script
from bottega.core import checkpoint
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.backend import open_backend
from bottega.engines.nonfinite import flatten_batch
from bottega.metrics_log import read_metrics
from small_run import differing_tensors, read_logged_steps, read_tensors, train

ALL_FEATURES: dict[str, Any] = {
    "model.dropout": 0.1,
    "training.ema": 0.9,
    "training.micro_batch_size": 2,
    "training.max_grad_norm": 0.5,
}


@pytest.fixture(params=[pytest.param(case, id=str(case), marks=case.marks) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=atol, err_msg=name)


OPTIMIZER_CASES = [
    case for case in CASES if str(case) in ("torch-language/shakespeare", "torch-image", "torch-classify")
]
"""Optimizer state depends on tensors and not on tasks, so that a few cases cover all optimizers."""
OPTIMIZED = [pytest.param(case, "adamw", id=f"{case}-adamw", marks=case.marks) for case in CASES]
OPTIMIZED += [
    pytest.param(case, name, id=f"{case}-{name}")
    for case in OPTIMIZER_CASES
    for name in ("muon", "adam", "sgd", "lion", "adafactor")
]


@pytest.mark.parametrize(("case", "optimizer"), OPTIMIZED, indirect=["case"])
def test_resume_is_bit_exact(case: Case, tmp_path: Path, optimizer: str) -> None:
    """Saving does not disturb the run that is saved, and loader workers change nothing."""
    options = {**ALL_FEATURES, "training.optimizer.name": optimizer}
    straight = build(case, tmp_path, **options)
    reports, checkpoints = [], {}
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        reports += straight.advance(start, stop)
        checkpoints[stop] = straight.save(tmp_path / f"at-{stop}", stop)
    end = straight.state()
    for cut in (1, 4):
        resumed = build(case, tmp_path, **options, **{"data.workers": 1 if cut == 4 and optimizer == "adamw" else 0})
        resumed.engine.load(checkpoints[cut])
        assert resumed.advance(cut, 6) == reports[cut:]
        assert differing_tensors(end, resumed.state()) == [], f"cut at step {cut}"


def test_micro_batches_do_not_change_the_loss_or_the_update(case: Case, tmp_path: Path) -> None:
    """With SGD a difference in a gradient is not amplified in the weights."""
    options = {"model.dropout": 0.0, "training.optimizer.name": "sgd", "training.learning_rate": 0.1}
    unsplit = build(case, tmp_path, **options)
    losses = [report["loss"] for report in unsplit.advance(0, 4)]
    for micro in (1, 3):
        split = build(case, tmp_path, **options, **{"training.micro_batch_size": micro})
        assert [report["loss"] for report in split.advance(0, 4)] == pytest.approx(losses, rel=1e-6)
        assert_close(unsplit.state(), split.state(), atol=1e-6)


def test_sample_order_does_not_depend_on_the_world_size(case: Case, tmp_path: Path) -> None:
    loader = build(case, tmp_path).loader
    for world, step in itertools.product((2, 4), (0, 1, 17, 1000)):
        ranks = [flatten_batch(replace(loader, data_rank=rank, data_size=world).batch(step)) for rank in range(world)]
        for name, expected in flatten_batch(loader.batch(step)).items():
            parts = [batch[name] for batch in ranks]
            if name in loader.source.padding_values:  # each rank pads to its own longest sample
                missing = [expected.shape[1] - part.shape[1] for part in parts]
                fill = loader.source.padding_values[name]
                parts = [np.pad(p, ((0, 0), (0, n)), constant_values=fill) for p, n in zip(parts, missing, strict=True)]
            # A scalar, such as the frame rate, is the same on every rank.
            gathered = np.concatenate(parts) if np.ndim(expected) else np.unique(parts).squeeze()
            np.testing.assert_array_equal(gathered, expected)


def test_evaluation_does_not_depend_on_the_batch_size(case: Case, tmp_path: Path) -> None:
    subject = build(case, tmp_path)
    source = subject.workload.data.validation()
    assert source is not None
    expected = evaluate(subject.engine, iter_eval_batches(source, 4))
    for size in (1, 3, 64):
        assert evaluate(subject.engine, iter_eval_batches(source, size)) == pytest.approx(expected, rel=1e-6)


def test_snapshots_and_evaluations_do_not_change_a_run(case: Case, tmp_path: Path) -> None:
    straight, watched = build(case, tmp_path, **ALL_FEATURES), build(case, tmp_path, **ALL_FEATURES)
    source = watched.workload.data.validation()
    assert source is not None
    reports = straight.advance(0, 4)
    first = watched.advance(0, 2)
    watched.save(tmp_path / "middle", 2)
    evaluate(watched.engine, iter_eval_batches(source, 4))
    assert first + watched.advance(2, 4) == reports
    assert differing_tensors(straight.state(), watched.state()) == []


def test_recomputed_activations_give_the_same_weights(case: Case, tmp_path: Path) -> None:
    plain = build(case, tmp_path, **ALL_FEATURES)
    checkpointed = build(case, tmp_path, **ALL_FEATURES, **{"training.gradient_checkpointing": True})
    expected, reports = plain.advance(0, 3), checkpointed.advance(0, 3)
    if case.engine == "jax":  # XLA fuses recomputed operations in another way, which rounds differently
        assert [r["loss"] for r in reports] == pytest.approx([r["loss"] for r in expected], rel=1e-6)
        assert_close(plain.state(), checkpointed.state(), atol=1e-6)
    else:
        assert reports == expected
        assert differing_tensors(plain.state(), checkpointed.state()) == []


def test_training_reduces_the_loss(case: Case, tmp_path: Path) -> None:
    losses = [report["loss"] for report in build(case, tmp_path, **{"training.learning_rate": 1e-2}).advance(0, 40)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [p for p in OPTIMIZED if p.values[1] in ("adamw", "muon")],
    indirect=["case"],
)
def test_frozen_parameter_does_not_move_and_has_no_state(case: Case, tmp_path: Path, optimizer: str) -> None:
    subject = build(case, tmp_path)
    first = next(name for name, info in subject.engine.parameters().items() if len(info.shape) > 1)
    groups = [{"pattern": first.replace(".", r"\."), "scale": "none"}, {"pattern": ".*"}]
    frozen = build(case, tmp_path, **ALL_FEATURES, **{"training.groups": groups, "training.optimizer.name": optimizer})
    before = frozen.state()
    frozen.advance(0, 4)
    after = frozen.state()
    # Buffers are in no group; some have their own update rule.
    model = {f"model.safetensors/{name}" for name in frozen.engine.parameters()}
    assert {name for name in model if np.array_equal(before[name], after[name])} == {f"model.safetensors/{first}"}
    assert [name for name in after if first in name and name not in model] == []


def test_evaluation_uses_the_averaged_weights(case: Case, tmp_path: Path) -> None:
    averaged, plain = build(case, tmp_path, **{"training.ema": 0.5}), build(case, tmp_path)
    averaged.advance(0, 3)
    folder = averaged.save(tmp_path / "averaged", 3)
    # State without a gradient is not averaged; its current value is evaluated.
    read = open_backend(case.engine).read_tensors
    weights = {**read(folder / "model.safetensors"), **read(folder / "ema.safetensors")}
    plain.engine.load_weights({"model.safetensors": weights}, folder)
    source = averaged.workload.data.validation()
    assert source is not None
    a, b = (evaluate(subject.engine, iter_eval_batches(source, 4)) for subject in (averaged, plain))
    assert a == b


def test_initial_weights_depend_on_the_seed(case: Case, tmp_path: Path) -> None:
    a, b, c = (build(case, tmp_path, seed=seed).state() for seed in (0, 0, 1))
    assert differing_tensors(a, b) == []
    assert (differing_tensors(a, c) == []) == case.starts_at_zero


def test_two_ranks_match_the_checkpoints_of_one_process(two_ranks: Path, tmp_path: Path, text_file: Path) -> None:
    """Compare the command under torchrun with the same command in one process."""
    alone = train(tmp_path, text_file, name="whole", **{"training.max_steps": 6, "checkpoint.every": 2}).path
    distributed = two_ranks / "whole"
    for link in ("last", "best"):
        assert_close(read_tensors(alone, link), read_tensors(distributed, link), atol=2e-6)
    assert read_logged_steps(distributed) == read_logged_steps(alone) == [1, 2, 3, 4, 5, 6]
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (alone, distributed)
    ]
    assert [r["loss"] for r in rows[1]] == pytest.approx([r["loss"] for r in rows[0]], rel=1e-5)
    manifest = checkpoint.verify(distributed / "checkpoints" / "last")
    assert manifest.fingerprint["world"] == 2


def test_two_ranks_draw_the_noise_of_one_process(two_ranks: Path, tmp_path: Path) -> None:
    """Noise depends on the position in the global batch, and in an evaluation on the sample."""
    alone = small_media.train(tmp_path, name="image", **two_ranks_script.IMAGE).path
    distributed = two_ranks / "image"
    assert_close(read_tensors(alone), read_tensors(distributed), atol=2e-6)
    a, b = (read_metrics(run / "metrics.jsonl") for run in (alone, distributed))
    assert [r["kind"] for r in a] == [r["kind"] for r in b]
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-5)
    for name in ("00.png", "01.png"):
        images = [np.asarray(Image.open(run / "samples" / "step-00000004" / name), int) for run in (alone, distributed)]
        # The weights differ by rounding, which can change the level of a pixel by one.
        np.testing.assert_allclose(*images, rtol=0, atol=1, err_msg=name)


def test_two_ranks_resume_together(two_ranks: Path, tmp_path: Path, text_file: Path) -> None:
    options = {"training.max_steps": 6, "checkpoint.every": 2, "training.scheduler.name": "constant"}
    alone = train(tmp_path, text_file, name="halves", **options).path
    assert_close(read_tensors(alone), read_tensors(two_ranks / "halves"), atol=2e-6)
    assert read_logged_steps(two_ranks / "halves") == [1, 2, 3, 4, 5, 6]
    assert "resumed" in (two_ranks / "halves" / "log.txt").read_text()


def test_one_process_resumes_a_run_of_two(two_ranks: Path, tmp_path: Path, text_file: Path) -> None:
    import shutil

    options = {"training.max_steps": 8, "checkpoint.every": 2, "training.scheduler.name": "constant"}
    shutil.copytree(two_ranks / "halves", tmp_path / "halves", symlinks=True)
    resumed = train(tmp_path, text_file, name="halves", **options).path
    alone = train(tmp_path / "alone", text_file, name="halves", **options).path
    assert_close(read_tensors(alone), read_tensors(resumed), atol=2e-6)
    assert "world: 2 -> 1" in (resumed / "log.txt").read_text(), "the changed world size is not logged"
