"""Suggestions for mistyped names: only names that differ by a typing error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_RATIO = 0.65
"""Smallest similarity (difflib's ratio) of two similar names."""
SHORT_LENGTH = 3
"""In names up to this length a letter may be missing, doubled or swapped, but not replaced."""
MAX_EDITS = 3
"""Largest edit distance of two similar names, however long."""


def find_similar_names(word: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Return up to `count` of `names` that differ from `word` by a typing error, the closest first.

    The edit distance is bounded besides the ratio, because long names such as `data.train.encoding` and `data.train.weight`
    have most letters in common.
    """
    names_by_lowercase = {name.lower(): name for name in names}
    candidates = difflib.get_close_matches(word.lower(), names_by_lowercase, n=10, cutoff=MIN_RATIO)
    similar = [name for name in candidates if _is_typing_error(word.lower(), name)]
    return [
        names_by_lowercase[name] for name in sorted(similar, key=lambda name: _count_edits(word.lower(), name))[:count]
    ]


def _is_typing_error(word: str, name: str) -> bool:
    edits, shorter = _count_edits(word, name), min(len(word), len(name))
    if shorter > SHORT_LENGTH:
        return edits <= min(MAX_EDITS, 1 + shorter // 4)
    # In a short name, replacing a letter gives another valid name: cpu and gpu.
    return edits <= 1 and (len(word) != len(name) or sorted(word) == sorted(name))


def _count_edits(a: str, b: str) -> int:
    """Return the Damerau-Levenshtein distance: letters to insert, delete, replace or swap with a neighbour."""
    rows: list[list[int]] = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
