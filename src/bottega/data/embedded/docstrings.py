"""Docstrings of Python's standard library: 2,508 of functions, classes and methods, from 11 packages.

docstrings.jsonl.gz beside this file was made by tools/docstrings.py from the sources of Python 3.11.7, Copyright (c) 2001
Python Software Foundation; All Rights Reserved, under the licence in docstrings.LICENSE. It differs from the sources:
docstrings of fewer than five words and near duplicates are left out, each is cut at 600 characters, there are at most 400
of a package, and package names (even within other words) are replaced by an underscore, because they would reveal the label.
"""

from __future__ import annotations

from pathlib import Path

from bottega.data.embedded import check_embedded_name

FILE = Path(__file__).with_name("docstrings.jsonl.gz")
"""Lines with text, label (the package) and group (the top-level class or function that contains the docstring)."""


def find_docstrings_file(name: str | None) -> Path:
    """Return the path of the file; `name` must be None, because there is only one."""
    check_embedded_name(name)
    return FILE
