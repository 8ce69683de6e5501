"""A run from training to export, through the command line, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import bottega
from bottega import cli
from bottega.core import checkpoint
from small_run import differing_tensors, read_tensors, train, train_arguments, write_text


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Any:
        capsys.readouterr()
        assert cli.main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_finished_run_is_not_trained_again(run_json: Any, tmp_path: Path, text_file: Path) -> None:
    first = run_json(*train_arguments(tmp_path, text_file, "--quiet"))
    assert first["step"] == 8
    assert set(first["metrics"]) == {"loss", "bits_per_byte", "perplexity"}
    run = Path(first["run"])
    stamps = {path: path.stat().st_mtime_ns for path in run.glob("checkpoints/step-*/*")}
    again = run_json(*train_arguments(tmp_path, text_file, "--quiet"))
    assert again == {**first, "metrics": pytest.approx(first["metrics"])}
    assert {path: path.stat().st_mtime_ns for path in run.glob("checkpoints/step-*/*")} == stamps


def test_files_of_a_finished_run(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    names -= {"evaluation"}  # written by `bottega evaluate` in other tests
    files = {
        "recipe.yaml",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "modules.jsonl",
        "memory.json",
        "log.txt",
        "LOCK",
    }
    assert names == {*files, "checkpoints", "processor"}
    assert {path.name for path in (finished_run / "checkpoints").iterdir()} == {
        "step-00000004",
        "step-00000008",
        "last",
        "best",
    }
    environment = json.loads((finished_run / "environment.json").read_text())
    assert environment["packages"].keys() >= {"torch", "numpy"}
    from bottega.tasks.recipes import load_recipe

    assert load_recipe([finished_run / "recipe.yaml"]).recipe.run_name() == "finished", "reloadable"


def test_evaluate_matches_the_training_log(run_json: Any, finished_run: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["kind"] == "eval"][-1]
    report = run_json("evaluate", finished_run, "--checkpoint", "last", "--output_dir", tmp_path / "out")
    assert report["metrics"] == pytest.approx({name: measured[name] for name in report["metrics"]}, rel=1e-6)
    details = {name: report[name] for name in ("split", "samples", "data", "checkpoint")}
    assert details["split"] == "validation"
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == {**report["metrics"], **details}
    other = run_json("evaluate", finished_run, "--data", write_text(tmp_path / "other.txt", seed=5))
    assert other["metrics"]["loss"] != report["metrics"]["loss"]


def test_generate_is_deterministic_for_a_seed(run_json: Any, finished_run: Path, tmp_path: Path) -> None:
    options = ["generate", finished_run, "--prompt", "alpha", "--max_tokens", 12, "--count", 2]
    a, b = run_json(*options, "--seed", 3, "--out", tmp_path / "t.txt"), run_json(*options, "--seed", 3)
    assert a == b
    assert a != run_json(*options, "--seed", 4)
    assert len(a["texts"]) == 2
    assert all(text.startswith("alpha") for text in a["texts"])
    assert (tmp_path / "t.txt").read_text() == "\n\n".join(a["texts"]) + "\n"


def test_a_single_prompt_streams(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(finished_run), "--prompt", "beta", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("beta")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--temperature", "nan"], "temperature nan"), (["--top_k", "0"], "top_k 0"), (["--count", "0"], "--count 0")],
)
def test_a_wrong_option_is_refused_before_anything_is_printed(
    options: list[str], message: str, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(finished_run), "--prompt", "beta", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_several_texts_report_their_progress(finished_run: Path) -> None:
    saved, calls = bottega.load(finished_run), []
    texts = saved.generate_samples(
        {"prompt": "beta", "count": 2, "max_tokens": 5}, progress=lambda *call: calls.append(call)
    )
    assert len(texts) == 2
    assert calls == [("tokens", done, 5) for done in range(1, 6)]


def test_export_has_the_transformers_files(run_json: Any, finished_run: Path, tmp_path: Path) -> None:
    folder = Path(run_json("export", finished_run, "--out", tmp_path / "final")["folder"])
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in folder.iterdir()
    }
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_ema_weights_are_loaded(tmp_path: Path, text_file: Path) -> None:
    run = train(tmp_path, text_file, name="ema", **{"training.ema": 0.5}).path
    saved = bottega.load(run, checkpoint="last")
    folder = checkpoint.read_link(run / "checkpoints", "last")
    assert folder is not None
    average = load_file(folder / "ema.safetensors")
    for name, p in saved.model.named_parameters():
        assert (p.detach().numpy() == average[name]).all()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert saved.evaluate()["loss"] == pytest.approx(rows[-1]["loss"], rel=1e-6)


def test_stray_ema_file_is_not_loaded(tmp_path: Path, text_file: Path) -> None:
    run = train(tmp_path, text_file, name="plain").path
    before = bottega.load(run).evaluate()
    best = checkpoint.read_link(run / "checkpoints", "best")
    assert best is not None
    weights = {name: array * 0 for name, array in load_file(best / "model.safetensors").items()}
    checkpoint.write_safetensors(best / "ema.safetensors", weights)
    assert bottega.load(run).evaluate() == before


def test_fp16_run_opens_on_a_cpu(tmp_path: Path, text_file: Path) -> None:
    run = train(tmp_path, text_file, name="half").path
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("mixed_precision: auto", "mixed_precision: fp16"))
    assert bottega.load(run, device="cpu").evaluate()["loss"] > 0


def test_resume_from_another_run_continues_its_state(tmp_path: Path, text_file: Path, finished_run: Path) -> None:
    longer = {"training.max_steps": 12, "training.scheduler.name": "constant"}
    assert (
        cli.main(
            train_arguments(tmp_path, text_file, "--quiet", f"--resume_from={finished_run}", name="next", **longer)
        )
        == 0
    )
    steps = [json.loads(line)["step"] for line in (tmp_path / "next" / "metrics.jsonl").read_text().splitlines()]
    assert min(steps) == 9
    assert differing_tensors(read_tensors(finished_run), read_tensors(tmp_path / "next")) != []


def test_python_api(tmp_path: Path, text_file: Path) -> None:
    run = train(tmp_path, text_file, name="library")
    assert run.step == 8
    assert run.path == tmp_path / "library"
    history = run.history()
    assert [row["step"] for row in history if row["kind"] == "train"] == list(range(1, 9))
    assert run.metrics["loss"] == history[-1]["loss"]
    saved = bottega.load(run.path)
    assert saved.generate("alpha", max_tokens=4)[0].startswith("alpha")
    assert saved.task is saved.workload.task
