"""The learning rate range test: a suggestion that trains, no side effects, and `learning_rate: auto` resolved once."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
import small_run
import small_texts
from bottega import cli
from bottega.analysis.lr_find import format_report, lr_find_command
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.data.sources.source import ArraySource
from bottega.engines.lr_range_test import (
    HIGHEST_RATE,
    LOWEST_RATE,
    NUM_STEPS,
    RateSweep,
    analyse_sweep,
    sweep_learning_rates,
)
from bottega.run import auto_learning_rate, compose
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from small_run import differing_tensors, read_tensors
from small_run import run_bottega as command
from toy_task import engine, loader, training


class QuadraticTask(Task):
    """A quadratic loss with one steep direction and one whose curvature is 100 times smaller."""

    curvature: float

    def specs(self) -> dict[str, ModelSpec]:
        ones = Initial(lambda model, seed: torch.nn.init.ones_(model.weight))
        return {"model": ModelSpec(lambda config: torch.nn.Linear(2, 1, bias=False), initial=ones)}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return {"height": float(len(batch["x"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        steep, flat = models["model"].weight[0]
        height = self.curvature / 2 * (steep**2 + flat**2 / 100)
        return Loss(terms={"height": (height * len(batch["x"]), 1.0)}, metrics={})


def test_suggestion_is_inversely_proportional_to_the_curvature() -> None:
    """Gradient descent converges below 2 / curvature, and slowly at a hundredth of that."""
    products = []
    for curvature in (0.5, 5.0, 500.0):
        options = training(optimizer={"name": "sgd", "momentum": 0.0}, weight_decay=0.0, max_grad_norm=None)
        sgd_engine = engine(options, task=QuadraticTask(curvature=curvature))
        sweep = sweep_learning_rates(sgd_engine, loader(ArraySource({"x": np.zeros(8)}), of=sgd_engine))
        assert sweep.diverged == (curvature > 0.5)
        rate = analyse_sweep(sweep, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).suggestion
        assert 0.01 < rate * curvature < 1.0
        products.append(rate * curvature)
    assert max(products) < 1.3 * min(products), "the suggestion scales with the inverse curvature"


def make_sweep(heights: np.ndarray, *, noise: float = 0.0, seed: int = 0) -> RateSweep:
    rates = np.geomspace(LOWEST_RATE, HIGHEST_RATE, NUM_STEPS)
    jitter = noise * np.random.default_rng(seed).standard_normal(NUM_STEPS + 1)
    return RateSweep(rates, np.r_[heights[0], heights] + jitter, diverged=False)


def test_steepest_point_of_a_known_curve() -> None:
    exponents = np.linspace(np.log10(LOWEST_RATE), np.log10(HIGHEST_RATE), NUM_STEPS)
    sweep = make_sweep(3 - 2 / (1 + np.exp(-3 * (exponents + 3))), noise=0.02)
    analysis = analyse_sweep(sweep, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert analysis.steepest == pytest.approx(1e-3, rel=0.5)
    assert analysis.suggestion < analysis.steepest
    assert analysis.start_loss == pytest.approx(3, abs=0.03)


FLAT = r"the loss never falls between the rates|falls only from .*, while batches differ by .*batch_size or more --s"


def test_messages_for_a_loss_that_does_not_fall_enough() -> None:
    rising = 2 + np.linspace(0, 1, NUM_STEPS) ** 2
    with pytest.raises(UsageError, match=r"^the loss never falls between the rates 1e-07 and 10 \(.*\(--min, --max\)"):
        analyse_sweep(make_sweep(rising), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    little = 2 - 0.03 * np.linspace(0, 1, NUM_STEPS)
    with pytest.raises(UsageError, match=r"falls only from 2\.\d+ to 1\.9\d+, while batches differ") as caught:
        analyse_sweep(make_sweep(little, noise=0.1, seed=1), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert "never falls" not in str(caught.value)


def test_divergence_starts_where_the_loss_exceeds_its_start() -> None:
    """Not where the sweep ends, some steps later."""
    exponents = np.linspace(np.log10(LOWEST_RATE), np.log10(HIGHEST_RATE), NUM_STEPS)
    heights = 3 - 2 / (1 + np.exp(-3 * (exponents + 3))) + np.where(exponents > -0.5, 40 * (exponents + 0.5), 0)
    sweep = make_sweep(heights)
    assert analyse_sweep(sweep, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).diverges_at is None
    ended = RateSweep(sweep.rates, sweep.losses, diverged=True)
    analysis = analyse_sweep(ended, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert analysis.diverges_at is not None
    assert analysis.minimum < analysis.diverges_at
    assert analysis.diverges_at == pytest.approx(10**-0.45, rel=0.5)
    sudden = RateSweep(sweep.rates[:60], sweep.losses[:61], diverged=True)  # from one step to the next, to NaN
    assert analyse_sweep(sudden, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).diverges_at == sweep.rates[59]


def test_early_divergence_is_told_from_a_loss_that_is_never_finite() -> None:
    class InfiniteTask(QuadraticTask):
        def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
            total, weight = super().loss(models, batch, rng).terms["height"]
            return Loss(terms={"height": (total + torch.inf, weight)}, metrics={})

    options = training(optimizer={"name": "sgd", "momentum": 0.0}, weight_decay=0.0, max_grad_norm=None)
    for task, low, message in (
        (InfiniteTask(curvature=1.0), 1e-3, r"not finite before the first update; check the data and the model$"),
        (
            QuadraticTask(curvature=1.0),
            1e3,
            r"^the loss diverges within [2-5] steps of the lowest rate 1000; lower --min",
        ),
    ):
        sgd_engine = engine(options, task=task)
        sweep = sweep_learning_rates(
            sgd_engine, loader(ArraySource({"x": np.zeros(8)}), of=sgd_engine), low=low, high=1e4
        )
        with pytest.raises(UsageError, match=message):
            analyse_sweep(sweep, low=low, high=1e4, steps=NUM_STEPS)


def test_a_loss_that_never_falls_is_refused() -> None:
    rising = 2 + np.linspace(0, 1, NUM_STEPS) ** 2
    for seed in range(40):
        for heights in (np.full(NUM_STEPS, 2.0), rising):
            with pytest.raises(UsageError, match=FLAT):
                analyse_sweep(
                    make_sweep(heights, noise=0.3, seed=seed), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS
                )


# Recipes


def language(folder: Path) -> tuple[str, dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    return "language/shakespeare", small_run.settings(folder, small_run.write_text(folder / "text.txt"))


def classify(folder: Path) -> tuple[str, dict[str, Any]]:
    return "classify", small_texts.settings(folder)


def image(folder: Path) -> tuple[str, dict[str, Any]]:
    return "image", small_media.image(folder)


MEDIA = [language, classify, image]


def to_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def run_lr_find(run_or_recipe: str, overrides: list[str], out: Path, **options: Any) -> dict[str, Any]:
    return lr_find_command(
        run_or_recipe,
        overrides,
        out=out,
        quiet=True,
        **{"low": LOWEST_RATE, "high": HIGHEST_RATE, "steps": NUM_STEPS, **options},
    )


def hash_files(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
def test_recipe_trains_at_the_suggested_rate(medium: Any, tmp_path: Path) -> None:
    name, values = medium(tmp_path / "data")
    values |= {"output_dir": str(tmp_path / "runs"), "training.batch_size": 16}
    report = run_lr_find(name, to_overrides(values), tmp_path / "out")
    assert not (tmp_path / "runs").exists(), "no run is created"
    again = run_lr_find(name, to_overrides(values), tmp_path / "more")
    files = {"picture", "json"}
    assert {k: v for k, v in report.items() if k not in files} == {k: v for k, v in again.items() if k not in files}
    saved = json.loads((tmp_path / "out" / "lr-find.json").read_text())
    assert saved["curve"] == report["curve"]
    rate = report["suggestion"]
    assert report["minimum_tenth"] == report["minimum"] / 10
    assert f"training.learning_rate={rate:g}" in report["command"]
    losses = {}
    for factor in (0.01, 1.0, 100.0):
        changes = {"training.learning_rate": rate * factor, "training.max_steps": 40, "evaluation.every": 40}
        changes |= {"training.scheduler.name": "constant", "training.on_nonfinite": "skip"}
        losses[factor] = bottega.train(name, {**values, **changes}).metrics["loss"]
    # Texts this small are also learned at 100 times the rate, so the suggestion is nearly the best of the three.
    best = min(losses.values())
    assert losses[1.0] - best < 0.1 * (losses[0.01] - best), losses


def test_report_names_the_plot(tmp_path: Path) -> None:
    name, values = classify(tmp_path)
    report = run_lr_find(name, to_overrides(values), tmp_path / "out")
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    assert f"plot:   {report['picture']}" in format_report(report)


def test_run_is_swept_from_its_weights_and_not_changed(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "finished"
    shutil.copytree(finished_run, run, symlinks=True)
    before = hash_files(run)
    report = run_lr_find(str(run), [], tmp_path / "out")
    assert hash_files(run) == before
    assert report["from_step"] == 8
    recipe = load_recipe([run / "recipe.yaml"]).recipe
    from_scratch = run_lr_find(str(run / "recipe.yaml"), [], tmp_path / "fresh")
    assert from_scratch["from_step"] == 0
    assert report["start_loss"] < from_scratch["start_loss"] - 0.01, "eight training steps lowered the loss"
    assert recipe.training.max_steps == 8
    assert report["command"].endswith(f"training.max_steps=16 --resume_from {run}")
    with pytest.raises(UsageError, match="is a run and has its own recipe; remove seed=1"):
        run_lr_find(str(run), ["seed=1"], tmp_path / "out")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run_lr_find(str(run), [], tmp_path / "out")


def test_invalid_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    for arguments, message in {
        ("--min", "1", "--max", "0.1"): "both must be positive, and --min below --max",
        ("--steps", "3"): "expected 10 or more",
        ("--max", "1e-6", "--steps", "20"): "set training.learning_rate to a number",
        ("--min", "high"): "invalid float value",
    }.items():
        assert cli.main(["lr-find", name, *to_overrides(values), "--out", str(tmp_path / "out"), *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_lr_find_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    arguments = ["lr-find", name, *to_overrides(values), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert "steepest fall" in output
    assert "minimum / 10" in output
    assert f"use it: bottega train {name} " in output
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suggestion"] > 0


# auto

AUTO = {"training.learning_rate": "auto"}


@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
def test_auto_equals_a_run_with_the_suggested_rate(
    medium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range test does not change the trained weights, and a resumed run does not repeat it."""
    name, values = medium(tmp_path)
    values |= {"training.batch_size": 16}
    auto = bottega.train(name, {**values, **AUTO, "name": "auto"})
    saved = json.loads((auto.path / "lr-find.json").read_text())
    assert (auto.path / "lr-find.png").is_file()
    assert load_recipe([auto.path / "recipe.yaml"]).recipe.training.learning_rate == "auto"
    assert f"auto is {saved['suggestion']:g}, found by a range test" in (auto.path / "log.txt").read_text()
    assert max(row["learning_rate"] for row in auto.history() if row["kind"] == "train") == saved["suggestion"]
    explicit = bottega.train(name, {**values, "training.learning_rate": saved["suggestion"], "name": "said"})
    assert not differing_tensors(read_tensors(auto.path), read_tensors(explicit.path))
    shutil.copytree(auto.path, tmp_path / "again", symlinks=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000008")
    monkeypatch.setattr(auto_learning_rate, "run_range_test", None)
    again = bottega.train(name, {**values, **AUTO, "name": "again"})
    assert again.step == 8
    assert not differing_tensors(read_tensors(auto.path), read_tensors(again.path))
    log = (again.path / "log.txt").read_text()
    assert f"auto is {saved['suggestion']:g}, from the earlier range test" in log
    assert re.search(r"resumed \S+ at step \d of 8", log)


def ewc_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    name, values = classify(folder)
    path = values.pop("data.train.path")
    sources = [{"path": path, "labels": ["cook", "sail"]}, {"path": path, "labels": ["sing"]}]
    own = {"data.train": {}, "data.sources": sources, "data.mixture": "sequence", "techniques": ["ewc"]}
    return name, {**values, **own, "data.split": None}


def test_range_test_releases_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A technique with a callback before each step refers to the engine; a leak would keep two models in memory."""
    engines: list[weakref.ref[Any]] = []

    def build(*args: Any) -> Any:
        engine = compose.build_engine(*args)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(auto_learning_rate, "build_engine", build)
    name, values = ewc_settings(tmp_path)
    recipe = load_recipe([name, values]).recipe
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    gc.disable()
    try:
        auto_learning_rate.run_range_test(recipe, workload, steps=20)
        assert [reference() for reference in engines] == [None]
    finally:
        gc.enable()


def test_resumed_checkpoint_is_verified_before_the_range_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, values = classify(tmp_path)
    start = bottega.train(name, {**values, "name": "first"}).path
    arguments = [
        "train",
        name,
        *to_overrides({**values, **AUTO, "training.batch_size": 16}),
        "--resume_from",
        str(start),
    ]
    (file,) = start.glob("checkpoints/step-00000008/model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cli.main([*arguments, "name=auto"]) == 4
    assert "model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "auto" / "lr-find.json").exists()
    file.write_bytes(content)
    assert cli.main([*arguments, "name=auto"]) == 0
    # 8 steps of half the batch size.
    assert json.loads((tmp_path / "auto" / "lr-find.json").read_text())["from_step"] == 4


def test_adapter_is_not_swept_on_another_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapter weights are meaningless on another base model."""
    name, values = image(tmp_path)
    exports = [
        bottega.load(bottega.train(name, {**values, "name": f"base-{seed}", "seed": seed}).path).export()
        for seed in range(2)
    ]
    values |= {"model.from": str(tmp_path / "base-0"), "techniques": [{"name": "lora", "options": {"rank": 2}}]}
    run = bottega.train(name, {**values, "name": "held"}).path
    with pytest.raises(UsageError, match=FLAT):  # the sweep ran; so few parameters lower the loss too little
        run_lr_find(str(run), [], tmp_path / "out")
    for file in exports[1].rglob("*.safetensors"):
        shutil.copy(file, exports[0] / file.relative_to(exports[1]))
    with pytest.raises(CheckpointError, match=r"model\.from is not the base that this run started with"):
        run_lr_find(str(run), [], tmp_path / "out")
    assert cli.main(["train", name, *to_overrides({**values, **AUTO}), "name=auto", "--resume_from", str(run)]) == 4
    assert "model.from is not the base that" in capsys.readouterr().err
    assert not (tmp_path / "auto" / "lr-find.json").exists()


def test_run_keeps_its_learning_rate(tmp_path: Path) -> None:
    name, values = classify(tmp_path)
    values |= {**AUTO, "name": "kept", "training.batch_size": 16}
    run = bottega.train(name, values).path
    with pytest.raises(UsageError, match=r"training\.learning_rate: auto -> 0\.001"):
        bottega.train(name, {**values, "training.learning_rate": 1e-3})
    saved = json.loads((run / "lr-find.json").read_text())
    (run / "lr-find.json").unlink()
    with pytest.raises(CheckpointError, match="is missing or damaged; it contains the learning rate of this run"):
        bottega.train(name, values)
    # Before the first checkpoint, the file may belong to another recipe.
    shutil.rmtree(run / "checkpoints")
    (run / "lr-find.json").write_text(json.dumps({**saved, "suggestion": 7.0, "key": "of another recipe"}))
    bottega.train(name, values)
    assert json.loads((run / "lr-find.json").read_text()) == saved


def test_auto_without_a_falling_loss_is_refused_before_training(tmp_path: Path) -> None:
    """Learning rates scaled by 1e-9 change nothing."""
    name, values = classify(tmp_path)
    frozen = {"training.groups": [{"pattern": ".*", "scale": 1e-9}], "name": "still"}
    with pytest.raises(UsageError, match=r"(never falls|falls only) .*set training\.learning_rate to a number"):
        bottega.train(name, {**values, **AUTO, **frozen})
    assert not (tmp_path / "still" / "checkpoints").exists()


def test_auto_in_plan_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    arguments = [*to_overrides(values), "--learning_rate", "auto"]
    assert cli.main(["plan", name, *arguments, "--check"]) == 0
    assert "adamw at a learning rate from a range test" in capsys.readouterr().err
    assert cli.main(["inspect", name, *arguments]) == 0
    assert load_recipe([name, {**values, **AUTO}]).recipe.run_name() != load_recipe([name, values]).recipe.run_name()
    with pytest.raises(UsageError, match=r"training\.learning_rate: expected a number.*got 'fast'"):
        load_recipe([name, {"training.learning_rate": "fast"}])
    with pytest.raises(UsageError, match=r"training\.learning_rate: .*above 0"):
        load_recipe([name, {"training.learning_rate": 0}])


@pytest.mark.slow
def test_auto_is_equal_across_ranks_and_kills(tmp_path: Path) -> None:
    name, values = classify(tmp_path / "data")
    arguments = [*to_overrides({**values, **AUTO, "training.batch_size": 16}), "name=two", f"output_dir={tmp_path}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for _ in range(2):
        command_line = [sys.executable, *launcher, "-m", "bottega", "train", name, *arguments]
        done = subprocess.run(command_line, env=small_run.environment(), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    alone = bottega.train(name, {**values, **AUTO, "training.batch_size": 16, "name": "alone"})
    reports = [json.loads((path / "lr-find.json").read_text()) for path in (tmp_path / "two", alone.path)]
    # Only dropout noise depends on the rank.
    assert reports[0]["suggestion"] == pytest.approx(reports[1]["suggestion"], rel=0.8)
    verify = ["verify-resume", name, *to_overrides({**values, **AUTO, "training.batch_size": 16}), "--steps", "12"]
    done = command([*verify, "--kills", "1"])
    assert done.returncode == 0, done.stderr
