"""Records of people as they come, through the command line: what is wrong is one line that names it, and nothing is made up."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bottega import cli
from small_collections import flickr, people, record, records, ser


class Said:
    """Exit code and output of a command, run in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: object) -> None:
        capfd.readouterr()
        self.code = cli.main([str(argument) for argument in arguments])
        self.out, self.err = capfd.readouterr()

    def refused(self, code: int, *parts: object) -> None:
        assert self.code == code, self.err
        assert self.err.startswith("bottega: ")
        assert self.err.count("\n") == 1, f"one line, not {self.err!r}"
        for part in map(str, parts):
            assert part in self.err, f"{part!r} is not in {self.err!r}"


def prepare(capfd: pytest.CaptureFixture[str], path: Path, *settings: str, recipe: str = "personalize") -> Said:
    return Said(capfd, "prepare", recipe, "--data", path, "image_size=8", *settings)


def with_row(change: Callable[[dict[str, Any]], Any]) -> list[Any]:
    rows: list[Any] = records()
    changed = change(rows[2])
    rows[2] = rows[2] if changed is None else changed
    return rows


def setting(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        for key in path[:-1]:
            row = row[key]
        row[path[-1]] = value

    return change


def without(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(row: Any) -> None:
        for key in path[:-1]:
            row = row[key]
        del row[path[-1]]

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing picture": (
        setting("target", "image", value="pictures/no.png"),
        ("pictures/no.png does not exist", "data.pictures"),
    ),
    "missing picture in a history": (
        setting("history", 1, "image", value="no.png"),
        ("no.png does not exist", "item 'i"),
    ),
    "empty history": (setting("history", value=[]), ("has an empty history",)),
    "no caption": (without("history", 0, "caption"), ("of the history has no caption", "data.captions")),
    "blank caption": (setting("target", "caption", value=" \t"), ("of the target has no caption", "data.captions")),
    "no target": (without("target"), ("target is missing", '"user"')),
    "no image for the target": (without("target", "image"), ("the target", "has no image")),
    "not a record": (lambda row: {"text": "a poem"}, ("is not a valid record: user is missing",)),
    "not an object": (lambda row: ["u1"], ("must be an object",)),
    "history of texts": (
        setting("history", value=["a star"]),
        ("history.0 must be an item such as {id, caption, image}, not 'a star'",),
    ),
    "history is a text": (setting("history", value="a star"), ("history must be a list of items, not 'a star'",)),
    "a caption that is a list": (
        setting("target", "caption", value=["a"]),
        ("target.caption must be text, not ['a']",),
    ),
    "a user without a name": (setting("user", value="  "), ("user is blank",)),
    "a misspelt key": (
        setting("whish", value="a star"),
        ("whish is not a known key; the keys are user, history, target, wish",),
    ),
    "a blank wish": (setting("wish", value=" "), ("the wish is blank",)),
    "the target liked already": (lambda row: {**row, "target": row["history"][0]}, ("is in the history too",)),
    "the same record twice": (lambda row: records()[0], ("is the same record as", "people.jsonl, line 1")),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_record_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str) -> None:
    change, said = BAD[what]
    path = people(tmp_path, with_row(change))
    prepare(capfd, path).refused(3, f"{path}, line 3", *said)
    prepare(capfd, path, "data.bad_records=skip").refused(
        3, f"{path}, line 3", "1 of 20 records are bad", "data.max_bad"
    )
    skipped = prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.1")
    assert skipped.code == 0
    assert "19 rows" in skipped.out
    assert "left out    1 bad of 20" in skipped.out
    assert f"{path}, line 3" in skipped.out, "what is left out is named"


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "bomb", "folder"])
def test_damaged_pictures_are_never_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    path = people(tmp_path, [record(1, [1, 2], 3), *(record(user, [5, 6], 7) for user in range(2, 20))])
    victim = tmp_path / "pictures/2.png"
    content = {
        "text": b"this is no picture",
        "cut": victim.read_bytes()[:60],
        "empty": b"",
        "bomb": _bomb(),
        "folder": b"",
    }[damage]
    victim.write_bytes(content)
    if damage == "folder":
        victim.unlink()
        victim.mkdir()
    prepare(capfd, path).refused(3, f"{path}, line 1", "pictures/2.png", "data.bad_records=skip")
    skipped = prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.1")
    assert skipped.code == 0
    assert "18 rows" in skipped.out
    assert "pictures/2.png" in skipped.out


