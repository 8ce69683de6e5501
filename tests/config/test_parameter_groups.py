"""The group table: the first row that matches decides, and every parameter and every row is accounted for."""

from __future__ import annotations

import pytest

from bottega.config.parameter_groups import ParameterRule, apply_parameter_rules, assign_layers, match_rules
from bottega.core.errors import UsageError

NAMES = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]


def test_the_first_row_that_matches_the_whole_name_decides() -> None:
    rows = [ParameterRule("embed.*", None), ParameterRule(r"layers\.0\..*", 0.1), ParameterRule(".*")]
    assert match_rules(NAMES, rows) == {NAMES[0]: 0, NAMES[1]: 1, NAMES[2]: 2, NAMES[3]: 2}
    with pytest.raises(UsageError, match=r"no pattern matches the parameter embed\.weight"):
        match_rules(NAMES, [ParameterRule("embed"), ParameterRule("layers.*")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ParameterRule("layers.*")], "embed.weight; add a last group"),
        (
            [ParameterRule("blocks.*"), ParameterRule(".*")],
            "'blocks.*' matches no parameter; parameters are named like embed.weight",
        ),
        ([ParameterRule(".*"), ParameterRule("head.*")], "'head.*' matches no parameter"),
        ([ParameterRule("("), ParameterRule(".*")], r"'\(' is not a regular expression"),
        ([ParameterRule(".*", None)], "every parameter is frozen"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(rows: list[ParameterRule], message: str) -> None:
    with pytest.raises(UsageError, match=r"training\.groups: .*") as caught:
        match_rules(NAMES, rows)
    assert caught.match(message)
    assert "\n" not in str(caught.value)


def test_layers_are_counted_from_the_embeddings_to_the_head() -> None:
    bert = ["emb.word", "encoder.layer.0.a.w", "encoder.layer.0.ff.1.w", "encoder.layer.1.a.w", "pooler.w", "cls.w"]
    assert list(assign_layers(bert).values()) == [0, 1, 1, 2, 3, 3]
    assert list(assign_layers(["down.0.w", "down.1.w", "mid.w", "up.0.w", "out.w"]).values()) == [1, 2, 4, 3, 4]
    assert set(assign_layers(["a.w", "b.w"]).values()) == {0}


def test_the_rate_decays_from_the_head_down() -> None:
    found = apply_parameter_rules(NAMES, [ParameterRule("head.*", 2.0), ParameterRule(".*")], layer_decay=0.5)
    assert [found[name].scale for name in NAMES] == [0.125, 0.25, 0.5, 2.0]


def test_unfreezing_goes_down_a_layer_at_a_time() -> None:
    found = apply_parameter_rules(
        NAMES, [ParameterRule("head.*", start_step=3), ParameterRule(".*")], unfreeze_every=10
    )
    assert [found[name].start_step for name in NAMES] == [30, 20, 10, 3]


@pytest.mark.parametrize(
    ("word", "frozen"),
    [
        ("embed", NAMES[:1]),
        ("layers", NAMES[1:3]),
        ("layers.1", NAMES[2:3]),
        (r"layers\.\d\.weight", NAMES[1:3]),
        ("backbone", NAMES[:3]),
    ],
)
def test_freezing_names_a_part_or_a_pattern(word: str, frozen: list[str]) -> None:
    found = apply_parameter_rules(NAMES, [ParameterRule(".*")], freeze=[word])
    assert [name for name in NAMES if found[name].scale is None] == frozen


def test_a_part_that_is_called_backbone_is_meant_before_all_but_the_head() -> None:
    names = ["backbone.blocks.0.w", "condition.w", "out.w"]
    found = apply_parameter_rules(names, [ParameterRule(".*")], freeze=["backbone"])
    assert [found[name].scale for name in names] == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["body"], "'body' matches no module and no parameter; the modules are embed, head, layers"),
        (["("], r"'\(' is not a regular expression"),
        (["backbone", "head"], "every parameter is frozen"),
    ],
)
def test_what_cannot_be_frozen_is_said(freeze: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r"training\.freeze: .*") as caught:
        apply_parameter_rules(NAMES, [ParameterRule(".*")], freeze=freeze)
    assert caught.match(message)
