"""A range test finds a rate that learns, leaves everything else alone, and settles `learning_rate: auto` once for a run."""

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
from small_run import bottega as command
from small_run import different, tensors
from toy_task import engine, loader, training


class Bowl(Task):
    """curvature / 2 of the distance to 0, squared, and beside it one that is a hundred times as flat."""

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


def test_the_rate_follows_the_curvature() -> None:
    """Plain descent needs less than 2 / curvature, and a hundredth of that is slow."""
    found = []
    for curvature in (0.5, 5.0, 500.0):
        options = training(optimizer={"name": "sgd", "momentum": 0.0}, weight_decay=0.0, max_grad_norm=None)
        one = engine(options, task=Bowl(curvature=curvature))
        swept = sweep_learning_rates(one, loader(ArraySource({"x": np.zeros(8)}), of=one))
        assert swept.diverged == (curvature > 0.5)
        rate = analyse_sweep(swept, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).suggestion
        assert 0.01 < rate * curvature < 1.0
        found.append(rate * curvature)
    assert max(found) < 1.3 * min(found), "it is one point of the curve, whatever the scale"


def curve(heights: np.ndarray, *, noise: float = 0.0, seed: int = 0) -> RateSweep:
    rates = np.geomspace(LOWEST_RATE, HIGHEST_RATE, NUM_STEPS)
    jitter = noise * np.random.default_rng(seed).standard_normal(NUM_STEPS + 1)
    return RateSweep(rates, np.r_[heights[0], heights] + jitter, diverged=False)


