"""`bottega predict`: texts as arguments, in a file, in a table or on standard input, and refused requests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_texts
from bottega import cli

LEARNS = {"training.max_steps": 40, "training.learning_rate": 1e-2, "evaluation.every": 40, "checkpoint.every": 40}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    return bottega.train("classify/transformer", {**small_texts.settings(folder, **LEARNS), "name": "run"}).path


def run_predict(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["predict", *arguments]) == code
    output = capsys.readouterr()
    return output.out, output.err


def test_texts_as_arguments(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run_predict(capsys, str(run), "salt and onion, bake", "the rope with the mast")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["cook", "sail"]
    assert all(1 / 3 < float(row[1]) <= 1 for row in rows)
    assert rows[1][2] == "the rope with the mast"
    predictions = json.loads(run_predict(capsys, str(run), "hum a verse", "--json")[0])["predictions"]
    assert predictions == bottega.predict(run, ["hum a verse"])
    assert predictions[0]["predicted"] == "sing"
    assert (
        json.loads(run_predict(capsys, "--model_path", str(run), "hum a verse", "--json")[0])["predictions"]
        == predictions
    )


def test_texts_may_follow_an_option(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["hum a verse", "salt and onion, bake"]
    expected = bottega.predict(run, texts)
    for arguments in (
        [str(run), "--checkpoint", "best", *texts],
        [str(run), texts[0], "--device", "cpu", texts[1]],
        ["--checkpoint", "best", str(run), *texts],
        ["--model_path", str(run), texts[0], "--device", "cpu", texts[1]],
        ["--model_path", str(run), "--device", "cpu", *texts],
    ):
        assert json.loads(run_predict(capsys, *arguments, "--json")[0])["predictions"] == expected, arguments
    dashed = run_predict(capsys, str(run), "--device", "cpu", "--json", "--", "-5 knots, the mast")[0]
    assert json.loads(dashed)["predictions"][0]["text"] == "-5 knots, the mast"
    assert "unexpected --top" in run_predict(capsys, str(run), "--top", "3", "hum", code=2)[1]


def test_texts_of_a_file_of_a_table_and_of_standard_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = small_texts.make_rows(12, seed=4)
    lines = "".join(row["text"] + "\n" for row in rows)
    (tmp_path / "new.txt").write_text(lines)
    (tmp_path / "new.csv").write_text("id,text\n" + "".join(f"{n},{row['text']}\n" for n, row in enumerate(rows)))
    expected = [row["label"] for row in rows]
    for name in ("new.txt", "new.csv"):
        out, _ = run_predict(capsys, str(run), "--data", str(tmp_path / name))
        assert [line.split("\t")[0] for line in out.splitlines()] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    run_predict(capsys, str(run), "--out", str(tmp_path / "out" / "labels.jsonl"))
    written: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out" / "labels.jsonl").read_text().splitlines()
    ]
    assert [row["predicted"] for row in written] == expected
    assert [row["text"] for row in written] == lines.splitlines()


def test_multi_label_prediction_lists_all_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "label": [row["label"], "dot"]} for row in small_texts.make_rows(96)]
    path = tmp_path / "several.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = small_texts.settings(tmp_path, **LEARNS)
    values |= {"data.train.path": str(path), "data.multi_label": True, "evaluation.metric": "macro_f1"}
    run = bottega.train("classify/transformer", values).path
    prediction = bottega.predict(run, ["salt and onion, bake"])[0]
    assert set(prediction["predicted"]) == {"cook", "dot"}
    assert prediction["probability"].keys() == {"cook", "dot", "sail", "sing"}
    columns = run_predict(capsys, str(run), "salt and onion, bake")[0].rstrip("\n").split("\t")
    assert (columns[0], columns[2], len(columns)) == ("cook, dot", "salt and onion, bake", 3)
    assert len(columns[1].split(", ")) == 2


def test_each_line_has_one_prediction(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["salt and onion", "", "hum\ta verse", "   ", "rope"]
    (tmp_path / "new.txt").write_text("\n".join(lines) + "\n")
    for source in (["--data", str(tmp_path / "new.txt")], []):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        rows = [line.split("\t") for line in run_predict(capsys, str(run), *source)[0].splitlines()]
        assert [row[0] for row in rows] == ["cook", "-", "sing", "-", "sail"]
        assert {len(row) for row in rows} == {3}
        assert rows[2][2] == r"hum\ta verse"
    assert run_predict(capsys, str(run), "salt\nand rope")[0].count("\n") == 1
    assert bottega.predict(run, ["salt", ""])[1] == dict.fromkeys(("predicted", "probability", "probabilities")) | {
        "text": ""
    }
    (tmp_path / "new.txt").write_bytes(b"salt\nse\xf1or\n")
    _, err = run_predict(capsys, str(run), "--data", str(tmp_path / "new.txt"), code=3)
    assert "new.txt, line 2: not UTF-8: byte 0xf1 at column 3; convert it" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"salt\nse\xf1or\n")))
    assert "standard input, line 2: not UTF-8" in run_predict(capsys, str(run), code=3)[1]


def test_truncated_texts_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run_predict(capsys, str(run), "salt " * 400, "salt")
    assert len(out.splitlines()) == 2
    assert "1 of 2 texts are truncated to 128 tokens" in err


def test_invalid_requests_are_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "other.jsonl"
    table.write_text(json.dumps({"words": "salt"}) + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n  \n"))
    for arguments, code, message in (
        ([str(run)], 3, "there is no text to classify"),
        ([str(run), "--data", str(table)], 3, "no field 'text'; the row has 'words'"),
        ([str(run), "salt", "--data", str(table)], 2, "and salt cannot be combined"),
        ([str(tmp_path / "none"), "salt"], 2, "none"),
    ):
        _, err = run_predict(capsys, *arguments, code=code)
        assert message in err
        assert err.count("\n") == 1


def test_file_name_among_texts_suggests_data(run: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "texts.txt").write_text("stir the soup\n")
    assert cli.main(["predict", str(run), str(tmp_path / "texts.txt")]) == 0
    assert f"use --data {tmp_path / 'texts.txt'} to classify its content" in capsys.readouterr().err
