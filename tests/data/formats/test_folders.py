"""Media folders: classes from subfolders, fields from a metadata table, every file and problem reported once."""

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
from bottega.data.formats.metadata import TABLE_NAMES, find_table
from bottega.data.formats.reader import Format
from bottega.data.records.record import BadRecord, Record

DATA = os.environ.get("BOTTEGA_DATA")


def write_files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def read_records(root: Path, form: Format = IMAGES, **options: object) -> list[Record | BadRecord]:
    """Read all pieces in the order of their names, as preparation does."""
    source = Source(path=str(root), **options)  # type: ignore[arg-type]
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in form.suffixes)
    pieces = [
        piece for file in files for piece in form.list_pieces(file, file.relative_to(root).as_posix(), source, 1 << 20)
    ]
    assert len(pieces) == len(files)
    return [record for piece in pieces for record in form.read(piece, source)]


def good_fields(records_and_errors: list[Record | BadRecord]) -> dict[str, dict[str, object]]:
    records = [record for record in records_and_errors if isinstance(record, Record)]
    assert len({record.key for record in records}) == len(records)
    return {record.key: record.fields for record in records}


def bad_messages(records: list[Record | BadRecord]) -> list[str]:
    return [str(record) for record in records if isinstance(record, BadRecord)]


def test_subfolders_are_classes_and_a_flat_folder_has_none(tmp_path: Path) -> None:
    write_files(tmp_path, "cats/1.jpg", "cats/young/2.JPG", "dogs/1.png", "dogs/readme.txt")
    fields_by_key = good_fields(read_records(tmp_path))
    assert {key: fields["label"] for key, fields in fields_by_key.items()} == {
        "cats/1.jpg": "cats",
        "cats/young/2.JPG": "cats",
        "dogs/1.png": "dogs",
    }
    assert fields_by_key["cats/1.jpg"]["image"] == tmp_path / "cats/1.jpg"
    assert good_fields(read_records(write_files(tmp_path / "flat", "1.jpg", "2.jpg"))) == {
        "1.jpg": {"image": tmp_path / "flat/1.jpg"},
        "2.jpg": {"image": tmp_path / "flat/2.jpg"},
    }


@pytest.mark.parametrize(("form", "name", "medium"), [(AUDIO, "a.wav", "audio"), (VIDEO, "a.mkv", "video")])
def test_audio_and_video_folders_are_read_alike(tmp_path: Path, form: Format, name: str, medium: str) -> None:
    write_files(tmp_path, f"one/{name}")
    assert good_fields(read_records(tmp_path, form)) == {
        f"one/{name}": {medium: tmp_path / "one" / name, "label": "one"}
    }
    assert form.is_media
    assert form.kind == medium


def test_every_suffix_has_one_kind() -> None:
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
def test_metadata_table_replaces_folder_labels(tmp_path: Path, name: str, text: str) -> None:
    write_files(tmp_path, "x/1.png", "2.png", "y/3.png")
    (tmp_path / name).write_text(text, newline="")
    records = read_records(tmp_path)
    assert bad_messages(records) == []
    assert good_fields(records) == {
        "2.png": {"text": 'say "hi"', "label": "dog", "image": tmp_path / "2.png"},
        "x/1.png": {"text": "a, b", "label": "cat", "image": tmp_path / "x/1.png"},
        "y/3.png": {"image": tmp_path / "y/3.png"},
    }


@pytest.mark.skipif(DATA is None, reason="BOTTEGA_DATA is not set")
def test_ljspeech_is_read_in_its_published_layout() -> None:
    root = Path(str(DATA), "audio-ljspeech-sample")
    all_records = read_records(root, AUDIO)
    assert bad_messages(all_records) == []
    fields_by_key = good_fields(all_records)
    assert len(fields_by_key) == 16
    described = {key: fields for key, fields in fields_by_key.items() if "text" in fields}
    assert sorted(described) == [f"wavs/LJ001-000{number}.flac" for number in range(1, 9)]
    assert str(described["wavs/LJ001-0001.flac"]["text"]).startswith("Printing, in the only sense")
    assert set(described["wavs/LJ001-0001.flac"]) == {"text", "normalised", "audio"}
    lines = (root / "metadata.csv").read_text().splitlines()
    assert [f"{fields['text']}|{fields['normalised']}" for fields in described.values()] == [
        line.partition("|")[2] for line in lines
    ]


