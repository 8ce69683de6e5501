"""The code uses the field's words: names that say nothing about a value, and sentence forms that have to be read twice, are refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("src", "tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))
VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        "found said told kept facts known seen made asked asks wanted given settled applied based served lesson branch codec "
        "teller whoever",
    )
)
ALLOWED = {
    "src/bottega/data/prepare/scan.py": {"kept"},  # a field of a file that earlier versions have written
    "src/bottega/data/recall.py": {"facts"},  # the facts of a stream; the class's name feeds the data's fingerprint
    "src/bottega/data/text/html.py": {"known"},
    "src/bottega/models/memory/episodic.py": {"said"},  # a buffer in checkpoints
    "src/bottega/models/metric_networks/inception.py": {"branch"},  # the paper's word
    "src/bottega/tasks/recall/workload.py": {"facts"},
    "tests/tasks/recall/test_recall.py": {"facts"},
}
RIDDLES = re.compile(
    r"\bso many \w+ asks?\b|\bwhat who\b|(?<!there )\bis no (?!longer|more|less|such)[a-z]+", re.IGNORECASE
)
FIRST_WORDINGS = (
    "src/bottega/tasks/personalize/data/tables.py"  # the wording of earlier versions, which cache keys contain
)


def iterate_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that the module defines or assigns, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "tools"])
def test_names_say_what_a_value_is(folder: str) -> None:
    vague = []
    for path in (path for path in SOURCES if path.is_relative_to(ROOT / folder)):
        allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
        for name, line in iterate_names(ast.parse(path.read_text(encoding="utf-8"))):
            word = name.lower().strip("_")
            if word in VAGUE_NAMES and word not in allowed:
                vague.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not vague, "\n".join(vague)


def test_sentences_are_plain() -> None:
    riddles = []
    for path in (path for path in SOURCES if path.is_relative_to(ROOT / "src") and path != ROOT / FIRST_WORDINGS):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := RIDDLES.search(line):
                riddles.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not riddles, "\n".join(riddles)
