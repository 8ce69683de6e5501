"""`bottega report`: what the page holds, from whole, damaged, mixed and hostile run directories."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_report
import small_run
from bottega.core.errors import Diverged, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.reporting.media import MAX_FILE_BYTES, MAX_STEPS, MediaBudget, collect_samples
from bottega.reporting.page import render_page
from bottega.reporting.run_report import build_run_report
from bottega.reporting.tables import format_large
from bottega.reporting.write import build_page, write_run_report
from bottega.run.job_pool import Job
from bottega.run_files.record import RunRecord, read_record
from bottega.tasks.dependencies import build_dependency_recipe
from bottega.tasks.recipes import load_recipe
from small_report import HOSTILE, write_evaluation, write_run, write_samples, write_study


def read_chart_data(html: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


def read_text(html: str) -> str:
    """Return the page without its scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)


def test_the_page_of_a_run_says_what_was_trained_and_how_good_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run)
    write_evaluation(run)
    html = render_page(build_page([run]))
    text = read_text(html)
    for expected in ("1,000 parameters", "90 samples of data.jsonl", "once upon a time at 300", "most frequent class"):
        assert expected in text
    data = read_chart_data(html)
    assert data["sections"]["loss"][0]["series"][0]["points"][0][0] == 10
    assert {chart["metric"] for chart in data["modules"][0]} == {"gradient_norm", "update_ratio", "dead_fraction"}
    assert [chart["kind"] for chart in data["evaluations"][0][0]] == ["confusion", "calibration"]
    assert text.count('<div class="sample-step"') == 3


def test_train_writes_the_report_and_names_it(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = small_run.settings(tmp_path, text_file, name="run")
    run = bottega.train("language/shakespeare", {**options, "logging.report": True}, quiet=False).path
    assert f"report: {run / 'report.html'}" in capsys.readouterr().err
    text = read_text((run / "report.html").read_text())
    assert "best validation loss" in text
    assert '<span class="state finished">' in text
    assert "Changes to the recipe language/shakespeare" in text


def test_a_diverged_run_writes_a_report_that_says_so(tmp_path: Path, text_file: Path) -> None:
    options = small_run.settings(tmp_path, text_file, name="run", **{"training.learning_rate": 1e30})
    with pytest.raises(Diverged):
        bottega.train("language/shakespeare", {**options, "logging.report": True, "training.max_grad_norm": None})
    text = read_text((tmp_path / "run" / "report.html").read_text())
    assert '<span class="state diverged">' in text
    assert "not finite" in text


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: RunRecord) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bottega.reporting.write.write_run_report", fail)
    options = small_run.settings(tmp_path, text_file, name="run")
    run = bottega.train("language/shakespeare", {**options, "logging.report": True}, quiet=False)
    assert run.step == options["training.max_steps"]
    assert "no report was written: No space left on device" in capsys.readouterr().err


def test_trials_folds_and_dependencies_write_no_report(tmp_path: Path) -> None:
    assert "logging.report=false" in Job(RunDirectory(tmp_path / "run"), tmp_path / "recipe.yaml").build_command()
    recipe = load_recipe(["image", {"needs": {"judge": {"recipe": "classify/image"}}}]).recipe
    assert recipe.logging.report
    assert not build_dependency_recipe(recipe, "judge").logging.report


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <b>", recipe={"origin": HOSTILE, "notes": {HOSTILE: HOSTILE}})
    write_samples(run, text=HOSTILE)
    write_evaluation(run, classes=(HOSTILE, "</script><script>"))
    (run / "samples" / "step-00000100" / "<i>.txt").write_text("x")
    study = write_study(tmp_path / "study", key=HOSTILE)
    html = render_page(build_page([run, study]))
    assert html.count("<script") == 4, "the data and the three scripts of the page"
    assert "<img src=x" not in html
    assert "&lt;script&gt;window.owned" in html
    assert read_chart_data(html)["evaluations"][0][0][0]["classes"][0] == HOSTILE


