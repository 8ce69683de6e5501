"""Bad data through the command line: one line that names file and position, an exit code, and no other file touched."""

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
from small_run import SMALL, command, differing_tensors, environment, read_logged_steps, read_tensors, run_bottega

REAL = os.environ.get("BOTTEGA_DATA")
BYTES = "data.tokenizer.kind=bytes"
GOOD = json.dumps({"text": "good words " * 20, "label": "a", "user": "u"}) + "\n"


class CommandResult:
    """Exit code and output of a command that is run in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capfd.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capfd.readouterr()

    def assert_refused(self, code: int, *parts: Any) -> str:
        return assert_one_line(self.code, self.err, code, *parts)


def assert_one_line(exit_code: int, err: str, code: int, *parts: Any) -> str:
    assert exit_code == code, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, f"one line, not {err!r}"
    assert lines[0].startswith("bottega: ")
    for part in map(str, parts):
        assert part in lines[0], f"{part!r} is not in {lines[0]!r}"
    return lines[0]


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: CommandResult(capfd, [str(a) for a in arguments])


@pytest.fixture(autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of the commands and its parents; no file may appear or change there."""
    tree = tmp_path_factory.mktemp("canary")
    (tree / "a" / "here").mkdir(parents=True)
    (tree / "evil.txt").write_text("as it was")
    monkeypatch.chdir(tree / "a" / "here")
    before = read_tree(tree)
    yield tree
    assert read_tree(tree) == before


def read_tree(tree: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(tree)): path.read_bytes() if path.is_file() else None for path in tree.rglob("*")}


