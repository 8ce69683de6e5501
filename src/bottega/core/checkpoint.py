"""Atomic checkpoints: hashed while they are written, renamed into place last, verified before they are read.

A checkpoint is a folder of safetensors files, progress.json and a MANIFEST.json with the size and SHA-256 of each file.
It is written to a temporary sibling and renamed when everything is on disk; a folder that is deleted is renamed first.
So a folder named step-* is complete, or was never reported as saved, whenever the process is killed.

Which checkpoint is the last and which the best follows from the manifests and from progress.json. The links `last` and
`best` are for people; this module does not rely on them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError, EnvironmentProblem
from bottega.core.types import Tensors
from bottega.redaction import redact_values
from bottega.storage.durable import delete_folder, remove_leftovers, replacing_file, writing_folder
from bottega.storage.tensor_file import write_bytes, write_safetensors

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Contents of a MANIFEST.json: `files` maps each file name to its size and SHA-256."""

    step: int
    sequence: int
    files: dict[str, dict[str, Any]]
    fingerprint: dict[str, Any]


def step_folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint, such as step-00001000."""
    return f"step-{step:08d}"


def write(
    folder: Path,
    *,
    step: int,
    files: Mapping[str, Tensors],
    progress: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step` under `folder` and return its path; after an error no temporary folder is left."""
    # After a rollback, or a resume from an older checkpoint, this step may have a checkpoint already; it is replaced.
    with writing_folder(folder / step_folder_name(step), mode=0o700) as temporary:
        file_entries = {name: write_safetensors(temporary / name, tensors) for name, tensors in files.items()}
        file_entries["progress.json"] = write_bytes(
            temporary / "progress.json", _encode_json(redact_values(dict(progress)))
        )
        manifest = {
            "format": FORMAT,
            "step": step,
            "sequence": 1 + max((m.sequence for _, m in list_checkpoints(folder)), default=0),
            "files": file_entries,
            "fingerprint": redact_values(dict(fingerprint)),
        }
        write_bytes(temporary / "MANIFEST.json", _seal_manifest(manifest))
    return folder / step_folder_name(step)


def list_step_folders(folder: Path) -> list[Path]:
    """Return every checkpoint folder in `folder`, complete or not. Raises if an existing folder cannot be listed."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith("step-"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read {folder}, the folder of the run's checkpoints: {error.strerror}; make it readable"
        ) from None


def list_checkpoints(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the folders with a readable manifest, newest first by sequence number, since clocks and file times can be wrong."""
    checkpoints = []
    for path in list_step_folders(folder):
        with suppress(CheckpointError):
            checkpoints.append((path, read_manifest(path)))
    return sorted(checkpoints, key=lambda item: (item[1].sequence, item[1].step), reverse=True)


def find_newest(folder: Path) -> Path | None:
    """Return the checkpoint that was saved last, if any."""
    return next((path for path, _ in list_checkpoints(folder)), None)


def find_best(folder: Path) -> tuple[Path | None, int]:
    """Return the best existing checkpoint, and the step that the newest progress names as the best (0: none).

    The two differ if the best checkpoint could not be saved or was deleted; then the newest former best is returned.
    """
    checkpoints = [
        (path, manifest.step, _read_best_step(path, manifest)) for path, manifest in list_checkpoints(folder)
    ]
    best_step = next((best for _, _, best in checkpoints if best is not None), 0)
    matches = [path for path, step, _ in checkpoints if step == best_step]
    matches += [path for path, step, best in checkpoints if step == best]
    return (matches[0] if matches else None), best_step