@pytest.mark.parametrize("content", ["", "\n\n", "{", '"text"\n[1]\n', '{"step": 1}\n', "\x00" * 100], ids=range(6))
def test_empty_and_damaged_metrics_are_noted(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run", metrics=content)
    report = build_run_report(read_record(run), budget=MediaBudget(1 << 20))
    assert "metrics.jsonl has no metrics" in report.notes
    assert "metrics.jsonl has no metrics" in read_text(render_page(build_page([run])))


@pytest.mark.parametrize("name", ["environment.json", "data.json", "memory.json", "evaluation/validation/metrics.json"])
@pytest.mark.parametrize(
    "content", ["{", "[]", '{"confusion": 3, "arms": [], "categories": 7}', "[" * 100_000], ids=range(4)
)
def test_damaged_files_are_noted_or_left_out(tmp_path: Path, name: str, content: str) -> None:
    run = write_run(tmp_path / "run")
    write_evaluation(run)
    (run / name).write_text(content)
    assert "<h1" in render_page(build_page([run]))


ODD_FILES = {
    "metrics.jsonl": [
        '{"step": Infinity, "kind": "train"}',
        '{"step": 1, "kind": "train", "step_seconds": 1e999, "loss": 1.0}',
    ],
    "data.json": ['{"notes": 5}', '{"splits": 3}', '{"classes": {"a": 1e999}}', '{"splits": {"train": "many"}}'],
    "environment.json": ['{"command": 5}', '{"packages": 3, "git": [1]}', '{"parameters": "many", "world": "x"}'],
    "recipe.yaml": ["task: [1]\ndata: {sources: 5}", "data: 3\nevaluation: 4", "data: {train: 7}\norigin: {a: 1}"],
    "memory.json": [
        '{"peak": 1}',
        '{"categories": {"weights": "x"}, "peak": 1}',
        '{"categories": {"weights": 1}, "peak": null}',
    ],
    "profile/operations.json": ['{"steps": 5}', '{"steps": [1, 2], "operations": [{}]}'],
    "evaluation/x/metrics.json": [
        '{"per_class": {"a": {"support": 1e999}}}',
        '{"arms": {"none": 3}}',
        '{"real": [], "samples": "x"}',
    ],
    "modules.jsonl": ['{"step": 1, "modules": {"a": 5}}', '{"step": 1, "modules": {"a": {"b": "c"}}}'],
}
"""File -> contents that are JSON or YAML, but not what a run writes."""


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in ODD_FILES.items() for text in texts])
def test_values_of_another_kind_are_left_out(tmp_path: Path, name: str, content: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(content)
    assert "<h1" in render_page(build_page([run]))


def test_a_damaged_progress_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics='{"step": "x", "kind": "train"}')
    with Lock(RunDirectory(run)):
        assert build_run_report(read_record(run), budget=MediaBudget(0)).state["step"] == 0


def test_a_run_without_a_recipe_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "recipe.yaml").write_text("a: [")
    report = build_run_report(read_record(run), budget=MediaBudget(1 << 20))
    assert any("recipe.yaml cannot be read" in note for note in report.notes)
    render_page(build_page([run]))


def test_a_run_that_still_trains_is_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with Lock(RunDirectory(run)):
        report = build_run_report(read_record(run), budget=MediaBudget(1 << 20))
    assert report.state["state"] == "running"
    assert any("still training" in note for note in report.notes)


