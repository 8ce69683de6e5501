"""Reading YAML: plain values only, hostile files refused, a line number for every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.config import yaml_io as yamlfile
from bottega.config.yaml_io import dump_yaml, parse_scalar, parse_value, parse_yaml, read_yaml
from bottega.core.errors import UsageError


@pytest.fixture(autouse=True, params=["CSafeLoader", "SafeLoader"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamlfile, "_LOADER", getattr(yaml, request.param, yaml.SafeLoader))


def parse_error(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "recipe.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("recipe.yaml")
    return message


def test_scalars_follow_yaml_1_2() -> None:
    assert parse_yaml("a: 1e-4\nb: 5.0e-6\nc: .5\nd: -3\ne: 1_000\n", "r").value == {
        "a": 1e-4,
        "b": 5e-6,
        "c": 0.5,
        "d": -3,
        "e": 1000,
    }
    assert parse_yaml("[no, off, yes, on, 012, 12:30, '5', 2024-01-01]", "r").value == [
        "no",
        "off",
        "yes",
        "on",
        "012",
        "12:30",
        "5",
        "2024-01-01",
    ]
    assert parse_yaml("[~, null, true, False, '']", "r").value == [None, None, True, False, ""]
    assert isinstance(parse_scalar("1e5"), int)


def test_every_key_has_its_line() -> None:
    lines = parse_yaml("a: 1\nb:\n  c: 2\n  d:\n    - e: 3\n    - f: 4\n", "r").lines
    assert (lines["a"], lines["b"], lines["b.c"], lines["b.d.0.e"], lines["b.d.1.f"]) == (1, 2, 3, 5, 6)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch marker']",
        "a: !!python/name:os.system",
        "a: !include other.yaml",
        "!!map {a: 1}",
        "a: !!str 5",
        "a: ! b",
    ],
)
def test_tags_are_refused(text: str) -> None:
    assert "recipe.yaml:1: tags such as !" in parse_error(text)


def test_duplicate_keys_name_both_lines() -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml("a: 1\nb:\n  c: 1\n  c: 1\na: 1\n", "recipe.yaml")
    assert str(caught.value).splitlines() == [
        "recipe.yaml:4: b.c: given twice, first on line 3; keep one",
        "recipe.yaml:5: a: given twice, first on line 1; keep one",
    ]


@pytest.mark.parametrize(
    "text",
    ["[" * 3000, "a: " + "{a: " * 3000, "- " * 3000, "\n".join(" " * i + "a:" for i in range(3000)), "[" * 500_000],
)
def test_deep_nesting_is_refused(text: str) -> None:
    assert "nested deeper" in parse_error(text)


def test_alias_bomb_is_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    assert "aliases" in parse_error(bomb)
    tower = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 90))
    assert "nested deeper" in parse_error(tower)
    assert "more than 100 aliases" in parse_error("a: &a 1\nb: [" + "*a, " * 200 + "]")
    assert "inside its anchor" in parse_error("a: &a [*a]")


def test_plain_aliases_work() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n", "r").value == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5: a", "a key must be text, got 1.5"),
        ("true: a", "a key must be text"),
        ("? [a]\n: 1", "cannot be a key"),
        ("<<: {a: 1}", "use extends"),
        ("a: 1\n---\nb: 1", "second YAML document"),
        ("a: [1", "not YAML"),
        ("a: \x00", "not YAML"),
    ],
)
def test_unsupported_yaml_is_refused_by_name(text: str, message: str) -> None:
    assert message in parse_error(text)


def test_files_must_be_small_utf8_text(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read_yaml(big)
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(UsageError, match=r"bad.yaml:2: not UTF-8"):
        read_yaml(bad)
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(UsageError, match=path.name):
            read_yaml(path)


def test_command_line_values_are_parsed() -> None:
    assert parse_value("3e-4", "x") == 3e-4
    assert parse_value("[3, 4]", "x") == [3, 4]
    assert parse_value("{a: no}", "x") == {"a": "no"}
    assert parse_value("'5'", "x") == "5"
    assert parse_value("a: b # c", "x") == "a: b # c"
    with pytest.raises(UsageError, match="command line: a"):
        parse_value("[1", "command line: a")


# YAML files cannot contain surrogates and a few other characters, even escaped.
texts = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\ufeff\ufffe\uffff"), max_size=20
)
tricky = st.sampled_from(
    ["1e-4", "no", "012", "a: b", "x # y", "", "\n", "[a]", "1e5", ".inf", "~", "- a", "null", "yes"]
)
leaves = st.one_of(texts, tricky, st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.booleans(), st.none())


@settings(deadline=None)
@given(st.dictionaries(tricky | texts, leaves | st.lists(leaves, max_size=3), max_size=4))
def test_yaml_round_trip(value: dict[str, Any]) -> None:
    for text in (dump_yaml({"a": value}), dump_yaml({"a": value}, flow=True)):
        if "<<" not in value:
            assert parse_yaml(text, "r").value == {"a": value}
