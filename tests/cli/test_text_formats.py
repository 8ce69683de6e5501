"""Texts as people have them: several files, no header, several fields, numbered classes, lines, encodings, stray blanks."""

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


def prepared(path: Path | list[Path], recipe: str = "classify", **changes: Any) -> PreparedData:
    paths = [str(one) for one in path] if isinstance(path, list) else str(path)
    settings = {"data.train.path": paths, "data.split": None, "data.validation": {"split": 0.25}}
    return bottega.prepare(recipe, {**settings, **changes})


def rows_of(found: PreparedData) -> list[tuple[str, str]]:
    """(text, label) of all tables, in some order."""
    tables = [found.table(name) for name in found.tables]
    return sorted(
        (text, label)
        for t in tables
        for text, label in zip(read_text_column(t, "text"), read_text_column(t, "label"), strict=True)
    )


def expected(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["text"], row["label"]) for row in rows)


# Several paths


def test_several_paths_follow_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a.txt", "b.txt", "c.txt")):
        small_run.write_text(tmp_path / name, seed=number)
    words = ["language", "--data", "a.txt", "b.txt", "c.txt", "--lr", "1e-3", "data.validation.split=0.1"]
    sources, overrides = parse_overrides(words)
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
    assert cli.main(["prepare", *words]) == 0
    # A recipe may still follow, and a later path takes the place of all.
    assert parse_overrides(["--data", "a.txt", "language"])[0] == ["language"]
    assert parse_overrides(["language", "--data", "a.txt", "mine.yaml"])[0] == ["language", "mine.yaml"]
    again = check_recipe(["language", {"data": {"train": recipe.data.train.model_dump()}}, {"data": "c.txt"}]).recipe
    assert (again.data.train.path, again.data.train.more_paths) == ("c.txt", None)


def test_a_missing_one_of_several_paths_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small_run.write_text(tmp_path / "a.txt")
    assert cli.main(["prepare", "language", "--data", str(first), str(tmp_path / "gone.txt")]) == 3
    assert "gone.txt does not exist" in capsys.readouterr().err


# Tables


def test_a_table_without_a_header_is_read_by_number(tmp_path: Path) -> None:
    rows = small_texts.rows(48)
    with (tmp_path / "news.csv").open("w", newline="") as out:
        cells = [(NAMES.index(row["label"]) + 1, *row["text"].split(" ", 1)) for row in rows]
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows(cells)
    numbered = {"data.train.field": [1, 2], "data.train.label": 0}
    found = prepared(tmp_path / "news.csv", **numbered)
    assert [text.replace("\n", " ") for text, _ in rows_of(found)] == [text for text, _ in expected(rows)]
    assert found.classes.names == ("1", "2", "3")
    named = prepared(tmp_path / "news.csv", **numbered, **{"data.class_names": {1: "cook", 2: "sail", 3: "sing"}})
    assert [(text.replace("\n", " "), label) for text, label in rows_of(named)] == expected(rows)
    words = ["data.train.field=[1, 2]", "data.train.label=0", "data.class_names={1: cook, 2: sail, 3: sing}"]
    assert cli.main(["prepare", "classify", "--data", str(tmp_path / "news.csv"), *words]) == 0
    by_field = prepared(tmp_path / "news.csv", **{"data.train.field": [1, 2], "data.label_field": 0})
    assert rows_of(by_field) == rows_of(found)
    with pytest.raises(DataError, match="numbered 0 to 2"):
        prepared(tmp_path / "news.csv", **{**numbered, "data.train.label": 3})
    with pytest.raises(DataError, match=r"label '3' has no name in data\.class_names, which names 0, 1, 2"):
        prepared(tmp_path / "news.csv", **numbered, **{"data.class_names": NAMES})


