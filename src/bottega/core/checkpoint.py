"""Checkpoints that are whole or not there: hashed while written, renamed last, verified before use.

A checkpoint is a folder of safetensors files, progress.json and a MANIFEST.json with size and SHA-256 of each file.
It is written to a temporary sibling and renamed when everything is on disk; a folder that is being deleted is renamed
first. So whatever moment the process dies at, a folder named step-* is either complete or was never announced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.durable import flush
from bottega.core.errors import CheckpointError
from bottega.core.types import Tensors

FORMAT = 1
CHUNK = 16 << 20
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Manifest:
    step: int
    sequence: int
    files: dict[str, dict[str, Any]]
    fingerprint: dict[str, Any]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def write(
    folder: Path,
    *,
    step: int,
    files: Mapping[str, Tensors],
    progress: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
) -> Path:
    """Commit one checkpoint under `folder` and return its path; on an error the temporary folder is gone again."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".tmp-{step}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(mode=0o700)
        table = {name: write_safetensors(temporary / name, tensors) for name, tensors in files.items()}
        table["progress.json"] = _write_bytes(temporary / "progress.json", _json(progress))
        manifest = {
            "format": FORMAT,
            "step": step,
            "sequence": 1 + max((m.sequence for _, m in candidates(folder)), default=0),
            "files": table,
            "fingerprint": dict(fingerprint),
        }
        _write_bytes(temporary / "MANIFEST.json", _sealed(manifest))
        flush(temporary)
        final = folder / step_name(step)
        if final.exists():
            # Reached again after a fallback or a rollback. The old one stays a candidate until the new one is in place.
            os.rename(final, folder / f"{final.name}.old-{uuid.uuid4().hex[:8]}")
        os.rename(temporary, final)
        flush(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in folder.glob(f"{final.name}.old-*"):
        discard(old)
    point(folder, "last", final)
    return final


def write_safetensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """The safetensors format, streamed so that the hash costs no second pass and no second copy."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    header: dict[str, Any] = {}
    offset = 0
    # Widest types first keeps every tensor aligned to its own size.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        array = arrays[name]
        end = offset + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        data = (arrays[name].reshape(-1).view(np.uint8).data for name in order if arrays[name].size)
        for view in (memoryview(len(head).to_bytes(8, "little")), memoryview(head), *data):
            for at in range(0, len(view), CHUNK):
                _write_all(file, view[at : at + CHUNK], digest)
        os.fsync(file.fileno())
    return {"size": 8 + len(head) + offset, "sha256": digest.hexdigest()}


def candidates(folder: Path) -> list[tuple[Path, Manifest]]:
    """Folders with a readable manifest, newest first by sequence: clocks and file times can lie."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda item: (item[1].sequence, item[1].step), reverse=True)


def read_manifest(path: Path) -> Manifest:
    try:
        raw = (path / "MANIFEST.json").read_bytes()
        fields = json.loads(raw)
        if fields["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path.name}: format {fields['format']!r}, this version reads {FORMAT}")
        # Written by us it reads back to the same bytes, so that no change of a step or a hash goes unnoticed.
        if _sealed({key: value for key, value in fields.items() if key != "sha256"}) != raw:
            raise CheckpointError(f"checkpoint {path.name} damaged: MANIFEST.json does not match its SHA-256")
        files = {str(name): {"size": int(f["size"]), "sha256": str(f["sha256"])} for name, f in fields["files"].items()}
        return Manifest(int(fields["step"]), int(fields["sequence"]), files, dict(fields["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name} damaged: MANIFEST.json: {type(error).__name__}") from None


def verify(path: Path) -> Manifest:
    """Sizes first, they are cheap; then every hash, in parallel. Nothing is parsed before this has passed."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        # A manifest is data too: it may not point outside its folder.
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None or name.startswith("."):
            raise CheckpointError(f"checkpoint {path.name} damaged: MANIFEST.json names {name!r}")
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"checkpoint {path.name} damaged: {name} is missing") from None
        if size != expected["size"]:
            raise CheckpointError(f"checkpoint {path.name} damaged: {name} {size} of {expected['size']} bytes")
    for needed in ("model.safetensors", "progress.json"):
        if needed not in manifest.files:
            raise CheckpointError(f"checkpoint {path.name} damaged: MANIFEST.json lacks {needed}")
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = dict(zip(manifest.files, pool.map(lambda name: _hash_file(path / name), manifest.files), strict=True))
    for name, digest in digests.items():
        if digest != manifest.files[name]["sha256"]:
            raise CheckpointError(f"checkpoint {path.name} damaged: {name} does not match its SHA-256")
    return manifest


def newest_good(folder: Path, say: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies; every one that does not is named."""
    unreadable = (
        {p.name for p in folder.glob("step-*")} - {p.name for p, _ in candidates(folder)} if folder.is_dir() else ()
    )
    for name in sorted(unreadable, reverse=True):
        say(f"checkpoint {name} damaged: MANIFEST.json cannot be read; ignored")
    for path, _ in candidates(folder):
        try:
            return path, verify(path)
        except CheckpointError as error:
            say(f"{error}; trying an older one")
    return None


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a verified checkpoint."""
    try:
        fields = json.loads((path / "progress.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name} damaged: progress.json: {type(error).__name__}") from None
    return dict(fields) if isinstance(fields, dict) else {}


def sweep(folder: Path) -> None:
    """Remove what an earlier process left half-written or half-deleted, and undo a replacement it had begun."""
    for path in [*folder.glob(".tmp-*"), *folder.glob(".trash-*")]:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for old in folder.glob("step-*.old-*"):
        final = folder / old.name.partition(".old-")[0]
        if final.exists():
            discard(old)
        else:
            os.rename(old, final)


def discard(path: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never a candidate."""
    trash = path.parent / f".trash-{path.name}-{uuid.uuid4().hex[:8]}"
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def retain(folder: Path, *, keep: int, protect: Sequence[Path]) -> None:
    """Keep the newest `keep` and the protected ones; delete the rest, once the newest is known to be good."""
    found = candidates(folder)
    doomed = [path for path, _ in found[keep:] if path not in protect]
    if not doomed:
        return
    verify(found[0][0])
    for path in doomed:
        discard(path)


def point(folder: Path, name: str, target: Path) -> None:
    """`last` and `best`: a link, or a text file holding the name where the file system has no links."""
    temporary = folder / f".tmp-{name}-{uuid.uuid4().hex[:8]}"
    try:
        os.symlink(target.name, temporary)
    except (OSError, NotImplementedError):
        temporary.write_text(target.name + "\n")
    os.replace(temporary, folder / name)


def follow(folder: Path, name: str) -> Path | None:
    """Where `last` or `best` points, if it does."""
    path = folder / name
    if path.is_symlink() or path.is_dir():
        target = folder / Path(os.readlink(path)).name if path.is_symlink() else path
    elif path.is_file():
        target = folder / Path(path.read_text().strip()).name  # a name: nothing outside this folder is a checkpoint
    else:
        return None
    return target if target.is_dir() else None


def _write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(data), digest)
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": digest.hexdigest()}


def _write_all(file: Any, view: memoryview, digest: Any) -> None:
    digest.update(view)
    while view:
        view = view[file.write(view) :]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest with a hash of itself."""
    return _json({**manifest, "sha256": hashlib.sha256(_json(manifest)).hexdigest()})


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
