"""Checkpoint faults: announced checkpoints survive damage and kills; damaged ones are refused."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bottega.core import checkpoint
from bottega.core.errors import CheckpointError
from bottega.storage import durable, tensor_file


def write_checkpoint(folder: Path, step: int, *, value: float = 0.0) -> Path:
    files = {
        "model.safetensors": {"w": np.full((40, 3), value + step, np.float32), "b": np.arange(5, dtype=np.int64)},
        "optimizer.safetensors": {
            "w/exp_avg": np.full((40, 3), -value, np.float32),
            "w/step": np.array(step, np.float32),
        },
        "ema.safetensors": {"w": np.full((40, 3), value, np.float32)},
    }
    progress = {"step": step, "samples": 8 * step, "notes": {"early_stop": {"best": 0.5}}}
    path = checkpoint.write(folder, step=step, files=files, progress=progress, fingerprint={"world": 1, "data": "ab12"})
    checkpoint.update_links(folder)
    return path


def damage_file(path: Path, rng: random.Random) -> str:
    """Flip one bit of the file or truncate it at a random position; return a description."""
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.7:
        at = rng.randrange(len(raw))
        raw[at] ^= 1 << rng.randrange(8)
        description = f"{path.name}: bit flip at byte {at} of {len(raw)}"
    else:
        length = rng.randrange(len(raw))
        del raw[length:]
        description = f"{path.name}: cut to {length} bytes"
    path.write_bytes(raw)
    return description


def check_damaged_checkpoints(folder: Path, rounds: int) -> None:
    """Damage one file of the newest checkpoint in each round; it must be refused with one warning, and the older one used."""
    older, newer = write_checkpoint(folder, 1), write_checkpoint(folder, 2)
    contents = {file.name: file.read_bytes() for file in newer.iterdir()}
    rng = random.Random(0)
    for i in range(rounds):
        name = sorted(contents)[i % len(contents)]
        description = damage_file(newer / name, rng)
        with pytest.raises(CheckpointError, match="step-00000002"):
            checkpoint.verify(newer)
        warnings: list[str] = []
        newest_valid = checkpoint.find_newest_valid(folder, warnings.append)
        assert newest_valid is not None, description
        assert newest_valid[0] == older, description
        assert len(warnings) == 1, "not one warning"
        assert "step-00000002 is damaged" in warnings[0]
        (newer / name).write_bytes(contents[name])
    assert checkpoint.find_newest_valid(folder, pytest.fail) == (newer, checkpoint.verify(newer))


def test_damaged_checkpoint_is_refused_and_the_older_one_is_used(tmp_path: Path) -> None:
    check_damaged_checkpoints(tmp_path, 60)


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    check_damaged_checkpoints(tmp_path, 1000)


def test_any_changed_byte_of_the_manifest_is_detected(tmp_path: Path) -> None:
    """A step, sequence number or version with a flipped bit is still valid JSON."""
    manifest = write_checkpoint(tmp_path, 1) / "MANIFEST.json"
    raw = manifest.read_bytes()
    for at in range(len(raw)):
        manifest.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint.read_manifest(manifest.parent)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.999])
def test_truncated_file_is_named_with_its_sizes(tmp_path: Path, fraction: float) -> None:
    path = write_checkpoint(tmp_path, 1)
    model = path / "model.safetensors"
    size = model.stat().st_size
    os.truncate(model, int(size * fraction))
    with pytest.raises(
        CheckpointError,
        match=rf"step-00000001 is damaged: model\.safetensors has {int(size * fraction)} of {size} bytes",
    ):
        checkpoint.verify(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        checkpoint.verify(path)


class ProcessKilled(BaseException):
    """A simulated kill; a BaseException, so that no cleanup handles it."""


def kill_at_call(monkeypatch: pytest.MonkeyPatch, number: int, *, before: bool) -> list[int]:
    """Raise at the `number`-th system call that writes to disk and at all later ones; return the running count."""
    count = [0]

    def count_calls(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] > number:
                raise ProcessKilled  # a killed process does not clean up
            if count[0] == number and before:
                raise ProcessKilled
            result = call(*args, **options)
            if count[0] == number:
                raise ProcessKilled
            return result

        return wrapper

    for name in ("rename", "replace", "fsync", "symlink", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, count_calls(getattr(os, name)))
    monkeypatch.setattr(tensor_file, "_write_all", count_calls(tensor_file._write_all))
    monkeypatch.setattr(durable, "_exchange", count_calls(durable._exchange))
    return count


def save_and_rotate(folder: Path, announced: dict[int, float], *, value: float) -> None:
    """Save two steps, one of them a second time, and delete old checkpoints, as a saver does."""
    for step in (2, 3):
        write_checkpoint(folder, step, value=value)
        announced[step] = value
        checkpoint.delete_old_checkpoints(folder, keep=2, protect=[])
        for deleted in set(announced) - {3, 2} if step == 3 else set(announced) - {2, 1}:
            del announced[deleted]


@pytest.mark.parametrize("has_exchange", [True, False], ids=["names exchanged", "renamed in turn"])
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "after the call"])
def test_kill_at_any_system_call_loses_no_announced_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, has_exchange: bool
) -> None:
    if not has_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda first, second: False)
    template = tmp_path / "template"
    for step in (1, 2):
        write_checkpoint(template, step, value=1.0)
    number = 0
    while True:
        number += 1
        folder = tmp_path / f"kill-{number}"
        shutil.copytree(template, folder, symlinks=True)
        announced = {1: 1.0, 2: 1.0}
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = kill_at_call(monkeypatch, number, before=before)
            try:
                save_and_rotate(folder, announced, value=2.0)
            except ProcessKilled:
                pass
        if not has_exchange:
            checkpoint.remove_partial_checkpoints(folder)  # as at every start of a run
        check_folder(folder, announced, f"call {number}")
        if count[0] < number:
            break  # it was not killed
    assert number > 40, "the calls were not counted"


def check_folder(folder: Path, announced: dict[int, float], context: str) -> None:
    candidates = checkpoint.list_checkpoints(folder)
    for path, _ in candidates:
        checkpoint.verify(path)  # no candidate is partially written or deleted
    steps = [manifest.step for _, manifest in candidates]
    # Retention may have deleted an announced checkpoint, but only once two newer ones are complete.
    newest = sorted(announced)[-1]
    assert newest in steps, f"{context}: {steps}"
    assert len(set(steps)) >= 2, f"{context}: {steps}"
    checkpoint.remove_partial_checkpoints(folder)
    names = {p.name for p in folder.iterdir()} - {"last"}
    assert all(name.startswith("step-") for name in names), f"{context}: {names}"
    newest_valid = checkpoint.find_newest_valid(folder, pytest.fail)
    assert newest_valid is not None
    assert newest_valid[1].step >= newest, context
    value = load_file(newest_valid[0] / "ema.safetensors")["w"][0, 0]
    assert value >= announced[newest], f"{context}: an older state under an announced name"


@pytest.mark.parametrize("name", ["rename", "fsync", "write"])
def test_os_error_at_any_call_cleans_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The process survives, so that the temporary folder must be removed as well."""
    for number in range(1, 8):
        folder = tmp_path / f"{name}-{number}"
        write_checkpoint(folder, 1, value=1.0)
        count = [0]
        real = tensor_file._write_all if name == "write" else getattr(os, name)

        def fail(*args: Any, real: Any = real, count: Any = count, number: int = number, **options: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise OSError(28, "No space left on device")
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*((tensor_file, "_write_all", fail) if name == "write" else (os, name, fail)))
            try:
                write_checkpoint(folder, 1, value=2.0)
            except OSError:
                assert not list(folder.glob(".tmp-*")), "a partial checkpoint was left"
        newest = checkpoint.find_newest_valid(folder, pytest.fail)
        assert newest is not None
        assert newest[1].step == 1
