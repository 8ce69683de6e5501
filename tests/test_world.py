"""Which of how many processes this one is: what a launcher says, in any combination, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bottega
from bottega.world import GROUP, World, environment_alone, is_launched, missing_variables, rank_of


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert World.current() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert World.current().is_main
    assert not is_launched()
    assert missing_variables() == ["RANK", "MASTER_ADDR", "MASTER_PORT"]


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    world = World.current()
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not world.is_main
    assert is_launched()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert World.current().local_size == 8, "one machine, unless it says otherwise"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("KEPT", "y")
    ours = environment_alone()
    assert not [name for name in ours if name in GROUP or name.startswith("TORCHELASTIC")]
    assert ours["KEPT"] == "y"


@pytest.mark.parametrize("text", ["", "abc", "-1", "²", "1.5", "9" * 5000])
def test_what_is_no_number_waits_for_the_check_of_the_command(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    monkeypatch.setenv("RANK", text)
    assert World.current() == World()
    assert rank_of({"RANK": "3"}) == 3
    assert rank_of({}) is None


def test_nobody_else_reads_the_variables() -> None:
    """Two files: the one that reads them, and the one that refuses what they cannot be."""
    folder = Path(bottega.__file__).parent
    named = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)["']""")
    readers = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if named.search(p.read_text())}
    assert readers == {"world.py", "config/launch.py"}
