"""Memory: bounded, forgetful by a clock that is given to it, found again by what it is like, and never changed in place."""

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
FADING = {"decay": 0.5, "floor": 0.1}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(count: int) -> Tensor:
    """Keys that are like no other."""
    return torch.eye(K)[:count]


def holds(found: Tensor, values: Tensor) -> bool:
    """Whether each of the values is among what was found, and nothing else is."""
    rows = {tuple(row) for row in found.tolist()}
    return rows == {tuple(row) for row in values.tolist()}


# Working memory


def working(slots: int = 4) -> Any:
    return memory_working.empty_working(slots=slots, key_size=K, value_size=V)


def test_strength_fades_by_the_tick_and_what_is_faint_is_forgotten() -> None:
    memory = memory_working.store(working(), apart(2), draw(2, V), torch.tensor([1.0, 0.3]), 7, **FADING)
    assert memory.strength.tolist() == pytest.approx([1.0, 0.3, 0, 0])
    later = memory_working.decay_working(memory, 8, **FADING)
    assert later.strength.tolist() == pytest.approx([0.5, 0.15, 0, 0])
    later = memory_working.decay_working(later, 9, **FADING)
    assert later.strength.tolist() == pytest.approx([0.25, 0, 0, 0]), "0.075 is less than 0.1"
    assert later.values[1].tolist() == [0, 0, 0], "and nothing of it is left"
    at_once = memory_working.decay_working(memory, 9, **FADING)
    assert torch.allclose(at_once.strength, later.strength), "two ticks are two times one"
    back = memory_working.decay_working(memory, 3, **FADING)
    assert torch.equal(back.strength, memory.strength), "time does not go back"


def test_the_weakest_makes_room_be_it_old_or_new() -> None:
    values = torch.arange(6.0)[:, None].expand(6, V)
    first = memory_working.store(working(), apart(6)[:4], values[:4], torch.tensor([0.9, 0.2, 0.7, 0.8]), 0, **FADING)
    second = memory_working.store(first, apart(6)[4:], values[4:], torch.tensor([0.5, 0.1]), 0, **FADING)
    assert sorted(second.values[:, 0].tolist()) == [0, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 3, 12])
def test_many_at_once_are_one_after_the_other(parts: int) -> None:
    keys, values, importance = draw(12, K), draw(12, V, seed=1), draw(12, seed=2).sigmoid()
    memory = working()
    for some in torch.arange(12).chunk(parts):
        memory = memory_working.store(memory, keys[some], values[some], importance[some], 3, **FADING)
    best = importance.argsort(descending=True)[:4]
    assert torch.equal(memory.values, values[best])


def test_a_key_that_comes_again_is_replaced() -> None:
    keys, same = torch.cat((apart(2), apart(1))), {"same": 0.9}
    memory = memory_working.store(working(), keys, torch.arange(9.0).view(3, 3), torch.ones(3), 0, **FADING, **same)
    assert holds(memory.values[memory.valid], torch.tensor([[3.0, 4, 5], [6, 7, 8]]))
    memory = memory_working.store(memory, 3 * apart(2)[1:], torch.zeros(1, V) - 1, torch.ones(1), 1, **FADING, **same)
    assert holds(memory.values[memory.valid], torch.tensor([[-1.0, -1, -1], [6, 7, 8]])), "whatever its length"


def test_what_does_not_matter_is_not_stored() -> None:
    memory = memory_working.store(working(), apart(2), draw(2, V), torch.tensor([0.0, 1.0]), 0, **FADING)
    assert memory.valid.sum() == 1
    assert memory.keys[~memory.valid].abs().sum() == memory.values[~memory.valid].abs().sum() == 0


def test_examples_of_a_batch_do_not_see_each_other() -> None:
    keys, values, importance = draw(5, 6, K), draw(5, 6, V, seed=1), draw(5, 6, seed=2).sigmoid()
    together = memory_working.empty_working(5, slots=4, key_size=K, value_size=V)
    together = memory_working.store(together, keys, values, importance, 2, **FADING, same=0.9)
    for row in range(5):
        alone = memory_working.store(working(), keys[row], values[row], importance[row], 2, **FADING, same=0.9)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[row], b)