def write_file(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_tar(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """Write a tar of (name, bytes) members; a str in place of the bytes is the type of a member without content."""
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


def encode_png(width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def random_png(seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return encode_png(16, 16, b"".join(b"\0" + rng.randbytes(48) for _ in range(16)))


def encode_wav(samples: int, *, claims: int | None = None) -> bytes:
    size = 2 * samples if claims is None else claims
    form = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + form + b"data" + struct.pack("<I", size) + bytes(2 * samples)
    )


# Rows


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
def test_invalid_json_row_is_named_by_line(run_cli: Any, tmp_path: Path, row: bytes, parts: list[str]) -> None:
    path = write_file(tmp_path / "rows.jsonl", GOOD.encode() * 2 + b"\n" + row + GOOD.encode())
    run_cli("prepare", "language", "--data", path, BYTES).assert_refused(3, path, *parts)


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
def test_invalid_table_row_is_named_by_line(run_cli: Any, tmp_path: Path, table: bytes, parts: list[str]) -> None:
    path = write_file(tmp_path / "rows.csv", table)
    run_cli("prepare", "language", "--data", path, BYTES).assert_refused(3, path, *parts)


def test_bad_rows_are_skipped_up_to_max_bad(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "rows.jsonl", GOOD * 7 + '{"text": \n' + GOOD * 2)
    skip = ["prepare", "language", "--data", path, BYTES, "data.bad_records=skip"]
    run_cli(*skip).assert_refused(3, f"{path}, line 8", "1 of 10 records are bad", "data.max_bad=0.001")
    result = run_cli(*skip, "data.max_bad=0.2")
    assert result.code == 0, result.err
    assert "1 bad of 10 records" in result.out
    assert f"{path}, line 8" in result.out


def test_row_without_a_label_is_a_bad_row_for_every_split(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "rows.jsonl", GOOD * 19 + '{"text": "x"}\n')
    for by in ("fraction", "stratified"):
        arguments = ["prepare", "classify", "--data", path, BYTES, f"data.split.by={by}"]
        run_cli(*arguments).assert_refused(3, f"{path}, line 20", "no field 'label'")
        result = run_cli(*arguments, "data.bad_records=skip", "data.max_bad=0.1")
        assert result.code == 0, result.err
        assert "1 bad of 20 records" in result.out


@pytest.mark.parametrize("score", ["null", '"high"', '"nan"', '"inf"'])
def test_curriculum_score_must_be_a_number(run_cli: Any, tmp_path: Path, score: str) -> None:
    row = '{"text": "words", "score": %s}\n'
    path = write_file(tmp_path / "rows.jsonl", row % 1 * 5 + row % score)
    curriculum = "data.curriculum={by: score, stages: [{steps: 3}]}"
    run_cli("prepare", "language", "--data", path, BYTES, curriculum).assert_refused(3, f"{path}, line 6", "'score'")


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
def test_hostile_archive_member_is_refused(
    run_cli: Any, tmp_path: Path, member: tuple[str, Any], parts: list[str]
) -> None:
    path = write_tar(tmp_path / "a.tar", ("a.txt", b"text " * 50), member)
    run_cli("prepare", "language", "--data", path, BYTES).assert_refused(3, path, *parts)
    run_cli("data", path, BYTES).assert_refused(3, path, *parts)
    run_cli("prepare", "image", "--data", path).assert_refused(3, path)


def test_pickled_data_is_refused_and_not_executed(run_cli: Any, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    pickled = pickle.dumps(Bomb())
    members = {"b.pkl": pickled, "b.pth": pickled, "b.pyd": b"x", "b.npy": objects.getvalue()}
    for name, content in members.items():
        path = write_tar(tmp_path / "a.tar", ("a.txt", b"text " * 50), (name, content))
        run_cli("prepare", "language", "--data", path, BYTES).assert_refused(3, path, repr(name))
    array = write_file(tmp_path / "a.npy", objects.getvalue())
    for arguments in (["routing"], ["image"], ["language", "data.train.kind=numpy"]):
        run_cli("prepare", *arguments, "--data", array).assert_refused(3, array, "Python objects")
    zipped = tmp_path / "a.npz"
    np.savez(zipped, allow_pickle=True, x=np.array([Bomb()], dtype=object))
    run_cli("prepare", "routing", "--data", zipped).assert_refused(3, zipped, "x.npy", "Python objects")
    for name in ("a.pkl", "a.pth", "a.pt"):
        path = write_file(tmp_path / name, pickled)
        run_cli("prepare", "language", "--data", path).assert_refused(3, path, "unknown suffix")
    assert not (tmp_path / "boom").exists()


# Media


def check_bad_files(run_cli: Any, task: str, folder: Path, bad: list[str], *overrides: str) -> None:
    """Check the default limit (1 record in 1,000 may be bad), a higher one, and `data.bad_records=stop`."""
    total = len([path for path in folder.rglob("*") if path.is_file()])
    arguments = ["prepare", task, "--data", folder, "data.validation=null", *overrides]
    run_cli(*arguments).assert_refused(
        3, folder / bad[0], f"{len(bad)} of {total} records are bad", "data.max_bad=0.001"
    )
    run_cli(*arguments, "data.bad_records=stop").assert_refused(3, folder / bad[0])
    result = run_cli(*arguments, "data.max_bad=0.8")
    assert result.code == 0, result.err
    assert result.err == ""
    assert f"{len(bad)} bad of {total} records" in result.out
    for name in bad[:5]:
        assert f"{folder / name}: " in result.out


def test_truncated_empty_and_mislabelled_images(run_cli: Any, tmp_path: Path) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(random_png()))
    jpeg = io.BytesIO()
    image.resize((64, 64)).save(jpeg, "JPEG")
    for n in range(3):
        write_file(tmp_path / "photos" / f"{n}.png", random_png(n))
    # A JPEG named .png is still read.
    write_file(tmp_path / "photos" / "3.png", jpeg.getvalue())
    write_file(tmp_path / "photos" / "5.png", random_png()[: len(random_png()) // 2])
    write_file(tmp_path / "photos" / "6.jpg", jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    write_file(tmp_path / "photos" / "7.png", b"")
    write_file(tmp_path / "photos" / "8.png", encode_wav(100))
    check_bad_files(run_cli, "image", tmp_path / "photos", ["5.png", "6.jpg", "7.png", "8.png"])


def test_truncated_empty_and_mislabelled_audio(run_cli: Any, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    pytest.importorskip("av", reason="av is not installed")
    samples = np.random.default_rng(0).normal(size=4000).astype(np.float32) * 0.1
    files = {}
    for suffix in ("flac", "mp3", "aiff"):
        out = io.BytesIO()
        soundfile.write(out, samples, 16000, format=suffix)
        files[suffix] = out.getvalue()
    for n in range(3):
        write_file(tmp_path / "sounds" / f"{n}.wav", encode_wav(500 + n))
    write_file(tmp_path / "sounds" / "5.wav", encode_wav(500)[:500])
    write_file(tmp_path / "sounds" / "6.flac", files["flac"][: len(files["flac"]) // 2])
    write_file(tmp_path / "sounds" / "7.wav", b"")
    write_file(tmp_path / "sounds" / "8.wav", random_png())
    # A chunk with a negative size, which libsndfile follows.
    write_file(tmp_path / "sounds" / "00.aiff", files["aiff"][:36] + b"\xff" * 4 + files["aiff"][40:])
    # Zeroed frames, about which libmpg123 prints many warnings.
    write_file(tmp_path / "sounds" / "9.mp3", files["mp3"][:600] + bytes(600) + files["mp3"][1200:])
    bad = ["00.aiff", "5.wav", "6.flac", "7.wav", "8.wav", "9.mp3"]
    check_bad_files(run_cli, "audio", tmp_path / "sounds", bad)


@pytest.mark.skipif(REAL is None, reason="BOTTEGA_DATA names no folder with real data")
def test_truncated_real_media(run_cli: Any, tmp_path: Path) -> None:
    root = Path(str(REAL))
    clip = (root / "video-clips" / "RATRACE_wave_f_nm_np1_fr_goo_37.avi").read_bytes()
    for n in range(2):
        write_file(tmp_path / "clips" / f"{n}.avi", clip)
    cut = {"5.avi": clip}
    for name, of in {"6.mp4": "carphone_pristine.mp4", "7.mkv": "av1_video.mkv"}.items():
        cut[name] = (root / "video-clips" / of).read_bytes()
    for name, content in cut.items():
        write_file(tmp_path / "clips" / name, content[: len(content) // 2])
    write_file(tmp_path / "clips" / "8.mp4", b"")
    # An unknown FourCC.
    write_file(tmp_path / "clips" / "9.avi", clip.replace(clip[112:116], b"????").replace(clip[188:192], b"????"))
    bad = [*cut, "8.mp4", "9.avi"]
    check_bad_files(
        run_cli,
        "video",
        tmp_path / "clips",
        bad,
        "data.image_size=16",
        "data.num_frames=2",
        "model.temporal_patch_size=1",
    )
    sound = next((root / "audio-ljspeech-sample" / "wavs").glob("*.flac")).read_bytes()
    write_file(tmp_path / "speech" / "0.flac", sound)
    write_file(tmp_path / "speech" / "1.flac", sound[: len(sound) // 2])
    check_bad_files(run_cli, "audio", tmp_path / "speech", ["1.flac"])


def test_arrow_file_with_offsets_out_of_bounds(tmp_path: Path) -> None:
    """pyarrow reads out of bounds and may crash the process, so the command is run in a subprocess."""
    pyarrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"text": [f"words {n}" for n in range(8)]})
    feather.write_feather(table, path, compression="uncompressed")
    offsets = np.arange(9, dtype="<i4") * 7
    raw = path.read_bytes()
    assert raw.count(offsets.tobytes()) == 1
    bad_offsets = offsets.copy()
    bad_offsets[4] = 1 << 30
    path.write_bytes(raw.replace(offsets.tobytes(), bad_offsets.tobytes()))
    process = run_bottega(["prepare", "language", "--data", str(path), BYTES])
    assert_one_line(process.returncode, process.stderr, 3, path, "damaged")


# Bombs

RUN_COMMANDS = """if True:
    import json, sys
    from bottega import cli
    codes = [cli.main(words) for words in json.loads(sys.argv[1])]
    # VmHWM is the peak of this process; wait4 includes the memory of the parent it was forked from.
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps([codes, peak]))
"""


def test_decompression_bombs_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Each would decompress to 100 MB to 1 GB; the process that reads them all stays below 400 MB."""
    import soundfile

    row = zlib.compressobj(9)
    black = b"".join(row.compress(bytes(1 + 30_000 // 8)) for _ in range(30_000)) + row.flush()
    big = write_file(tmp_path / "photos" / "1.png", encode_png(30_000, 30_000, b"", depth=1, colour=0))
    big.write_bytes(big.read_bytes().replace(zlib.compress(b"", 1), black))  # the checksum of IDAT is not reached
    write_file(tmp_path / "photos" / "0.png", random_png())
    write_file(tmp_path / "lines.jsonl.gz", gzip.compress(b'{"text": "') + gzip.compress(b"a" * (64 << 20)) * 17)
    write_file(tmp_path / "text.txt.gz", gzip.compress(b"a" * (64 << 20)) * 17)
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
    for name, content in {
        "0.wav": encode_wav(400),
        "1.wav": encode_wav(400, claims=2**32 - 38),
        "2.flac": bytes(long),
    }.items():
        write_file(tmp_path / "sounds" / name, content)
    cases = {
        "image": (tmp_path / "photos", "1.png", "more than 67,108,864 pixels"),
        "language": (tmp_path / "lines.jsonl.gz", "", "compression bomb"),
        "classify": (tmp_path / "text.txt.gz", "", "compression bomb"),
        "routing": (tmp_path / "zip.npz", "x.npy", "a zip bomb"),
        "audio": (tmp_path / "sounds", "1.wav", "2 of 3 records are bad"),
    }
    commands = [["prepare", task, "--data", str(path)] for task, (path, *_) in cases.items()]
    process = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    codes, peak = json.loads(process.stdout)
    assert codes == [3] * len(cases), process.stderr
    for line, (path, *parts) in zip(process.stderr.strip().splitlines(), cases.values(), strict=True):
        assert all(str(part) in line for part in (path, *parts)), line
    assert peak < 400_000, f"{peak} kB"


def test_yaml_alias_bomb_is_refused(run_cli: Any, tmp_path: Path) -> None:
    layers = [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefghi", "bcdefghij", strict=True)]
    path = write_file(tmp_path / "my.yaml", "\n".join(["a: &a [x,x,x,x,x,x,x,x,x]", *layers]) + "\n")
    for verb in ("prepare", "data"):
        run_cli(verb, path).assert_refused(2, path, "aliases")


# Empty or too little data


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
def test_empty_file_is_refused(run_cli: Any, tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    path = write_file(tmp_path / name, content)
    run_cli("prepare", "language", "--data", path, BYTES).assert_refused(3, path, *parts)


def test_empty_folders_and_sources_are_refused(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for task in ("language", "image"):
        run_cli("prepare", task, "--data", tmp_path / "empty").assert_refused(
            3, tmp_path / "empty", "no file of a supported kind"
        )
    run_cli("data", tmp_path / "empty").assert_refused(3, tmp_path / "empty")
    full, empty = write_file(tmp_path / "a.jsonl", GOOD * 9), write_file(tmp_path / "b.jsonl", "")
    run_cli("prepare", "language", "--data", full, BYTES, f"data.validation={{path: {empty}}}").assert_refused(
        3, empty, "is empty"
    )
    two = f"task: language\ndata: {{tokenizer: {{kind: bytes}}, sources: [{{path: {full}}}, {{path: {empty}}}]}}\n"
    run_cli("prepare", write_file(tmp_path / "two.yaml", two)).assert_refused(3, empty, "is empty")


def test_filter_or_split_that_leaves_no_rows_is_refused(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.jsonl", GOOD * 2)
    arguments = ["prepare", "language", "--data", path, BYTES]
    run_cli(*arguments, "data.filter.min_characters=1000").assert_refused(3, path, "2 too short", "loosen data.filter")
    fraction = "data.validation.split=0.4"
    run_cli(*arguments, fraction, "data.split={by: group, field: user}").assert_refused(
        3, "by group leaves no row for train"
    )
    run_cli(*arguments, fraction, "data.split.by=file").assert_refused(3, "by file leaves no row for train")
    run_cli(*arguments, "data.split={folds: 5, fold: 4}").assert_refused(
        3, "no row for validation", "data.split.folds=5"
    )
    run_cli(*arguments, fraction, "data.split={by: group, field: usr}").assert_refused(
        3, f"{path}, line 1", "no field 'usr'"
    )
    bad = write_file(tmp_path / "bad.jsonl", '{"text": \n' * 5)
    run_cli("prepare", "language", "--data", bad, BYTES).assert_refused(3, f"{bad}, line 1")
    skip = ["data.bad_records=skip", "data.max_bad=1"]
    run_cli("prepare", "language", "--data", bad, BYTES, *skip).assert_refused(
        3, f"all 5 records of {bad} are bad", "line 1"
    )
    for n in range(3):
        write_file(tmp_path / "photos" / f"{n}.png", b"no")
    for overrides in ([], ["data.max_bad=1", "data.image_size=8", "data.channels=3"]):
        run_cli("prepare", "image", "--data", tmp_path / "photos", *overrides).assert_refused(
            3, tmp_path / "photos" / "0.png"
        )


def test_label_out_of_range_is_refused(run_cli: Any, tmp_path: Path) -> None:
    for label in (0, 1, 2, 7):
        write_file(tmp_path / "photos" / str(label) / "a.png", random_png(label))
    run_cli("prepare", "image", "--data", tmp_path / "photos", "model.num_classes=3").assert_refused(
        3, "7/a.png", "label 7", "0 to 2"
    )
    rows = "".join(json.dumps({"text": "some words", "label": n % 4}) + "\n" for n in range(20))
    path = write_file(tmp_path / "a.jsonl", rows)
    run_cli("prepare", "classify", "--data", path, BYTES, "model.num_labels=3").assert_refused(
        3, "a.jsonl:4", "label 3", "0 to 2"
    )


def test_fewer_samples_than_one_batch_are_refused(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.jsonl", '{"text": "just enough for two windows of it"}\n' * 2)
    result = run_cli("train", write_recipe(tmp_path, f"train: {{path: {path}}}"), *small_run_arguments(tmp_path))
    result.assert_refused(3, "fewer than one batch of 4")
    assert not list(tmp_path.rglob("step-*"))


# The command line


def test_source_of_the_wrong_kind_is_refused(run_cli: Any, tmp_path: Path) -> None:
    text = write_file(tmp_path / "a.txt", "hello world\n" * 50)
    for task in ("image", "audio", "video", "routing"):
        run_cli("prepare", task, "--data", text).assert_refused(3, f"{text} contains text", "data.train.kind")
    photos = write_file(tmp_path / "photos" / "a.png", random_png()).parent
    for task in ("language", "classify", "audio"):
        run_cli("prepare", task, "--data", photos).assert_refused(3, f"{photos} contains images", "data.train.kind")
    rows = write_file(tmp_path / "a.jsonl", GOOD)
    run_cli("prepare", "video", "--data", rows).assert_refused(
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
        run_cli("prepare", "language", "--data", text, f"data.train.kind={kind}").assert_refused(3, text, part)
    run_cli("prepare", "language", "--data", text, "data.train.kind=txt").assert_refused(2, "data.train.kind", "'txt'")


def test_conflicting_data_keys_are_refused(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.jsonl", GOOD * 20)
    arguments = ["prepare", "language", "--data", path, BYTES]
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
        run_cli(*arguments, key).assert_refused(2, *parts)
    run_cli(*arguments, "data.validation.split=0.6", "data.test={split: 0.5}").assert_refused(
        2, "data.validation.split", "data.test.split"
    )
    weights = write_recipe(tmp_path, f"sources: [{{path: {path}, weight: 3}}, {{path: {path}}}]")
    result = run_cli("train", weights, *small_run_arguments(tmp_path), "data.mixture=concatenate")
    result.assert_refused(2, "data.sources[0].weight=3", "data.mixture=weighted")


def test_wrong_paths_are_refused(run_cli: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "data" / "rows.jsonl", GOOD * 20)
    wrong = path.with_name("row.jsonl")
    for arguments in (["prepare", "language", "--data", wrong], ["data", wrong]):
        run_cli(*arguments).assert_refused(3, f"{wrong} does not exist", f"did you mean {path}?")
    run_cli("data", tmp_path / "data" / "row*.json").assert_refused(3, "no file matches")
    run_cli("prepare", "language", "--data", "/dev/zero").assert_refused(3, "neither a file nor a folder")
    arguments = ["prepare", "language", "--data", path, BYTES]
    run_cli(*arguments, "--to", "zip", tmp_path / "out").assert_refused(
        2, "--to zip", "webdataset, tfrecord, parquet, jsonl"
    )
    run_cli(*arguments, "--to", "jsonl", path.parent).assert_refused(
        2, path.parent, "rows.jsonl, which Bottega did not write"
    )
    run_cli(*arguments, "--to", "jsonl", path).assert_refused(2, f"{path} is a file")
    run_cli(*arguments, "--out", path.parent).assert_refused(2, f"--out {path.parent}", "not empty")
    run_cli(*arguments, "--out", path).assert_refused(2, f"--out {path}", "is a file")
    run_cli(*arguments, "--out", path / "x").assert_refused(5, f"--out {path / 'x'}")
    # Reported before the data is read: this data is unreadable.
    bad = write_file(tmp_path / "bad.jsonl", "{\n")
    run_cli("prepare", "language", "--data", bad, "--out", path.parent).assert_refused(2, "--out")
    assert read_tree(path.parent) == {"rows.jsonl": (GOOD * 20).encode()}


def test_changed_prepared_folder_is_refused(run_cli: Any, tmp_path: Path) -> None:
    path, out = write_file(tmp_path / "rows.jsonl", GOOD * 20), tmp_path / "out"
    assert run_cli("prepare", "language", "--data", path, BYTES, "--out", out).code == 0
    assert run_cli("prepare", "language", "--data", out, BYTES).code == 0
    run_cli("prepare", "classify", "--data", out).assert_refused(3, out, "prepared for language")
    shard = next((out / "train").glob("*.bin"))
    raw = shard.read_bytes()
    write_file(shard, raw[:-1] + bytes([raw[-1] ^ 1]))
    run_cli("prepare", "language", "--data", out, BYTES).assert_refused(3, out, "damaged")
    write_file(out / "meta.json", "[]")
    run_cli("prepare", "language", "--data", out, "data.train.kind=shards").assert_refused(3, out, "meta.json")


def test_control_characters_are_escaped_in_the_output(run_cli: Any, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"\x1b[2Jwords {n}\x07", "label": "\x1b[31m"}) + "\n" for n in range(20))
    path = write_file(tmp_path / "rows.jsonl", rows)
    for arguments in (["data", path, BYTES], ["data", "classify", "--data", path, BYTES]):
        result = run_cli(*arguments)
        assert result.code == 0, result.err
        assert "\\x1b[2Jwords" in result.out
        assert not set("\x1b\x07") & set(result.out)


# Resuming


def write_recipe(folder: Path, data: str, name: str = "my") -> Path:
    text = f"task: language\ndata:\n  tokenizer: {{kind: bytes}}\n  validation: {{split: 0.1}}\n  {data}\n"
    return write_file(folder / f"{name}.yaml", text)


def small_run_arguments(output: Path, **changes: Any) -> list[str]:
    """Return the arguments of a small run with a constant learning rate, so that it can be extended."""
    constant = {"training.scheduler.name": "constant", "training.learning_rate": 0.01, "output_dir": output / "runs"}
    keys = {**SMALL, **constant, **changes}
    return ["--quiet", *(f"{key}={json.dumps(value, default=str)}" for key, value in keys.items())]


def random_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    words = ("alpha", "beta", "gamma", "delta")
    return [{"text": " ".join(rng.choices(words, k=rng.randrange(5, 40))), "score": rng.random()} for _ in range(count)]


def to_jsonl(rows: list[dict[str, Any]]) -> str:
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
def test_resume_within_an_epoch_is_bitwise_equal(run_cli: Any, tmp_path: Path, data: str) -> None:
    rows = random_rows(60)
    write_tar(tmp_path / "a.tar", *((f"{n:04}.txt", row["text"].encode()) for n, row in enumerate(rows)))
    write_file(tmp_path / "a.jsonl.gz", gzip.compress(to_jsonl(rows).encode()))
    write_file(tmp_path / "b.jsonl", to_jsonl(random_rows(40, seed=1)))
    path, runs = write_recipe(tmp_path, data.format(tmp_path)), tmp_path / "runs"
    arguments = small_run_arguments(tmp_path, name="whole")
    result = run_cli("train", path, *arguments)
    assert result.code == 0, result.err
    expected = read_tensors(runs / "whole")
    if "curriculum" not in data:  # its last stage begins at step 6, after the end of a run of 4 steps
        for steps in (4, 8):
            result = run_cli(
                "train", path, *small_run_arguments(tmp_path, name="halves", **{"training.max_steps": steps})
            )
            assert result.code == 0, result.err
        assert read_logged_steps(runs / "halves") == list(range(1, 9))
        assert differing_tensors(expected, read_tensors(runs / "halves")) == []
    # Equivalent to a kill after step 4.
    write_file(runs / "whole" / "checkpoints" / "step-00000008" / "model.safetensors", b"")
    result = run_cli("train", path, *arguments)
    assert result.code == 0, result.err
    assert "step-00000004 at step 4 of 8" in (runs / "whole" / "log.txt").read_text()
    assert differing_tensors(expected, read_tensors(runs / "whole")) == []


def test_resume_after_a_data_change_needs_consent(run_cli: Any, tmp_path: Path) -> None:
    text = to_jsonl(random_rows(60))
    rows, runs = write_file(tmp_path / "a.jsonl", text), tmp_path / "runs"
    path = write_recipe(tmp_path, f"train: {{path: {rows}}}")
    short, longer = (
        small_run_arguments(tmp_path, name="x", **{"training.max_steps": 4}),
        small_run_arguments(tmp_path, name="x"),
    )
    assert run_cli("train", path, *short).code == 0
    before = read_tensors(runs / "x")
    write_file(rows, text.replace("alpha", "gamma", 1))
    line = run_cli("train", path, *longer).assert_refused(
        3, "the data has changed", "->", "--allow-data-change", "--fresh"
    )
    old, new = line.partition("(")[2].partition(")")[0].split(" -> ")
    assert old != new
    assert differing_tensors(before, read_tensors(runs / "x")) == []
    tokens = ["data.tokenizer={kind: bpe, vocab_size: 300}"]
    for flags in ([], ["--allow-data-change"]):
        run_cli("train", path, *longer, *tokens, *flags).assert_refused(2, "data.tokenizer.kind: bytes -> bpe")
    assert differing_tensors(before, read_tensors(runs / "x")) == []
    assert run_cli("train", path, *longer, "--allow-data-change").code == 0
    assert read_logged_steps(runs / "x") == list(range(1, 9))
    assert old in (runs / "x" / "log.txt").read_text(), "the change is recorded"


# The machine


def read_cache_entry(folder: Path) -> dict[str, bytes | None]:
    [entry] = [path for path in (folder / "bottega").iterdir() if path.is_dir()]
    return {name: raw for name, raw in read_tree(entry).items() if name != "MANIFEST.json"}


# Runs as sitecustomize in the command and its workers: the jobs listed in HOLD_JOBS wait forever.
HOLD_JOBS = """
import os, threading
from bottega.data.prepare import jobs
call = jobs.Jobs.__call__
def hold(self, number):
    if str(number) in os.environ["HOLD_JOBS"].split():
        threading.Event().wait()
    return call(self, number)
jobs.Jobs.__call__ = hold
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200  # ends a test that hangs
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_interrupted_and_killed_preparation_resumes(
    run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26 MB: two processes and four jobs."""
    line = json.dumps({"text": "lorem ipsum dolor sit amet " * 400}) + "\n"
    path = write_file(tmp_path / "rows.jsonl", line * (26_000_000 // len(line)))
    arguments = command(["prepare", "language", "--data", str(path), BYTES, "data.validation=null"])
    cache = tmp_path / "cache"
    write_file(tmp_path / "hold" / "sitecustomize.py", HOLD_JOBS)
    env = environment(XDG_CACHE_HOME=str(cache))
    env["PYTHONPATH"] = f"{tmp_path / 'hold'}{os.pathsep}{env['PYTHONPATH']}"

    def parts() -> list[str]:
        return sorted(part.name for part in cache.glob("bottega/*.tmp/parts/[0-9]*"))

    for number, code, held, done in (
        (signal.SIGINT, 130, "1 2 3", ["000000"]),
        (signal.SIGKILL, -9, "3", ["000000", "000001", "000002"]),
    ):
        process = subprocess.Popen(
            arguments, env={**env, "HOLD_JOBS": held}, stderr=subprocess.PIPE, text=True, process_group=0
        )
        wait_until(lambda done=done, process=process: parts() == done or process.poll() is not None)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        _, err = process.communicate(timeout=200)
        line = "bottega: stopped by SIGINT; run the same command again; it continues from what was saved, if anything was\n"
        assert (process.returncode, err) == (code, line if number == signal.SIGINT else "")
        wait_until(lambda children=children: not any(map(is_running, children)))
    done = run_bottega(arguments[3:], env={"XDG_CACHE_HOME": str(cache)})
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert run_cli(*arguments[3:]).code == 0
    assert read_cache_entry(cache) == read_cache_entry(tmp_path / "other")


def is_running(child: str) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_full_disk_during_preparation(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_file(tmp_path / "rows.jsonl", GOOD * 2000), tmp_path / "cache"
    arguments = ["prepare", "language", "--data", str(path), BYTES]
    process = run_bottega(
        arguments,
        env={"XDG_CACHE_HOME": str(cache)},
        setup_code="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))",
    )
    assert_one_line(process.returncode, process.stderr, 5, cache, "File too large", "free some space")
    assert not list(cache.glob("bottega/*/")), "no partial output is left"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert run_cli(*arguments).code == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    run_cli(*arguments).assert_refused(5, path, "XDG_CACHE_HOME")


def test_full_disk_under_out(run_cli: Any, tmp_path: Path) -> None:
    path, out = write_file(tmp_path / "rows.jsonl", GOOD * 2000), tmp_path / "kept"
    arguments = ["prepare", "language", "--data", str(path), BYTES]
    assert run_cli(*arguments).code == 0  # the prepared data is in the cache
    process = run_bottega(
        [*arguments, "--out", str(out)],
        setup_code="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))",
    )
    assert_one_line(
        process.returncode, process.stderr, 5, f"--out: cannot write {out}", "size limit", "make room there"
    )
    assert "[(" not in process.stderr, "no Python list in the message"
    assert not list(tmp_path.glob(".tmp-*"))
    assert not out.exists()
