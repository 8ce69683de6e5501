"""Folders with links that lead outside, and with file names of arbitrary bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from data_files import relative_names, write_files

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files
from bottega.data.records.record import Record

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
ROW = b'{"text": "fine"}\n'


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "images", "webdataset", "auto"])
def test_links_that_leave_a_folder_are_refused_for_every_kind(tmp_path: Path, kind: str) -> None:
    suffix = {"auto": "txt", "text": "txt", "images": "png", "webdataset": "tar"}.get(kind, kind)
    root = (
        write_files(tmp_path, {f"data/deep/a.{suffix}": b"a", f"secret.{suffix}": b"s", f"other/b.{suffix}": b"b"})
        / "data"
    )
    (root / f"b.{suffix}").symlink_to(Path("deep") / f"a.{suffix}")
    (tmp_path / "link").symlink_to(root)
    for path in (root, tmp_path / "link"):  # links that stay inside, and a folder that is a link
        assert relative_names(Source(path=str(path), kind=kind)) == [f"b.{suffix}", f"deep/a.{suffix}"]  # type: ignore[arg-type]
    link = root / "deep" / f"c.{suffix}"
    link.symlink_to(tmp_path / f"secret.{suffix}")
    for path in (root, tmp_path / "link", root / "**" / f"*.{suffix}"):
        with pytest.raises(DataError, match=rf"deep/c\.{suffix} is a link to .*/secret\.{suffix}, outside") as caught:
            find_files(Source(path=str(path), kind=kind))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert relative_names(Source(path=str(link), kind=kind)) == [f"c.{suffix}"]  # type: ignore[arg-type]
    link.unlink()
    (root / "further").symlink_to(tmp_path / "other")
    for path in (root, root / "**" / f"*.{suffix}"):
        with pytest.raises(DataError, match=r"data/further is a link to .*/other, outside"):
            find_files(Source(path=str(path), kind=kind))  # type: ignore[arg-type]
    (root / "further").unlink()
    (root / "circle").symlink_to("circle")
    assert len(relative_names(Source(path=str(root), kind=kind))) == 2  # type: ignore[arg-type]


def test_path_may_be_a_link_to_a_media_file(tmp_path: Path) -> None:
    write_files(tmp_path, {"far/a.png": PNG, "near/x.txt": b""})
    (tmp_path / "near" / "b.png").symlink_to(tmp_path / "far" / "a.png")
    source_files = find_files(Source(path=str(tmp_path / "near" / "b.png")))
    (record,) = source_files.read(source_files.list_pieces(1)[0])
    assert isinstance(record, Record)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("txt", b"t"),
        ("jsonl", ROW),
        ("csv", b"a,b\n1,x\n"),
        ("png", PNG),
        ("jsonl", b"no row\n"),
        ("json", b'[{"a": 1}]'),
    ],
)
def test_arbitrary_file_names_give_printable_keys(tmp_path: Path, suffix: str, content: bytes) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9\n"
    os.mkdir(folder)
    for i in range(2):
        Path(os.fsdecode(folder + b"/%d\xff." % i + suffix.encode())).write_bytes(content)
    for path in (tmp_path, Path(os.fsdecode(folder))):
        source_files = find_files(Source(path=str(path)))
        records = [record for piece in source_files.list_pieces(1) for record in source_files.read(piece)]
        assert len({record.key for record in records}) == 2
        for record in records:
            for text in (record.key, record.where, *getattr(record, "fields", {}).values()):
                if isinstance(text, str):
                    assert text.isprintable()
                    text.encode()
        prefix = "caf\\udce9\\n/" if path == tmp_path else ""
        assert records[0].key.startswith(f"{prefix}0\\udcff.{suffix}")
        assert len(source_files.fingerprint) == 64