def test_bad_table_rows_are_reported_once_with_their_line(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png", "2.png", "z/3.png")
    rows = "file_name,text\ngone.png,a\n1.png,b\n2.png\n,c\n../1.png,d\n/etc/passwd,e\n"
    (tmp_path / "metadata.csv").write_text(rows)
    records = read_records(tmp_path)
    table = tmp_path / "metadata.csv"
    assert bad_messages(records) == [
        f"{table}, line 4: has 1 columns; expected 2",
        f"{table}, line 5: names no file; expected a file name in one of file_name, filename, file, path, id",
        f"{table}, line 2: names the image file 'gone.png', which is missing",
        f"{table}, line 6: names the image file '../1.png', which is missing",
        f"{table}, line 7: names the image file '/etc/passwd', which is missing",
    ]
    assert len(good_fields(records)) == 3
    write_files(tmp_path, "gone.png")  # missing files are not cached
    assert len(bad_messages(read_records(tmp_path))) == 4


def test_bad_json_lines_are_reported_with_their_line(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.png"}\n[1]\n{"file_name": \n{"file_name": 3}\n')
    assert [line.partition("line ")[2][:12] for line in bad_messages(read_records(tmp_path))] == [
        "2: a row mus",
        "3, column 14",
        "4: names no ",
    ]


def test_table_that_matches_no_file_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\nb.png,y\n")
    with pytest.raises(DataError, match=r"none of its 2 rows matches a file under .*'a\.png' in line 2"):
        read_records(tmp_path)


def test_several_rows_of_one_file_are_separate_records(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\n1.png,a\n1.png,b\n")
    assert {key: fields["text"] for key, fields in good_fields(read_records(tmp_path)).items()} == {
        "1.png": "a",
        "1.png:2": "b",
    }


def test_row_matches_the_exact_path_first(tmp_path: Path) -> None:
    write_files(tmp_path, "a.png", "x/a.png", "x/b.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,one\nb.png,two\n")
    fields_by_key = good_fields(read_records(tmp_path))
    assert {key: fields.get("text") for key, fields in fields_by_key.items()} == {
        "a.png": "one",
        "x/a.png": None,
        "x/b.png": "two",
    }


@pytest.mark.parametrize("inner", ["a", "z"])
def test_nearest_table_is_used(tmp_path: Path, inner: str) -> None:
    write_files(tmp_path, "m/1.png", f"{inner}/1.png", f"{inner}/c/2.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\nm/1.png,outer\nlost.png,outer\n")
    (tmp_path / inner / "metadata.csv").write_text("file_name,text\n1.png,inner\nc/2.png,inner\ngone.png,inner\n")
    records = read_records(tmp_path)
    assert {key: fields["text"] for key, fields in good_fields(records).items()} == {
        "m/1.png": "outer",
        f"{inner}/1.png": "inner",
        f"{inner}/c/2.png": "inner",
    }
    assert sorted(line.partition("names")[2] for line in bad_messages(records)) == [
        " the image file 'gone.png', which is missing",
        " the image file 'lost.png', which is missing",
    ]
    source = Source(path=str(tmp_path))
    assert find_table(tmp_path / inner / "c/2.png", tmp_path, source) == tmp_path / inner / "metadata.csv"


@pytest.mark.parametrize("mark", ["|", "\t"])
def test_quotation_marks_in_bar_and_tab_tables_are_text(tmp_path: Path, mark: str) -> None:
    write_files(tmp_path, "1.png", "2.png")
    (tmp_path / "metadata.csv").write_text(f'id{mark}text\n1{mark}"so it began\n2{mark}"and" so on\n')
    records = read_records(tmp_path)
    assert bad_messages(records) == []
    assert [fields["text"] for fields in good_fields(records).values()] == ['"so it began', '"and" so on']


def test_table_and_columns_can_be_set_in_the_recipe(tmp_path: Path) -> None:
    write_files(tmp_path / "files", "1.png", "2.png")
    (tmp_path / "rows.txt").write_text("1.png,a\n2.png,b\n")
    with pytest.raises(DataError, match="no column is named"):
        read_records(tmp_path / "files", metadata="../rows.txt")
    records = read_records(tmp_path / "files", metadata="../rows.txt", columns=("file", "text"))
    assert {key: fields["text"] for key, fields in good_fields(records).items()} == {"1.png": "a", "2.png": "b"}
    assert bad_messages(records) == []
    with pytest.raises(DataError, match=r"data\.train\.metadata: there is no file .*files/no\.csv or .*/no\.csv; give"):
        read_records(tmp_path / "files", metadata="no.csv")


def test_table_line_that_is_not_utf_8_is_bad(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png", "2.png")
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\n1.png,caf\xe9\n2.png,x\n")
    records = read_records(tmp_path)
    assert bad_messages(records) == [
        f"{tmp_path / 'metadata.csv'}, line 2: not UTF-8: byte 0xe9 at column 10 of line 2; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv"
    ]
    assert good_fields(records)["2.png"]["text"] == "x"


def test_broken_links_and_pipes_are_bad(tmp_path: Path) -> None:
    write_files(tmp_path, "data/a.png")
    root = tmp_path / "data"
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "broken.png").symlink_to(root / "no.png")
    os.mkfifo(root / "pipe.png")
    records = read_records(root)
    assert sorted(good_fields(records)) == ["a.png", "inside.png"]
    assert [line.removeprefix(f"{root}/").partition(":")[0] for line in bad_messages(records)] == [
        "broken.png",
        "pipe.png",
    ]
    (tmp_path / "link").symlink_to(root)
    assert sorted(good_fields(read_records(tmp_path / "link"))) == ["a.png", "inside.png"]


def test_table_is_read_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, *(f"{number}.png" for number in range(30)))
    (tmp_path / "metadata.csv").write_text("file_name,text\n" + "".join(f"{number}.png,t\n" for number in range(30)))
    reads: list[Path] = []
    original = metadata._read_records
    monkeypatch.setattr(
        metadata, "_read_records", lambda piece, source: reads.append(piece.file) or original(piece, source)
    )  # type: ignore[func-returns-value]
    assert len(good_fields(read_records(tmp_path))) == 30
    assert reads == [tmp_path / "metadata.csv"]


def test_every_metadata_file_name_is_read(tmp_path: Path) -> None:
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
    for name in TABLE_NAMES:
        root = write_files(tmp_path / name, "1.png", "2.png")
        suffix = name.partition(".")[2]
        if suffix == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist([row, {"file_name": "gone.png"}]), root / name)
        else:
            (root / name).write_text(contents[suffix])
        source_files = find_files(Source(path=str(root)))
        assert (source_files.kind, len(source_files.paths)) == ("images", 2)
        records = [record for piece in source_files.list_pieces(1) for record in source_files.read(piece)]
        assert good_fields(records)["1.png"] == {"text": "a, b", "image": root / "1.png"}
        assert good_fields(records)["2.png"] == {"image": root / "2.png"}
        before = source_files.fingerprint
        (root / name).write_bytes((root / name).read_bytes().replace(b"a, b", b"a, c"))
        assert find_files(Source(path=str(root))).fingerprint != before
    assert bad_messages(records) == [f"{root / name}, row 2: names the image file 'gone.png', which is missing"]


def test_table_is_read_as_strictly_as_data(tmp_path: Path) -> None:
    write_files(tmp_path, "1.png")
    rows = '{"file_name": "1.png", "x": NaN}\n{"file_name": "1.png", "x": 1, "x": 2}\n{"file_name": "1.png", "x": 3}\n'
    (tmp_path / "metadata.jsonl").write_text(rows)
    records = read_records(tmp_path)
    assert [line.partition("line ")[2] for line in bad_messages(records)] == [
        "1, column 29: invalid JSON: NaN is not a JSON number",
        "2: key 'x' occurs twice in one object",
    ]
    assert good_fields(records) == {"1.png": {"x": 3, "image": tmp_path / "1.png"}}
    (tmp_path / "metadata.csv").write_text("file_name,x,x\n1.png,1,2\n")
    with pytest.raises(DataError, match="two columns are named 'x'"):
        read_records(tmp_path)


def test_metadata_json_with_one_object_is_ignored(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.png")
    (tmp_path / "metadata.json").write_text('{"about": "my cats"}')
    assert good_fields(read_records(tmp_path)) == {"cat/1.png": {"label": "cat", "image": tmp_path / "cat/1.png"}}


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\n\r", exclude_categories=("Cs", "Cc")),
    min_size=1,
    max_size=6,
)


@given(texts=st.lists(names, min_size=1, max_size=5))
def test_any_text_round_trips_through_each_table_format(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    import csv
    import io

    root = write_files(tmp_path_factory.mktemp("any"), *(f"{number}.png" for number in range(len(texts))))
    out = io.StringIO()
    csv.writer(out).writerows([("file_name", "text"), *((f"{n}.png", text) for n, text in enumerate(texts))])
    rows = (json.dumps({"file_name": f"{n}.png", "text": text}) for n, text in enumerate(texts))
    for name, content in (("metadata.csv", out.getvalue()), ("metadata.jsonl", "\n".join(rows))):
        (root / name).write_text(content, encoding="utf-8", newline="")
        fields_by_key = good_fields(read_records(root, metadata=name))
        assert [fields_by_key[f"{n}.png"]["text"] for n in range(len(texts))] == texts
