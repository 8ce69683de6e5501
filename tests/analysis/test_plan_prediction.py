"""`bottega plan`: predictions, --fit and --probe, and what they answer to bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bottega
import small_run
from bottega import cli
from bottega.analysis import fit as fit_module
from bottega.analysis.fit import DEFAULT_MARGIN, MARGINS, fit_memory, parse_memory
from bottega.analysis.probe import parse_price
from bottega.config.training import Training
from bottega.core.errors import OutOfMemory, UsageError
from bottega.engines.torch.engine import TorchEngine
from bottega.measurements import MemoryPrediction, PredictionUnavailable
from bottega.models.device import is_simulated
from small_run import settings, train, write_text

MIB = 1 << 20


def plan_words(folder: Path, *more: str, **changes: Any) -> list[str]:
    arguments = small_run.train_arguments(folder, write_text(folder / "text.txt"), **changes)
    return ["plan", *arguments[1:], *more]


def run_plan(
    capsys: pytest.CaptureFixture[str], folder: Path, *more: str, **changes: Any
) -> tuple[int, dict[str, Any]]:
    code = cli.main([*plan_words(folder, *more, **changes), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_prediction_matches_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model.hidden_size": 64, "model.intermediate_size": 256}
    code, report = run_plan(capsys, tmp_path, **changes)
    prediction = report["prediction"]
    assert code == 0
    run = train(tmp_path, tmp_path / "text.txt", **changes)
    environment = json.loads((run.path / "environment.json").read_text())
    assert prediction["parts"][0]["parameters"] == environment["parameters"]
    assert prediction["steps"] == run.step == 8
    assert prediction["samples"] == 8 * 4
    saved = sum(file.stat().st_size for file in (run.path / "checkpoints" / "step-00000008").iterdir())
    assert prediction["checkpoint_bytes"] == pytest.approx(saved, rel=0.05), "manifest and headers beside the tensors"
    assert prediction["disk_bytes"] == prediction["checkpoint_bytes"] * prediction["num_checkpoints"]
    assert prediction["memory"]["peak"] == sum(prediction["memory"]["categories"].values())


def test_text_has_parameters_memory_steps_and_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(plan_words(tmp_path)) == 0
    captured = capsys.readouterr()
    for text in ("parameters", "weights", "gradients", "optimizer", "activations", "in all", "steps", "checkpoints"):
        assert f"{text} " in captured.err
    assert captured.out.startswith("task: language"), "the recipe alone is on standard output"


def test_check_predicts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_plan(capsys, tmp_path, "--check")
    assert code == 0
    assert "prediction" not in report


def test_device_that_is_not_here_is_a_problem_beside_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, report = run_plan(capsys, tmp_path, device="cuda", **{"training.compile": True})
    assert code == report["exit_code"] == 5
    assert not report["valid"]
    assert "cuda is not available" in report["problems"][0]
    prediction = report["prediction"]
    assert prediction["device"] == "cuda"
    assert prediction["is_compiled"]
    assert prediction["precision"] == "bf16"
    code, report = run_plan(capsys, tmp_path, "--fit", "24GB", device="cuda")
    assert code == 0, "with --fit the run is planned for another machine"
    assert report["fit"]["overrides"] == []


def test_all_problems_of_a_recipe_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "language",
        f"output_dir={tmp_path}",
        "data.train.path=nowhere.txt",
        "label_smoothing=0.1",
        "typo=1",
    ]
    assert cli.main(words) == 2
    lines = capsys.readouterr().err
    assert all(text in lines for text in ("nowhere.txt", "label_smoothing", "typo"))


class LinearPredictor:
    """Stands for a MemoryPredictor: each sample of a micro-batch adds the same bytes; checkpointing and bf16 halve them."""

    def __init__(self, batch_size: int, constant: int, per_sample: int, *, device_type: str) -> None:
        self.batch_size, self.constant, self.per_sample, self.device_type = (
            batch_size,
            constant,
            per_sample,
            device_type,
        )
        training = Training(max_steps=1, batch_size=batch_size, mixed_precision="fp32")
        self.recipe, self.evaluation_batch_size = SimpleNamespace(training=training), batch_size

    def predict(self, training: Training, *, micro_batch_size: int | None) -> MemoryPrediction:
        size = micro_batch_size or self.batch_size
        divisor = (2 if training.gradient_checkpointing else 1) * (2 if training.mixed_precision == "bf16" else 1)
        peak = self.constant + size * self.per_sample // divisor
        return MemoryPrediction(peak, {})

    def resolve_precision(self, training: Training) -> str:
        return training.mixed_precision


@given(
    batch_size=st.integers(1, 512),
    constant=st.integers(0, 10**6),
    per_sample=st.integers(1, 10**6),
    memory=st.integers(1, 10**9),
    device_type=st.sampled_from(["cpu", "cuda"]),
)
def test_fit_is_the_largest_power_of_two_that_fits(
    batch_size: int, constant: int, per_sample: int, memory: int, device_type: str
) -> None:
    """On a GPU, bf16 is tried as well, each precision first without and then with checkpointing."""
    predictor: Any = LinearPredictor(batch_size, constant, per_sample, device_type=device_type)
    usable = memory / MARGINS.get(device_type, DEFAULT_MARGIN)
    memory += fit_module.RESERVE.get(device_type, 0)
    divisors = {"cpu": [1, 2], "cuda": [1, 2, 2, 4]}[device_type]
    sizes = [batch_size, *(1 << power for power in range(10) if 1 << power < batch_size)]

    def largest(divisor: int) -> int | None:
        return max((size for size in sizes if constant + size * per_sample // divisor <= usable), default=None)

    if largest(divisors[-1]) is None:
        with pytest.raises(OutOfMemory, match="nothing fits"):
            fit_memory(predictor, memory)
        return
    report = fit_memory(predictor, memory)
    assert [row["micro_batch_size"] for row in report["rows"]] == [largest(divisor) for divisor in divisors]
    assert report["best"] == next(row for row in report["rows"] if row["micro_batch_size"] is not None)
    is_whole = report["best"]["micro_batch_size"] == batch_size
    for key in ("training.micro_batch_size", "evaluation.batch_size"):
        assert any(word.startswith(key) for word in report["overrides"]) != is_whole


def test_overrides_of_fit_are_accepted_and_lower_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fit_module.RESERVE, "cuda", 0)
    monkeypatch.setattr("bottega.engines.torch.memory_prediction.KERNEL_WORKSPACE", {})
    changes = {"training.batch_size": 64, "model.num_layers": 4}
    _, report = run_plan(capsys, tmp_path, "--fit", "1TB", **changes)
    peak = report["fit"]["best"]["peak"]
    keys = settings(tmp_path, tmp_path / "text.txt", **changes)
    report = bottega.plan("language/shakespeare", keys, fit=f"{0.9 * peak / 1000:.0f}KB")
    overrides = report["fit"]["overrides"]
    assert overrides
    assert report["fit"]["best"]["peak"] < peak
    assert run_plan(capsys, tmp_path, "--check", *overrides, **changes)[0] == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("80GiB", 80 << 30), ("24", 24 * 10**9), ("1.5 tb", 1.5e12), ("512MiB", 512 * MIB)],
)
def test_sizes_of_memory(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(("text", "price"), [("2.5/h", 2.5 / 3600), ("2.5", 2.5 / 3600), ("$60 / day", 60 / 86400)])
def test_prices(text: str, price: float) -> None:
    assert parse_price(text) == pytest.approx(price)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fit", "much"], "--fit much: expected a size of memory, such as 24GB or 80GiB"),
        (["--fit", "24B"], "--fit 24B: expected a size of memory"),
        (["--fit", "0GB"], "--fit 0GB: expected a size"),
        (["--probe", "--price", "cheap"], "--price cheap: expected a price per hour, such as 2.5/h"),
        (["--price", "2.5/h"], "--price needs --probe"),
        (["--check", "--fit", "24GB"], "--check and --fit cannot be combined"),
        (["--memory", "--probe"], "--memory and --probe cannot be combined"),
    ],
)
def test_bad_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert cli.main(plan_words(tmp_path, *flags)) == 2
    assert message in capsys.readouterr().err


def test_checkpoints_that_do_not_fit_on_the_disk_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them fit, so that train would start; the third would fill the disk."""
    code, report = run_plan(capsys, tmp_path)
    real, size = shutil.disk_usage(tmp_path), report["prediction"]["checkpoint_bytes"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=int(2.5 * size)))
    code, report = run_plan(capsys, tmp_path)
    assert code == report["exit_code"] == 5
    assert "lower checkpoint.keep or free some space" in report["problems"][0]


