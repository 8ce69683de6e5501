"""What earlier processes of a run have logged to Weights & Biases, read from wandb's own files in the run directory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import IO, Any

_RUN_FOLDER = re.compile(r"(offline-)?run-\d{8}_\d{6}-")
_FILE_HEADER_SIZE, _BLOCK_SIZE = 7, 32768
_CHUNK_HEADER = struct.Struct("<IHB")
"""Checksum, size and kind of a chunk; a record that crosses the border of a block has several chunks."""
_FULL, _LAST = 1, 4


def find_run_id(folder: Path) -> str | None:
    """Return the id of the newest wandb run in a run directory; None if there is none."""
    # The name of the folder is not enough: wandb adds a number to the second folder of one second.
    paths = [path for path in (folder / "wandb").glob("*run-*/run-*.wandb") if _RUN_FOLDER.match(path.parent.name)]
    newest = max(paths, key=lambda path: path.parent.name.partition("run-")[2], default=None)
    return newest.stem.removeprefix("run-") if newest is not None else None


def read_last_step(folder: Path, run_id: str) -> int:
    """Return the last step in the local files of a wandb run, -1 if there is none.

    wandb writes its file every 15 seconds, so a killed process may have logged later steps, which are lost.
    """
    paths = (folder / "wandb").glob(f"*run-*/run-{escape(run_id)}.wandb")
    return max((step for path in paths for step in read_steps(path)), default=-1)


def read_steps(path: Path) -> list[int]:
    """Return the steps in the history of a .wandb file, up to where it is cut off or damaged."""
    from wandb.proto import wandb_internal_pb2

    record_class: Any = wandb_internal_pb2.__dict__["Record"]  # generated when the module is loaded
    steps = []
    with path.open("rb") as file:
        for data in _iterate_records(file):
            try:
                record = record_class.FromString(data)
            except Exception:  # protobuf has an error class of its own for damaged messages
                break
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "_step" in items:
                steps.append(int(json.loads(items["_step"])))
    return steps


def _iterate_records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the complete records of a file in the log format of LevelDB, which wandb uses."""
    file.seek(_FILE_HEADER_SIZE)
    position, chunks = _FILE_HEADER_SIZE, b""
    while True:
        remaining = _BLOCK_SIZE - position % _BLOCK_SIZE
        if remaining < _CHUNK_HEADER.size:  # the rest of a block that cannot hold a header is padding
            position = file.seek(position + remaining)
        header = file.read(_CHUNK_HEADER.size)
        if len(header) < _CHUNK_HEADER.size:
            return
        _, size, kind = _CHUNK_HEADER.unpack(header)
        chunk = file.read(size)
        if len(chunk) < size or kind == 0:
            return
        position += _CHUNK_HEADER.size + size
        chunks += chunk
        if kind in (_FULL, _LAST):
            yield chunks
            chunks = b""
