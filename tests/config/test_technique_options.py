"""Technique options: aliases of other libraries, and all problems reported at once."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe


def load_options(name: str, values: dict[str, Any]) -> Any:
    return check_recipe(["language", {"techniques": [{"name": name, "options": values}]}]).recipe.techniques[0].options


def test_peft_and_guide_names_are_aliases() -> None:
    guide = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["query", "value", "key"]}
    expected = {"rank": 8, "alpha": 16, "dropout": 0.1, "targets": ["query", "value", "key"]}
    assert load_options("lora", guide) == load_options("lora", expected)
    assert load_options("adapter", {"bottleneck_size": 64, "adapter_layers": "all"}) == load_options(
        "adapter", {"size": 64}
    )
    assert load_options("adapter", {"adapter_layers": ["down_proj"]}).targets == ("down_proj",)


def test_aliases_of_an_option_must_agree() -> None:
    assert load_options("lora", {"r": 4, "rank": 4}).rank == 4
    with pytest.raises(UsageError, match=r"rank: 8 conflicts with rank: 4|r: 4 conflicts|conflicts with rank"):
        load_options("lora", {"r": 4, "rank": 8})


def test_all_problems_of_the_options_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        load_options("lora", {"foo": 1, "barr": 2, "rank": 0, "dropout": 3})
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for part in (
        "foo",
        "barr",
        "rank: expected a number above 0",
        "dropout: expected a number below 1",
        "choose from rank, alpha",
    ):
        assert part in text
