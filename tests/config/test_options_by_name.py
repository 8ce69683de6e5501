"""Options of a technique by its name, as an override, in a later layer, and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.core.errors import UsageError
from bottega.tasks.recipes import load_recipe, parse_overrides


def load_options(*sources: Any, words: list[str] | None = None) -> dict[str, dict[str, Any]]:
    recipe = load_recipe(["language", *sources], parse_overrides(words or [])[1]).recipe
    return {technique.name: technique.options.model_dump() for technique in recipe.techniques}  # type: ignore[union-attr]


def test_an_option_is_set_and_the_others_stay() -> None:
    recipe = {"techniques": [{"name": "lora", "options": {"rank": 16, "dropout": 0.1}}]}
    options = load_options(recipe, words=["techniques.lora.rank=4"])["lora"]
    assert (options["rank"], options["dropout"]) == (4, 0.1)
    assert load_options(recipe, words=["--techniques.lora.rank", "5"])["lora"]["rank"] == 5


def test_a_later_layer_and_the_same_command_line_set_options() -> None:
    assert load_options({"techniques": ["lora"]}, {"techniques": {"lora": {"rank": 3}}})["lora"]["rank"] == 3
    assert load_options(words=["techniques=[lora]", "techniques.lora.lora_alpha=7"])["lora"]["alpha"] == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["techniques.lora.rank=4"], r"the recipe does not use lora; add it to the list: techniques=\[lora\]"),
        (["techniques=[lora]", "techniques.lora.rnk=4"], "did you mean techniques.lora.rank"),
        (["techniques=[lora]", "techniques.lora.rank=x"], "rank: expected a whole number, got 'x'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_options(words=words)