def test_the_steepest_place_of_a_curve_that_is_known() -> None:
    exponents = np.linspace(np.log10(LOWEST_RATE), np.log10(HIGHEST_RATE), NUM_STEPS)
    swept = curve(3 - 2 / (1 + np.exp(-3 * (exponents + 3))), noise=0.02)
    found = analyse_sweep(swept, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert found.steepest == pytest.approx(1e-3, rel=0.5)
    assert found.suggestion < found.steepest
    assert found.start_loss == pytest.approx(3, abs=0.03)


FLAT = r"the loss never falls between the rates|falls only from .*, while batches differ by .*batch_size or more --s"


def test_what_is_said_of_a_loss_that_does_not_fall_enough() -> None:
    rising = 2 + np.linspace(0, 1, NUM_STEPS) ** 2
    with pytest.raises(UsageError, match=r"^the loss never falls between the rates 1e-07 and 10 \(.*\(--min, --max\)"):
        analyse_sweep(curve(rising), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    little = 2 - 0.03 * np.linspace(0, 1, NUM_STEPS)
    with pytest.raises(UsageError, match=r"falls only from 2\.\d+ to 1\.9\d+, while batches differ") as caught:
        analyse_sweep(curve(little, noise=0.1, seed=1), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert "never falls" not in str(caught.value)


def test_it_diverges_where_it_is_above_its_start_again() -> None:
    """Not where the test ends, which is some steps after."""
    exponents = np.linspace(np.log10(LOWEST_RATE), np.log10(HIGHEST_RATE), NUM_STEPS)
    heights = 3 - 2 / (1 + np.exp(-3 * (exponents + 3))) + np.where(exponents > -0.5, 40 * (exponents + 0.5), 0)
    swept = curve(heights)
    assert analyse_sweep(swept, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).diverges_at is None
    ended = RateSweep(swept.rates, swept.losses, diverged=True)
    found = analyse_sweep(ended, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)
    assert found.diverges_at is not None
    assert found.minimum < found.diverges_at
    assert found.diverges_at == pytest.approx(10**-0.45, rel=0.5)
    sudden = RateSweep(swept.rates[:60], swept.losses[:61], diverged=True)  # from one step to the next, to no number
    assert analyse_sweep(sudden, low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS).diverges_at == swept.rates[59]


def test_a_loss_that_never_falls_is_refused() -> None:
    rising = 2 + np.linspace(0, 1, NUM_STEPS) ** 2
    for seed in range(40):
        for heights in (np.full(NUM_STEPS, 2.0), rising):
            with pytest.raises(UsageError, match=FLAT):
                analyse_sweep(curve(heights, noise=0.3, seed=seed), low=LOWEST_RATE, high=HIGHEST_RATE, steps=NUM_STEPS)


# Recipes


def language(folder: Path) -> tuple[str, dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    return "language/shakespeare", small_run.settings(folder, small_run.write_text(folder / "text.txt"))


def classify(folder: Path) -> tuple[str, dict[str, Any]]:
    return "classify", small_texts.settings(folder)


def image(folder: Path) -> tuple[str, dict[str, Any]]:
    return "image", small_media.image(folder)


MEDIA = [language, classify, image]


def as_words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def run_find(what: str, words: list[str], out: Path, **options: Any) -> dict[str, Any]:
    return lr_find_command(
        what, words, out=out, quiet=True, **{"low": LOWEST_RATE, "high": HIGHEST_RATE, "steps": NUM_STEPS, **options}
    )


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
def test_a_recipe_learns_at_the_rate_that_is_found(medium: Any, tmp_path: Path) -> None:
    name, values = medium(tmp_path / "data")
    values |= {"output_dir": str(tmp_path / "runs"), "training.batch_size": 16}
    report = run_find(name, as_words(values), tmp_path / "out")
    assert not (tmp_path / "runs").exists(), "no run is made"
    again = run_find(name, as_words(values), tmp_path / "more")
    files = {"picture", "json"}
    assert {k: v for k, v in report.items() if k not in files} == {k: v for k, v in again.items() if k not in files}
    kept = json.loads((tmp_path / "out" / "lr-find.json").read_text())
    assert kept["curve"] == report["curve"]
    rate = report["suggestion"]
    assert report["minimum_tenth"] == report["minimum"] / 10
    assert f"training.learning_rate={rate:g}" in report["command"]
    losses = {}
    for factor in (0.01, 1.0, 100.0):
        changes = {"training.learning_rate": rate * factor, "training.max_steps": 40, "evaluation.every": 40}
        changes |= {"training.scheduler.name": "constant", "training.on_nonfinite": "skip"}
        losses[factor] = bottega.train(name, {**values, **changes}).metrics["loss"]
    # Texts this small are told apart at a hundred times the rate as well, so not the best of three, but nearly so.
    best = min(losses.values())
    assert losses[1.0] - best < 0.1 * (losses[0.01] - best), losses


def test_report_names_the_plot(tmp_path: Path) -> None:
    name, values = classify(tmp_path)
    report = run_find(name, as_words(values), tmp_path / "out")
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    assert f"plot:   {report['picture']}" in format_report(report)


def test_a_run_is_tested_from_its_weights_and_left_alone(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "finished"
    shutil.copytree(finished_run, run, symlinks=True)
    before = bytes_of(run)
    report = run_find(str(run), [], tmp_path / "out")
    assert bytes_of(run) == before
    assert report["from_step"] == 8
    recipe = load_recipe([run / "recipe.yaml"]).recipe
    fresh = run_find(str(run / "recipe.yaml"), [], tmp_path / "fresh")
    assert fresh["from_step"] == 0
    assert report["start_loss"] < fresh["start_loss"] - 0.01, "eight steps have taught it something"
    assert recipe.training.max_steps == 8
    assert report["command"].endswith(f"training.max_steps=16 --resume_from {run}")
    with pytest.raises(UsageError, match="is a run and has its own recipe; remove seed=1"):
        run_find(str(run), ["seed=1"], tmp_path / "out")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run_find(str(run), [], tmp_path / "out")


def test_what_is_asked_for_wrongly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    for words, said in {
        ("--min", "1", "--max", "0.1"): "both must be positive, and --min below --max",
        ("--steps", "3"): "expected 10 or more",
        ("--max", "1e-6", "--steps", "20"): "set training.learning_rate to a number",
        ("--min", "high"): "invalid float value",
    }.items():
        assert cli.main(["lr-find", name, *as_words(values), "--out", str(tmp_path / "out"), *words]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    words = ["lr-find", name, *as_words(values), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "steepest fall" in shown
    assert "minimum / 10" in shown
    assert f"use it: bottega train {name} " in shown
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suggestion"] > 0


# auto

AUTO = {"training.learning_rate": "auto"}


@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
def test_auto_is_the_number_that_is_found(medium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test leaves no trace in what is learnt, and a resumed run does not test again."""
    name, values = medium(tmp_path)
    values |= {"training.batch_size": 16}
    auto = bottega.train(name, {**values, **AUTO, "name": "auto"})
    kept = json.loads((auto.path / "lr-find.json").read_text())
    assert (auto.path / "lr-find.png").is_file()
    assert load_recipe([auto.path / "recipe.yaml"]).recipe.training.learning_rate == "auto"
    assert f"auto is {kept['suggestion']:g}, found by a range test" in (auto.path / "log.txt").read_text()
    assert max(row["learning_rate"] for row in auto.history() if row["kind"] == "train") == kept["suggestion"]
    said = bottega.train(name, {**values, "training.learning_rate": kept["suggestion"], "name": "said"})
    assert not different(tensors(auto.path), tensors(said.path))
    shutil.copytree(auto.path, tmp_path / "again", symlinks=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000008")
    monkeypatch.setattr(auto_learning_rate, "run_range_test", None)
    again = bottega.train(name, {**values, **AUTO, "name": "again"})
    assert again.step == 8
    assert not different(tensors(auto.path), tensors(again.path))
    log = (again.path / "log.txt").read_text()
    assert f"auto is {kept['suggestion']:g}, from the earlier range test" in log
    assert re.search(r"resumed \S+ at step \d of 8", log)


def ewc(folder: Path) -> tuple[str, dict[str, Any]]:
    name, values = classify(folder)
    path = values.pop("data.train.path")
    sources = [{"path": path, "labels": ["cook", "sail"]}, {"path": path, "labels": ["sing"]}]
    own = {"data.train": {}, "data.sources": sources, "data.mixture": "sequence", "techniques": ["ewc"]}
    return name, {**values, **own, "data.split": None}


def test_nothing_of_the_test_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A technique that is called before each step holds the engine, and so the model would be in memory twice."""
    made: list[weakref.ref[Any]] = []

    def build(*given: Any) -> Any:
        one = compose.build_engine(*given)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(auto_learning_rate, "build_engine", build)
    name, values = ewc(tmp_path)
    recipe = load_recipe([name, values]).recipe
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    gc.disable()
    try:
        auto_learning_rate.run_range_test(recipe, workload, steps=20)
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_the_checkpoint_to_go_on_from_is_verified_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    start = bottega.train(name, {**values, "name": "first"}).path
    words = ["train", name, *as_words({**values, **AUTO, "training.batch_size": 16}), "--resume_from", str(start)]
    (file,) = start.glob("checkpoints/step-00000008/model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert cli.main([*words, "name=auto"]) == 4
    assert "model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "auto" / "lr-find.json").exists()
    file.write_bytes(whole)
    assert cli.main([*words, "name=auto"]) == 0
    assert json.loads((tmp_path / "auto" / "lr-find.json").read_text())["from_step"] == 4  # in batches twice as large


def test_what_learnt_is_not_tested_on_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There it means nothing, however well the loss falls."""
    name, values = image(tmp_path)
    exports = [
        bottega.load(bottega.train(name, {**values, "name": f"base-{seed}", "seed": seed}).path).export()
        for seed in range(2)
    ]
    values |= {"model.from": str(tmp_path / "base-0"), "techniques": [{"name": "lora", "options": {"rank": 2}}]}
    run = bottega.train(name, {**values, "name": "held"}).path
    with pytest.raises(UsageError, match=FLAT):  # it was tested: so few parameters learn little
        run_find(str(run), [], tmp_path / "out")
    for file in exports[1].rglob("*.safetensors"):
        shutil.copy(file, exports[0] / file.relative_to(exports[1]))
    with pytest.raises(CheckpointError, match=r"model\.from: is not the base that this run started with"):
        run_find(str(run), [], tmp_path / "out")
    assert cli.main(["train", name, *as_words({**values, **AUTO}), "name=auto", "--resume_from", str(run)]) == 4
    assert "model.from: is not the base that" in capsys.readouterr().err
    assert not (tmp_path / "auto" / "lr-find.json").exists()


def test_a_run_keeps_its_rate(tmp_path: Path) -> None:
    name, values = classify(tmp_path)
    values |= {**AUTO, "name": "kept", "training.batch_size": 16}
    run = bottega.train(name, values).path
    with pytest.raises(UsageError, match=r"training\.learning_rate: auto -> 0\.001"):
        bottega.train(name, {**values, "training.learning_rate": 1e-3})
    kept = json.loads((run / "lr-find.json").read_text())
    (run / "lr-find.json").unlink()
    with pytest.raises(CheckpointError, match="is missing or damaged; it contains the learning rate of this run"):
        bottega.train(name, values)
    # Before the first checkpoint the number may be one of another recipe.
    shutil.rmtree(run / "checkpoints")
    (run / "lr-find.json").write_text(json.dumps({**kept, "suggestion": 7.0, "key": "of another recipe"}))
    bottega.train(name, values)
    assert json.loads((run / "lr-find.json").read_text()) == kept


def test_a_run_without_a_falling_loss_is_refused_before_it_begins(tmp_path: Path) -> None:
    """Labels that have nothing to do with the texts, and a rate that hardly moves anything."""
    name, values = classify(tmp_path)
    frozen = {"training.groups": [{"pattern": ".*", "scale": 1e-9}], "name": "still"}
    with pytest.raises(UsageError, match=r"(never falls|falls only) .*set training\.learning_rate to a number"):
        bottega.train(name, {**values, **AUTO, **frozen})
    assert not (tmp_path / "still" / "checkpoints").exists()


def test_auto_in_the_other_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, values = classify(tmp_path)
    words = [*as_words(values), "--learning_rate", "auto"]
    assert cli.main(["plan", name, *words, "--check"]) == 0
    assert "adamw at a learning rate from a range test" in capsys.readouterr().err
    assert cli.main(["inspect", name, *words]) == 0
    assert load_recipe([name, {**values, **AUTO}]).recipe.run_name() != load_recipe([name, values]).recipe.run_name()
    with pytest.raises(UsageError, match=r"training\.learning_rate: expected a number.*got 'fast'"):
        load_recipe([name, {"training.learning_rate": "fast"}])
    with pytest.raises(UsageError, match=r"training\.learning_rate: .*greater than 0"):
        load_recipe([name, {"training.learning_rate": 0}])


@pytest.mark.slow
def test_ranks_have_one_rate_and_kills_change_nothing(tmp_path: Path) -> None:
    name, values = classify(tmp_path / "data")
    words = [*as_words({**values, **AUTO, "training.batch_size": 16}), "name=two", f"output_dir={tmp_path}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for _ in range(2):
        started = [sys.executable, *launcher, "-m", "bottega", "train", name, *words]
        done = subprocess.run(started, env=small_run.environment(), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    alone = bottega.train(name, {**values, **AUTO, "training.batch_size": 16, "name": "alone"})
    kept = [json.loads((path / "lr-find.json").read_text()) for path in (tmp_path / "two", alone.path)]
    # Dropout is the one draw that knows about ranks.
    assert kept[0]["suggestion"] == pytest.approx(kept[1]["suggestion"], rel=0.8)
    verify = ["verify-resume", name, *as_words({**values, **AUTO, "training.batch_size": 16}), "--steps", "12"]
    done = command([*verify, "--kills", "1"])
    assert done.returncode == 0, done.stderr
