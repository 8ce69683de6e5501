"""Parameter groups: the first matching rule applies, and every parameter and every rule must match."""

from __future__ import annotations

import pytest

from bottega.config.parameter_groups import ParameterRule, apply_parameter_rules, assign_layers, match_rules
from bottega.core.errors import UsageError

NAMES = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]


def test_first_rule_matching_the_full_name_applies() -> None:
    rules = [ParameterRule("embed.*", None), ParameterRule(r"layers\.0\..*", 0.1), ParameterRule(".*")]
    assert match_rules(NAMES, rules) == {NAMES[0]: 0, NAMES[1]: 1, NAMES[2]: 2, NAMES[3]: 2}
    with pytest.raises(UsageError, match=r"no pattern matches the parameter embed\.weight"):
        match_rules(NAMES, [ParameterRule("embed"), ParameterRule("layers.*")])


@pytest.mark.parametrize(
    ("rules", "message"),
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
def test_invalid_rules_are_refused_by_name(rules: list[ParameterRule], message: str) -> None:
    with pytest.raises(UsageError, match=r"training\.groups: .*") as caught:
        match_rules(NAMES, rules)
    assert caught.match(message)
    assert "\n" not in str(caught.value)


def test_layers_are_counted_from_the_embeddings_to_the_head() -> None:
    bert = ["emb.word", "encoder.layer.0.a.w", "encoder.layer.0.ff.1.w", "encoder.layer.1.a.w", "pooler.w", "cls.w"]
    assert list(assign_layers(bert).values()) == [0, 1, 1, 2, 3, 3]
    assert list(assign_layers(["down.0.w", "down.1.w", "mid.w", "up.0.w", "out.w"]).values()) == [1, 2, 4, 3, 4]
    assert set(assign_layers(["a.w", "b.w"]).values()) == {0}


def test_layer_decay_starts_at_the_head() -> None:
    settings = apply_parameter_rules(NAMES, [ParameterRule("head.*", 2.0), ParameterRule(".*")], layer_decay=0.5)
    assert [settings[name].scale for name in NAMES] == [0.125, 0.25, 0.5, 2.0]


def test_gradual_unfreezing_starts_at_the_head() -> None:
    settings = apply_parameter_rules(
        NAMES, [ParameterRule("head.*", start_step=3), ParameterRule(".*")], unfreeze_every=10
    )
    assert [settings[name].start_step for name in NAMES] == [30, 20, 10, 3]


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
def test_freeze_accepts_module_names_and_patterns(word: str, frozen: list[str]) -> None:
    settings = apply_parameter_rules(NAMES, [ParameterRule(".*")], freeze=[word])
    assert [name for name in NAMES if settings[name].scale is None] == frozen


def test_module_named_backbone_takes_precedence_over_the_keyword() -> None:
    names = ["backbone.blocks.0.w", "condition.w", "out.w"]
    settings = apply_parameter_rules(names, [ParameterRule(".*")], freeze=["backbone"])
    assert [settings[name].scale for name in names] == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["body"], "'body' matches no module and no parameter; the modules are embed, head, layers"),
        (["("], r"'\(' is not a regular expression"),
        (["backbone", "head"], "every parameter is frozen"),
    ],
)
def test_invalid_freeze_is_refused(freeze: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r"training\.freeze: .*") as caught:
        apply_parameter_rules(NAMES, [ParameterRule(".*")], freeze=freeze)
    assert caught.match(message)