def test_runs_of_different_tasks_are_noted_and_compared_by_key(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", task="language", recipe={"seed": 1})]
    page = build_page(runs)
    assert [run.name for run in page.runs] == ["a/run", "b/run"]
    assert any("different tasks (classify, language)" in note for note in page.notes)
    text = read_text(render_page(page))
    assert "Differences" in text
    assert '<th scope="row">seed</th>' in text


def test_media_that_are_gone_linked_or_large_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, steps=(100,))
    folder = run / "samples" / "step-00000100"
    (tmp_path / "secret.txt").write_text("a secret of another folder")
    (folder / "linked.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "broken.png").symlink_to(tmp_path / "none.png")
    (tmp_path / "foreign" / "sheets").mkdir(parents=True)
    (tmp_path / "foreign" / "sheets" / "private.png").write_bytes(small_report.PNG)
    (tmp_path / "foreign" / "metrics.json").write_text('{"accuracy": 0.123456}')
    (run / "evaluation").mkdir()
    (run / "evaluation" / "linked").symlink_to(tmp_path / "foreign")
    (run / "data.json").unlink()
    (run / "data.json").symlink_to(tmp_path / "foreign" / "metrics.json")
    (run / "samples" / "step-00000200").symlink_to(tmp_path / "foreign" / "sheets")
    (folder / "large.wav").write_bytes(b"\0" * (MAX_FILE_BYTES + 1))
    html = render_page(build_page([run]))
    assert "a secret of another folder" not in html
    assert "not a file of this run, such as a link elsewhere" in html
    assert "private.png" not in html
    assert "0.1234" not in html
    assert "4.0 MiB, not included" in html


@pytest.mark.parametrize("name", ["samples/step-00000100/00.txt", "data.json", "metrics.jsonl", "modules.jsonl"])
def test_a_pipe_does_not_block_the_report(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, steps=(100,))
    (run / name).unlink()
    os.mkfifo(run / name)
    assert "<h1" in render_page(build_page([run]))


def test_samples_that_are_left_out_are_counted_and_damaged_ones_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, steps=(100,))
    folder = run / "samples" / "step-00000100"
    for number in range(1, 20):
        (folder / f"{number:02}.wav").write_bytes(small_report.make_wav())
    (folder / "00.png").write_bytes(b"GIF89a")
    text = read_text(render_page(build_page([run])))
    assert "4 more of this kind are in this folder" in text
    assert "damaged: not a .png file" in text


def test_a_pattern_leaves_out_what_is_not_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "runs" / "parts" / "judge-1")
    assert bottega.report(tmp_path / "runs" / "*", out=tmp_path)["runs"] == [str(tmp_path / "runs" / "first")]


def test_a_nested_recipe_is_no_error_among_several_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(i)) for i in range(2)]
    for name in ("recipe.yaml", "environment.json"):
        (runs[0] / name).write_text("[" * 100_000)
    assert bottega.report(*runs, out=tmp_path)["runs"] == list(map(str, runs))


def test_the_baseline_of_a_classifier_is_the_most_frequent_class_of_the_training_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")  # 60 of a, 30 of b
    write_evaluation(run)
    result = json.loads((run / "evaluation" / "validation" / "metrics.json").read_text())
    result["per_class"]["a"]["support"], result["per_class"]["b"]["support"] = 1, 7
    (run / "evaluation" / "validation" / "metrics.json").write_text(json.dumps(result))
    assert "training data (a): 0.1250" in read_text(render_page(build_page([run])))


def test_one_evaluation_in_two_files_is_shown_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_evaluation(run)
    (run / "results").mkdir()
    (run / "results" / "metrics.json").write_text((run / "evaluation" / "validation" / "metrics.json").read_text())
    assert read_text(render_page(build_page([run]))).count("Evaluation on the validation split") == 1


def test_the_page_of_a_cross_validation_has_its_name_and_shows_it_first(tmp_path: Path) -> None:
    folder = write_crossval(tmp_path / "run-crossval")
    page = build_page([folder])
    assert page.title == "Cross-validation run-crossval"
    text = read_text(render_page(page))
    assert text.index("accuracy 0.6250") < text.index("fold-0 <span")


def test_samples_of_many_steps_are_thinned_and_the_newest_are_inlined_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, steps=tuple(range(100, 4000, 100)))
    samples = collect_samples(run, MediaBudget(len(small_report.PNG) + len(small_report.make_wav()) + 100))
    assert len(samples) == MAX_STEPS
    assert [samples[0].step, samples[-1].step] == [100, 3900]
    assert all(item.source or item.text for item in samples[-1].items)
    assert not any(item.source for item in samples[0].items)


