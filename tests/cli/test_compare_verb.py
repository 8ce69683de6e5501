"""`bottega compare` from training to verdict: tiny runs of two learning rates with three seeds each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from bottega import cli
from bottega.metrics_log import read_metrics

TINY = (
    *("model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "training.max_steps=4"),
    *("training.batch_size=8", "evaluation.every=2", "samples.every=null", "data.validation.split=0.02"),
    *("logging.tensorboard=false", "logging.report=false", "logging.resources=false"),
)
RATES = {"slow": "1e-4", "fast": "1e-2"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    for name, rate in RATES.items():
        for seed in range(3):
            own = (f"name={name}-s{seed}", f"seed={seed}", f"training.learning_rate={rate}", f"output_dir={folder}")
            assert cli.main(["train", "image", *own, *TINY, "--quiet"]) == 0
    return folder


@pytest.fixture(autouse=True)
def working_directory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def best_losses(name: str) -> list[float]:
    histories = (read_metrics(Path(f"{name}-s{seed}") / "metrics.jsonl") for seed in range(3))
    return [min(row["loss"] for row in history if row["kind"] == "eval") for history in histories]


def test_table_of_two_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "slow-s*", "fast-s*"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "loss, smaller is better, from metrics.jsonl",
        "A      slow-s*  3 seeds",
        "B      fast-s*  3 seeds",
        "B - A: paired t-test, because they have 3 seeds in common",
        "B - A: training.learning_rate 0.0001 -> 0.01",
        "note: with 3 pairs a test has little power",
    ):
        assert expected in text


def test_report_matches_the_runs_and_scipy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "slow-s*", "fast-s0,fast-s1,fast-s2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    slow, fast = best_losses("slow"), best_losses("fast")
    expected = scipy.stats.ttest_rel(fast, slow)
    (pair,) = report["pairs"]
    assert [group["mean"] for group in report["groups"]] == pytest.approx([np.mean(slow), np.mean(fast)])
    assert (pair["statistic"], pair["p"]) == pytest.approx((expected.statistic, expected.pvalue))
    assert pair["difference"] < 0  # a learning rate 100 times as large lowers the loss within four steps


def test_options_are_accepted_in_any_position(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "plot.png"
    assert cli.main(["compare", "slow-s*", "--out", str(out), "fast-s*", "--alpha", "0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["alpha"], report["picture"]) == (0.1, str(out))
    assert out.read_bytes().startswith(b"\x89PNG")


def test_json_report_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """Two pairs have no unbiased effect size, and JSON no NaN."""
    assert cli.main(["compare", "slow-s[01]", "fast-s[01]", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert report["pairs"][0]["effect"]["unbiased"] is None
    assert math.isfinite(report["pairs"][0]["effect"]["size"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give at least two groups"),
        (("slow-s*",), "give at least two groups"),
        (("slow-s0", "fast-s0"), "at least 2"),
        (("slow-s*", "fast-s0"), "fast-s0 is a single run"),
        (("*-s*", "fast-s0"), "given twice"),
        (("*-s[01]", "fast-s2,slow-s2"), "differ in more than the seed: training.learning_rate"),
        (("slow-s*", "fast-s*", "--metric", "accuracy"), "; it has loss"),
        (("slow-s*", "fast-s*", "--split", "test"), "bottega evaluate slow-s0 --split test --out"),
        (("slow-s*", "fast-s*", "--split", "train"), "--split"),
        (("slow-s*", "fast-s*", "--alpha", "5"), "--alpha 5"),
        (("slow-s*", "fast-s*", "--out", "a.pdf"), "plots are PNG files"),
        (("slow-s*", "fast-s*", "--sead", "5"), "unexpected --sead"),
        (("slow-s*", "quick-s*"), "no run matches"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err
