"""Hints for incomplete or slightly wrong commands: the next command, with the user's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bottega
import small_texts
from bottega import cli


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main([str(word) for word in arguments])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    return Path(bottega.train("classify", {**small_texts.settings(folder), "training.max_steps": 2}).path)


@pytest.mark.parametrize("line", ["{0}\t{1}", "__label__{0} {1}"])
def test_data_suggests_classify_for_labelled_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "my texts.txt"
    path.write_text("".join(line.format(row["label"], row["text"]) + "\n" for row in small_texts.make_rows()))
    code, out, err = run_cli(capsys, "data", path, "--examples", 0)
    assert code == 0, err
    assert f"bottega data classify --data '{path}'" in out
    path.write_text("".join(row["text"] + "\n" for row in small_texts.make_rows()))
    assert "data classify" not in run_cli(capsys, "data", path, "--examples", 0)[1], "plain texts have no labels"


def test_data_suggests_columns_by_their_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{row['label']},{n},{row['text']}\n" for n, row in enumerate(small_texts.make_rows())))
    out = run_cli(capsys, "data", path)[1]
    assert "data.train.field=column_2 data.train.label=column_0" in out
    code, _, err = run_cli(capsys, "train", "classify", "--data", path, f"output_dir={tmp_path}")
    assert (code, "`bottega data FILE` lists all" in err) == (3, True), err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "shakespear"], "did you mean language/shakespeare?"),
        (["train", "clasify"], "did you mean classify?"),
        (["train", "nothing-like-it"], "list them with `bottega recipes`"),
        (["inspect", "runs/nope"], "no run at runs/nope"),
        (["data", "nope.txt"], "has no file with a similar name"),
    ],
)
def test_only_similar_names_are_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t2.txt").write_text("another text")
    code, out, err = run_cli(capsys, *arguments)
    assert code in (2, 3)
    assert out == ""
    assert part in err
    assert err.count("\n") == 1


def test_generate_with_a_classifier_suggests_predict(classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--prompt", "hello"]):
        code, _, err = run_cli(capsys, "generate", classifier, *flags)
        assert (code, "bottega predict classifies new samples" in err) == (2, True), err


def test_repr_of_a_loaded_run_is_one_line(classifier: Path) -> None:
    saved = bottega.load(classifier)
    assert repr(saved) == f"<SavedRun {classifier}: classify, step-00000002>"
    with pytest.raises(bottega.core.errors.UsageError, match=r"^checkpoint 99: .* is already a checkpoint"):
        bottega.load(classifier / "checkpoints" / "last", checkpoint=99)


def test_steps_is_short_for_max_steps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, "plan", "routing", "--steps", 7)
    assert code == 0, err
    assert "max_steps: 7" in out