# Episodic memory


def episodic(slots: int = 3) -> Any:
    return memory_episodic.empty_episodic(slots=slots, key_size=K, value_size=V)


def kept(memory: Any) -> list[int]:
    """Which of the keys of `apart` are there."""
    return sorted(memory.keys[memory.valid].argmax(-1).tolist())


def said(memory: Any, key: int, clock: int, importance: float = 1.0, value: Tensor | None = None) -> Any:
    values = value if value is not None else torch.full((1, V), float(key + 1))
    return memory_episodic.store(
        memory, apart(K)[key : key + 1], values, torch.tensor([importance]), clock, decay=0.9, same=0.95
    )


def test_what_matters_less_leaves_first() -> None:
    memory = episodic()
    for key, importance in enumerate([0.5, 0.9, 0.7, 0.8]):
        memory = said(memory, key, 0, importance)
    assert kept(memory) == [1, 2, 3]
    assert kept(said(memory, 4, 0, 0.1)) == [1, 2, 3], "also where it is the new one"


def test_of_equals_the_newest_stays() -> None:
    at_once = memory_episodic.store(episodic(), apart(5), draw(5, V), torch.ones(5), 0, decay=0.9, same=0.95)
    assert kept(at_once) == [2, 3, 4]
    memory = memory_working.store(working(), apart(6), draw(6, V), torch.ones(6), 0, **FADING)
    assert kept(memory) == [2, 3, 4, 5]


def test_what_is_older_leaves_first() -> None:
    memory = episodic()
    for key in range(4):
        memory = said(memory, key, clock=key)
    assert kept(memory) == [1, 2, 3]


def test_importance_weighs_against_age_by_the_clock() -> None:
    """1.0 of seven ticks ago is worth 0.9^7 = 0.478."""
    for importance, expected in ((0.47, [0, 1, 2]), (0.49, [1, 2, 3])):
        memory = said(said(said(episodic(), 0, 0), 1, 7), 2, 7)
        assert kept(said(memory, 3, 7, importance)) == expected


def test_what_was_of_use_stays() -> None:
    memory = said(said(said(episodic(), 0, 0), 1, 1), 2, 2)
    where = memory.keys.argmax(-1).tolist().index(0)
    memory = memory_episodic.record_use(memory, torch.tensor([where]), 3)
    assert (memory.uses[where], memory.used[where]) == (1, 3)
    memory = said(memory, 3, 4)
    assert kept(memory) == [0, 2, 3]


def test_the_same_again_is_reinforced_and_another_value_begins_anew() -> None:
    memory = said(said(episodic(), 0, 0, importance=0.8), 0, 5, importance=0.3)
    slot = int(memory.valid.nonzero())
    assert (memory.said[slot], memory.written[slot]) == (2, 5)
    assert memory.importance[slot] == pytest.approx(0.8)
    memory = said(memory_episodic.record_use(memory, torch.tensor([slot]), 6), 0, 7, value=torch.full((1, V), 9.0))
    slot = int(memory.valid.nonzero())
    assert (memory.said[slot], memory.uses[slot]) == (1, 0)
    assert memory.values[slot].tolist() == [9, 9, 9]


def test_of_one_key_said_twice_at_one_tick_the_last_counts() -> None:
    keys, values = apart(1).expand(3, K), torch.tensor([[1.0] * V, [2.0] * V, [2.0] * V])
    memory = memory_episodic.store(episodic(), keys, values, torch.ones(3), 0, decay=0.9, same=0.95)
    assert memory.valid.sum() == 1
    slot = int(memory.valid.nonzero())
    assert memory.values[slot].tolist() == [2, 2, 2]
    assert memory.said[slot] == 2, "the two that agree"