def _read_best_step(path: Path, manifest: Manifest) -> int | None:
    """Return the best step according to progress.json; None if the file cannot be read."""
    try:
        raw = (path / "progress.json").read_bytes()
        is_intact = hashlib.sha256(raw).hexdigest() == manifest.files["progress.json"]["sha256"]
        return int(json.loads(raw).get("best_step", 0)) if is_intact else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def update_links(folder: Path, *, last: Path | None = None) -> None:
    """Point the links `last` (by default the newest checkpoint) and `best` where manifests and progress say."""
    for name, target in (("last", last or find_newest(folder)), ("best", find_best(folder)[0])):
        if target is not None and read_link(folder, name) != folder / target.name:
            write_link(folder, name, target)
        elif target is None and os.path.lexists(folder / name):
            os.unlink(folder / name)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise CheckpointError if it is damaged or of another format."""
    try:
        raw = (path / "MANIFEST.json").read_bytes()
        fields = json.loads(raw)
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {path.name} has format {fields['format']!r}, but this version reads {FORMAT}; use the "
                "version that wrote it"
            )
        # Encoded again, the fields must give the same bytes, so that no change of a step or a hash goes unnoticed.
        if _seal_manifest({key: value for key, value in fields.items() if key != "sha256"}) != raw:
            raise CheckpointError(f"checkpoint {path.name} is damaged: MANIFEST.json does not match its SHA-256")
        files = {str(name): {"size": int(f["size"]), "sha256": str(f["sha256"])} for name, f in fields["files"].items()}
        return Manifest(int(fields["step"]), int(fields["sequence"]), files, dict(fields["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: MANIFEST.json: {type(error).__name__}") from None


def verify(path: Path, *, only: Collection[str] | None = None) -> Manifest:
    """Check the sizes of all files, then their hashes in parallel; raise CheckpointError if one does not match.

    `only` names the files that will be read, if not all of them: an evaluation does not need the optimizer state.
    """
    manifest = read_manifest(path)
    files = [name for name in manifest.files if only is None or name in only]
    for name, expected in manifest.files.items():
        # A manifest is untrusted data: it must not point outside its folder.
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None or name.startswith("."):
            raise CheckpointError(f"checkpoint {path.name} is damaged: MANIFEST.json lists the invalid name {name!r}")
        if name not in files:
            continue
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path.name} is damaged: {name} is missing") from None
        except OSError as error:
            raise _make_read_error(path, name, error) from None
        if size != expected["size"]:
            raise CheckpointError(f"checkpoint {path.name} is damaged: {name} has {size} of {expected['size']} bytes")
    for required in ("model.safetensors", "progress.json"):
        if required not in manifest.files:
            raise CheckpointError(f"checkpoint {path.name} is damaged: MANIFEST.json lacks {required}")
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = dict(zip(files, pool.map(lambda name: _hash_file(path, name), files), strict=True))
    for name, digest in digests.items():
        if digest != manifest.files[name]["sha256"]:
            raise CheckpointError(f"checkpoint {path.name} is damaged: {name} does not match its SHA-256")
    return manifest


def find_newest_valid(folder: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that passes verification; warn about each one that does not."""
    checkpoints = list_checkpoints(folder)
    for path in sorted(set(list_step_folders(folder)) - {path for path, _ in checkpoints}, reverse=True):
        warn(f"checkpoint {path.name} is damaged: MANIFEST.json cannot be read; ignored")
    for path, _ in checkpoints:
        try:
            return path, verify(path)
        except CheckpointError as error:
            warn(f"{error}; trying an older one")
    return None


def read_progress(path: Path) -> dict[str, Any]:
    """Return the fields of progress.json of a verified checkpoint."""
    try:
        fields = json.loads((path / "progress.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: progress.json: {type(error).__name__}") from None
    return dict(fields) if isinstance(fields, dict) else {}


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove checkpoints that a killed process left half-written or half-deleted, and restore one that it was replacing."""
    if folder.is_dir():
        remove_leftovers(folder)


def delete_old_checkpoints(folder: Path, *, keep: int, protect: Sequence[Path]) -> None:
    """Delete all but the newest `keep` and the protected checkpoints, after verifying the newest one."""
    checkpoints = list_checkpoints(folder)
    outdated = [path for path, _ in checkpoints[keep:] if path not in protect]
    if not outdated:
        return
    verify(checkpoints[0][0])
    for path in outdated:
        delete_folder(path)


def write_link(folder: Path, name: str, target: Path) -> None:
    """Write the link `last` or `best`; if the file system has no links, a text file that contains the target's name."""
    with replacing_file(folder / name) as temporary:
        try:
            os.symlink(target.name, temporary)
        except (OSError, NotImplementedError) as error:
            if getattr(error, "errno", None) in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            temporary.write_text(target.name + "\n")


def read_link(folder: Path, name: str) -> Path | None:
    """Return the checkpoint that `last` or `best` points to; None if there is none."""
    path = folder / name
    if path.is_symlink() or path.is_dir():
        target = folder / Path(os.readlink(path)).name if path.is_symlink() else path
    elif path.is_file():
        target = folder / Path(path.read_text().strip()).name  # the name alone: a link must stay inside this folder
    else:
        return None
    return target if target.is_dir() else None


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest as JSON with a hash of itself."""
    return _encode_json({**manifest, "sha256": hashlib.sha256(_encode_json(manifest)).hexdigest()})


def _hash_file(path: Path, name: str) -> str:
    try:
        with open(path / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _make_read_error(path, name, error) from None


def _make_read_error(path: Path, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read checkpoint {path.name}: {name}: {error.strerror}")
