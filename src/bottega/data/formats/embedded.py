"""The text that every machine has, the sources of Python's standard library; and texts that are made, by name."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.files import Listing
from bottega.data.formats.reader import Format
from bottega.data.formats.text import FORMAT as TEXT

# Left out: tests, code tables, what some distributions package apart, and what belongs to one installation; so one
# version of Python gives one corpus nearly everywhere.
PACKAGED_APART = ("idlelib", "lib2to3", "turtledemo", "tkinter", "distutils", "ensurepip")
INSTALLED = ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "sitecustomize.py", "usercustomize.py")
WITHOUT = frozenset(("test", "tests", "__phello__", "encodings", *PACKAGED_APART, *INSTALLED))

FORMAT = Format(kind="embedded", suffixes=frozenset(), read=TEXT.read, list_pieces=TEXT.list_pieces)


def list_standard_library() -> Listing:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in WITHOUT and not name.startswith(".")]
        files += [Path(folder, name) for name in names if _belongs(name)]
    if not files:
        raise DataError(f"{root} has no Python sources; name a corpus of your own")
    return Listing(root, sorted(files, key=lambda file: file.relative_to(root).as_posix()), is_folder=True)


def resolve_named_texts(source: Source) -> Source:
    """Texts that are asked for by name, as a source of files."""
    from bottega.data.embedded.sticker_texts import materialise_texts

    assert source.path is not None
    return source.model_copy(update={"kind": "jsonl", "path": str(materialise_texts(source.path))})


def _belongs(name: str) -> bool:
    # _sysconfigdata* is generated when that Python is built, so no two machines agree on it.
    return name.endswith(".py") and name not in WITHOUT and not name.startswith((".", "_sysconfigdata"))
