"""What `bottega tune` answers to bad input: one line, the right exit code, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optuna")

from small_run import run_bottega

LR = ["--space", "training.learning_rate=log(1e-5,1e-2)"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "no recipe given; run bottega tune RECIPE"),
        (["classify/cnn"], 2, "the search space is empty; add --space KEY=VALUES"),
        (["classify/cnn", "--space", "training.learning_rate"], 2, "expected KEY=VALUES"),
        (
            ["classify/cnn", "--space", "training.learning_rate=log(1e-2,1e-5)"],
            2,
            "the lowest value must be below the highest",
        ),
        (
            ["classify/cnn", "--space", "training.learning_rat=log(1e-5,1e-2)"],
            2,
            "unknown key; did you mean training.learning_rate?",
        ),
        (
            ["classify/cnn", "--space", "techniques.lora.rnk=[2,4]"],
            2,
            "unknown key; did you mean techniques.lora.rank?",
        ),
        (["classify/cnn", "--space", "techniques.lora.rank=[2,4]"], 2, "the recipe does not use lora"),
        (["classify/cnn", "--space", "model.dropout=[0,1.5]"], 2, "--space model.dropout: "),
        (["classify/cnn", "--space", "training.optimizer.name=[adamw,foo]"], 2, "got 'foo'"),
        (["classify/cnn", "--space", "output_dir=[a,b]"], 2, "set by the study itself"),
        (["classify/cnn", "--space", "tune.seed=[1,2]"], 2, "set by the study itself"),
        (["classify/cnn", "--space", "checkpoint.keep=[1,2]"], 2, "set by the study itself"),
        (["classify/cnn", *LR, "--verify"], 2, "replays the winner of pbt"),
        (["classify/cnn", *LR, "--fresh", "--storage", "sqlite:///t.db"], 2, "a study in a database cannot be renamed"),
        (["classify/cnn", *LR, "--metric", "acuracy"], 2, "did you mean accuracy?"),
        (["classify/cnn", *LR, "--metric", "-accuracy"], 2, "higher accuracy is better; remove the sign"),
        (["classify/cnn", *LR, "--metric", "banana"], 2, "write -banana to minimise it or +banana to maximise it"),
        (["classify/cnn", *LR, "--method", "bayes"], 2, "--method: expected one of tpe, random, grid, gp, cmaes, pbt"),
        (["classify/cnn", *LR, "--method", "grid"], 2, "a grid needs single values"),
        (["classify/cnn", *LR, "--pruner", "foo"], 2, "--pruner: expected one of none, median, hyperband, asha"),
        (["classify/cnn", *LR, "--trials", "0"], 2, "--trials: expected a number above 0"),
        (["classify/cnn", *LR, "--timeout", "5"], 2, '--timeout: expected a time such as "30 min"'),
        (["classify/cnn", *LR, "--jobs", "0"], 2, "--jobs 0: expected auto, or 1 or more"),
        (["classify/cnn", *LR, "--study", "a/b"], 2, "expected a name without /"),
        (["classify/cnn", *LR, "--storage", "tune.db"], 2, "expected a URL"),
        (["classify/cnn", *LR, "--storage", "sqlite:////no/such/folder/t.db"], 5, "cannot connect"),
        (["classify/cnn", *LR, "--confirm", "1"], 2, "--confirm 1: expected 2 or more seeds"),
        (["classify/cnn", *LR, "data.validation=null"], 2, "tune needs validation data"),
        (
            ["classify/cnn", *LR, "--pruner", "median", "--metric", "accuracy,-parameters"],
            2,
            "trials are pruned by one metric",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    result = run_bottega(["tune", *words], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0], lines[0]
    assert not (tmp_path / "studies").exists()


def test_jobs_beyond_the_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.core.errors import UsageError
    from bottega.run.job_pool import plan_job_environments

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(UsageError, match=r"--jobs 5: this machine has 4 GPUs; use --jobs 4 or fewer"):
        plan_job_environments("cuda", 5, num_runs=9, strict=True)
    with pytest.raises(UsageError, match=r"--jobs 3: this machine has 4 GPUs, and each run uses 2; use --jobs 2"):
        plan_job_environments("cuda", 3, num_runs=9, num_processes=2, strict=True)
    groups = [env["CUDA_VISIBLE_DEVICES"] for env in plan_job_environments("cuda", "auto", num_runs=9, num_processes=2)]
    assert groups == ["0,1", "2,3"]