def test_values_of_one_direction_are_two_values() -> None:
    memory = said(said(episodic(), 0, 0, value=torch.ones(1, V)), 0, 1, value=2 * torch.ones(1, V))
    assert memory.said.max() == 1
    memory = said(said(episodic(), 0, 0, value=torch.zeros(1, V)), 0, 1, value=torch.zeros(1, V))
    assert memory.said.max() == 2, "and nothing is the same as nothing"


ROOMY = MemoryShape(
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


def near(rows: Tensor, seed: int) -> Tensor:
    """The same keys, a little beside: some pairs of them are still the same key and some are not."""
    return rows + 0.06 * draw(*rows.shape, seed=seed)


@pytest.mark.parametrize("many", range(6))
def test_many_at_once_are_one_after_the_other_also_where_keys_come_again(many: int) -> None:
    """300 sequences of few keys and values: said again, contradicted, and said as before. There is room for all."""
    for case in range(50 * many, 50 * many + 50):
        choose = torch.Generator().manual_seed(case)
        at_once = one_by_one = memories.empty_memory(ROOMY)
        for clock in range(2):
            which = torch.randint(0, 3, (5,), generator=choose)
            keys = near(apart(3)[which], case + clock)
            values = torch.eye(V)[torch.randint(0, 2, (5,), generator=choose)] + 0.05 * draw(5, V, seed=case)
            importance = torch.rand(5, generator=choose) - 0.1
            at_once = memories.store(at_once, keys, values, importance, clock, shape=ROOMY)
            for i in range(5):
                one = slice(i, i + 1)
                one_by_one = memories.store(one_by_one, keys[one], values[one], importance[one], clock, shape=ROOMY)
            assert same_memory(at_once, one_by_one), (case, clock)
            found = memories.search(at_once, keys[:2], 1, same=ROOMY.same)
            at_once = memories.consolidate(memories.record_use(at_once, found, clock, same=0.95), clock, shape=ROOMY)
            one_by_one = memories.consolidate(
                memories.record_use(one_by_one, found, clock, same=0.95), clock, shape=ROOMY
            )


def same_memory(a: memories.MemoryState, b: memories.MemoryState) -> bool:
    return all(
        torch.allclose(x, y)
        for x, y in zip(memories.flatten_memory(a).values(), memories.flatten_memory(b).values(), strict=True)
    )


def test_only_what_was_said_since_the_last_contradiction_counts() -> None:
    one, two = torch.ones(1, V), -torch.ones(1, V)
    before = said(episodic(), 0, 0, value=one)
    before = memory_episodic.record_use(before, torch.tensor([0]), 1)
    values = torch.cat((one, two, one))
    memory = memory_episodic.store(before, apart(1).expand(3, K), values, torch.ones(3), 2, decay=0.9, same=0.95)
    assert memory.said.tolist() == [1, 0, 0]
    assert memory.uses.tolist() == [0, 0, 0]
    values = torch.cat((one, one))
    memory = memory_episodic.store(before, apart(1).expand(2, K), values, torch.ones(2), 2, decay=0.9, same=0.95)
    assert (memory.said[0], memory.uses[0]) == (3, 1)


def test_what_is_too_faint_is_not_stored_and_yet_replaces() -> None:
    memory = memory_working.store(working(), apart(1), draw(1, V), torch.ones(1), 0, **FADING, same=0.9)
    memory = memory_working.store(memory, apart(1), draw(1, V), torch.tensor([0.05]), 0, **FADING, same=0.9)
    assert not memory.valid.any()


def test_nothing_can_be_stored() -> None:
    memory = memories.store(
        memories.empty_memory(SHAPE), torch.zeros(0, K), torch.zeros(0, V), torch.zeros(0), 0, shape=SHAPE
    )
    assert not memories.visible_slots(memory, same=0.95).any()


# Semantic memory


def test_what_is_said_and_used_often_enough_becomes_a_prototype() -> None:
    memory = said(said(said(episodic(), 0, 0), 1, 0), 1, 1)
    where = memory.keys.argmax(-1).tolist().index(1)
    rest, found = memory_semantic.consolidate(memory, semantic(), promote_after=3, same=0.95)
    assert not found.valid.any()
    memory = memory_episodic.record_use(memory, torch.tensor([where]), 2)
    rest, found = memory_semantic.consolidate(memory, semantic(), promote_after=3, same=0.95)
    assert kept(rest) == [0]
    assert kept(found) == [1]
    assert found.counts.max() == 3


def semantic(slots: int = 2) -> Any:
    return memory_semantic.empty_semantic(slots=slots, key_size=K, value_size=V)


def episode(keys: Tensor, values: Tensor, times: Tensor) -> Any:
    """Episodes that were said so often."""
    memory = memory_episodic.empty_episodic(slots=len(keys), key_size=K, value_size=V)
    stored = memory_episodic.store(memory, keys, values, torch.ones(len(keys)), 0, decay=1.0, same=1.0)
    order = torch.cdist(stored.values, values).argmin(1)
    return stored._replace(said=times[order])


def test_a_prototype_is_the_mean_of_what_agrees_with_it() -> None:
    """Noise of many episodes evens out."""
    true, found = draw(1, V), semantic()
    seen = []
    for step in range(50):
        noisy = true + 0.05 * draw(1, V, seed=step + 1)
        seen.append(noisy)
        one = episode(apart(1) + 0.02 * draw(1, K, seed=step + 100), noisy, torch.tensor([4.0]))
        _, found = memory_semantic.consolidate(one, found, promote_after=4, same=0.9)
    assert found.valid.sum() == 1
    assert found.counts[0] == 200
    assert torch.allclose(found.values[0], torch.cat(seen).mean(0), atol=1e-5)
    assert found.keys[0].norm().item() == pytest.approx(1.0)


def test_what_contradicts_a_prototype_takes_its_place() -> None:
    _, found = memory_semantic.consolidate(
        episode(apart(1), torch.ones(1, V), torch.tensor([9.0])), semantic(), promote_after=3, same=0.95
    )
    other = episode(apart(1), -torch.ones(1, V), torch.tensor([3.0]))
    _, found = memory_semantic.consolidate(other, found, promote_after=3, same=0.95)
    assert found.counts.tolist() == [3, 0]
    assert found.values[0].tolist() == [-1, -1, -1]


def test_an_episode_stays_one_where_prototypes_rest_on_more() -> None:
    full = episode(apart(2), draw(2, V), torch.tensor([5.0, 6.0]))
    _, found = memory_semantic.consolidate(full, semantic(), promote_after=3, same=0.95)
    rest, again = memory_semantic.consolidate(
        episode(apart(3)[2:], draw(1, V), torch.tensor([4.0])), found, promote_after=3, same=0.95
    )
    assert rest.valid.sum() == 1, "nothing is lost for want of room"
    assert kept(again) == kept(found) == [0, 1]
    rest, again = memory_semantic.consolidate(
        episode(apart(3)[2:], draw(1, V), torch.tensor([8.0])), found, promote_after=3, same=0.95
    )
    assert rest.valid.sum() == 0
    assert kept(again) == [1, 2]


# All levels


def test_it_is_bounded_whatever_is_written() -> None:
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


def filled(seed: int = 0, steps: int = 6) -> HierarchicalMemory:
    """Something on every level."""
    memory = HierarchicalMemory(SHAPE)
    keys, values = draw(9, K, seed=seed), draw(9, V, seed=seed + 1)
    for clock in range(steps):
        some = slice(0, 3) if clock % 2 else slice(2, 9)
        memory.store(keys[some], values[some], clock=clock)
        memory.search(keys[:1], 1, clock=clock)
        memory.consolidate(clock)
    return memory


def test_search_is_what_a_look_at_each_slot_finds() -> None:
    memory = filled()
    assert {memory.level_of(w) for w in memory.search(draw(40, K), 3).where.unique().tolist()} > {"semantic"}
    queries = draw(7, K, seed=5)
    found = memory.search(queries, 4)
    seen = memories.visible_slots(memory.memory, same=SHAPE.same)
    for number, query in enumerate(queries):
        scores = {
            slot: float(torch.dot(query, key) / query.norm())
            for slot, key in enumerate(memory.memory.keys)
            if seen[slot]
        }
        best = sorted(scores, key=lambda slot: -scores[slot])[:4]
        assert found.where[number].tolist() == best
        assert found.scores[number].tolist() == pytest.approx([scores[slot] for slot in best], abs=1e-6)
        assert torch.equal(found.values[number], memory.memory.values[best])


def test_nothing_is_found_twice_and_nothing_as_it_was_before() -> None:
    """Said anew while an episode and a prototype hold the old value."""
    memory = filled()
    key = draw(9, K)[:1]
    memory.store(key, 5 * torch.ones(1, V), clock=9)
    found = memory.search(key, SHAPE.slots)
    same = found.scores[0] > SHAPE.same
    assert same.sum() == 1
    assert found.values[0, 0].tolist() == [5, 5, 5]
    for clock in range(10, 40):  # it fades from what is at hand, and is an episode by then
        memory.consolidate(clock)
    found = memory.search(key, 1)
    assert memory.level_of(int(found.where[0, 0])) == "episodic"
    assert found.values[0, 0].tolist() == [5, 5, 5]


def test_an_empty_memory_finds_nothing_and_says_zeros() -> None:
    memory = HierarchicalMemory(SHAPE)
    found = memory.search(draw(2, K), 3, clock=0)
    assert found.scores.tolist() == [[float("-inf")] * 3] * 2
    assert found.where.tolist() == [[-1] * 3] * 2
    assert not found.valid.any()
    assert found.values.abs().sum() == 0
    queries = draw(2, K).requires_grad_()
    told = memory.read(queries)
    assert told.tolist() == [[0.0] * V] * 2
    told.sum().backward()
    assert queries.grad is not None
    assert queries.grad.tolist() == [[0.0] * K] * 2
    assert len(memory) == 0


def test_more_than_there_is_is_filled_up_and_marked() -> None:
    memory = HierarchicalMemory(SHAPE)
    memory.store(apart(2), draw(2, V), clock=0)
    found = memory.search(apart(1), 50)
    assert found.scores.shape == (1, 50)
    assert found.valid.sum() == 2
    assert found.values[0, 2:].abs().sum() == 0


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_search_for_nothing_is_refused(top_k: int) -> None:
    with pytest.raises(UsageError, match=f"top_k must be 1 or more, got {top_k}"):
        HierarchicalMemory(SHAPE).search(draw(1, K), top_k)


def test_what_does_not_fit_is_refused() -> None:
    memory = HierarchicalMemory(SHAPE)
    with pytest.raises(UsageError, match=r"expected keys \[n, 8\], got \[2, 7\]"):
        memory.store(draw(2, 7), draw(2, V), clock=0)
    with pytest.raises(UsageError, match=r"\[2\] keys and \[3\] values"):
        memory.store(draw(2, K), draw(3, V), clock=0)
    memory.store(draw(2, K), draw(2, V), clock=5)
    with pytest.raises(UsageError, match="clock 4 is before 5"):
        memory.consolidate(4)
    with pytest.raises(UsageError, match="slot 21 is out of range; there are 21"):
        memory.level_of(21)


def test_a_read_has_the_gradient_of_finite_differences() -> None:
    valid = torch.tensor([True, True, False, True])

    def told(keys: Tensor, values: Tensor, queries: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
        return memories.read_memory(keys, values, valid, queries, temperature, bias=bias)

    inputs = [draw(4, K), draw(4, V, seed=1), draw(2, K, seed=2), torch.tensor(0.3), draw(4, seed=3)]
    assert torch.autograd.gradcheck(told, [one.double().requires_grad_() for one in inputs])


def test_a_read_is_the_mean_by_softmax_of_what_is_there() -> None:
    memory = filled()
    seen = memories.visible_slots(memory.memory, same=SHAPE.same)
    queries = draw(3, K, seed=9)
    weights = torch.softmax(torch.nn.functional.normalize(queries, dim=-1) @ memory.memory.keys[seen].T / 0.2, dim=-1)
    assert torch.allclose(memory.read(queries, 0.2), weights @ memory.memory.values[seen], atol=1e-6)


def test_nothing_is_changed_in_place() -> None:
    """Each function is called with tensors that are compared afterwards."""
    memory = filled().memory
    before = {name: tensor.clone() for name, tensor in memories.flatten_memory(memory).items()}
    keys, values = draw(4, K, seed=7), draw(4, V, seed=8)
    one = memories.store(memory, keys, values, torch.ones(4), 11, shape=SHAPE)
    found = memories.search(one, keys, 2, same=SHAPE.same)
    two = memories.consolidate(memories.record_use(one, found, 12, same=SHAPE.same), 13, shape=SHAPE)
    after = memories.flatten_memory(memory)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(before[name], tensor) for name, tensor in memories.flatten_memory(two).items())


def test_the_same_calls_give_the_same_bits() -> None:
    a, b = filled().state_dict(), filled().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_it_is_saved_and_read_back_whole(tmp_path: Path) -> None:
    memory, again = filled(), HierarchicalMemory(SHAPE)
    memory.save(tmp_path / "memory.safetensors")
    again.load(tmp_path / "memory.safetensors")
    a, b = memory.state_dict(), again.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for one in (memory, again):
        one.store(draw(2, K, seed=30), draw(2, V), clock=20)
    a, b = memory.state_dict(), again.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a), "and goes on alike"


