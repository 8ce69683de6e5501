"""Text formats: several files, no header, several fields, numbered classes, labelled lines, encodings, extra spaces."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_run
import small_texts
from bottega import cli
from bottega.core.errors import DataError, UsageError
from bottega.data.prepare.prepared import PreparedData
from bottega.data.tables.classes import read_text_column
from bottega.tasks.recipes import check_recipe, parse_overrides

NAMES = list(small_texts.WORDS)


def prepare(path: Path | list[Path], recipe: str = "classify", **changes: Any) -> PreparedData:
    paths = list(map(str, path)) if isinstance(path, list) else str(path)
    settings = {"data.train.path": paths, "data.split": None, "data.validation": {"split": 0.25}}
    return bottega.prepare(recipe, {**settings, **changes})


def read_pairs(data: PreparedData) -> list[tuple[str, str]]:
    """Return the sorted (text, label) pairs of all tables."""
    tables = [data.table(name) for name in data.tables]
    return sorted(
        (text, label)
        for t in tables
        for text, label in zip(read_text_column(t, "text"), read_text_column(t, "label"), strict=True)
    )


def expected_pairs(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["text"], row["label"]) for row in rows)


# Several paths


def test_data_accepts_several_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a.txt", "b.txt", "c.txt")):
        small_run.write_text(tmp_path / name, seed=number)
    arguments = ["language", "--data", "a.txt", "b.txt", "c.txt", "--lr", "1e-3", "data.validation.split=0.1"]
    sources, overrides = parse_overrides(arguments)
    recipe = check_recipe(sources, overrides).recipe
    assert sources == ["language"]
    assert (recipe.data.train.path, recipe.data.train.more_paths) == ("a.txt", ("b.txt", "c.txt"))
    assert recipe.training.learning_rate == 1e-3
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_bytes((tmp_path / name).read_bytes())
    together = bottega.prepare("language", {"data.train.path": ["a.txt", "b.txt", "c.txt"]})
    alone = bottega.prepare("language", {"data.train.path": str(folder)})
    assert together.tables == alone.tables
    assert cli.main(["prepare", *arguments]) == 0
    # A recipe may still follow, and a later path replaces all.
    assert parse_overrides(["--data", "a.txt", "language"])[0] == ["language"]
    assert parse_overrides(["language", "--data", "a.txt", "mine.yaml"])[0] == ["language", "mine.yaml"]
    again = check_recipe(["language", {"data": {"train": recipe.data.train.model_dump()}}, {"data": "c.txt"}]).recipe
    assert (again.data.train.path, again.data.train.more_paths) == ("c.txt", None)


def test_missing_path_among_several_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small_run.write_text(tmp_path / "a.txt")
    assert cli.main(["prepare", "language", "--data", str(first), str(tmp_path / "gone.txt")]) == 3
    assert "gone.txt does not exist" in capsys.readouterr().err


# Tables


def test_columns_without_a_header_are_numbered(tmp_path: Path) -> None:
    rows = small_texts.make_rows(48)
    with (tmp_path / "news.csv").open("w", newline="") as out:
        cells = [(NAMES.index(row["label"]) + 1, *row["text"].split(" ", 1)) for row in rows]
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows(cells)
    numbered = {"data.train.field": [1, 2], "data.train.label": 0}
    data = prepare(tmp_path / "news.csv", **numbered)
    assert [text.replace("\n", " ") for text, _ in read_pairs(data)] == [text for text, _ in expected_pairs(rows)]
    assert data.classes.names == ("1", "2", "3")
    named = prepare(tmp_path / "news.csv", **numbered, **{"data.class_names": {1: "cook", 2: "sail", 3: "sing"}})
    assert [(text.replace("\n", " "), label) for text, label in read_pairs(named)] == expected_pairs(rows)
    overrides = ["data.train.field=[1, 2]", "data.train.label=0", "data.class_names={1: cook, 2: sail, 3: sing}"]
    assert cli.main(["prepare", "classify", "--data", str(tmp_path / "news.csv"), *overrides]) == 0
    by_field = prepare(tmp_path / "news.csv", **{"data.train.field": [1, 2], "data.label_field": 0})
    assert read_pairs(by_field) == read_pairs(data)
    with pytest.raises(DataError, match="numbered 0 to 2"):
        prepare(tmp_path / "news.csv", **{**numbered, "data.train.label": 3})
    with pytest.raises(DataError, match=r"label '3' has no name in data\.class_names, which has names for 0, 1, 2"):
        prepare(tmp_path / "news.csv", **numbered, **{"data.class_names": NAMES})


def test_several_fields_are_joined_by_name(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(
        "".join(json.dumps({"title": f"the t{n}", "body": f"a b{n}", "label": NAMES[n % 3]}) + "\n" for n in range(24))
    )
    data = prepare(path, **{"data.train.field": ["title", "body"]})
    assert ("the t3\na b3", "cook") in read_pairs(data)
    with pytest.raises(DataError, match="no field 'bodi'; did you mean 'body'"):
        prepare(path, **{"data.train.field": ["title", "bodi"]})
    run = bottega.train(
        "classify",
        {**small_texts.settings(tmp_path), "data.train.path": str(path), "data.train.field": ["title", "body"]},
    )
    assert [row["text"] for row in bottega.predict(run.path, data=path)][:2] == ["the t0\na b0", "the t1\na b1"]


def test_class_names_are_assigned_by_number(tmp_path: Path) -> None:
    rows = small_texts.make_rows(48)
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(json.dumps({**row, "label": NAMES.index(row["label"])}) + "\n" for row in rows))
    assert read_pairs(prepare(path, **{"data.class_names": NAMES})) == expected_pairs(rows)
    assert read_pairs(prepare(path)) != expected_pairs(rows)


def test_recipe_of_one_data_set_reads_other_tables(tmp_path: Path) -> None:
    rows = small_texts.make_rows(48)
    with (tmp_path / "mine.csv").open("w", newline="") as out:
        csv.writer(out).writerows(
            [("id", "review", "label"), *((n, r["text"], r["label"]) for n, r in enumerate(rows))]
        )
    assert read_pairs(
        prepare(tmp_path / "mine.csv", "classify/sst2", **{"data.train.field": "review"})
    ) == expected_pairs(rows)
    lines = "".join(f"{row['text']}\t{NAMES.index(row['label']) % 2}\n" for row in rows)
    (tmp_path / "train.tsv").write_text(lines)
    assert len(read_pairs(prepare(tmp_path / "train.tsv", "classify/sst2"))) == 48


# Lines


@pytest.mark.parametrize(
    "form", ["{label}\t{text}", "{text}\t{label}", "__label__{label} {text}", "{label} {text}", "{label}: {text}"]
)
def test_labelled_lines_are_recognised(tmp_path: Path, form: str) -> None:
    rows = small_texts.make_rows(48)
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(form.format(**row) for row in rows) + "\n\n")
    data = prepare(path)
    assert read_pairs(data) == expected_pairs(rows)
    assert any("each line is read as" in note for note in data.notes())


def test_prose_is_refused_by_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("".join(f"{word} is a word of its own\n" for word in map("w{}".format, range(40))))
    with pytest.raises(DataError, match="no delimiter splits all lines into a label"):
        prepare(path)


# Encodings


def test_other_encodings(tmp_path: Path) -> None:
    rows = [{**row, "text": f"café {row['text']}"} for row in small_texts.make_rows(48)]
    table = "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows)
    for encoding in ("latin-1", "utf-16", "cp1252"):
        path = tmp_path / f"{encoding}.csv"
        path.write_text(table, encoding=encoding)
        assert read_pairs(prepare(path, **{"data.train.encoding": encoding})) == expected_pairs(rows)
        with pytest.raises(DataError, match=r"set data\.train\.encoding, such as latin-1"):
            prepare(path)
    text = tmp_path / "prose.txt"
    text.write_text("été\n" * 200, encoding="latin-1")
    data = bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "latin-1"})
    assert "été" in data.tokenizer.decode(np.asarray(data.table("train").values("tokens"))[:60])
    with pytest.raises(DataError, match="is not ascii from byte 0"):
        bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "ascii"})
    with pytest.raises(UsageError, match="not a Python text encoding"):
        bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "latin1337"})


# Labels


def test_labels_that_differ_in_spaces_are_one_class(tmp_path: Path) -> None:
    rows = small_texts.make_rows(48)
    path = tmp_path / "blanks.jsonl"
    stray = [{**row, "label": f" {row['label']}" if n % 5 == 0 else row["label"]} for n, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in stray))
    data = prepare(path)
    assert data.classes.names == ("cook", "sail", "sing")
    assert any(note.startswith("extra spaces were removed from 10 labels") for note in data.notes())
    assert read_pairs(data) == expected_pairs(rows)


def test_error_suggests_only_remedies_that_help(tmp_path: Path) -> None:
    path = tmp_path / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": f"word {n}", "kind": n % 2}) + "\n" for n in range(20)))
    with pytest.raises(DataError, match=r"set data\.label_field to the right field") as caught:
        prepare(path)
    assert "bad_records" not in str(caught.value)
