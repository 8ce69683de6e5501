"""Folders of media: classes from sub-folders, descriptions from a table, every file once and every loss said once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files, folders, metadata
from bottega.data.formats.folders import AUDIO, IMAGES, VIDEO
from bottega.data.formats.metadata import TABLES, find_table
from bottega.data.formats.reader import Format
from bottega.data.records.record import BadRecord, Record

DATA = os.environ.get("BOTTEGA_DATA")


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def read(root: Path, form: Format = IMAGES, **options: object) -> list[Record | BadRecord]:
    """All pieces in the order of their names, as preparing does it."""
    source = Source(path=str(root), **options)  # type: ignore[arg-type]
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in form.suffixes)
    pieces = [
        piece for file in files for piece in form.list_pieces(file, file.relative_to(root).as_posix(), source, 1 << 20)
    ]
    assert len(pieces) == len(files)
    return [record for piece in pieces for record in form.read(piece, source)]


def good(found: list[Record | BadRecord]) -> dict[str, dict[str, object]]:
    records = [record for record in found if isinstance(record, Record)]
    assert len({record.key for record in records}) == len(records)
    return {record.key: record.fields for record in records}


def bad(found: list[Record | BadRecord]) -> list[str]:
    return [str(record) for record in found if isinstance(record, BadRecord)]


def test_sub_folders_are_classes_and_a_flat_folder_has_none(tmp_path: Path) -> None:
    put(tmp_path, "cats/1.jpg", "cats/young/2.JPG", "dogs/1.png", "dogs/readme.txt")
    found = good(read(tmp_path))
    assert {key: fields["label"] for key, fields in found.items()} == {
        "cats/1.jpg": "cats",
        "cats/young/2.JPG": "cats",
        "dogs/1.png": "dogs",
    }
    assert found["cats/1.jpg"]["image"] == tmp_path / "cats/1.jpg"
    assert good(read(put(tmp_path / "flat", "1.jpg", "2.jpg"))) == {
        "1.jpg": {"image": tmp_path / "flat/1.jpg"},
        "2.jpg": {"image": tmp_path / "flat/2.jpg"},
    }


@pytest.mark.parametrize(("form", "name", "what"), [(AUDIO, "a.wav", "audio"), (VIDEO, "a.mkv", "video")])
def test_sound_and_video_are_read_alike(tmp_path: Path, form: Format, name: str, what: str) -> None:
    put(tmp_path, f"one/{name}")
    assert good(read(tmp_path, form)) == {f"one/{name}": {what: tmp_path / "one" / name, "label": "one"}}
    assert form.is_media
    assert form.kind == what


def test_no_suffix_is_of_two_kinds() -> None:
    sets = (folders.IMAGE_SUFFIXES, folders.AUDIO_SUFFIXES, folders.VIDEO_SUFFIXES)
    assert len(frozenset.union(*sets)) == sum(map(len, sets))
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in frozenset.union(*sets))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.csv", 'file_name,text,label\nx/1.png,"a, b",cat\n./2.png,"say ""hi""",dog\n'),
        ("metadata.csv", '\ufefffile_name;text;label\r\nx/1.png;"a, b";cat\r\n2.png;"say ""hi""";dog\r\n'),
        ("metadata.tsv", 'file\ttext\tlabel\nx/1.png\ta, b\tcat\n2.png\tsay "hi"\tdog\n'),
        ("metadata.csv", 'id|text|label\n1|a, b|cat\n2|say "hi"|dog\n'),
        (
            "metadata.jsonl",
            '{"file_name": "x/1.png", "text": "a, b", "label": "cat"}\n\n'
            '{"label": "dog", "text": "say \\"hi\\"", "file_name": "2.png"}\n',
        ),
        ("metadata.psv", 'file|text|label\nx/1.png|a, b|cat\n2.png|say "hi"|dog\n'),
        (
            "metadata.json",
            ' [{"file_name": "x/1.png", "text": "a, b", "label": "cat"},\n'
            ' {"label": "dog", "text": "say \\"hi\\"", "file_name": "2.png"}]',
        ),
    ],
)
def test_a_table_describes_the_files_and_folders_mean_nothing_then(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, "x/1.png", "2.png", "y/3.png")
    (tmp_path / name).write_text(text, newline="")
    found = read(tmp_path)
    assert bad(found) == []
    assert good(found) == {
        "2.png": {"text": 'say "hi"', "label": "dog", "image": tmp_path / "2.png"},
        "x/1.png": {"text": "a, b", "label": "cat", "image": tmp_path / "x/1.png"},
        "y/3.png": {"image": tmp_path / "y/3.png"},
    }


@pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
def test_ljspeech_is_read_as_it_lies() -> None:
    root = Path(str(DATA), "audio-ljspeech-sample")
    found = read(root, AUDIO)
    assert bad(found) == []
    records = good(found)
    assert len(records) == 16
    described = {key: fields for key, fields in records.items() if "text" in fields}
    assert sorted(described) == [f"wavs/LJ001-000{number}.flac" for number in range(1, 9)]
    assert str(described["wavs/LJ001-0001.flac"]["text"]).startswith("Printing, in the only sense")
    assert set(described["wavs/LJ001-0001.flac"]) == {"text", "normalised", "audio"}
    lines = (root / "metadata.csv").read_text().splitlines()
    assert [f"{fields['text']}|{fields['normalised']}" for fields in described.values()] == [
        line.partition("|")[2] for line in lines
    ]


def test_what_a_table_says_wrongly_is_said_once_with_its_line(tmp_path: Path) -> None:
    put(tmp_path, "1.png", "2.png", "z/3.png")
    rows = "file_name,text\ngone.png,a\n1.png,b\n2.png\n,c\n../1.png,d\n/etc/passwd,e\n"
    (tmp_path / "metadata.csv").write_text(rows)
    found = read(tmp_path)
    table = tmp_path / "metadata.csv"
    assert bad(found) == [
        f"{table}, line 4: has 1 columns; expected 2",
        f"{table}, line 5: names no file; expected a file name in one of file_name, filename, file, path, id",
        f"{table}, line 2: names the image file 'gone.png', which is missing",
        f"{table}, line 6: names the image file '../1.png', which is missing",
        f"{table}, line 7: names the image file '/etc/passwd', which is missing",
    ]
    assert len(good(found)) == 3
    put(tmp_path, "gone.png")  # no process remembers what was missing
    assert len(bad(read(tmp_path))) == 4


def test_bad_json_lines_are_named(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.png"}\n[1]\n{"file_name": \n{"file_name": 3}\n')
    assert [line.partition("line ")[2][:12] for line in bad(read(tmp_path))] == [
        "2: a row mus",
        "3, column 14",
        "4: names no ",
    ]


def test_a_table_of_other_files_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\nb.png,y\n")
    with pytest.raises(DataError, match=r"none of its 2 rows matches a file under .*'a\.png' in line 2"):
        read(tmp_path)


def test_several_rows_of_a_file_are_as_many_records(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\n1.png,a\n1.png,b\n")
    assert {key: fields["text"] for key, fields in good(read(tmp_path)).items()} == {"1.png": "a", "1.png:2": "b"}


def test_a_row_belongs_to_the_file_it_names_exactly(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "x/a.png", "x/b.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,one\nb.png,two\n")
    found = good(read(tmp_path))
    assert {key: fields.get("text") for key, fields in found.items()} == {
        "a.png": "one",
        "x/a.png": None,
        "x/b.png": "two",
    }


@pytest.mark.parametrize("inner", ["a", "z"])
def test_the_nearest_table_counts(tmp_path: Path, inner: str) -> None:
    put(tmp_path, "m/1.png", f"{inner}/1.png", f"{inner}/c/2.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\nm/1.png,outer\nlost.png,outer\n")
    (tmp_path / inner / "metadata.csv").write_text("file_name,text\n1.png,inner\nc/2.png,inner\ngone.png,inner\n")
    found = read(tmp_path)
    assert {key: fields["text"] for key, fields in good(found).items()} == {
        "m/1.png": "outer",
        f"{inner}/1.png": "inner",
        f"{inner}/c/2.png": "inner",
    }
    assert sorted(line.partition("names")[2] for line in bad(found)) == [
        " the image file 'gone.png', which is missing",
        " the image file 'lost.png', which is missing",
    ]
    source = Source(path=str(tmp_path))
    assert find_table(tmp_path / inner / "c/2.png", tmp_path, source) == tmp_path / inner / "metadata.csv"


@pytest.mark.parametrize("mark", ["|", "\t"])
def test_a_quotation_mark_between_bars_or_tabs_is_part_of_the_text(tmp_path: Path, mark: str) -> None:
    put(tmp_path, "1.png", "2.png")
    (tmp_path / "metadata.csv").write_text(f'id{mark}text\n1{mark}"so it began\n2{mark}"and" so on\n')
    found = read(tmp_path)
    assert bad(found) == []
    assert [fields["text"] for fields in good(found).values()] == ['"so it began', '"and" so on']


def test_a_recipe_may_name_the_table_and_its_columns(tmp_path: Path) -> None:
    put(tmp_path / "files", "1.png", "2.png")
    (tmp_path / "rows.txt").write_text("1.png,a\n2.png,b\n")
    with pytest.raises(DataError, match="no column is named"):
        read(tmp_path / "files", metadata="../rows.txt")
    found = read(tmp_path / "files", metadata="../rows.txt", columns=("file", "text"))
    assert {key: fields["text"] for key, fields in good(found).items()} == {"1.png": "a", "2.png": "b"}
    assert bad(found) == []
    with pytest.raises(DataError, match=r"no\.csv does not exist"):
        read(tmp_path / "files", metadata="no.csv")


def test_a_line_of_a_table_that_is_no_utf_8_is_bad(tmp_path: Path) -> None:
    put(tmp_path, "1.png", "2.png")
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\n1.png,caf\xe9\n2.png,x\n")
    found = read(tmp_path)
    assert bad(found) == [
        f"{tmp_path / 'metadata.csv'}, line 2: not UTF-8: byte 0xe9 at column 10 of line 2; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv"
    ]
    assert good(found)["2.png"]["text"] == "x"


def test_odd_files_are_bad(tmp_path: Path) -> None:
    put(tmp_path, "data/a.png")
    root = tmp_path / "data"
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "broken.png").symlink_to(root / "no.png")
    os.mkfifo(root / "pipe.png")
    found = read(root)
    assert sorted(good(found)) == ["a.png", "inside.png"]
    assert [line.removeprefix(f"{root}/").partition(":")[0] for line in bad(found)] == [
        "broken.png",
        "pipe.png",
    ]
    (tmp_path / "link").symlink_to(root)
    assert sorted(good(read(tmp_path / "link"))) == ["a.png", "inside.png"]


def test_a_table_is_read_once_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, *(f"{number}.png" for number in range(30)))
    (tmp_path / "metadata.csv").write_text("file_name,text\n" + "".join(f"{number}.png,t\n" for number in range(30)))
    reads: list[Path] = []
    original = metadata._records
    monkeypatch.setattr(metadata, "_records", lambda piece, source: reads.append(piece.file) or original(piece, source))  # type: ignore[func-returns-value]
    assert len(good(read(tmp_path))) == 30
    assert reads == [tmp_path / "metadata.csv"]


