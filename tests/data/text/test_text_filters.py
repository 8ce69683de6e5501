"""Text filters: the reason for each dropped text; texts at a limit are retained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.config.data import Filter
from bottega.core.errors import UsageError
from bottega.data.text.filters import (
    check_filter,
    compute_repeated_line_fraction,
    compute_symbol_fraction,
    find_drop_reason,
)

ENGLISH = "The rain fell on the roof of the house, and it was dark when we came home."
GERMAN = "Der Regen fiel auf das Dach des Hauses, und es war dunkel, als wir nach Hause kamen."


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("abc", Filter(), None),
        ("", Filter(), None),
        ("abc", Filter(min_characters=3), None),
        ("abc", Filter(min_characters=4), "too short"),
        ("abc", Filter(max_characters=3), None),
        ("abcd", Filter(max_characters=3), "too long"),
        ("one two", Filter(min_words=2), None),
        ("one two", Filter(min_words=3), "too few words"),
        ("我们晚上回到家的时候", Filter(min_words=5), None),
        ("ab!?", Filter(max_symbol_share=0.5), None),
        ("ab!?#", Filter(max_symbol_share=0.5), "too many symbols"),
        ("a\nb\na\nb", Filter(max_repeated_share=0.5), None),
        ("a\nb\na\na", Filter(max_repeated_share=0.49), "repeated lines"),
        (ENGLISH, Filter(languages=("en",)), None),
        (ENGLISH, Filter(languages=("de", "EN-gb")), None),
        (GERMAN, Filter(languages=("en",)), "other language"),
        ("abc", Filter(languages=("en",)), "unknown language"),
        ("", Filter(min_characters=1, languages=("en",)), "too short"),
    ],
)
def test_drop_reasons(text: str, options: Filter, reason: str | None) -> None:
    assert find_drop_reason(text, options) == reason


def test_fractions_of_symbols_and_repeated_lines() -> None:
    assert compute_symbol_fraction("a, b.") == pytest.approx(2 / 4)
    assert compute_symbol_fraction("é, b.") == pytest.approx(2 / 4)
    assert compute_symbol_fraction("_") == 1
    assert compute_symbol_fraction(" \n") == compute_symbol_fraction("") == 0
    assert (
        compute_symbol_fraction("नमस्ते") == 0
    )  # A quarter of ordinary Hindi are combining marks, which are not symbols.
    assert compute_symbol_fraction(ENGLISH) < 0.06
    assert compute_repeated_line_fraction("a\n\n b \n\na\n\n") == pytest.approx(1 / 3)
    assert compute_repeated_line_fraction("") == 0


@given(st.text(st.characters(max_codepoint=127)))
def test_fast_path_for_ascii_counts_symbols_exactly(text: str) -> None:
    num_symbols = sum(not character.isalnum() and not character.isspace() for character in text)
    num_visible = sum(not character.isspace() for character in text)
    assert compute_symbol_fraction(text) == pytest.approx(num_symbols / max(num_visible, 1))


@given(st.text())
def test_any_text_has_a_drop_reason_or_none(text: str) -> None:
    options = Filter(min_words=1, languages=("en",), max_symbol_share=0.3, max_repeated_share=0.3)
    assert find_drop_reason(text, options) in {
        None,
        "too few words",
        "too many symbols",
        "repeated lines",
        "unknown language",
        "other language",
    }
    assert 0 <= compute_symbol_fraction(text) <= 1
    assert 0 <= compute_repeated_line_fraction(text) < 1


def test_undetectable_language_is_refused_by_name() -> None:
    check_filter(Filter(languages=("en", "de-AT", "nb", "zh_CN")))
    check_filter(Filter())
    with pytest.raises(UsageError, match=r"data\.filter\.languages: 'english'.*did you mean 'en'"):
        check_filter(Filter(languages=("english",)))
    with pytest.raises(UsageError, match=r"'xx'.*choose from am, ar"):
        check_filter(Filter(languages=("xx",)))