def test_a_memory_larger_than_its_bounds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory.safetensors"
    HierarchicalMemory(SHAPE.model_copy(update={"episodic_slots": 99})).save(path)
    with pytest.raises(CheckpointError, match=r"the memory has episodic_slots 99 \(this memory: 12\); create"):
        HierarchicalMemory(SHAPE).load(path)
    path.write_bytes(b"no memory")
    with pytest.raises(CheckpointError, match="cannot be read as a memory"):
        HierarchicalMemory(SHAPE).load(path)
    with pytest.raises(CheckpointError, match="clock is missing"):
        HierarchicalMemory(SHAPE).load_state_dict(memories.flatten_memory(memories.empty_memory(SHAPE)))


@pytest.mark.parametrize("slots", ["working_slots", "episodic_slots", "semantic_slots"])
def test_a_memory_without_slots_is_none(slots: str) -> None:
    with pytest.raises(ValueError, match=slots):
        MemoryShape(**{**SHAPE.model_dump(), slots: 0})


def test_without_faiss_it_says_what_to_install() -> None:
    if importlib.util.find_spec("faiss") is not None:
        pytest.skip("faiss is installed")
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[faiss\]'"):
        filled().search(draw(1, K), 1, by="faiss")


def test_faiss_finds_what_the_exact_search_finds() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed; pip install 'bottega[faiss]'")
    keys = torch.nn.functional.normalize(draw(5000, 32), dim=-1)
    values, queries, valid = draw(5000, 4, seed=1), draw(20, 32, seed=2), draw(5000, seed=3) > 0
    exact, fast = search_exact(keys, values, valid, queries, 7), search_faiss(keys, values, valid, queries, 7)
    assert torch.equal(exact.where, fast.where)
    assert torch.allclose(exact.scores, fast.scores, atol=1e-6)
    assert torch.equal(exact.values, fast.values)
    few = valid & (torch.arange(5000) < 10)
    assert torch.equal(
        search_exact(keys, values, few, queries, 9).where, search_faiss(keys, values, few, queries, 9).where
    )