def test_every_table_that_is_passed_over_as_one_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"file_name": "1.png", "text": "a, b"}
    contents = {
        "csv": 'file_name,text\n1.png,"a, b"\n',
        "tsv": "file_name\ttext\n1.png\ta, b\n",
        "psv": "1.png|a, b\n",
        "jsonl": json.dumps(row),
        "json": json.dumps([row]),
    }
    for name in TABLES:
        root = put(tmp_path / name, "1.png", "2.png")
        suffix = name.partition(".")[2]
        if suffix == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist([row, {"file_name": "gone.png"}]), root / name)
        else:
            (root / name).write_text(contents[suffix])
        found = find_files(Source(path=str(root)))
        assert (found.kind, len(found.paths)) == ("images", 2)
        records = [record for piece in found.list_pieces(1) for record in found.read(piece)]
        assert good(records)["1.png"] == {"text": "a, b", "image": root / "1.png"}
        assert good(records)["2.png"] == {"image": root / "2.png"}
        before = found.fingerprint
        (root / name).write_bytes((root / name).read_bytes().replace(b"a, b", b"a, c"))
        assert find_files(Source(path=str(root))).fingerprint != before
    assert bad(records) == [f"{root / name}, row 2: names the image file 'gone.png', which is missing"]


def test_a_table_is_read_as_strictly_as_data(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    rows = '{"file_name": "1.png", "x": NaN}\n{"file_name": "1.png", "x": 1, "x": 2}\n{"file_name": "1.png", "x": 3}\n'
    (tmp_path / "metadata.jsonl").write_text(rows)
    found = read(tmp_path)
    assert [line.partition("line ")[2] for line in bad(found)] == [
        "1, column 29: invalid JSON: NaN is not a JSON number",
        "2: key 'x' occurs twice in one object",
    ]
    assert good(found) == {"1.png": {"x": 3, "image": tmp_path / "1.png"}}
    (tmp_path / "metadata.csv").write_text("file_name,x,x\n1.png,1,2\n")
    with pytest.raises(DataError, match="two columns are named 'x'"):
        read(tmp_path)


def test_an_object_about_the_whole_is_no_table(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png")
    (tmp_path / "metadata.json").write_text('{"about": "my cats"}')
    assert good(read(tmp_path)) == {"cat/1.png": {"label": "cat", "image": tmp_path / "cat/1.png"}}


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\n\r", exclude_categories=("Cs", "Cc")),
    min_size=1,
    max_size=6,
)


@given(texts=st.lists(names, min_size=1, max_size=5))
def test_any_text_survives_each_kind_of_table(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    import csv
    import io

    root = put(tmp_path_factory.mktemp("any"), *(f"{number}.png" for number in range(len(texts))))
    out = io.StringIO()
    csv.writer(out).writerows([("file_name", "text"), *((f"{n}.png", text) for n, text in enumerate(texts))])
    rows = (json.dumps({"file_name": f"{n}.png", "text": text}) for n, text in enumerate(texts))
    for name, content in (("metadata.csv", out.getvalue()), ("metadata.jsonl", "\n".join(rows))):
        (root / name).write_text(content, encoding="utf-8", newline="")
        found = good(read(root, metadata=name))
        assert [found[f"{n}.png"]["text"] for n in range(len(texts))] == texts
