"""Damage and death: whatever happens to a checkpoint or its writer, what was announced loads and what is broken does not."""

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


def write(folder: Path, step: int, *, value: float = 0.0) -> Path:
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


def hurt(path: Path, rng: random.Random) -> str:
    """Flip one bit or cut the file, anywhere; what was done, in words."""
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.7:
        at = rng.randrange(len(raw))
        raw[at] ^= 1 << rng.randrange(8)
        what = f"{path.name}: bit flip at byte {at} of {len(raw)}"
    else:
        keep = rng.randrange(len(raw))
        del raw[keep:]
        what = f"{path.name}: cut to {keep} bytes"
    path.write_bytes(raw)
    return what


def campaign(folder: Path, rounds: int) -> None:
    older, newer = write(folder, 1), write(folder, 2)
    whole = {file.name: file.read_bytes() for file in newer.iterdir()}
    rng = random.Random(0)
    for i in range(rounds):
        name = sorted(whole)[i % len(whole)]
        what = hurt(newer / name, rng)
        with pytest.raises(CheckpointError, match="step-00000002"):
            checkpoint.verify(newer)
        said: list[str] = []
        found = checkpoint.find_newest_valid(folder, said.append)
        assert found is not None, what
        assert found[0] == older, what
        assert len(said) == 1, "the rejected one is named"
        assert "step-00000002 is damaged" in said[0]
        (newer / name).write_bytes(whole[name])
    assert checkpoint.find_newest_valid(folder, pytest.fail) == (newer, checkpoint.verify(newer))


def test_any_flip_or_cut_is_refused_and_the_older_one_is_used(tmp_path: Path) -> None:
    campaign(tmp_path, 60)


@pytest.mark.slow
def test_a_thousand_flips_and_cuts(tmp_path: Path) -> None:
    campaign(tmp_path, 1000)


def test_every_byte_of_the_manifest_matters(tmp_path: Path) -> None:
    """A step, a sequence number or a version changed by one bit would still be JSON."""
    manifest = write(tmp_path, 1) / "MANIFEST.json"
    raw = manifest.read_bytes()
    for at in range(len(raw)):
        manifest.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint.read_manifest(manifest.parent)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_file_is_named_with_its_sizes(tmp_path: Path, share: float) -> None:
    path = write(tmp_path, 1)
    model = path / "model.safetensors"
    size = model.stat().st_size
    os.truncate(model, int(size * share))
    with pytest.raises(
        CheckpointError, match=rf"step-00000001 is damaged: model\.safetensors {int(size * share)} of {size} bytes"
    ):
        checkpoint.verify(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        checkpoint.verify(path)


class Death(BaseException):
    """The process ends here. A real one does not clean up, so the simulated one must not either."""


def die_at(monkeypatch: pytest.MonkeyPatch, number: int, *, before: bool) -> list[int]:
    """Let every system call that changes the disk count, and the `number`-th be the last. Returns the count so far."""
    count = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] > number:
                raise Death  # nothing after death: cleaning up does not happen either
            if count[0] == number and before:
                raise Death
            result = call(*args, **options)
            if count[0] == number:
                raise Death
            return result

        return one

    for name in ("rename", "replace", "fsync", "symlink", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(tensor_file, "_write_all", counted(tensor_file._write_all))
    monkeypatch.setattr(durable, "_exchange", counted(durable._exchange))
    return count


def life(folder: Path, announced: dict[int, float], *, value: float) -> None:
    """What a saver does with two steps, one of them for the second time, and with retention."""
    for step in (2, 3):
        write(folder, step, value=value)
        announced[step] = value
        checkpoint.delete_old_checkpoints(folder, keep=2, protect=[])
        for gone in set(announced) - {3, 2} if step == 3 else set(announced) - {2, 1}:
            del announced[gone]


@pytest.mark.parametrize("exchanges", [True, False], ids=["two names exchanged", "renamed one by one"])
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "after the call"])
def test_death_at_any_system_call_loses_nothing_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    template = tmp_path / "template"
    for step in (1, 2):
        write(template, step, value=1.0)
    number = 0
    while True:
        number += 1
        folder = tmp_path / f"death-{number}"
        shutil.copytree(template, folder, symlinks=True)
        announced = {1: 1.0, 2: 1.0}
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = die_at(monkeypatch, number, before=before)
            try:
                life(folder, announced, value=2.0)
            except Death:
                pass
        if not exchanges:
            checkpoint.remove_partial_checkpoints(folder)  # as every start does
        check(folder, announced, f"call {number}")
        if count[0] < number:
            break  # it lived to the end
    assert number > 40, "the calls were seen"


def check(folder: Path, announced: dict[int, float], when: str) -> None:
    candidates = checkpoint.list_checkpoints(folder)
    for path, _ in candidates:
        checkpoint.verify(path)  # nothing half-written or half-deleted is ever a candidate
    steps = [manifest.step for _, manifest in candidates]
    # Retention may have taken an announced one on its way out, but only once two newer ones are whole.
    newest = sorted(announced)[-1]
    assert newest in steps, f"{when}: {steps}"
    assert len(set(steps)) >= 2, f"{when}: {steps}"
    checkpoint.remove_partial_checkpoints(folder)
    left = {p.name for p in folder.iterdir()} - {"last"}
    assert all(name.startswith("step-") for name in left), f"{when}: {left}"
    found = checkpoint.find_newest_valid(folder, pytest.fail)
    assert found is not None
    assert found[1].step >= newest, when
    value = load_file(found[0] / "ema.safetensors")["w"][0, 0]
    assert value >= announced[newest], f"{when}: an older state under an announced name"


@pytest.mark.parametrize("name", ["rename", "fsync", "write"])
def test_an_error_at_any_call_cleans_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Here the process lives on, so the temporary folder must be gone as well."""
    for number in range(1, 8):
        folder = tmp_path / f"{name}-{number}"
        write(folder, 1, value=1.0)
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
                write(folder, 1, value=2.0)
            except OSError:
                assert not list(folder.glob(".tmp-*")), "the half-written one is gone"
        good = checkpoint.find_newest_valid(folder, pytest.fail)
        assert good is not None
        assert good[1].step == 1
