"""Built-in text corpora: the sources of Python's standard library, and generated texts by name."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.files import Listing
from bottega.data.formats.reader import Format
from bottega.data.formats.text import FORMAT as TEXT

# Excluded are tests, code tables, modules that some distributions package separately, and files that belong to one
# installation, so that a version of Python gives the same corpus nearly everywhere.
PACKAGED_SEPARATELY = ("idlelib", "lib2to3", "turtledemo", "tkinter", "distutils", "ensurepip")
INSTALLED = ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "sitecustomize.py", "usercustomize.py")
EXCLUDED = frozenset(("test", "tests", "__phello__", "encodings", *PACKAGED_SEPARATELY, *INSTALLED))

FORMAT = Format(kind="embedded", suffixes=frozenset(), read=TEXT.read, list_pieces=TEXT.list_pieces)


def list_standard_library() -> Listing:
    """List the Python files of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED and not name.startswith(".")]
        files += [Path(folder, name) for name in names if _is_corpus_file(name)]
    if not files:
        raise DataError(f"{root} has no Python sources; give a corpus of your own with data.train.path")
    return Listing(root, sorted(files, key=lambda file: file.relative_to(root).as_posix()), is_folder=True)


def resolve_named_texts(source: Source) -> Source:
    """Replace a source of generated texts, given by name, by the files they are written to."""
    from bottega.data.embedded.sticker_texts import materialise_texts

    assert source.path is not None
    return source.model_copy(update={"kind": "jsonl", "path": str(materialise_texts(source.path))})


def _is_corpus_file(name: str) -> bool:
    # _sysconfigdata* is generated when Python is built and differs between machines.
    return name.endswith(".py") and name not in EXCLUDED and not name.startswith((".", "_sysconfigdata"))
