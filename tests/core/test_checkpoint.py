"""Checkpoints: writing, verification, selection, retention and links."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from bottega.core import checkpoint
from bottega.core.errors import CheckpointError
from bottega.storage import tensor_file

FILES = {
    "model.safetensors": {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "flag": np.array([True, False, True]),
        "half": np.array([1.5, -2.0], np.float16),
        "empty": np.zeros((0, 3), np.float32),
    },
    "optimizer.safetensors": {"a.weight/step": np.array(7.0, np.float32), "count": np.array([2**40], np.int64)},
}


def write_checkpoint(folder: Path, step: int, *, value: float = 0.0) -> Path:
    files = {**FILES, "ema.safetensors": {"a.weight": np.full((2, 2), value, np.float32)}}
    path = checkpoint.write(folder, step=step, files=files, progress={"step": step}, fingerprint={"data": "x"})
    checkpoint.update_links(folder)
    return path


def list_names(folder: Path) -> list[str]:
    return [path.name for path, _ in checkpoint.list_checkpoints(folder)]


def test_checkpoint_round_trip_through_safetensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoints", 5, value=3.0)
    assert path == tmp_path / "checkpoints" / "step-00000005"
    manifest = checkpoint.verify(path)
    assert (manifest.step, manifest.sequence, manifest.fingerprint) == (5, 1, {"data": "x"})
    assert (
        set(manifest.files) == {*FILES, "ema.safetensors", "progress.json"} == set(os.listdir(path)) - {"MANIFEST.json"}
    )
    for file, tensors in FILES.items():
        tensors_read = safetensors.numpy.load_file(path / file)
        assert tensors_read.keys() == tensors.keys()
        for name, array in tensors.items():
            assert tensors_read[name].dtype == array.dtype
            np.testing.assert_array_equal(tensors_read[name], array)
    assert checkpoint.read_progress(path) == {"step": 5}


def test_non_contiguous_tensors_of_every_dtype_round_trip(tmp_path: Path) -> None:
    grid = np.arange(24).reshape(4, 6)
    tensors = {kind: grid.astype(kind).T[::2] for kind in tensor_file.DTYPES}
    entry = checkpoint.write_safetensors(tmp_path / "all.safetensors", tensors)
    raw = (tmp_path / "all.safetensors").read_bytes()
    assert entry == {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    tensors_read = safetensors.numpy.load_file(tmp_path / "all.safetensors")
    for kind, array in tensors.items():
        np.testing.assert_array_equal(tensors_read[kind], array)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    starts = {kind: 8 + int.from_bytes(raw[:8], "little") + header[kind]["data_offsets"][0] for kind in tensors}
    assert all(start % np.dtype(kind).itemsize == 0 for kind, start in starts.items()), "not aligned for a memory map"


def test_newest_checkpoint_is_the_last_written(tmp_path: Path) -> None:
    for step in (20, 30, 10):  # 10 was saved after a resume from an older checkpoint
        os.utime(write_checkpoint(tmp_path, step), (step, 10_000 - step))
    assert list_names(tmp_path) == ["step-00000010", "step-00000030", "step-00000020"]
    newest = checkpoint.find_newest_valid(tmp_path, pytest.fail)
    assert newest is not None
    assert newest[0].name == "step-00000010"
    assert checkpoint.find_newest_valid(tmp_path / "nowhere", pytest.fail) is None


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, value=1.0)
    path = write_checkpoint(tmp_path, 1, value=2.0)
    assert safetensors.numpy.load_file(path / "ema.safetensors")["a.weight"][0, 0] == 2.0
    assert checkpoint.verify(path).sequence == 2
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000001"]


def test_old_checkpoints_are_deleted_except_protected_ones(tmp_path: Path) -> None:
    paths = {step: write_checkpoint(tmp_path, step) for step in range(1, 7)}
    checkpoint.delete_old_checkpoints(tmp_path, keep=2, protect=[paths[3]])
    assert list_names(tmp_path) == ["step-00000006", "step-00000005", "step-00000003"]
    assert not list(tmp_path.glob(".trash-*"))
    checkpoint.delete_old_checkpoints(tmp_path, keep=9, protect=[])
    assert len(list_names(tmp_path)) == 3


def test_nothing_is_deleted_while_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-00000003" / "ema.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="step-00000003 is damaged"):
        checkpoint.delete_old_checkpoints(tmp_path, keep=1, protect=[])
    assert len(list_names(tmp_path)) == 3


def test_links_follow_a_checkpoint_and_survive_a_move(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    write_checkpoint(folder, 1)
    path = write_checkpoint(folder, 2)
    assert checkpoint.read_link(folder, "last") == path
    assert checkpoint.read_link(folder, "best") is None
    checkpoint.write_link(folder, "best", folder / "step-00000001")
    moved = tmp_path / "there"
    folder.rename(moved)
    assert checkpoint.read_link(moved, "best") == moved / "step-00000001"
    checkpoint.delete_folder(moved / "step-00000001")
    assert checkpoint.read_link(moved, "best") is None, "a link to a deleted checkpoint has a target"


def test_text_file_replaces_links_where_symlinks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    path = write_checkpoint(tmp_path, 3)
    assert not (tmp_path / "last").is_symlink()
    assert checkpoint.read_link(tmp_path, "last") == path
    assert checkpoint.read_link(tmp_path, "last") == write_checkpoint(tmp_path, 3)


def test_a_moved_or_renamed_checkpoint_still_verifies(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "run", 4)
    renamed = tmp_path / "checkpoint of the paper"
    path.rename(renamed)
    assert checkpoint.verify(renamed).step == 4
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in renamed.iterdir())


def test_partial_checkpoints_are_removed_and_replacements_finished(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2, value=1.0)
    # Killed between the two renames: the old checkpoint is moved aside and has no replacement.
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001-0123abcd")
    # Killed after them: the new checkpoint is complete.
    (tmp_path / ".old-step-00000002-0123abcd").mkdir()
    for name in (".tmp-3-0123abcd", ".trash-step-00000000-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-last-0123abcd").symlink_to("step-00000001")
    checkpoint.remove_partial_checkpoints(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000001", "step-00000002"]
    assert checkpoint.verify(tmp_path / "step-00000001").step == 1


def test_manifest_with_outside_paths_or_missing_files_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    entry = {"size": 1, "sha256": hashlib.sha256(b"s").hexdigest()}
    fields = json.loads((path / "MANIFEST.json").read_bytes())
    del fields["sha256"]

    def seal(files: dict[str, object]) -> None:
        (path / "MANIFEST.json").write_bytes(checkpoint._seal_manifest({**fields, "files": files}))

    for name in ("../secret", str(secret), ".hidden", "a/b", ""):
        seal({**fields["files"], name: entry})
        with pytest.raises(CheckpointError, match=r"MANIFEST\.json lists"):
            checkpoint.verify(path)
    for required in ("model.safetensors", "progress.json"):
        seal({name: entry for name, entry in fields["files"].items() if name != required})
        with pytest.raises(CheckpointError, match=f"lacks {required}"):
            checkpoint.verify(path)
    seal(fields["files"])
    checkpoint.verify(path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000, b'{"format": 99}', b'{"a": NaN}']
)
def test_invalid_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write_checkpoint(tmp_path, 1)
    (path / "MANIFEST.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="step-00000001"):
        checkpoint.verify(path)
    warnings: list[str] = []
    assert checkpoint.find_newest_valid(tmp_path, warnings.append) is None
    assert len(warnings) == 1
    assert "step-00000001 is damaged" in warnings[0]


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"{"])
def test_invalid_progress_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    """The file may be crafted with a valid hash."""
    from bottega.core.callback import Progress

    path = write_checkpoint(tmp_path, 1)
    (path / "progress.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"progress\.json"):
        Progress.from_json({"step": "ten", **checkpoint.read_progress(path)})