def test_plan_without_a_recipe_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == 2
    assert "name a recipe" in capsys.readouterr().err


def test_micro_batch_beyond_the_batch_has_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "training.micro_batch_size: 9 has no effect, because a process has {} samples in a step"
    _, report = run_plan(capsys, tmp_path, **{"training.micro_batch_size": 9})
    assert note.format(4) in report["notes"]
    changes = {"training.micro_batch_size": 9, "training.gradient_accumulation_steps": 3}
    _, report = run_plan(capsys, tmp_path, **changes)
    assert not any("has no effect" in text for text in report["notes"]), "a step has 12 samples"


@pytest.mark.parametrize("recipe", ["align", "video", "recall/lasting", "routing/few-shot"])
def test_memory_of_bundled_recipes_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["plan", recipe, "device=cuda", "training.compile=false", "--json"])
    prediction = json.loads(capsys.readouterr().out)["prediction"]
    assert prediction["memory"]["peak"] > 0, prediction["notes"]
    assert prediction["checkpoint_bytes"] > 0


def test_memory_that_fits_nothing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(plan_words(tmp_path, "--fit", "1MB")) == 7
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "nothing fits in 977 KiB" in last_line


def test_probe_measures_time_cost_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_plan(capsys, tmp_path, "--probe", "--price", "3600/h")
    probe = report["probe"]
    assert code == 0
    assert probe["step_seconds"] > 0
    assert probe["cost"] == pytest.approx(probe["run_seconds"]), "a price of one per second"
    assert not any((tmp_path).glob("*/checkpoints")), "nothing is saved"


