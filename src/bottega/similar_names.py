"""Which known name somebody probably meant: only one that is really near, so that no suggestion leads astray."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_RATIO = 0.65
"""Share of letters in common (difflib's ratio) from which two names are near."""
SHORT_LENGTH = 3
"""Letters up to which a letter may be missing, doubled or swapped, and not another one."""
MAX_EDITS = 3
"""Letters apart from which no two names are, however long they are."""


def find_similar_names(word: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Return up to `count` of `names` that differ from `word` by a slip of the hand, the nearest first.

    Letters are counted and not shares of them alone: `data.train.encoding` and `data.train.weight` have most letters in
    common, and nobody means one by the other.
    """
    folded = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), folded, n=10, cutoff=MIN_RATIO)
    near = [name for name in close if _is_slip(word.lower(), name)]
    return [folded[name] for name in sorted(near, key=lambda name: _edits(word.lower(), name))[:count]]


def _is_slip(word: str, name: str) -> bool:
    edits, shorter = _edits(word, name), min(len(word), len(name))
    if shorter > SHORT_LENGTH:
        return edits <= min(MAX_EDITS, 1 + shorter // 4)
    # Of three letters another one makes another word: cpu and gpu.
    return edits <= 1 and (len(word) != len(name) or sorted(word) == sorted(name))


def _edits(a: str, b: str) -> int:
    """Return the number of letters to add, drop, change or swap with a neighbour between two words (Damerau)."""
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
