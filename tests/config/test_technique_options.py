"""Options of techniques: other guides' names are understood, and all that is wrong with them is said at once."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe


def options(name: str, values: dict[str, Any]) -> Any:
    return check_recipe(["language", {"techniques": [{"name": name, "options": values}]}]).recipe.techniques[0].options


def test_the_names_of_peft_and_of_the_guides_are_ours() -> None:
    guide = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["query", "value", "key"]}
    ours = {"rank": 8, "alpha": 16, "dropout": 0.1, "targets": ["query", "value", "key"]}
    assert options("lora", guide) == options("lora", ours)
    assert options("adapter", {"bottleneck_size": 64, "adapter_layers": "all"}) == options("adapter", {"size": 64})
    assert options("adapter", {"adapter_layers": ["down_proj"]}).targets == ("down_proj",)


def test_two_names_of_one_option_must_agree() -> None:
    assert options("lora", {"r": 4, "rank": 4}).rank == 4
    with pytest.raises(UsageError, match=r"rank: 8 conflicts with rank: 4|r: 4 conflicts|conflicts with rank"):
        options("lora", {"r": 4, "rank": 8})


def test_all_problems_of_the_options_are_named_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        options("lora", {"foo": 1, "barr": 2, "rank": 0, "dropout": 3})
    text = str(refused.value)
    assert len(text.splitlines()) == 1
    for part in (
        "foo",
        "barr",
        "rank: expected a number above 0",
        "dropout: expected a number below 1",
        "choose from rank, alpha",
    ):
        assert part in text