def test_library_measures_the_cost_too(tmp_path: Path) -> None:
    values = settings(tmp_path, write_text(tmp_path / "text.txt"))
    probe = bottega.plan("language/shakespeare", values, probe=True, price="3600/h")["probe"]
    assert probe["cost"] == pytest.approx(probe["run_seconds"])
    with pytest.raises(UsageError, match="price needs probe=True"):
        bottega.plan("language/shakespeare", values, price="1/h")


def test_probe_that_runs_out_of_memory_ends_with_one_line_after_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TorchEngine.backward

    def run_out_of_memory(*arguments: Any) -> Any:
        if is_simulated():
            return backward(*arguments)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(TorchEngine, "backward", run_out_of_memory)
    assert cli.main(plan_words(tmp_path, "--probe")) == 7
    lines = capsys.readouterr().err.splitlines()
    assert any("in all" in line for line in lines)
    assert lines[-1].startswith("bottega: out of memory")


def test_memory_that_cannot_be_predicted_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise PredictionUnavailable("a step cannot be simulated: no reason")

    monkeypatch.setattr("bottega.engines.torch.memory_prediction.predict_memory", fail)
    code, report = run_plan(capsys, tmp_path)
    assert code == 0
    assert report["prediction"]["memory"] is None
    assert "no reason; bottega plan --probe measures it" in report["prediction"]["notes"][0]
    assert cli.main(plan_words(tmp_path)) == 0
    text = capsys.readouterr().err
    assert "memory on cpu, without activations, which are not predicted\n  weights " in text
    with pytest.raises(UsageError, match="cannot be predicted"):
        bottega.plan("language/shakespeare", settings(tmp_path, tmp_path / "text.txt"), fit="24GB")
