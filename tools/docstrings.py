"""Makes src/bottega/data/embedded/docstrings.jsonl.gz from the standard library of the Python that runs it.

    python tools/docstrings.py src/bottega/data/embedded/docstrings.jsonl.gz

The file is made once and kept: Python 3.11, 3.12 and 3.13 differ in hundreds of docstrings, and every machine must learn
from the same ones. Run it with Python 3.11 only to see how the file came about.
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
FEWEST_WORDS = 5
LONGEST = 600
"""Characters; cut at a word. The longest have 4,000, and what they are about is said at the beginning."""
MOST = 400
"""Of one package: tkinter and idlelib have twice as many as any other."""
SIMILAR = 0.5
"""Share of common runs of five words that makes two docstrings one."""
HIDDEN = "_"
NAMES = re.compile(rf"\w*(?:{'|'.join(PACKAGES)})\w*", re.IGNORECASE)


class Doc(NamedTuple):
    text: str
    label: str
    group: str
    """The class or function at the top of its module that it belongs to; a split keeps these together."""


def docs(root: Path, package: str) -> Iterator[Doc]:
    for file in sorted((root / package).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if {"test", "tests", "idle_test"} & set(file.parts):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for text in _texts(node):
                if len(text.split()) >= FEWEST_WORDS:
                    yield Doc(hidden(text), package, f"{module}.{getattr(node, 'name', '')}")


def hidden(text: str) -> str:
    """Without the names of all the packages, also within other words: any of them would give an answer away."""
    text = NAMES.sub(HIDDEN, inspect.cleandoc(text))
    if len(text) > LONGEST:
        text = text[:LONGEST].rsplit(maxsplit=1)[0]
    return text


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        text = ast.get_docstring(node)
        if text is not None:
            yield text
        for inner in node.body:
            yield from _texts(inner)


def chosen(root: Path) -> list[Doc]:
    """No two alike, in no package too many, in the order of a hash."""
    found = [doc for package in PACKAGES for doc in docs(root, package)]
    found = [doc for doc, stays in zip(found, find_exact_unique(_keys(found)), strict=True) if stays]
    signatures = np.stack([minhash_signature(doc.text) for doc in found])
    found = [doc for doc, stays in zip(found, find_near_unique(signatures, SIMILAR), strict=True) if stays]
    found.sort(key=lambda doc: hashlib.sha256(doc.text.encode()).digest())
    return [doc for package in PACKAGES for doc in [doc for doc in found if doc.label == package][:MOST]]


def _keys(found: list[Doc]) -> np.ndarray:
    return np.array([hash_content(doc.text) for doc in found], np.uint64)


def main() -> None:
    rows = chosen(Path(sysconfig.get_paths()["stdlib"]))
    rows.sort(key=lambda doc: hashlib.sha256(doc.text.encode()).digest())
    lines = "".join(json.dumps(doc._asdict(), ensure_ascii=False) + "\n" for doc in rows)
    # No name and no time in the header, so that the same lines are the same bytes.
    Path(sys.argv[1]).write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
