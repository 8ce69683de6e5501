"""Bad data through the command line: one line that names the file and the place, its exit code, and nothing else touched."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega import cli
from small_run import SMALL, bottega, command, different, environment, steps_logged, tensors

REAL = os.environ.get("BOTTEGA_DATA")
BYTES = "data.tokenizer.kind=bytes"
GOOD = json.dumps({"text": "good words " * 20, "label": "a", "user": "u"}) + "\n"


class Said:
    """Exit code and standard error of a command, run in this process: the same function the real one calls."""

    def __init__(self, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capfd.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capfd.readouterr()

    def refused(self, code: int, *parts: Any) -> str:
        return one_line(self.code, self.err, code, *parts)


def one_line(found: int, err: str, code: int, *parts: Any) -> str:
    assert found == code, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, f"one line, not {err!r}"
    assert lines[0].startswith("bottega: ")
    for part in map(str, parts):
        assert part in lines[0], f"{part!r} is not in {lines[0]!r}"
    return lines[0]


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Said(capfd, [str(a) for a in arguments])


@pytest.fixture(autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder commands are run in, and those above it: nothing appears there and nothing changes."""
    tree = tmp_path_factory.mktemp("canary")
    (tree / "a" / "here").mkdir(parents=True)
    (tree / "evil.txt").write_text("as it was")
    monkeypatch.chdir(tree / "a" / "here")
    before = listing(tree)
    yield tree
    assert listing(tree) == before


def listing(tree: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(tree)): path.read_bytes() if path.is_file() else None for path in tree.rglob("*")}


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def archive(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """A tar of these members; a text in place of bytes is the type of one without content."""
    with tarfile.open(path, "w") as out:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = content.encode(), "/etc/passwd"
                out.addfile(info)
            else:
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    return path


def png(width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def picture(seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return png(16, 16, b"".join(b"\0" + rng.randbytes(48) for _ in range(16)))


def wav(samples: int, *, claims: int | None = None) -> bytes:
    size = 2 * samples if claims is None else claims
    form = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + form + b"data" + struct.pack("<I", size) + bytes(2 * samples)
    )


# Rows (RELIABILITY: JSON lines, tables)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (b'{"text": "abc\n', ["line 4, column 10", "invalid JSON"]),
        (b'\xef\xbb\xbf{"text": "x"}\n', ["line 4", "byte order mark"]),
        (b'{"text": "a\0b"}\n', ["line 4", "NUL", "column 12"]),
        (b'{"text": "a", "v": NaN}\n', ["line 4, column 20", "NaN is not a JSON number"]),
        (b'["a"]\n', ["line 4", "must be an object", "not list"]),
        (b'{"text": "caf\xe9"}\n', ["line 4", "not UTF-8: byte 0xe9 at column 14"]),
        (b'{"text": "a", "text": "b"}\n', ["line 4", "'text' occurs twice"]),
        (b'{"txet": "a"}\n', ["line 4", "no field 'text'", "did you mean 'txet'"]),
        (b'{"text": 3}\n', ["line 4", "must be text, not int"]),
        (b'{"text": "\\ud800"}\n', ["line 4", "an unpaired surrogate"]),
        (b"[" * 100_000 + b"\n", ["line 4", "nested too deeply"]),
        (b'{"text": "' + b"a" * (65 << 20) + b'"}\n', ["line 4", "longer than 67,108,864 bytes"]),
    ],
    ids=["cut", "BOM", "NUL", "NaN", "list", "latin-1", "key twice", "misspelt", "number", "half", "deep", "huge"],
)
def test_a_row_of_json_that_is_wrong(say: Any, tmp_path: Path, row: bytes, parts: list[str]) -> None:
    path = put(tmp_path / "rows.jsonl", GOOD.encode() * 2 + b"\n" + row + GOOD.encode())
    say("prepare", "language", "--data", path, BYTES).refused(3, path, *parts)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (b'text,label\n"two\nlines",1\na,b,c\n', ["line 4", "3 columns", "expected 2"]),
        (b'text,label\nx,1\n"open,1\n', ["line 3", "never closed"]),
        (b"text,label\nx,1\ncaf\xe9,1\n", ["line 3", "0xe9 at column 4"]),
        (b"text,label\nx,1\na\0b,1\n", ["line 3", "NUL byte at column 2"]),
    ],
    ids=["columns", "quote", "latin-1", "NUL"],
)
def test_a_table_that_is_wrong(say: Any, tmp_path: Path, table: bytes, parts: list[str]) -> None:
    path = put(tmp_path / "rows.csv", table)
    say("prepare", "language", "--data", path, BYTES).refused(3, path, *parts)


