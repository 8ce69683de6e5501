"""User records through the command line: a bad record is named in one line, and no value is invented."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bottega import cli
from small_collections import record, records, write_flickr, write_records, write_ser


class CommandResult:
    """Exit code and output of a command that is run in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: object) -> None:
        capfd.readouterr()
        self.code = cli.main([str(argument) for argument in arguments])
        self.out, self.err = capfd.readouterr()

    def assert_refused(self, code: int, *parts: object) -> None:
        assert self.code == code, self.err
        assert self.err.startswith("bottega: ")
        assert self.err.count("\n") == 1, f"one line, not {self.err!r}"
        for part in map(str, parts):
            assert part in self.err, f"{part!r} is not in {self.err!r}"


def prepare(
    capfd: pytest.CaptureFixture[str], path: Path, *settings: str, recipe: str = "personalize"
) -> CommandResult:
    return CommandResult(capfd, "prepare", recipe, "--data", path, "image_size=8", *settings)


def replace_third_row(change: Callable[[dict[str, Any]], Any]) -> list[Any]:
    rows: list[Any] = records()
    changed = change(rows[2])
    rows[2] = rows[2] if changed is None else changed
    return rows


def set_value(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        for key in path[:-1]:
            row = row[key]
        row[path[-1]] = value

    return change


def delete_key(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        for key in path[:-1]:
            row = row[key]
        del row[path[-1]]

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing picture": (
        set_value("target", "image", value="pictures/no.png"),
        ("pictures/no.png does not exist", "data.pictures"),
    ),
    "missing picture in a history": (
        set_value("history", 1, "image", value="no.png"),
        ("no.png does not exist", "item 'i"),
    ),
    "empty history": (set_value("history", value=[]), ("has an empty history",)),
    "no caption": (delete_key("history", 0, "caption"), ("of the history has no caption", "data.captions")),
    "blank caption": (set_value("target", "caption", value=" \t"), ("of the target has no caption", "data.captions")),
    "no target": (delete_key("target"), ("target is missing", '"user"')),
    "no image for the target": (delete_key("target", "image"), ("the target", "has no image")),
    "not a record": (lambda row: {"text": "a poem"}, ("is not a valid record: user is missing",)),
    "not an object": (lambda row: ["u1"], ("must be an object",)),
    "history of texts": (
        set_value("history", value=["a star"]),
        ("history.0 must be an item such as {id, caption, image}, not 'a star'",),
    ),
    "history is a text": (set_value("history", value="a star"), ("history must be a list of items, not 'a star'",)),
    "a caption that is a list": (
        set_value("target", "caption", value=["a"]),
        ("target.caption must be text, not ['a']",),
    ),
    "a user without a name": (set_value("user", value="  "), ("user is blank",)),
    "a misspelt key": (
        set_value("whish", value="a star"),
        ("whish is not a known key; the keys are user, history, target, wish",),
    ),
    "a blank wish": (set_value("wish", value=" "), ("the wish is blank",)),
    "the target liked already": (lambda row: {**row, "target": row["history"][0]}, ("is in the history too",)),
    "the same record twice": (lambda row: records()[0], ("is the same record as", "people.jsonl, line 1")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    change, parts = BAD[case]
    path = write_records(tmp_path, replace_third_row(change))
    prepare(capfd, path).assert_refused(3, f"{path}, line 3", *parts)
    prepare(capfd, path, "data.bad_records=skip").assert_refused(
        3, f"{path}, line 3", "1 of 20 records are bad", "data.max_bad"
    )
    skipped = prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.1")
    assert skipped.code == 0
    assert "19 rows" in skipped.out
    assert "left out    1 bad of 20" in skipped.out
    assert f"{path}, line 3" in skipped.out, "the dropped record is named"


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "bomb", "folder"])
def test_damaged_images_are_bad_records(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    path = write_records(tmp_path, [record(1, [1, 2], 3), *(record(user, [5, 6], 7) for user in range(2, 20))])
    image_path = tmp_path / "pictures/2.png"
    content = {
        "text": b"this is not an image",
        "cut": image_path.read_bytes()[:60],
        "empty": b"",
        "bomb": _bomb(),
        "folder": b"",
    }[damage]
    image_path.write_bytes(content)
    if damage == "folder":
        image_path.unlink()
        image_path.mkdir()
    prepare(capfd, path).assert_refused(3, f"{path}, line 1", "pictures/2.png", "data.bad_records=skip")
    skipped = prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.1")
    assert skipped.code == 0
    assert "18 rows" in skipped.out
    assert "pictures/2.png" in skipped.out


def _bomb() -> bytes:
    """Return a PNG of 100,000 x 100,000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    "name", ["../outside.png", "pictures/../../outside.png", "{absolute}", "link.png", "linked/outside.png"]
)
def test_image_paths_outside_the_folder_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "data"
    path = write_records(
        folder, replace_third_row(set_value("target", "image", value=name.format(absolute=tmp_path / "outside.png")))
    )
    (tmp_path / "outside.png").write_bytes((folder / "pictures/1.png").read_bytes())
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "linked").symlink_to(tmp_path)
    prepare(capfd, path).assert_refused(3, f"{path}, line 3", "is outside", "data.pictures")
    # A security problem, so it is an error even with data.bad_records=skip.
    prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.5").assert_refused(3, "is outside")


def test_absolute_path_inside_the_folder_is_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inside = str((tmp_path / "pictures/20.png").absolute())
    path = write_records(
        tmp_path, [record(1, [1], 3), {**record(2, [1], 4), "target": {"id": "x", "caption": "x", "image": inside}}]
    )
    assert prepare(capfd, path).code == 0


def test_user_in_two_splits_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train, held_out = (
        write_records(tmp_path, records()[:12], "a.jsonl"),
        write_records(tmp_path, records()[11:], "b.jsonl"),
    )
    result = prepare(capfd, train, f"data.validation.path={held_out}")
    result.assert_refused(3, f"{held_out}, line 1", "user 'u5' of validation is also in train", f"{train}, line 11")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.validation.path=no.jsonl"], (3, "data.validation.path: no.jsonl does not exist")),
        (["data.validation.split=dev"], (3, "has no split validation")),
        (["data.captions=no.csv"], (3, "data.captions: no.csv does not exist")),
        (["data.split.by=stratified", "data.validation=0.2"], (2, "records are always split by user")),
        (["data.train.kind=csv"], (2, "expected embedded, json, jsonl for user records, got csv")),
        (["data.validation=0.9", "data.test=0.3"], (2, "leave nothing to train on")),
        (["data.online=true"], (2, "data.online: user records come from one source")),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], expected: tuple[int, str]
) -> None:
    prepare(capfd, write_records(tmp_path), *settings).assert_refused(*expected)


def test_paths_without_records_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path / "a")
    prepare(capfd, tmp_path / "a").assert_refused(3, "has no train.jsonl", "data.collection=flickr, pog or ser")
    prepare(capfd, tmp_path / "no").assert_refused(3, "no does not exist")
    (tmp_path / "empty.jsonl").write_text("")
    prepare(capfd, tmp_path / "empty.jsonl").assert_refused(3, "has no records")
    (tmp_path / "x.csv").write_text("user,history\n")
    prepare(capfd, tmp_path / "x.csv").assert_refused(3, "is of kind csv")
    (tmp_path / "bad.jsonl").write_text("{\n")
    prepare(capfd, tmp_path / "bad.jsonl").assert_refused(3, "bad.jsonl, line 1", "invalid JSON")
    (tmp_path / "one.json").write_text(json.dumps(record(1, [1], 2)))
    prepare(capfd, tmp_path / "one.json").assert_refused(3, "one.json", "expected a list of objects")


def test_too_few_users_to_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_records(tmp_path, records(users=1))
    prepare(capfd, path, "data.validation=0.1").assert_refused(3, "leaves no row for", "each row is a user")


def test_collection_is_exported_as_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The export is read back as the same tables, with the same users in each split."""
    folder, out = write_flickr(tmp_path / "flickr", workers=20), tmp_path / "records"
    captions = f"data.captions={folder / 'captions.json'}"
    options = (captions, "data.history_length=3")
    first = prepare(capfd, folder, *options, "--to", "jsonl", str(out), "--json", recipe="personalize/flickr")
    assert first.code == 0, first.err
    tables = json.loads(first.out)["tables"]
    assert set(tables) == {"train", "validation", "test"}
    exported = sorted(path.name for path in out.glob("*.jsonl"))
    assert exported == ["test-000000.jsonl", "train-000000.jsonl", "validation-000000.jsonl"]
    row = json.loads((out / "train-000000.jsonl").read_text().splitlines()[0])
    assert row["target"]["caption"].startswith("a photo of")
    assert row["target"]["image"].startswith("40K/")
    again = prepare(capfd, out, f"data.pictures={folder}", "--json", recipe="personalize/flickr")
    assert again.code == 0
    assert json.loads(again.out)["tables"] == tables
    # A record file is recognised regardless of data.collection.
    alone = prepare(capfd, out / "train-000000.jsonl", f"data.pictures={folder}", recipe="personalize/flickr")
    assert alone.code == 0
    assert f"{tables['train']['rows']}" not in alone.out.splitlines()[1]


@pytest.mark.parametrize("collection", ["flickr", "ser"])
def test_collection_without_captions_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], collection: str
) -> None:
    folder = {"flickr": write_flickr, "ser": write_ser}[collection](tmp_path / collection)
    result = prepare(capfd, folder, "data.history_length=3", recipe=f"personalize/{collection}")
    result.assert_refused(
        3, "has no caption", "set data.captions to a file of captions or to the folder of a captioning model"
    )


def test_data_describes_user_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_records(tmp_path)
    result = CommandResult(capfd, "data", path, "image_size=8", "--examples", "2", "--out", tmp_path / "report")
    assert result.code == 0, result.err
    assert "20 rows, 10 users" in result.out
    assert "lengths in liked items" in result.out
    assert "liked: thing" in result.out
    assert (tmp_path / "report/people.png").is_file()


def test_prepare_imports_no_framework(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write_records(tmp_path)
    code = (
        "import sys, bottega.cli\n"
        f"assert bottega.cli.main(['prepare', 'personalize', '--data', {str(path)!r}, 'image_size=8']) == 0\n"
        f"assert bottega.cli.main(['data', {str(path)!r}, 'image_size=8', '--examples', '0']) == 0\n"
        "assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, capture_output=True)