def test_several_fields_are_joined_by_name(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(
        "".join(json.dumps({"title": f"the t{n}", "body": f"a b{n}", "label": NAMES[n % 3]}) + "\n" for n in range(24))
    )
    found = prepared(path, **{"data.train.field": ["title", "body"]})
    assert ("the t3\na b3", "cook") in rows_of(found)
    with pytest.raises(DataError, match="no field 'bodi'; did you mean 'body'"):
        prepared(path, **{"data.train.field": ["title", "bodi"]})
    run = bottega.train(
        "classify",
        {**small_texts.settings(tmp_path), "data.train.path": str(path), "data.train.field": ["title", "body"]},
    )
    assert [row["text"] for row in bottega.predict(run.path, data=path)][:2] == ["the t0\na b0", "the t1\na b1"]


def test_names_in_order_of_the_numbers(tmp_path: Path) -> None:
    rows = small_texts.rows(48)
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(json.dumps({**row, "label": NAMES.index(row["label"])}) + "\n" for row in rows))
    assert rows_of(prepared(path, **{"data.class_names": NAMES})) == expected(rows)
    assert rows_of(prepared(path)) != expected(rows)


def test_a_recipe_for_one_data_set_reads_other_tables(tmp_path: Path) -> None:
    rows = small_texts.rows(48)
    with (tmp_path / "mine.csv").open("w", newline="") as out:
        csv.writer(out).writerows(
            [("id", "review", "label"), *((n, r["text"], r["label"]) for n, r in enumerate(rows))]
        )
    assert rows_of(prepared(tmp_path / "mine.csv", "classify/sst2", **{"data.train.field": "review"})) == expected(rows)
    lines = "".join(f"{row['text']}\t{NAMES.index(row['label']) % 2}\n" for row in rows)
    (tmp_path / "train.tsv").write_text(lines)
    assert len(rows_of(prepared(tmp_path / "train.tsv", "classify/sst2"))) == 48


# Lines


@pytest.mark.parametrize(
    "form", ["{label}\t{text}", "{text}\t{label}", "__label__{label} {text}", "{label} {text}", "{label}: {text}"]
)
def test_lines_of_a_label_and_a_text(tmp_path: Path, form: str) -> None:
    rows = small_texts.rows(48)
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(form.format(**row) for row in rows) + "\n\n")
    found = prepared(path)
    assert rows_of(found) == expected(rows)
    assert any("each line is read as" in note for note in found.notes())


def test_prose_is_no_data_of_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("".join(f"{word} is a word of its own\n" for word in map("w{}".format, range(40))))
    with pytest.raises(DataError, match="no delimiter splits all lines into a label"):
        prepared(path)


# Encodings


def test_other_encodings(tmp_path: Path) -> None:
    rows = [{**row, "text": f"café {row['text']}"} for row in small_texts.rows(48)]
    table = "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows)
    for encoding in ("latin-1", "utf-16", "cp1252"):
        path = tmp_path / f"{encoding}.csv"
        path.write_text(table, encoding=encoding)
        assert rows_of(prepared(path, **{"data.train.encoding": encoding})) == expected(rows)
        with pytest.raises(DataError, match=r"set data\.train\.encoding, such as latin-1"):
            prepared(path)
    text = tmp_path / "prose.txt"
    text.write_text("été\n" * 200, encoding="latin-1")
    found = bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "latin-1"})
    assert "été" in found.tokenizer.decode(np.asarray(found.table("train").values("tokens"))[:60])
    with pytest.raises(DataError, match="is not ascii from byte 0"):
        bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "ascii"})
    with pytest.raises(UsageError, match="not a Python text encoding"):
        bottega.prepare("language", {"data.train.path": str(text), "data.train.encoding": "latin1337"})


# Labels


def test_labels_that_differ_by_blanks_are_one_class(tmp_path: Path) -> None:
    rows = small_texts.rows(48)
    path = tmp_path / "blanks.jsonl"
    stray = [{**row, "label": f" {row['label']}" if n % 5 == 0 else row["label"]} for n, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in stray))
    found = prepared(path)
    assert found.classes.names == ("cook", "sail", "sing")
    assert any(note.startswith("extra spaces were removed from 10 labels") for note in found.notes())
    assert rows_of(found) == expected(rows)


def test_a_remedy_that_cannot_help_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": f"word {n}", "kind": n % 2}) + "\n" for n in range(20)))
    with pytest.raises(DataError, match=r"set data\.label_field to the right field") as caught:
        prepared(path)
    assert "bad_records" not in str(caught.value)