def test_a_study_shows_trials_and_pareto_front(tmp_path: Path) -> None:
    html = render_page(build_page([write_study(tmp_path / "study")]))
    charts = read_chart_data(html)["folders"][0]
    assert [chart["kind"] for chart in charts] == ["history", "parallel", "pareto"]
    assert charts[2]["front"] == [1, 3]
    assert "failed: out of memory" in read_text(html)


def test_a_trial_with_an_infinite_value_is_listed_without_it(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    fields = json.loads((study / "study.json").read_text())
    fields["trials"][0]["values"][0] = None
    (study / "study.json").write_text(json.dumps(fields))
    html = render_page(build_page([study]))
    assert len(read_chart_data(html)["folders"][0][0]["trials"]) == 2
    assert read_text(html).count("complete") >= 3


def test_memory_is_shown_without_any_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics="")
    (run / "memory.json").write_text('{"device": "cpu", "peak": 5, "categories": {"weights": 5}}')
    assert "Memory and operations" in read_text(render_page(build_page([run])))


def test_without_a_checkpoint_the_last_value_is_not_called_the_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "last validation accuracy" in read_text(render_page(build_page([run])))


@pytest.mark.parametrize(
    ("number", "text"),
    [(999_999, "1 million"), (984_448, "984 thousand"), (9_949, "9,949"), (12.4, "12"), (1.3e10, "13 billion")],
)
def test_large_numbers_in_words(number: float, text: str) -> None:
    assert format_large(number) == text


