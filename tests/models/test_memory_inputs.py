"""Input validation of a memory: accepted types, one-line errors, and no change of state after an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.memory.config import MemoryShape
from bottega.models.memory.torch import HierarchicalMemory

SHAPE = MemoryShape(key_size=3, value_size=2, working_slots=4, episodic_slots=6, semantic_slots=2, promote_after=3)
KEYS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
VALUES = [[1.0, 2.0], [3.0, 4.0]]
NAN, INF = float("nan"), float("inf")


def build_memory(**changes: Any) -> HierarchicalMemory:
    memory = HierarchicalMemory(SHAPE.model_copy(update=changes))
    memory.store(KEYS, VALUES, clock=3)
    return memory


def state_lists(memory: HierarchicalMemory) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in memory.state_dict().items()}


REFUSED: dict[str, tuple[Callable[[HierarchicalMemory], Any], str]] = {
    "nan key": (lambda m: m.store([[NAN, 0, 0]], [[1, 2]], clock=4), "keys have numbers that are not finite"),
    "inf value": (lambda m: m.store([[1, 0, 0]], [[INF, 2]], clock=4), "values have numbers that are not finite"),
    "nan importance": (lambda m: m.store(KEYS, VALUES, NAN, clock=4), "importances have numbers that are not finite"),
    "too large": (
        lambda m: m.store(np.full((1, 3), 1e300), [[1, 2]], clock=4),
        "keys have numbers that are not finite",
    ),
    "ragged": (lambda m: m.store([[1, 0, 0], [1]], VALUES, clock=4), "keys cannot be read as a table of numbers"),
    "strings": (lambda m: m.store([["a", "b", "c"]], [[1, 2]], clock=4), "keys cannot be read as a table of numbers"),
    "a single key": (lambda m: m.store([1, 0, 0], [[1, 2]], clock=4), r"expected keys \[n, 3\], got \[3\]"),
    "importances": (
        lambda m: m.store(KEYS, VALUES, [1.0, 1.0, 1.0], clock=4),
        r"\[3\] importances for \[2\] keys; give one for each, or a single number",
    ),
    "single importance in a list": (
        lambda m: m.store(KEYS, VALUES, [1.0], clock=4),
        r"\[1\] importances for \[2\] keys",
    ),
    "fractional clock": (lambda m: m.store(KEYS, VALUES, clock=4.5), "clock 4.5 is not an integer"),
    "decreasing clock": (lambda m: m.search(KEYS, 1, clock=2), "clock 2 is before 3, the last one"),
    "query size": (lambda m: m.search([[1, 0, 0, 0]], 1), r"expected queries \[n, 3\], got \[1, 4\]"),
    "read query size": (lambda m: m.read(torch.zeros(1, 4)), r"expected queries \[n, 3\], got \[1, 4\]"),
    "nan query": (lambda m: m.search([[NAN, 0, 0]], 1), "queries have numbers that are not finite"),
    "by": (lambda m: m.search(KEYS, 1, by="foo"), "by must be exact or faiss, got 'foo'"),
    "zero temperature": (lambda m: m.read(KEYS, 0.0), "temperature must be greater than 0, got 0.0"),
    "negative temperature": (lambda m: m.read(KEYS, -1), "temperature must be greater than 0, got -1"),
    "nan temperature": (lambda m: m.read(KEYS, NAN), "temperature must be greater than 0, got nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_input_is_refused_and_leaves_the_memory_unchanged(name: str) -> None:
    memory = build_memory()
    before = state_lists(memory)
    call, message = REFUSED[name]
    with pytest.raises(UsageError, match=f"^memory: {message}") as error:
        call(memory)
    assert "\n" not in str(error.value)
    assert state_lists(memory) == before


@pytest.mark.parametrize(
    "convert",
    [
        torch.tensor,
        lambda rows: torch.tensor(rows, dtype=torch.float64),
        lambda rows: torch.tensor(rows, dtype=torch.bfloat16),
        lambda rows: np.array(rows, np.float16),
        lambda rows: np.array(rows, np.int64),
    ],
    ids=["float32", "float64", "bfloat16", "numpy", "integers"],
)
def test_any_numeric_type_gives_the_same_memory(convert: Callable[[Any], Any]) -> None:
    memory = HierarchicalMemory(SHAPE)
    memory.store(convert(KEYS), convert(VALUES), convert([1, 1]), clock=np.int64(3))
    assert state_lists(memory) == state_lists(build_memory())
    assert {t.dtype for name, t in memory.state_dict().items() if name != "clock"} == {torch.float32}
    assert memory.search(convert(KEYS), 1).values[:, 0].tolist() == VALUES
    assert memory.read(convert(KEYS), 0.01).tolist() == VALUES


def test_scalar_importance_applies_to_all_keys() -> None:
    scalar, per_key = HierarchicalMemory(SHAPE), HierarchicalMemory(SHAPE)
    scalar.store(KEYS, VALUES, 0.5, clock=0)
    per_key.store(KEYS, VALUES, [0.5, 0.5], clock=0)
    assert state_lists(scalar) == state_lists(per_key)


def test_smaller_saved_memory_loads_into_a_larger_one(tmp_path: Path) -> None:
    small = build_memory(working_slots=2, episodic_slots=3, semantic_slots=1)
    small.save(str(tmp_path / "small"))
    large = HierarchicalMemory(SHAPE)
    large.load(str(tmp_path / "small"))
    assert len(large) == len(small) == 2
    assert large.clock == 3
    assert {name: len(t) for name, t in large.state_dict().items() if name.endswith("keys")} == {
        "working_keys": 4,
        "episodic_keys": 6,
        "semantic_keys": 2,
    }
    large.store([[0.0, 0.0, 1.0]], [[5.0, 6.0]], clock=4)
    assert large.search([*KEYS, [0.0, 0.0, 1.0]], 1).values[:, 0].tolist() == [*VALUES, [5.0, 6.0]]


def test_every_mismatched_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    HierarchicalMemory(SHAPE.model_copy(update={"key_size": 5, "working_slots": 9, "semantic_slots": 1})).save(path)
    memory = build_memory()
    before = state_lists(memory)
    with pytest.raises(
        CheckpointError,
        match=r"the saved memory has key_size 5 \(this memory: 3\), working_slots 9 \(this memory: 4\); create",
    ):
        memory.load(path)
    assert state_lists(memory) == before


def test_level_with_inconsistent_sizes_is_refused() -> None:
    state = build_memory().state_dict()
    state["episodic_uses"] = state["episodic_uses"][:2]
    with pytest.raises(CheckpointError, match=r"episodic_uses has shape \[2\], which does not match its level"):
        HierarchicalMemory(SHAPE).load_state_dict(state)


def test_saving_to_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*missing does not exist; create it first"):
        build_memory().save(tmp_path / "missing" / "memory")