def test_bad_rows_are_skipped_where_that_is_asked_for(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "rows.jsonl", GOOD * 7 + '{"text": \n' + GOOD * 2)
    skip = ["prepare", "language", "--data", path, BYTES, "data.bad_records=skip"]
    say(*skip).refused(3, f"{path}, line 8", "1 of 10 records are bad", "data.max_bad=0.001")
    said = say(*skip, "data.max_bad=0.2")
    assert said.code == 0, said.err
    assert "1 bad of 10 records" in said.out
    assert f"{path}, line 8" in said.out


def test_a_row_without_a_class_is_a_bad_row_however_the_data_is_split(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "rows.jsonl", GOOD * 19 + '{"text": "x"}\n')
    for by in ("fraction", "stratified"):
        words = ["prepare", "classify", "--data", path, BYTES, f"data.split.by={by}"]
        say(*words).refused(3, f"{path}, line 20", "no field 'label'")
        said = say(*words, "data.bad_records=skip", "data.max_bad=0.1")
        assert said.code == 0, said.err
        assert "1 bad of 20 records" in said.out


@pytest.mark.parametrize("score", ["null", '"high"', '"nan"', '"inf"'])
def test_a_score_that_is_no_number(say: Any, tmp_path: Path, score: str) -> None:
    row = '{"text": "words", "score": %s}\n'
    path = put(tmp_path / "rows.jsonl", row % 1 * 5 + row % score)
    curriculum = "data.curriculum={by: score, stages: [{steps: 3}]}"
    say("prepare", "language", "--data", path, BYTES, curriculum).refused(3, f"{path}, line 6", "'score'")


# Archives


@pytest.mark.parametrize(
    ("member", "parts"),
    [
        (("../evil.txt", b"x"), ["'../evil.txt'", "leads out of the archive"]),
        (("/tmp/evil.txt", b"x"), ["'/tmp/evil.txt'", "absolute path"]),
        (("b.txt", "2"), ["'b.txt'", "a symbolic link"]),
        (("b.txt", "1"), ["'b.txt'", "a hard link"]),
        (("b.txt", "3"), ["'b.txt'", "a device"]),
        (("b.txt", "6"), ["'b.txt'", "a pipe"]),
        (("a.txt", b"another"), ["'a.txt'", "a second member of this name"]),
    ],
    ids=["dots", "absolute", "symlink", "hard link", "device", "pipe", "twice"],
)
def test_a_hostile_archive(say: Any, tmp_path: Path, member: tuple[str, Any], parts: list[str]) -> None:
    path = archive(tmp_path / "a.tar", ("a.txt", b"text " * 50), member)
    say("prepare", "language", "--data", path, BYTES).refused(3, path, *parts)
    say("data", path, BYTES).refused(3, path, *parts)
    say("prepare", "image", "--data", path).refused(3, path)


