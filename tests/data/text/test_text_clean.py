"""Text cleaning: idempotent, adds no characters, leaves clean text unchanged, takes linear time."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bottega.config.data import Cleaning
from bottega.data.text.clean import clean_text
from operations import count_operations

ALL = Cleaning()
# Problematic characters among letters they may compose or join with.
TEXTS = st.text(
    st.sampled_from(
        "ab eE\t\n\r\x00\x0b\x0c\x1c\x1f\x7f\x85\xa0\xad\u0301\u0345\u200b\u200c\u200d\u2028\u202e\u3000\ufeff\ue000"
    )
    | st.sampled_from("नक्षیمΑＡⅣ¨ﬁ\u212b\U0001f468\u1f00\u0390가\u1161")
    | st.characters(),
    max_size=60,
)
OPTIONS = st.builds(
    Cleaning,
    unicode=st.sampled_from(["NFC", "NFKC", "none"]),
    control=st.booleans(),
    whitespace=st.booleans(),
    boilerplate=st.booleans(),
)


@given(TEXTS, OPTIONS)
@example("e\u00ad\u0301", ALL)
@example("\uff21\u200d\u0915", Cleaning(unicode="NFKC"))
@example("e\u200d\u0301", ALL)
@example("x\u0301\u200d\u1dc2\u200d\u0915", ALL)  # Without the first joiner the accents are reordered.
def test_cleaning_is_idempotent(text: str, options: Cleaning) -> None:
    once = clean_text(text, options)
    assert clean_text(once, options) == once


@given(st.text(st.sampled_from("ab \t\n\r\xa0"), max_size=40), st.integers(0, 40), st.booleans())
@example("  word138\nword139  ", 9, False)
@example("a  b", 3, False)
def test_cleaning_two_pieces_preserves_words(text: str, cut: int, html: bool) -> None:
    options = Cleaning(html=html)
    joined = clean_text(text[:cut], options, is_end=False) + clean_text(text[cut:], options, is_start=False)
    assert joined.split() == clean_text(text, options).split()


@given(st.lists(st.text(st.sampled_from("ab \t\n"), max_size=20), min_size=1, max_size=4))
def test_cleaning_pieces_cut_at_line_ends_equals_cleaning_the_text(parts: list[str]) -> None:
    # Like pieces of text files: each but the first begins with a line break that follows a word.
    pieces = [f"{'' if i == 0 else chr(10)}{part}x" for i, part in enumerate(parts)]
    last = len(pieces) - 1
    cleaned = [clean_text(piece, ALL, is_start=i == 0, is_end=i == last) for i, piece in enumerate(pieces)]
    assert "".join(cleaned) == clean_text("".join(pieces), ALL)


@given(TEXTS, OPTIONS)
def test_cleaning_adds_no_characters(text: str, options: Cleaning) -> None:
    # Composition may add characters: compare with the composed text without its invisible characters.
    visible = "".join(
        character for character in text if unicodedata.category(character) not in ("Cc", "Cf", "Co", "Cs")
    )
    forms = {unicodedata.normalize(form, part) for form in ("NFC", "NFKC") for part in (text, visible)}
    allowed = set(text).union(" \n", *forms)
    if options.unicode == "none":
        allowed = {*text, " ", "\n"}
    assert set(clean_text(text, options)) <= allowed


@given(st.lists(st.lists(st.text(st.sampled_from("abc.,XYZ019<&"), min_size=1), min_size=1).map(" ".join), min_size=1))
def test_clean_ascii_is_unchanged(lines: list[str]) -> None:
    text = "\n    ".join(lines)
    assert clean_text(text, ALL) == text


@given(TEXTS)
def test_white_space_is_normalised(text: str) -> None:
    cleaned = clean_text(text, ALL)
    assert cleaned == cleaned.strip()
    assert "\n\n\n" not in cleaned
    for line in cleaned.split("\n"):
        assert line == line.rstrip()
        assert "  " not in line.lstrip()


def test_invisible_characters_are_removed_and_separators_become_line_breaks() -> None:
    assert (
        clean_text("\ufeffso\u00adft\u200b \u202eleft\u2060 \x00nul \ue123\U000f1234pri\x7fvate", ALL)
        == "soft left nul private"
    )
    assert clean_text("a\r\nb\rc\x0cd\x85e\u2028f", ALL) == "a\nb\nc\nd\ne\nf"
    assert clean_text("a\r\nb\x00", Cleaning(control=False, whitespace=False, unicode="none")) == "a\r\nb\x00"


def test_control_format_and_private_characters_are_removed_unless_visible() -> None:
    visible = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13460)}
    options = Cleaning(unicode="none", whitespace=False)
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Co", "Cs"):
            expected = chr(code) if code in visible or chr(code) in "\t\n" else ""
            assert clean_text(chr(code), options).replace("\n", "") == expected.replace("\n", ""), hex(code)


def test_joiners_are_preserved_where_spelling_needs_them() -> None:
    for word in ("می\u200cخواهم", "क्\u200dष", "👨\u200d👩\u200d👧"):
        assert clean_text(word, ALL) == word
    assert clean_text("zero\u200dwidth\u200cjoiners\u200d", ALL) == "zerowidthjoiners"


def test_unicode_normalisation_forms() -> None:
    assert clean_text("e\u0301 ﬁ Ａ", ALL) == "é ﬁ Ａ"
    assert clean_text("e\u0301 ﬁ Ａ", Cleaning(unicode="NFKC")) == "é fi A"
    assert clean_text("e\u0301", Cleaning(unicode="none")) == "e\u0301"


def test_spaces_are_collapsed_and_indentation_is_preserved() -> None:
    assert clean_text("  a  b \t c\td  \n\n \n\n\xa0e\u3000f \n", ALL) == "a b c\td\n\n e f"
    code = "def f(x):\n    if x:\n\treturn  1   # why"
    assert clean_text(code, ALL) == "def f(x):\n    if x:\n\treturn 1 # why"


def test_html_and_boilerplate_are_removed_only_on_request() -> None:
    page = "<ul><li>Home<li>News<li>Contact</ul><p>It was   a dark night &amp; cold.</p>"
    assert clean_text(page, ALL).startswith("<ul>")
    assert clean_text(page, Cleaning(html=True)) == "Home\nNews\nContact\n\nIt was a dark night & cold."
    assert clean_text(page, Cleaning(html=True, boilerplate=True)) == "It was a dark night & cold."


@pytest.mark.parametrize(
    "text", [" " * 2_000_000 + "x", "a" + " " * 2_000_000, "a\t" * 1_000_000, "\n \n" * 700_000, "\u200d" * 2_000_000]
)
def test_hostile_white_space_takes_linear_time(text: str) -> None:
    """A pattern that backtracks at every character would take hours and reach the suite's time limit."""
    clean_text(text, Cleaning(unicode="NFKC"))


def test_cleaning_clean_text_does_not_loop_over_lines() -> None:
    line = "It was a dark night, and the rain fell in torrents except at occasional intervals.\n"
    short, long = (count_operations(lambda n=n: clean_text(line * n, ALL)) for n in (10, 1000))
    assert long == short < 200