def test_paths_that_are_not_runs_are_refused_with_a_hint(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    for name, hint in (
        ("runs/fist", r"did you mean .*first\?"),
        ("runs", "is a folder of runs"),
        ("empty", "is not a run, a cross-validation or a study"),
        ("nothing-*", "matches no run"),
        ("training.max_steps=3", "a report takes no settings"),
    ):
        with pytest.raises(UsageError, match=hint):
            bottega.report(tmp_path / name)
    with pytest.raises(UsageError, match=r"out .*expected a name that ends in \.html"):
        bottega.report(tmp_path / "runs" / "first", out=tmp_path / "page.pdf")


def test_the_library_writes_several_runs_by_pattern(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"run-{seed}", recipe={"seed": seed})
    result = bottega.report(tmp_path / "run-*", out=tmp_path)
    assert result["report"] == str(tmp_path / "report.html")
    assert len(result["runs"]) == 2
    assert result["bytes"] == (tmp_path / "report.html").stat().st_size < 3e6


def test_groups_of_seeds_are_tested_for_significance(tmp_path: Path, text_file: Path) -> None:
    options = small_run.settings(tmp_path, text_file)
    for rate in (1e-4, 1e-2):
        for seed in range(2):
            bottega.train(
                "language/shakespeare",
                {**options, "training.learning_rate": rate, "seed": seed, "name": f"{rate}-{seed}"},
            )
    result = bottega.report(*(tmp_path / f"{rate}-{seed}" for rate in (1e-4, 1e-2) for seed in range(2)), out=tmp_path)
    text = read_text(Path(result["report"]).read_text())
    assert "Is the difference real?" in text
    assert "paired t-test" in text


def write_metrics(run: Path, name: str, fields: dict[str, Any]) -> None:
    (run / "evaluation" / name).mkdir(parents=True)
    (run / "evaluation" / name / "metrics.json").write_text(json.dumps(fields))


def test_generated_samples_stand_beside_real_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", task="image")
    scores = {"loss": 0.3, "frechet_distance": 4.0, "conditional_accuracy": 0.9, "split": "validation", "samples": 100}
    write_metrics(run, "validation", {**scores, "real": {"frechet_distance": 1.5, "conditional_accuracy": 0.99}})
    text = read_text(render_page(build_page([run])))
    assert re.search(r"frechet_distance</th><td[^>]*>4.0000</td><td[^>]*>1.5000", text)
    assert "real, held-out samples: 0.9900" in text, "the baseline of the headline"


def test_personalised_images_show_arms_tests_and_sheets(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", task="personalize")
    arms = {
        arm: {"preference_accuracy": {"mean": mean, "low": 0, "high": 1}}
        for arm, mean in (("none", 0.2), ("both", 0.8))
    }
    pair = {"measure": "preference_accuracy", "first": "none", "second": "both", "difference": 0.6, "test": "McNemar"}
    tests = [{**pair, "interval": {"low": 0.4, "high": 0.7}, "p_adjusted": 1e-9}]
    fields = {"preference_accuracy": 0.8, "arms": arms, "tests": tests, "chance": {"preference_accuracy": 0.1}}
    write_metrics(run, "validation", fields)
    (run / "evaluation" / "validation" / "sheets").mkdir()
    (run / "evaluation" / "validation" / "sheets" / "00.png").write_bytes(small_report.PNG)
    text = read_text(render_page(build_page([run])))
    assert re.search(r"0.2000</td><td[^>]*>0.8000</td><td[^>]*>0.1000", text), "none, both, chance"
    assert "&lt; 0.0001" in text
    assert 'alt="00.png of run"' in text
    assert "without personalisation: 0.2000" in text


def test_memory_and_profile_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    categories = {"weights": 1 << 30, "averaged weights": 0, "activations and workspace": 3 << 30}
    (run / "memory.json").write_text(
        json.dumps({"device": "cuda:0", "peak": 4 << 30, "total": 8 << 30, "categories": categories})
    )
    (run / "profile").mkdir()
    operations = [{"name": "aten::mm", "calls": 1234, "self_ms": 12.5, "share": 0.625, "device": "cuda"}]
    (run / "profile" / "operations.json").write_text(json.dumps({"steps": [10, 20], "operations": operations}))
    html = render_page(build_page([run]))
    assert read_chart_data(html)["memory"] == [
        {
            "kind": "memory",
            "title": "Memory at its peak, cuda:0",
            "categories": {"weights": 1, "activations and workspace": 3},
        }
    ]
    assert re.search(r"aten::mm</th><td[^>]*>1,234</td><td[^>]*>12.5</td><td[^>]*>62.5 %", read_text(html))


def write_crossval(folder: Path) -> Path:
    """Write a cross-validation with two folds."""
    for fold in range(2):
        write_run(folder / f"fold-{fold}", recipe={"seed": fold})
    runs = [
        {"run": f"runs/run-crossval/fold-{i}", "held_out": 40, "metrics": {"accuracy": 0.5 + i / 4}} for i in range(2)
    ]
    summary = {"mean": 0.625, "deviation": 0.177, "interval": {"low": 0.1, "high": 1.2}}
    fields = {"task": "classify", "metric": "accuracy", "mode": "max", "folds": 2, "by": "stratified", "runs": runs}
    (folder / "crossval.json").write_text(json.dumps({**fields, "metrics": {"accuracy": summary}, "notes": ["a note"]}))
    return folder


def test_folds_of_a_cross_validation_are_shown(tmp_path: Path) -> None:
    folder = write_crossval(tmp_path / "run-crossval")
    html = render_page(build_page([folder]))
    assert read_chart_data(html)["runs"] == ["fold-0", "fold-1"]
    assert "accuracy 0.6250 (larger is better)" in read_text(html)


def test_a_damaged_study_is_one_line(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    (study / "study.json").write_text("{")
    with pytest.raises(UsageError, match=r"study\.json cannot be read: it is damaged"):
        bottega.report(study)


def test_an_evaluation_is_recorded_for_the_report(tmp_path: Path, text_file: Path) -> None:
    options = small_run.settings(tmp_path, text_file, name="run")
    run = bottega.train("language/shakespeare", options).path
    measured = bottega.evaluate(run)
    recorded = json.loads((run / "evaluation" / "validation" / "metrics.json").read_text())
    assert recorded["loss"] == measured["metrics"]["loss"]
    assert "Evaluation on the validation split" in write_run_report(read_record(run)).read_text()