def test_what_could_run_code_is_named_and_does_not_run(say: Any, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    pickled = pickle.dumps(Bomb())
    members = {"b.pkl": pickled, "b.pth": pickled, "b.pyd": b"x", "b.npy": objects.getvalue()}
    for name, content in members.items():
        path = archive(tmp_path / "a.tar", ("a.txt", b"text " * 50), (name, content))
        say("prepare", "language", "--data", path, BYTES).refused(3, path, repr(name))
    array = put(tmp_path / "a.npy", objects.getvalue())
    for words in (["routing"], ["image"], ["language", "data.train.kind=numpy"]):
        say("prepare", *words, "--data", array).refused(3, array, "Python objects")
    zipped = tmp_path / "a.npz"
    np.savez(zipped, allow_pickle=True, x=np.array([Bomb()], dtype=object))
    say("prepare", "routing", "--data", zipped).refused(3, zipped, "x.npy", "Python objects")
    for name in ("a.pkl", "a.pth", "a.pt"):
        path = put(tmp_path / name, pickled)
        say("prepare", "language", "--data", path).refused(3, path, "unknown suffix")
    assert not (tmp_path / "boom").exists()


# Media


def refused_then_skipped(say: Any, task: str, folder: Path, bad: list[str], *more: str) -> None:
    """By default (a thousandth may be bad), with a higher limit, and where a bad file is to stop it."""
    total = len([path for path in folder.rglob("*") if path.is_file()])
    words = ["prepare", task, "--data", folder, "data.validation=null", *more]
    say(*words).refused(3, folder / bad[0], f"{len(bad)} of {total} records are bad", "data.max_bad=0.001")
    say(*words, "data.bad_records=stop").refused(3, folder / bad[0])
    said = say(*words, "data.max_bad=0.8")
    assert said.code == 0, said.err
    assert said.err == ""
    assert f"{len(bad)} bad of {total} records" in said.out
    for name in bad[:5]:
        assert f"{folder / name}: " in said.out


def test_pictures_that_are_cut_empty_or_something_else(say: Any, tmp_path: Path) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(picture()))
    jpeg = io.BytesIO()
    image.resize((64, 64)).save(jpeg, "JPEG")
    for n in range(3):
        put(tmp_path / "photos" / f"{n}.png", picture(n))
    # A JPEG called .png is a picture all the same.
    put(tmp_path / "photos" / "3.png", jpeg.getvalue())
    put(tmp_path / "photos" / "5.png", picture()[: len(picture()) // 2])
    put(tmp_path / "photos" / "6.jpg", jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    put(tmp_path / "photos" / "7.png", b"")
    put(tmp_path / "photos" / "8.png", wav(100))
    refused_then_skipped(say, "image", tmp_path / "photos", ["5.png", "6.jpg", "7.png", "8.png"])


def test_sounds_that_are_cut_empty_or_something_else(say: Any, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    pytest.importorskip("av", reason="av is not installed")
    samples = np.random.default_rng(0).normal(size=4000).astype(np.float32) * 0.1
    files = {}
    for suffix in ("flac", "mp3", "aiff"):
        out = io.BytesIO()
        soundfile.write(out, samples, 16000, format=suffix)
        files[suffix] = out.getvalue()
    for n in range(3):
        put(tmp_path / "sounds" / f"{n}.wav", wav(500 + n))
    put(tmp_path / "sounds" / "5.wav", wav(500)[:500])
    put(tmp_path / "sounds" / "6.flac", files["flac"][: len(files["flac"]) // 2])
    put(tmp_path / "sounds" / "7.wav", b"")
    put(tmp_path / "sounds" / "8.wav", picture())
    # A chunk that would end before the beginning: libsndfile goes there.
    put(tmp_path / "sounds" / "00.aiff", files["aiff"][:36] + b"\xff" * 4 + files["aiff"][40:])
    # A hole, of which libmpg123 has much to say.
    put(tmp_path / "sounds" / "9.mp3", files["mp3"][:600] + bytes(600) + files["mp3"][1200:])
    bad = ["00.aiff", "5.wav", "6.flac", "7.wav", "8.wav", "9.mp3"]
    refused_then_skipped(say, "audio", tmp_path / "sounds", bad)


@pytest.mark.skipif(REAL is None, reason="BOTTEGA_DATA names no folder with real data")
def test_real_media_that_are_cut(say: Any, tmp_path: Path) -> None:
    root = Path(str(REAL))
    clip = (root / "video-clips" / "RATRACE_wave_f_nm_np1_fr_goo_37.avi").read_bytes()
    for n in range(2):
        put(tmp_path / "clips" / f"{n}.avi", clip)
    cut = {"5.avi": clip}
    for name, of in {"6.mp4": "carphone_pristine.mp4", "7.mkv": "av1_video.mkv"}.items():
        cut[name] = (root / "video-clips" / of).read_bytes()
    for name, content in cut.items():
        put(tmp_path / "clips" / name, content[: len(content) // 2])
    put(tmp_path / "clips" / "8.mp4", b"")
    # The name of a codec that nobody knows.
    put(tmp_path / "clips" / "9.avi", clip.replace(clip[112:116], b"????").replace(clip[188:192], b"????"))
    bad = [*cut, "8.mp4", "9.avi"]
    refused_then_skipped(
        say, "video", tmp_path / "clips", bad, "data.image_size=16", "data.num_frames=2", "model.temporal_patch_size=1"
    )
    sound = next((root / "audio-ljspeech-sample" / "wavs").glob("*.flac")).read_bytes()
    put(tmp_path / "speech" / "0.flac", sound)
    put(tmp_path / "speech" / "1.flac", sound[: len(sound) // 2])
    refused_then_skipped(say, "audio", tmp_path / "speech", ["1.flac"])


def test_an_arrow_file_whose_offsets_lead_elsewhere(tmp_path: Path) -> None:
    """pyarrow reads where they say, and a process that reads there ends; so it is asked in one of its own."""
    pyarrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"text": [f"words {n}" for n in range(8)]})
    feather.write_feather(table, path, compression="uncompressed")
    offsets = np.arange(9, dtype="<i4") * 7
    raw = path.read_bytes()
    assert raw.count(offsets.tobytes()) == 1
    wild = offsets.copy()
    wild[4] = 1 << 30
    path.write_bytes(raw.replace(offsets.tobytes(), wild.tobytes()))
    done = bottega(["prepare", "language", "--data", str(path), BYTES])
    one_line(done.returncode, done.stderr, 3, path, "damaged")


# Bombs

MANY = """if True:
    import json, sys
    from bottega import cli
    codes = [cli.main(words) for words in json.loads(sys.argv[1])]
    # Its own peak: what wait4 says of a child includes the memory of the parent it was forked from.
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps([codes, peak]))
"""


def test_bombs_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Each would be 100 MB to 1 GB; the process that reads them all stays at what Python and one long line take."""
    import soundfile

    row = zlib.compressobj(9)
    black = b"".join(row.compress(bytes(1 + 30_000 // 8)) for _ in range(30_000)) + row.flush()
    big = put(tmp_path / "photos" / "1.png", png(30_000, 30_000, b"", depth=1, colour=0))
    big.write_bytes(big.read_bytes().replace(zlib.compress(b"", 1), black))  # the checksum of IDAT is not reached
    put(tmp_path / "photos" / "0.png", picture())
    put(tmp_path / "lines.jsonl.gz", gzip.compress(b'{"text": "') + gzip.compress(b"a" * (64 << 20)) * 17)
    put(tmp_path / "text.txt.gz", gzip.compress(b"a" * (64 << 20)) * 17)
    with zipfile.ZipFile(tmp_path / "zip.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        head = io.BytesIO()
        form = {"descr": "|u1", "fortran_order": False, "shape": (128 << 20, 1)}
        np.lib.format.write_array_header_1_0(head, form)
        out.writestr("x.npy", head.getvalue() + bytes(128 << 20))
    flac = io.BytesIO()
    soundfile.write(flac, np.zeros(4000), 8000, format="FLAC")
    # STREAMINFO: the last 36 bits of these 8 bytes are the number of samples.
    long = bytearray(flac.getvalue())
    long[21:26] = bytes([long[21] | 0x0F]) + b"\xff" * 4
    for name, content in {"0.wav": wav(400), "1.wav": wav(400, claims=2**32 - 38), "2.flac": bytes(long)}.items():
        put(tmp_path / "sounds" / name, content)
    cases = {
        "image": (tmp_path / "photos", "1.png", "more than 67,108,864 pixels"),
        "language": (tmp_path / "lines.jsonl.gz", "", "compression bomb"),
        "classify": (tmp_path / "text.txt.gz", "", "compression bomb"),
        "routing": (tmp_path / "zip.npz", "x.npy", "a zip bomb"),
        "audio": (tmp_path / "sounds", "1.wav", "2 of 3 records are bad"),
    }
    words = [["prepare", task, "--data", str(path)] for task, (path, *_) in cases.items()]
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(words)], env=environment(), capture_output=True, text=True, check=True
    )
    codes, peak = json.loads(done.stdout)
    assert codes == [3] * len(cases), done.stderr
    for line, (path, *parts) in zip(done.stderr.strip().splitlines(), cases.values(), strict=True):
        assert all(str(part) in line for part in (path, *parts)), line
    assert peak < 400_000, f"{peak} kB"


def test_a_recipe_of_aliases(say: Any, tmp_path: Path) -> None:
    layers = [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefghi", "bcdefghij", strict=True)]
    path = put(tmp_path / "my.yaml", "\n".join(["a: &a [x,x,x,x,x,x,x,x,x]", *layers]) + "\n")
    for verb in ("prepare", "data"):
        say(verb, path).refused(2, path, "aliases")


# Nothing, or too little


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"", ["is empty"]),
        ("a.jsonl", b"", ["is empty"]),
        ("a.jsonl", b"\n \n", ["is empty"]),
        ("a.jsonl", b'{"text": ""}\n', ["none of the 1 records", "1 empty"]),
        ("a.csv", b"text,label\n", ["is empty"]),
        ("a.tar", b"", ["is empty"]),
        ("a.tar", bytes(10240), ["is empty"]),
        ("a.jsonl.gz", b"", ["is empty"]),
        ("a.jsonl.gz", gzip.compress(GOOD.encode() * 9, mtime=0)[:40], ["truncated"]),
        ("a.json", b"[]", ["is empty"]),
        ("a.parquet", b"", ["0 bytes"]),
        ("a.npy", b"", ["not an array file"]),
        ("a.xyz", b"what is this", ["unknown suffix .xyz"]),
    ],
)
def test_a_file_with_nothing_in_it(say: Any, tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    path = put(tmp_path / name, content)
    say("prepare", "language", "--data", path, BYTES).refused(3, path, *parts)


def test_folders_and_sources_with_nothing_in_them(say: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for task in ("language", "image"):
        say("prepare", task, "--data", tmp_path / "empty").refused(3, tmp_path / "empty", "no file of a supported kind")
    say("data", tmp_path / "empty").refused(3, tmp_path / "empty")
    full, empty = put(tmp_path / "a.jsonl", GOOD * 9), put(tmp_path / "b.jsonl", "")
    say("prepare", "language", "--data", full, BYTES, f"data.validation={{path: {empty}}}").refused(
        3, empty, "is empty"
    )
    two = f"task: language\ndata: {{tokenizer: {{kind: bytes}}, sources: [{{path: {full}}}, {{path: {empty}}}]}}\n"
    say("prepare", put(tmp_path / "two.yaml", two)).refused(3, empty, "is empty")


def test_what_is_left_after_filter_and_split(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", GOOD * 2)
    words = ["prepare", "language", "--data", path, BYTES]
    say(*words, "data.filter.min_characters=1000").refused(3, path, "2 too short", "loosen data.filter")
    share = "data.validation.split=0.4"
    say(*words, share, "data.split={by: group, field: user}").refused(3, "by group leaves no row for train")
    say(*words, share, "data.split.by=file").refused(3, "by file leaves no row for train")
    say(*words, "data.split={folds: 5, fold: 4}").refused(3, "no row for validation", "data.split.folds=5")
    say(*words, share, "data.split={by: group, field: usr}").refused(3, f"{path}, line 1", "no field 'usr'")
    bad = put(tmp_path / "bad.jsonl", '{"text": \n' * 5)
    say("prepare", "language", "--data", bad, BYTES).refused(3, f"{bad}, line 1")
    skip = ["data.bad_records=skip", "data.max_bad=1"]
    say("prepare", "language", "--data", bad, BYTES, *skip).refused(3, f"all 5 records of {bad} are bad", "line 1")
    for n in range(3):
        put(tmp_path / "photos" / f"{n}.png", b"no")
    for more in ([], ["data.max_bad=1", "data.image_size=8", "data.channels=3"]):
        say("prepare", "image", "--data", tmp_path / "photos", *more).refused(3, tmp_path / "photos" / "0.png")


def test_a_class_out_of_range(say: Any, tmp_path: Path) -> None:
    for label in (0, 1, 2, 7):
        put(tmp_path / "photos" / str(label) / "a.png", picture(label))
    say("prepare", "image", "--data", tmp_path / "photos", "model.num_classes=3").refused(
        3, "7/a.png", "label 7", "0 to 2"
    )
    rows = "".join(json.dumps({"text": "some words", "label": n % 4}) + "\n" for n in range(20))
    path = put(tmp_path / "a.jsonl", rows)
    say("prepare", "classify", "--data", path, BYTES, "model.num_labels=3").refused(3, "a.jsonl:4", "label 3", "0 to 2")


def test_fewer_than_one_batch(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", '{"text": "just enough for two windows of it"}\n' * 2)
    said = say("train", recipe(tmp_path, f"train: {{path: {path}}}"), *small(tmp_path))
    said.refused(3, "fewer than one batch of 4")
    assert not list(tmp_path.rglob("step-*"))


# The command line


def test_a_source_of_another_kind_than_the_task_learns_from(say: Any, tmp_path: Path) -> None:
    text = put(tmp_path / "a.txt", "hello world\n" * 50)
    for task in ("image", "audio", "video", "routing"):
        say("prepare", task, "--data", text).refused(3, f"{text} contains text", "data.train.kind")
    photos = put(tmp_path / "photos" / "a.png", picture()).parent
    for task in ("language", "classify", "audio"):
        say("prepare", task, "--data", photos).refused(3, f"{photos} contains images", "data.train.kind")
    rows = put(tmp_path / "a.jsonl", GOOD)
    say("prepare", "video", "--data", rows).refused(
        3, f"{rows}, line 1", "no field contains the video", "data.train.field"
    )
    kinds = {
        "jsonl": "line 1",
        "parquet": "damaged",
        "webdataset": "no tar header",
        "idx": "contains idx",
        "shards": "meta.json",
    }
    for kind, part in kinds.items():
        say("prepare", "language", "--data", text, f"data.train.kind={kind}").refused(3, text, part)
    say("prepare", "language", "--data", text, "data.train.kind=txt").refused(2, "data.train.kind", "'txt'")


def test_keys_that_do_not_go_together(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", GOOD * 20)
    words = ["prepare", "language", "--data", path, BYTES]
    for key, parts in {
        f"data.sources=[{{path: {path}}}]": ["train and sources"],
        "data.split={folds: 3, fold: 3}": ["data.split", "fold: expected at most 2"],
        "data.split.by=group": ["data.split", "group needs field"],
        "data.curriculum={stages: [{share: 0.5}]}": ["data.curriculum.stages.0.steps", "missing"],
        "data.mixture=temperature": ["mixture", "needs several data.sources"],
        "data.validation={split: 1.5}": ["data.validation", "between 0 and 1"],
        "data.max_bad=2": ["data.max_bad"],
        "data.filter.languages=[xx]": ["data.filter.languages", "'xx'"],
    }.items():
        say(*words, key).refused(2, *parts)
    say(*words, "data.validation.split=0.6", "data.test={split: 0.5}").refused(
        2, "data.validation.split", "data.test.split"
    )
    weights = recipe(tmp_path, f"sources: [{{path: {path}, weight: 3}}, {{path: {path}}}]")
    said = say("train", weights, *small(tmp_path), "data.mixture=concatenate")
    said.refused(2, "data.sources[0].weight=3", "data.mixture=weighted")


def test_paths_that_are_wrong(say: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "data" / "rows.jsonl", GOOD * 20)
    wrong = path.with_name("row.jsonl")
    for words in (["prepare", "language", "--data", wrong], ["data", wrong]):
        say(*words).refused(3, f"{wrong} does not exist", f"did you mean {path}?")
    say("data", tmp_path / "data" / "row*.json").refused(3, "no file matches")
    say("prepare", "language", "--data", "/dev/zero").refused(3, "neither a file nor a folder")
    words = ["prepare", "language", "--data", path, BYTES]
    say(*words, "--to", "zip", tmp_path / "out").refused(2, "--to zip", "webdataset, tfrecord, parquet, jsonl")
    say(*words, "--to", "jsonl", path.parent).refused(2, path.parent, "rows.jsonl, which Bottega did not write")
    say(*words, "--to", "jsonl", path).refused(2, f"{path} is a file")
    say(*words, "--out", path.parent).refused(2, f"--out {path.parent}", "not empty")
    say(*words, "--out", path).refused(2, f"--out {path}", "is a file")
    say(*words, "--out", path / "x").refused(5, f"--out {path / 'x'}")
    # It is told before the work and not after it: this data cannot be read at all.
    bad = put(tmp_path / "bad.jsonl", "{\n")
    say("prepare", "language", "--data", bad, "--out", path.parent).refused(2, "--out")
    assert listing(path.parent) == {"rows.jsonl": (GOOD * 20).encode()}


def test_a_prepared_folder_that_was_changed(say: Any, tmp_path: Path) -> None:
    path, out = put(tmp_path / "rows.jsonl", GOOD * 20), tmp_path / "out"
    assert say("prepare", "language", "--data", path, BYTES, "--out", out).code == 0
    assert say("prepare", "language", "--data", out, BYTES).code == 0
    say("prepare", "classify", "--data", out).refused(3, out, "prepared for language")
    shard = next((out / "train").glob("*.bin"))
    raw = shard.read_bytes()
    put(shard, raw[:-1] + bytes([raw[-1] ^ 1]))
    say("prepare", "language", "--data", out, BYTES).refused(3, out, "damaged")
    put(out / "meta.json", "[]")
    say("prepare", "language", "--data", out, "data.train.kind=shards").refused(3, out, "meta.json")


def test_what_is_shown_cannot_drive_the_terminal(say: Any, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"\x1b[2Jwords {n}\x07", "label": "\x1b[31m"}) + "\n" for n in range(20))
    path = put(tmp_path / "rows.jsonl", rows)
    for words in (["data", path, BYTES], ["data", "classify", "--data", path, BYTES]):
        said = say(*words)
        assert said.code == 0, said.err
        assert "\\x1b[2Jwords" in said.out
        assert not set("\x1b\x07") & set(said.out)


# Between two starts


def recipe(folder: Path, data: str, name: str = "my") -> Path:
    text = f"task: language\ndata:\n  tokenizer: {{kind: bytes}}\n  validation: {{split: 0.1}}\n  {data}\n"
    return put(folder / f"{name}.yaml", text)


def small(output: Path, **changes: Any) -> list[str]:
    """The keys of a small run that can be made longer, since its rate stays as it is."""
    constant = {"training.scheduler.name": "constant", "training.learning_rate": 0.01, "output_dir": output / "runs"}
    keys = {**SMALL, **constant, **changes}
    return ["--quiet", *(f"{key}={json.dumps(value, default=str)}" for key, value in keys.items())]


def texts(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    words = ("alpha", "beta", "gamma", "delta")
    return [{"text": " ".join(rng.choices(words, k=rng.randrange(5, 40))), "score": rng.random()} for _ in range(count)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MIXTURE = "sources: [{{path: {0}/a.jsonl.gz, weight: 3}}, {{path: {0}/b.jsonl}}]\n  mixture: weighted"
CURRICULUM = """train: {{path: {0}/b.jsonl}}
  curriculum:
    by: score
    stages: [{{share: 0.5, steps: 3, batch_size: 2}}, {{share: 0.8, steps: 3, replay: 0.25}}, {{steps: 1, batch_size: 6}}]"""


@pytest.mark.parametrize(
    "data",
    ["train: {{path: {0}/a.tar}}", "train: {{path: {0}/a.jsonl.gz}}", MIXTURE, CURRICULUM],
    ids=["tar", "jsonl.gz", "mixture", "curriculum"],
)
def test_a_run_goes_on_within_an_epoch_bit_for_bit(say: Any, tmp_path: Path, data: str) -> None:
    rows = texts(60)
    archive(tmp_path / "a.tar", *((f"{n:04}.txt", row["text"].encode()) for n, row in enumerate(rows)))
    put(tmp_path / "a.jsonl.gz", gzip.compress(lines(rows).encode()))
    put(tmp_path / "b.jsonl", lines(texts(40, seed=1)))
    path, runs = recipe(tmp_path, data.format(tmp_path)), tmp_path / "runs"
    whole = small(tmp_path, name="whole")
    said = say("train", path, *whole)
    assert said.code == 0, said.err
    expected = tensors(runs / "whole")
    if "curriculum" not in data:  # whose last stage begins at step 6: a run of 4 would be too short
        for steps in (4, 8):
            said = say("train", path, *small(tmp_path, name="halves", **{"training.max_steps": steps}))
            assert said.code == 0, said.err
        assert steps_logged(runs / "halves") == list(range(1, 9))
        assert different(expected, tensors(runs / "halves")) == []
    # As if it had been killed after step 4.
    put(runs / "whole" / "checkpoints" / "step-00000008" / "model.safetensors", b"")
    said = say("train", path, *whole)
    assert said.code == 0, said.err
    assert "step-00000004 at step 4 of 8" in (runs / "whole" / "log.txt").read_text()
    assert different(expected, tensors(runs / "whole")) == []


def test_a_row_that_changed_since_the_checkpoint(say: Any, tmp_path: Path) -> None:
    text = lines(texts(60))
    rows, runs = put(tmp_path / "a.jsonl", text), tmp_path / "runs"
    path = recipe(tmp_path, f"train: {{path: {rows}}}")
    short, longer = small(tmp_path, name="x", **{"training.max_steps": 4}), small(tmp_path, name="x")
    assert say("train", path, *short).code == 0
    before = tensors(runs / "x")
    put(rows, text.replace("alpha", "gamma", 1))
    line = say("train", path, *longer).refused(3, "the data has changed", "->", "--allow-data-change", "--fresh")
    old, new = line.partition("(")[2].partition(")")[0].split(" -> ")
    assert old != new
    assert different(before, tensors(runs / "x")) == []
    tokens = ["data.tokenizer={kind: bpe, vocab_size: 300}"]
    for more in ([], ["--allow-data-change"]):
        say("train", path, *longer, *tokens, *more).refused(2, "data.tokenizer.kind: bytes -> bpe")
    assert different(before, tensors(runs / "x")) == []
    assert say("train", path, *longer, "--allow-data-change").code == 0
    assert steps_logged(runs / "x") == list(range(1, 9))
    assert old in (runs / "x" / "log.txt").read_text(), "the change is on record"


# The machine


def prepared(folder: Path) -> dict[str, bytes | None]:
    [entry] = [path for path in (folder / "bottega").iterdir() if path.is_dir()]
    return {name: raw for name, raw in listing(entry).items() if name != "MANIFEST.json"}


# Python runs this at the start of the command and of its workers: the jobs that are named wait to be stopped.
HOLD = """
import os, threading
from bottega.data.prepare import jobs
call = jobs.Jobs.__call__
def hold(self, number):
    if str(number) in os.environ["HOLD_JOBS"].split():
        threading.Event().wait()
    return call(self, number)
jobs.Jobs.__call__ = hold
"""


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200  # ends a test that hangs
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def test_an_interrupted_and_a_killed_preparation_go_on(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26 MB, which is worth two processes, in four jobs."""
    line = json.dumps({"text": "lorem ipsum dolor sit amet " * 400}) + "\n"
    path = put(tmp_path / "rows.jsonl", line * (26_000_000 // len(line)))
    words = command(["prepare", "language", "--data", str(path), BYTES, "data.validation=null"])
    cache = tmp_path / "cache"
    put(tmp_path / "hold" / "sitecustomize.py", HOLD)
    env = environment(XDG_CACHE_HOME=str(cache))
    env["PYTHONPATH"] = f"{tmp_path / 'hold'}{os.pathsep}{env['PYTHONPATH']}"

    def parts() -> list[str]:
        return sorted(part.name for part in cache.glob("bottega/*.tmp/parts/[0-9]*"))

    for number, code, held, done in (
        (signal.SIGINT, 130, "1 2 3", ["000000"]),
        (signal.SIGKILL, -9, "3", ["000000", "000001", "000002"]),
    ):
        process = subprocess.Popen(
            words, env={**env, "HOLD_JOBS": held}, stderr=subprocess.PIPE, text=True, process_group=0
        )
        until(lambda done=done, process=process: parts() == done or process.poll() is not None)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        _, err = process.communicate(timeout=200)
        line = "bottega: stopped by SIGINT; run the same command again to resume from what is saved\n"
        assert (process.returncode, err) == (code, line if number == signal.SIGINT else "")
        until(lambda children=children: not any(map(is_running, children)))
    done = bottega(words[3:], env={"XDG_CACHE_HOME": str(cache)})
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert say(*words[3:]).code == 0
    assert prepared(cache) == prepared(tmp_path / "other")


def is_running(child: str) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_disk_that_is_full(say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = put(tmp_path / "rows.jsonl", GOOD * 2000), tmp_path / "cache"
    words = ["prepare", "language", "--data", str(path), BYTES]
    full = bottega(
        words,
        env={"XDG_CACHE_HOME": str(cache)},
        first="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))",
    )
    one_line(full.returncode, full.stderr, 5, cache, "File too large", "free some space")
    assert not list(cache.glob("bottega/*/")), "nothing half done is left"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert say(*words).code == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    say(*words).refused(5, path, "XDG_CACHE_HOME")


def test_out_on_a_disk_that_is_full(say: Any, tmp_path: Path) -> None:
    path, out = put(tmp_path / "rows.jsonl", GOOD * 2000), tmp_path / "kept"
    words = ["prepare", "language", "--data", str(path), BYTES]
    assert say(*words).code == 0  # what is copied is there already
    full = bottega(
        [*words, "--out", str(out)],
        first="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))",
    )
    one_line(full.returncode, full.stderr, 5, f"--out: cannot write {out}", "size limit", "make room there")
    assert "[(" not in full.stderr, "that would be a list of Python"
    assert not list(tmp_path.glob(".tmp-*"))
    assert not out.exists()