def _bomb() -> bytes:
    """A PNG of 100,000 x 100,000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    "name", ["../outside.png", "pictures/../../outside.png", "{absolute}", "link.png", "linked/outside.png"]
)
def test_pictures_stay_in_their_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    folder = tmp_path / "data"
    path = people(folder, with_row(setting("target", "image", value=name.format(absolute=tmp_path / "outside.png"))))
    (tmp_path / "outside.png").write_bytes((folder / "pictures/1.png").read_bytes())
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "linked").symlink_to(tmp_path)
    prepare(capfd, path).refused(3, f"{path}, line 3", "is outside", "data.pictures")
    # It might do harm, so it is not one of those that are merely left out.
    prepare(capfd, path, "data.bad_records=skip", "data.max_bad=0.5").refused(3, "is outside")


def test_what_leads_back_inside_is_inside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inside = str((tmp_path / "pictures/20.png").absolute())
    path = people(
        tmp_path, [record(1, [1], 3), {**record(2, [1], 4), "target": {"id": "x", "caption": "x", "image": inside}}]
    )
    assert prepare(capfd, path).code == 0


def test_a_user_in_two_splits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train, held_out = people(tmp_path, records()[:12], "a.jsonl"), people(tmp_path, records()[11:], "b.jsonl")
    said = prepare(capfd, train, f"data.validation.path={held_out}")
    said.refused(3, f"{held_out}, line 1", "user 'u5' of validation is also in train", f"{train}, line 11")


@pytest.mark.parametrize(
    ("settings", "said"),
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
def test_settings_that_cannot_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], said: tuple[int, str]
) -> None:
    prepare(capfd, people(tmp_path), *settings).refused(*said)


def test_places_without_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    people(tmp_path / "a")
    prepare(capfd, tmp_path / "a").refused(3, "has no train.jsonl", "data.collection=flickr, pog or ser")
    prepare(capfd, tmp_path / "no").refused(3, "no does not exist")
    (tmp_path / "empty.jsonl").write_text("")
    prepare(capfd, tmp_path / "empty.jsonl").refused(3, "has no records")
    (tmp_path / "x.csv").write_text("user,history\n")
    prepare(capfd, tmp_path / "x.csv").refused(3, "is of kind csv")
    (tmp_path / "bad.jsonl").write_text("{\n")
    prepare(capfd, tmp_path / "bad.jsonl").refused(3, "bad.jsonl, line 1", "invalid JSON")
    (tmp_path / "one.json").write_text(json.dumps(record(1, [1], 2)))
    prepare(capfd, tmp_path / "one.json").refused(3, "one.json", "expected a list of objects")


def test_too_few_people_to_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = people(tmp_path, records(users=1))
    prepare(capfd, path, "data.validation=0.1").refused(3, "leaves no row for", "a row is a user here")


def test_a_collection_becomes_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is exported is read again as what it was, with the same people on the same side."""
    folder, out = flickr(tmp_path / "flickr", workers=20), tmp_path / "records"
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
    # A record file is one whatever the collection is called.
    alone = prepare(capfd, out / "train-000000.jsonl", f"data.pictures={folder}", recipe="personalize/flickr")
    assert alone.code == 0
    assert f"{tables['train']['rows']}" not in alone.out.splitlines()[1]


@pytest.mark.parametrize("collection", ["flickr", "ser"])
def test_a_collection_without_captions(tmp_path: Path, capfd: pytest.CaptureFixture[str], collection: str) -> None:
    folder = {"flickr": flickr, "ser": ser}[collection](tmp_path / collection)
    said = prepare(capfd, folder, "data.history_length=3", recipe=f"personalize/{collection}")
    said.refused(3, "has no caption", "set data.captions to a file of captions or to the folder of a captioning model")


def test_data_shows_people(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = people(tmp_path)
    said = Said(capfd, "data", path, "image_size=8", "--examples", "2", "--out", tmp_path / "report")
    assert said.code == 0, said.err
    assert "20 rows, 10 users" in said.out
    assert "lengths in liked items" in said.out
    assert "liked: thing" in said.out
    assert (tmp_path / "report/people.png").is_file()


def test_nothing_is_loaded_to_prepare(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = people(tmp_path)
    code = (
        "import sys, bottega.cli\n"
        f"assert bottega.cli.main(['prepare', 'personalize', '--data', {str(path)!r}, 'image_size=8']) == 0\n"
        f"assert bottega.cli.main(['data', {str(path)!r}, 'image_size=8', '--examples', '0']) == 0\n"
        "assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, capture_output=True)
