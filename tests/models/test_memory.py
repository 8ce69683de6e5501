"""Hierarchical memory: bounded size, decay by an explicit clock, retrieval by cosine similarity, and no in-place updates."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.models.memory import episodic as memory_episodic
from bottega.models.memory import semantic as memory_semantic
from bottega.models.memory import torch as memories
from bottega.models.memory import working as memory_working
from bottega.models.memory.config import MemoryShape
from bottega.models.memory.search import search_exact, search_faiss
from bottega.models.memory.torch import HierarchicalMemory

K, V = 8, 3
SHAPE = MemoryShape(
    key_size=K,
    value_size=V,
    working_slots=4,
    working_decay=0.5,
    working_floor=0.1,
    episodic_slots=12,
    episodic_decay=0.9,
    semantic_slots=5,
    promote_after=3,
)
DECAY = {"decay": 0.5, "floor": 0.1}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthogonal_keys(count: int) -> Tensor:
    """Return `count` orthogonal keys."""
    return torch.eye(K)[:count]


def have_equal_rows(a: Tensor, b: Tensor) -> bool:
    """Return whether both have the same rows, in any order."""
    return {tuple(row) for row in a.tolist()} == {tuple(row) for row in b.tolist()}


# Working memory


def empty_working(slots: int = 4) -> Any:
    return memory_working.empty_working(slots=slots, key_size=K, value_size=V)


def test_strength_decays_each_tick_and_weak_items_are_removed() -> None:
    memory = memory_working.store(empty_working(), orthogonal_keys(2), draw(2, V), torch.tensor([1.0, 0.3]), 7, **DECAY)
    assert memory.strength.tolist() == pytest.approx([1.0, 0.3, 0, 0])
    later = memory_working.decay_working(memory, 8, **DECAY)
    assert later.strength.tolist() == pytest.approx([0.5, 0.15, 0, 0])
    later = memory_working.decay_working(later, 9, **DECAY)
    assert later.strength.tolist() == pytest.approx([0.25, 0, 0, 0]), "0.075 is below the floor of 0.1"
    assert later.values[1].tolist() == [0, 0, 0], "a removed value is zeroed"
    two_ticks = memory_working.decay_working(memory, 9, **DECAY)
    assert torch.allclose(two_ticks.strength, later.strength), "decaying by two ticks equals decaying twice by one"
    back = memory_working.decay_working(memory, 3, **DECAY)
    assert torch.equal(back.strength, memory.strength), "an earlier clock changes nothing"


def test_weakest_item_is_evicted_old_or_new() -> None:
    values = torch.arange(6.0)[:, None].expand(6, V)
    first = memory_working.store(
        empty_working(), orthogonal_keys(6)[:4], values[:4], torch.tensor([0.9, 0.2, 0.7, 0.8]), 0, **DECAY
    )
    second = memory_working.store(first, orthogonal_keys(6)[4:], values[4:], torch.tensor([0.5, 0.1]), 0, **DECAY)
    assert sorted(second.values[:, 0].tolist()) == [0, 2, 3, 4]


@pytest.mark.parametrize("num_stores", [1, 3, 12])
def test_batched_store_equals_sequential_stores(num_stores: int) -> None:
    keys, values, importance = draw(12, K), draw(12, V, seed=1), draw(12, seed=2).sigmoid()
    memory = empty_working()
    for indices in torch.arange(12).chunk(num_stores):
        memory = memory_working.store(memory, keys[indices], values[indices], importance[indices], 3, **DECAY)
    best = importance.argsort(descending=True)[:4]
    assert torch.equal(memory.values, values[best])


def test_repeated_key_replaces_its_value() -> None:
    keys, same = torch.cat((orthogonal_keys(2), orthogonal_keys(1))), {"same": 0.9}
    memory = memory_working.store(
        empty_working(), keys, torch.arange(9.0).view(3, 3), torch.ones(3), 0, **DECAY, **same
    )
    assert have_equal_rows(memory.values[memory.valid], torch.tensor([[3.0, 4, 5], [6, 7, 8]]))
    memory = memory_working.store(
        memory, 3 * orthogonal_keys(2)[1:], torch.zeros(1, V) - 1, torch.ones(1), 1, **DECAY, **same
    )
    assert have_equal_rows(memory.values[memory.valid], torch.tensor([[-1.0, -1, -1], [6, 7, 8]])), (
        "keys are compared by direction only"
    )


def test_item_of_zero_importance_is_not_stored() -> None:
    memory = memory_working.store(empty_working(), orthogonal_keys(2), draw(2, V), torch.tensor([0.0, 1.0]), 0, **DECAY)
    assert memory.valid.sum() == 1
    assert memory.keys[~memory.valid].abs().sum() == memory.values[~memory.valid].abs().sum() == 0


def test_examples_of_a_batch_are_independent() -> None:
    keys, values, importance = draw(5, 6, K), draw(5, 6, V, seed=1), draw(5, 6, seed=2).sigmoid()
    together = memory_working.empty_working(5, slots=4, key_size=K, value_size=V)
    together = memory_working.store(together, keys, values, importance, 2, **DECAY, same=0.9)
    for row in range(5):
        alone = memory_working.store(empty_working(), keys[row], values[row], importance[row], 2, **DECAY, same=0.9)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[row], b)


# Episodic memory


def empty_episodic(slots: int = 3) -> Any:
    return memory_episodic.empty_episodic(slots=slots, key_size=K, value_size=V)


def stored_keys(memory: Any) -> list[int]:
    """Return the indices of the stored `orthogonal_keys`."""
    return sorted(memory.keys[memory.valid].argmax(-1).tolist())


def store_episode(memory: Any, key: int, clock: int, importance: float = 1.0, value: Tensor | None = None) -> Any:
    values = value if value is not None else torch.full((1, V), float(key + 1))
    return memory_episodic.store(
        memory, orthogonal_keys(K)[key : key + 1], values, torch.tensor([importance]), clock, decay=0.9, same=0.95
    )


def test_least_important_item_is_evicted_first() -> None:
    memory = empty_episodic()
    for key, importance in enumerate([0.5, 0.9, 0.7, 0.8]):
        memory = store_episode(memory, key, 0, importance)
    assert stored_keys(memory) == [1, 2, 3]
    assert stored_keys(store_episode(memory, 4, 0, 0.1)) == [1, 2, 3], "a new item is evicted too"


def test_newest_of_equally_important_items_stay() -> None:
    batched = memory_episodic.store(
        empty_episodic(), orthogonal_keys(5), draw(5, V), torch.ones(5), 0, decay=0.9, same=0.95
    )
    assert stored_keys(batched) == [2, 3, 4]
    memory = memory_working.store(empty_working(), orthogonal_keys(6), draw(6, V), torch.ones(6), 0, **DECAY)
    assert stored_keys(memory) == [2, 3, 4, 5]


def test_oldest_item_is_evicted_first() -> None:
    memory = empty_episodic()
    for key in range(4):
        memory = store_episode(memory, key, clock=key)
    assert stored_keys(memory) == [1, 2, 3]


def test_importance_is_discounted_by_age() -> None:
    """An importance of 1.0 is discounted to 0.9^7 = 0.478 after seven ticks."""
    for importance, expected in ((0.47, [0, 1, 2]), (0.49, [1, 2, 3])):
        memory = store_episode(store_episode(store_episode(empty_episodic(), 0, 0), 1, 7), 2, 7)
        assert stored_keys(store_episode(memory, 3, 7, importance)) == expected


def test_recently_used_item_stays() -> None:
    memory = store_episode(store_episode(store_episode(empty_episodic(), 0, 0), 1, 1), 2, 2)
    slot = memory.keys.argmax(-1).tolist().index(0)
    memory = memory_episodic.record_use(memory, torch.tensor([slot]), 3)
    assert (memory.uses[slot], memory.used[slot]) == (1, 3)
    memory = store_episode(memory, 3, 4)
    assert stored_keys(memory) == [0, 2, 3]


def test_repetition_reinforces_an_episode_and_a_new_value_resets_it() -> None:
    memory = store_episode(store_episode(empty_episodic(), 0, 0, importance=0.8), 0, 5, importance=0.3)
    slot = int(memory.valid.nonzero())
    assert (memory.said[slot], memory.written[slot]) == (2, 5)
    assert memory.importance[slot] == pytest.approx(0.8)
    memory = store_episode(
        memory_episodic.record_use(memory, torch.tensor([slot]), 6), 0, 7, value=torch.full((1, V), 9.0)
    )
    slot = int(memory.valid.nonzero())
    assert (memory.said[slot], memory.uses[slot]) == (1, 0)
    assert memory.values[slot].tolist() == [9, 9, 9]


def test_last_value_of_a_key_repeated_in_one_tick_wins() -> None:
    keys, values = orthogonal_keys(1).expand(3, K), torch.tensor([[1.0] * V, [2.0] * V, [2.0] * V])
    memory = memory_episodic.store(empty_episodic(), keys, values, torch.ones(3), 0, decay=0.9, same=0.95)
    assert memory.valid.sum() == 1
    slot = int(memory.valid.nonzero())
    assert memory.values[slot].tolist() == [2, 2, 2]
    assert memory.said[slot] == 2, "the last two values agree"


def test_values_are_compared_by_length_too() -> None:
    memory = store_episode(
        store_episode(empty_episodic(), 0, 0, value=torch.ones(1, V)), 0, 1, value=2 * torch.ones(1, V)
    )
    assert memory.said.max() == 1
    memory = store_episode(
        store_episode(empty_episodic(), 0, 0, value=torch.zeros(1, V)), 0, 1, value=torch.zeros(1, V)
    )
    assert memory.said.max() == 2, "zero vectors are equal"


LARGE = MemoryShape(
    key_size=K,
    value_size=V,
    working_slots=9,
    working_decay=0.9,
    working_floor=0.1,
    episodic_slots=9,
    episodic_decay=0.9,
    semantic_slots=4,
    promote_after=4,
)


def perturb(rows: Tensor, seed: int) -> Tensor:
    """Perturb keys: some pairs still count as the same key and some do not."""
    return rows + 0.06 * draw(*rows.shape, seed=seed)


@pytest.mark.parametrize("block", range(6))
def test_batched_store_equals_sequential_stores_with_repeated_keys(block: int) -> None:
    """300 sequences with few keys and values: repeated, contradicted and restored. There is a slot for every key."""
    for case in range(50 * block, 50 * block + 50):
        choose = torch.Generator().manual_seed(case)
        batched = sequential = memories.empty_memory(LARGE)
        for clock in range(2):
            key_indices = torch.randint(0, 3, (5,), generator=choose)
            keys = perturb(orthogonal_keys(3)[key_indices], case + clock)
            values = torch.eye(V)[torch.randint(0, 2, (5,), generator=choose)] + 0.05 * draw(5, V, seed=case)
            importance = torch.rand(5, generator=choose) - 0.1
            batched = memories.store(batched, keys, values, importance, clock, shape=LARGE)
            for i in range(5):
                row = slice(i, i + 1)
                sequential = memories.store(sequential, keys[row], values[row], importance[row], clock, shape=LARGE)
            assert equal_memories(batched, sequential), (case, clock)
            result = memories.search(batched, keys[:2], 1, same=LARGE.same)
            batched = memories.consolidate(memories.record_use(batched, result, clock, same=0.95), clock, shape=LARGE)
            sequential = memories.consolidate(
                memories.record_use(sequential, result, clock, same=0.95), clock, shape=LARGE
            )


def equal_memories(a: memories.MemoryState, b: memories.MemoryState) -> bool:
    return all(
        torch.allclose(x, y)
        for x, y in zip(memories.flatten_memory(a).values(), memories.flatten_memory(b).values(), strict=True)
    )


def test_repetitions_are_counted_since_the_last_contradiction() -> None:
    ones, minus_ones = torch.ones(1, V), -torch.ones(1, V)
    before = store_episode(empty_episodic(), 0, 0, value=ones)
    before = memory_episodic.record_use(before, torch.tensor([0]), 1)
    values = torch.cat((ones, minus_ones, ones))
    memory = memory_episodic.store(
        before, orthogonal_keys(1).expand(3, K), values, torch.ones(3), 2, decay=0.9, same=0.95
    )
    assert memory.said.tolist() == [1, 0, 0]
    assert memory.uses.tolist() == [0, 0, 0]
    values = torch.cat((ones, ones))
    memory = memory_episodic.store(
        before, orthogonal_keys(1).expand(2, K), values, torch.ones(2), 2, decay=0.9, same=0.95
    )
    assert (memory.said[0], memory.uses[0]) == (3, 1)


def test_item_below_the_floor_is_not_stored_but_still_replaces() -> None:
    memory = memory_working.store(empty_working(), orthogonal_keys(1), draw(1, V), torch.ones(1), 0, **DECAY, same=0.9)
    memory = memory_working.store(memory, orthogonal_keys(1), draw(1, V), torch.tensor([0.05]), 0, **DECAY, same=0.9)
    assert not memory.valid.any()


def test_storing_zero_items_leaves_the_memory_empty() -> None:
    memory = memories.store(
        memories.empty_memory(SHAPE), torch.zeros(0, K), torch.zeros(0, V), torch.zeros(0), 0, shape=SHAPE
    )
    assert not memories.find_visible_slots(memory, same=0.95).any()


# Semantic memory


def test_frequent_episode_becomes_a_prototype() -> None:
    memory = store_episode(store_episode(store_episode(empty_episodic(), 0, 0), 1, 0), 1, 1)
    slot = memory.keys.argmax(-1).tolist().index(1)
    _, prototypes = memory_semantic.consolidate(memory, empty_semantic(), promote_after=3, same=0.95)
    assert not prototypes.valid.any()
    memory = memory_episodic.record_use(memory, torch.tensor([slot]), 2)
    episodes, prototypes = memory_semantic.consolidate(memory, empty_semantic(), promote_after=3, same=0.95)
    assert stored_keys(episodes) == [0]
    assert stored_keys(prototypes) == [1]
    assert prototypes.counts.max() == 3


def empty_semantic(slots: int = 2) -> Any:
    return memory_semantic.empty_semantic(slots=slots, key_size=K, value_size=V)


def build_episodes(keys: Tensor, values: Tensor, counts: Tensor) -> Any:
    """Build episodes that were stored as often as `counts` says."""
    memory = memory_episodic.empty_episodic(slots=len(keys), key_size=K, value_size=V)
    stored = memory_episodic.store(memory, keys, values, torch.ones(len(keys)), 0, decay=1.0, same=1.0)
    order = torch.cdist(stored.values, values).argmin(1)
    return stored._replace(said=counts[order])


def test_prototype_is_the_mean_of_agreeing_episodes() -> None:
    """The noise of many episodes averages out."""
    true, prototypes = draw(1, V), empty_semantic()
    noisy_values = []
    for step in range(50):
        noisy = true + 0.05 * draw(1, V, seed=step + 1)
        noisy_values.append(noisy)
        episodes = build_episodes(orthogonal_keys(1) + 0.02 * draw(1, K, seed=step + 100), noisy, torch.tensor([4.0]))
        _, prototypes = memory_semantic.consolidate(episodes, prototypes, promote_after=4, same=0.9)
    assert prototypes.valid.sum() == 1
    assert prototypes.counts[0] == 200
    assert torch.allclose(prototypes.values[0], torch.cat(noisy_values).mean(0), atol=1e-5)
    assert prototypes.keys[0].norm().item() == pytest.approx(1.0)


def test_contradicting_episode_replaces_the_prototype() -> None:
    _, prototypes = memory_semantic.consolidate(
        build_episodes(orthogonal_keys(1), torch.ones(1, V), torch.tensor([9.0])),
        empty_semantic(),
        promote_after=3,
        same=0.95,
    )
    other = build_episodes(orthogonal_keys(1), -torch.ones(1, V), torch.tensor([3.0]))
    _, prototypes = memory_semantic.consolidate(other, prototypes, promote_after=3, same=0.95)
    assert prototypes.counts.tolist() == [3, 0]
    assert prototypes.values[0].tolist() == [-1, -1, -1]


def test_episode_is_promoted_only_over_a_prototype_of_lower_count() -> None:
    full = build_episodes(orthogonal_keys(2), draw(2, V), torch.tensor([5.0, 6.0]))
    _, prototypes = memory_semantic.consolidate(full, empty_semantic(), promote_after=3, same=0.95)
    episodes, updated = memory_semantic.consolidate(
        build_episodes(orthogonal_keys(3)[2:], draw(1, V), torch.tensor([4.0])), prototypes, promote_after=3, same=0.95
    )
    assert episodes.valid.sum() == 1, "the episode is not lost when no prototype slot is free"
    assert stored_keys(updated) == stored_keys(prototypes) == [0, 1]
    episodes, updated = memory_semantic.consolidate(
        build_episodes(orthogonal_keys(3)[2:], draw(1, V), torch.tensor([8.0])), prototypes, promote_after=3, same=0.95
    )
    assert episodes.valid.sum() == 0
    assert stored_keys(updated) == [1, 2]


# All levels


def test_memory_size_is_bounded() -> None:
    memory = HierarchicalMemory(SHAPE)
    sizes = {name: tensor.shape for name, tensor in memory.state_dict().items()}
    for clock in range(100):
        memory.store(
            draw(100, K, seed=clock), draw(100, V, seed=clock + 1000), draw(100, seed=clock).abs(), clock=clock
        )
        memory.search(draw(5, K, seed=clock), 3, clock=clock)
        memory.consolidate(clock)
    assert {name: tensor.shape for name, tensor in memory.state_dict().items()} == sizes
    assert 0 < len(memory) <= SHAPE.slots
    assert all(tensor.isfinite().all() for tensor in memory.state_dict().values())


def fill_memory(seed: int = 0, steps: int = 6) -> HierarchicalMemory:
    """Build a memory with items on every level."""
    memory = HierarchicalMemory(SHAPE)
    keys, values = draw(9, K, seed=seed), draw(9, V, seed=seed + 1)
    for clock in range(steps):
        rows = slice(0, 3) if clock % 2 else slice(2, 9)
        memory.store(keys[rows], values[rows], clock=clock)
        memory.search(keys[:1], 1, clock=clock)
        memory.consolidate(clock)
    return memory


def test_search_equals_an_exhaustive_scan() -> None:
    memory = fill_memory()
    assert {memory.get_level(w) for w in memory.search(draw(40, K), 3).slot_indices.unique().tolist()} > {"semantic"}
    queries = draw(7, K, seed=5)
    result = memory.search(queries, 4)
    visible = memories.find_visible_slots(memory.memory, same=SHAPE.same)
    for number, query in enumerate(queries):
        scores = {
            slot: float(torch.dot(query, key) / query.norm())
            for slot, key in enumerate(memory.memory.keys)
            if visible[slot]
        }
        best = sorted(scores, key=lambda slot: -scores[slot])[:4]
        assert result.slot_indices[number].tolist() == best
        assert result.scores[number].tolist() == pytest.approx([scores[slot] for slot in best], abs=1e-6)
        assert torch.equal(result.values[number], memory.memory.values[best])


def test_search_returns_each_key_once_with_its_latest_value() -> None:
    """A new value is stored while an episode and a prototype hold the old one."""
    memory = fill_memory()
    key = draw(9, K)[:1]
    memory.store(key, 5 * torch.ones(1, V), clock=9)
    result = memory.search(key, SHAPE.slots)
    is_same_key = result.scores[0] > SHAPE.same
    assert is_same_key.sum() == 1
    assert result.values[0, 0].tolist() == [5, 5, 5]
    for clock in range(10, 40):  # it decays out of working memory and is an episode by then
        memory.consolidate(clock)
    result = memory.search(key, 1)
    assert memory.get_level(int(result.slot_indices[0, 0])) == "episodic"
    assert result.values[0, 0].tolist() == [5, 5, 5]


def test_empty_memory_returns_no_results_and_reads_zeros() -> None:
    memory = HierarchicalMemory(SHAPE)
    result = memory.search(draw(2, K), 3, clock=0)
    assert result.scores.tolist() == [[float("-inf")] * 3] * 2
    assert result.slot_indices.tolist() == [[-1] * 3] * 2
    assert not result.valid.any()
    assert result.values.abs().sum() == 0
    queries = draw(2, K).requires_grad_()
    output = memory.read(queries)
    assert output.tolist() == [[0.0] * V] * 2
    output.sum().backward()
    assert queries.grad is not None
    assert queries.grad.tolist() == [[0.0] * K] * 2
    assert len(memory) == 0


def test_results_beyond_the_stored_items_are_padded_and_masked() -> None:
    memory = HierarchicalMemory(SHAPE)
    memory.store(orthogonal_keys(2), draw(2, V), clock=0)
    result = memory.search(orthogonal_keys(1), 50)
    assert result.scores.shape == (1, 50)
    assert result.valid.sum() == 2
    assert result.values[0, 2:].abs().sum() == 0


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_below_one_is_refused(top_k: int) -> None:
    with pytest.raises(UsageError, match=f"top_k must be 1 or more, got {top_k}"):
        HierarchicalMemory(SHAPE).search(draw(1, K), top_k)


def test_mismatched_shapes_clocks_and_slots_are_refused() -> None:
    memory = HierarchicalMemory(SHAPE)
    with pytest.raises(UsageError, match=r"expected keys \[n, 8\], got \[2, 7\]"):
        memory.store(draw(2, 7), draw(2, V), clock=0)
    with pytest.raises(UsageError, match=r"\[2\] keys but \[3\] values"):
        memory.store(draw(2, K), draw(3, V), clock=0)
    memory.store(draw(2, K), draw(2, V), clock=5)
    with pytest.raises(UsageError, match="clock 4 is before 5"):
        memory.consolidate(4)
    with pytest.raises(UsageError, match="slot 21 is out of range; there are 21"):
        memory.get_level(21)


def test_read_gradient_matches_finite_differences() -> None:
    valid = torch.tensor([True, True, False, True])

    def read(keys: Tensor, values: Tensor, queries: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
        return memories.read_memory(keys, values, valid, queries, temperature, bias=bias)

    inputs = [draw(4, K), draw(4, V, seed=1), draw(2, K, seed=2), torch.tensor(0.3), draw(4, seed=3)]
    assert torch.autograd.gradcheck(read, [tensor.double().requires_grad_() for tensor in inputs])


def test_read_is_the_softmax_weighted_mean_of_visible_slots() -> None:
    memory = fill_memory()
    visible = memories.find_visible_slots(memory.memory, same=SHAPE.same)
    queries = draw(3, K, seed=9)
    weights = torch.softmax(
        torch.nn.functional.normalize(queries, dim=-1) @ memory.memory.keys[visible].T / 0.2, dim=-1
    )
    assert torch.allclose(memory.read(queries, 0.2), weights @ memory.memory.values[visible], atol=1e-6)


def test_functions_do_not_modify_their_inputs() -> None:
    memory = fill_memory().memory
    before = {name: tensor.clone() for name, tensor in memories.flatten_memory(memory).items()}
    keys, values = draw(4, K, seed=7), draw(4, V, seed=8)
    stored = memories.store(memory, keys, values, torch.ones(4), 11, shape=SHAPE)
    result = memories.search(stored, keys, 2, same=SHAPE.same)
    consolidated = memories.consolidate(memories.record_use(stored, result, 12, same=SHAPE.same), 13, shape=SHAPE)
    after = memories.flatten_memory(memory)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(before[name], tensor) for name, tensor in memories.flatten_memory(consolidated).items())


def test_same_calls_are_bitwise_deterministic() -> None:
    a, b = fill_memory().state_dict(), fill_memory().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_saved_memory_loads_with_its_full_state(tmp_path: Path) -> None:
    memory, loaded = fill_memory(), HierarchicalMemory(SHAPE)
    memory.save(tmp_path / "memory.safetensors")
    loaded.load(tmp_path / "memory.safetensors")
    a, b = memory.state_dict(), loaded.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for copy in (memory, loaded):
        copy.store(draw(2, K, seed=30), draw(2, V), clock=20)
    a, b = memory.state_dict(), loaded.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a), "further updates agree too"


def test_saved_memory_that_is_too_large_damaged_or_incomplete_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory.safetensors"
    HierarchicalMemory(SHAPE.model_copy(update={"episodic_slots": 99})).save(path)
    with pytest.raises(CheckpointError, match=r"the saved memory has episodic_slots 99 \(this memory: 12\); create"):
        HierarchicalMemory(SHAPE).load(path)
    path.write_bytes(b"no memory")
    with pytest.raises(CheckpointError, match="cannot be read as a memory"):
        HierarchicalMemory(SHAPE).load(path)
    with pytest.raises(CheckpointError, match="clock is missing"):
        HierarchicalMemory(SHAPE).load_state_dict(memories.flatten_memory(memories.empty_memory(SHAPE)))


@pytest.mark.parametrize("slots", ["working_slots", "episodic_slots", "semantic_slots"])
def test_zero_slots_are_refused(slots: str) -> None:
    with pytest.raises(ValueError, match=slots):
        MemoryShape(**{**SHAPE.model_dump(), slots: 0})


def test_missing_faiss_names_the_package_to_install() -> None:
    if importlib.util.find_spec("faiss") is not None:
        pytest.skip("faiss is installed")
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[faiss\]'"):
        fill_memory().search(draw(1, K), 1, by="faiss")


def test_faiss_matches_exact_search() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed; pip install 'bottega[faiss]'")
    keys = torch.nn.functional.normalize(draw(5000, 32), dim=-1)
    values, queries, valid = draw(5000, 4, seed=1), draw(20, 32, seed=2), draw(5000, seed=3) > 0
    exact, fast = search_exact(keys, values, valid, queries, 7), search_faiss(keys, values, valid, queries, 7)
    assert torch.equal(exact.slot_indices, fast.slot_indices)
    assert torch.allclose(exact.scores, fast.scores, atol=1e-6)
    assert torch.equal(exact.values, fast.values)
    few = valid & (torch.arange(5000) < 10)
    assert torch.equal(
        search_exact(keys, values, few, queries, 9).slot_indices,
        search_faiss(keys, values, few, queries, 9).slot_indices,
    )
