"""Write src/bottega/data/embedded/docstrings.jsonl.gz from the standard library of the running Python.

    python tools/docstrings.py src/bottega/data/embedded/docstrings.jsonl.gz

The file is generated once and committed: Python 3.11, 3.12 and 3.13 differ in hundreds of docstrings, and every machine must
train on the same ones. It was generated with Python 3.11.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bottega.data.text.duplicates import find_exact_unique, find_near_unique, hash_content, minhash_signature

PACKAGES = (
    *("asyncio", "email", "http", "idlelib", "importlib", "logging"),
    *("multiprocessing", "tkinter", "unittest", "urllib", "xml"),
)
MIN_WORDS = 5
MAX_CHARACTERS = 600
"""Longer texts are cut at a word. The longest have 4,000 characters, and their subject is stated at the beginning."""
MAX_PER_PACKAGE = 400
"""tkinter and idlelib have twice as many docstrings as any other package."""
MIN_SIMILARITY = 0.5
"""Fraction of shared 5-word shingles above which two docstrings are duplicates."""
REPLACEMENT = "_"
PACKAGE_NAMES = re.compile(rf"\w*(?:{'|'.join(PACKAGES)})\w*", re.IGNORECASE)


class Doc(NamedTuple):
    text: str
    label: str
    group: str
    """The top-level class or function that contains the docstring; splits do not separate a group."""


def iter_docs(root: Path, package: str) -> Iterator[Doc]:
    for file in sorted((root / package).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if {"test", "tests", "idle_test"} & set(file.parts):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for text in _iter_docstrings(node):
                if len(text.split()) >= MIN_WORDS:
                    yield Doc(hide_package_names(text), package, f"{module}.{getattr(node, 'name', '')}")


def hide_package_names(text: str) -> str:
    """Replace each word that contains the name of a package, which would reveal the label; cut long texts."""
    text = PACKAGE_NAMES.sub(REPLACEMENT, inspect.cleandoc(text))
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS].rsplit(maxsplit=1)[0]
    return text


def _iter_docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        text = ast.get_docstring(node)
        if text is not None:
            yield text
        for inner in node.body:
            yield from _iter_docstrings(inner)


def select_docs(root: Path) -> list[Doc]:
    """Return deduplicated docstrings: of each package the first MAX_PER_PACKAGE in the order of their hashes."""
    docs = [doc for package in PACKAGES for doc in iter_docs(root, package)]
    docs = [doc for doc, is_unique in zip(docs, find_exact_unique(_hash_texts(docs)), strict=True) if is_unique]
    signatures = np.stack([minhash_signature(doc.text) for doc in docs])
    docs = [doc for doc, is_unique in zip(docs, find_near_unique(signatures, MIN_SIMILARITY), strict=True) if is_unique]
    docs.sort(key=lambda doc: hashlib.sha256(doc.text.encode()).digest())
    return [doc for package in PACKAGES for doc in [doc for doc in docs if doc.label == package][:MAX_PER_PACKAGE]]


def _hash_texts(docs: list[Doc]) -> np.ndarray:
    return np.array([hash_content(doc.text) for doc in docs], np.uint64)


def main() -> None:
    docs = select_docs(Path(sysconfig.get_paths()["stdlib"]))
    docs.sort(key=lambda doc: hashlib.sha256(doc.text.encode()).digest())
    lines = "".join(json.dumps(doc._asdict(), ensure_ascii=False) + "\n" for doc in docs)
    # No file name and no time in the header, so that equal lines give equal bytes.
    Path(sys.argv[1]).write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
