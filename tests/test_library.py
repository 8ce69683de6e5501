"""The Python API: its functions are listed, loaded on first use, and return what the command line does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bottega
import small_run
from bottega.cli import main
from bottega.cli.train_help import HELP_KEYS, describe_keys
from bottega.config.aliases import resolve_alias
from bottega.core.errors import UsageError
from bottega.tasks.recipes import load_recipe

PUBLIC_FUNCTIONS = {
    *(
        "augment",
        "compare",
        "crossval",
        "diagnose",
        "doctor",
        "evaluate",
        "load",
        "load_plugin",
        "lr_find",
        "plan",
        "predict",
        "prepare",
    ),
    *("report", "runs", "train", "tune"),
}


def test_every_public_function_is_listed_and_documented() -> None:
    assert set(dir(bottega)) >= PUBLIC_FUNCTIONS
    assert {name for name in dir(bottega) if not name.startswith("_")} == PUBLIC_FUNCTIONS
    assert set(bottega.__all__) == {*PUBLIC_FUNCTIONS, "__version__"}
    page = (Path(__file__).parents[1] / "docs" / "library.md").read_text()
    for name in sorted(PUBLIC_FUNCTIONS):
        assert getattr(bottega, name).__doc__, name
        assert f"bottega.{name}(" in page, f"docs/library.md does not mention bottega.{name}"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        bottega.trian  # noqa: B018


def test_listing_the_api_imports_no_framework() -> None:
    code = "import sys, bottega; dir(bottega); bottega.runs; bottega.augment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=small_run.environment())


def test_plan_and_lr_find_match_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = small_run.write_text(tmp_path / "t.txt")
    settings = small_run.settings(tmp_path, text)
    arguments = small_run.train_arguments(tmp_path, text)[1:]
    assert main(["plan", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    same_report = bottega.plan("language/shakespeare", settings)
    for prediction in (report["prediction"], same_report["prediction"]):
        for name in ("memory", "available_memory", "disk_free"):  # they change from one moment to the next
            assert prediction.pop(name) is not None
    assert same_report == report
    with pytest.raises(UsageError, match=r"training\.max_steps"):
        bottega.plan("language", {"training.max_steps": -1})
    options = ["--steps", "10", "--min", "1e-4", "--max", "1e-1", "--out", str(tmp_path / "found"), "--json"]
    assert main(["lr-find", *arguments, *options]) == 0
    command_report = json.loads(capsys.readouterr().out)
    report = bottega.lr_find("language/shakespeare", settings, low=1e-4, high=1e-1, steps=10)
    assert report == {name: command_report[name] for name in report}
    assert not {"picture", "json"} & report.keys(), "nothing is written without `out`"
    bottega.lr_find(["language/shakespeare", settings], low=1e-4, high=1e-1, steps=10, out=tmp_path / "again")
    assert (tmp_path / "again" / "lr-find.json").is_file()
    with pytest.raises(UsageError) as caught:
        bottega.lr_find("language/shakespeare", settings, low=1.0, high=0.1)
    assert "--" not in str(caught.value)


def test_compare_errors_name_arguments_without_dashes() -> None:
    with pytest.raises(UsageError, match="alpha 2: expected a number between 0 and 1") as caught:
        bottega.compare("a", "b", alpha=2)
    assert "--" not in str(caught.value)


def test_augment_is_deterministic_for_a_sample_and_its_index() -> None:
    text = "a really fine film about dogs and their people"
    copies = bottega.augment(text, probability=0.3, augmentation_factor=3)
    assert len(copies) == 3
    assert text not in copies
    assert copies == bottega.augment(text, probability=0.3, augmentation_factor=3)
    assert copies != bottega.augment(text, probability=0.3, augmentation_factor=3, index=1)
    pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
    before = pixels.copy()
    flips = [bottega.augment(pixels, flip=True, index=index) for index in range(16)]
    assert {(image == pixels).all() for image in flips} == {True, False}
    assert all((image == pixels).all() or (image == pixels[:, ::-1]).all() for image in flips)
    assert (pixels == before).all(), "the sample itself is not changed"
    frames = np.stack([pixels] * 3)
    assert (bottega.augment(frames, flip=True, index=3) == np.stack([flips[3]] * 3)).all(), (
        "all frames have the same augmentation"
    )
    waveform = np.sin(np.arange(800, dtype=np.float32))
    assert not np.array_equal(bottega.augment(waveform, rate=8000, noise=0.1), waveform)
    for wrong in ({"crop": 2.0}, {"noise": 0.1}):
        with pytest.raises(UsageError, match="options of this medium: enabled, crop, flip, colour_jitter"):
            bottega.augment(pixels, **wrong)
    with pytest.raises(UsageError, match="rate is missing"):
        bottega.augment(waveform, frequency_mask=0.1)
    with pytest.raises(UsageError, match=r"int64 with shape \(3,\) cannot be augmented"):
        bottega.augment(np.arange(3))


def test_help_of_train_lists_common_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    output = capsys.readouterr().out
    default_recipe = load_recipe(["language", {"data.train.path": "x"}]).recipe
    for key, alias in HELP_KEYS.items():
        assert key in output
        assert alias in output
        if alias:
            assert set(resolve_alias(alias.removeprefix("--"), 1)) == {key}
    assert describe_keys().splitlines()[0] in output
    (line,) = (line for line in output.splitlines() if "training.batch_size" in line)
    assert line.endswith(f"[{type(default_recipe.training).model_fields['batch_size'].default}]")
