"""Contact sheet captions are printable, fit their image and distinguish it from the others."""

from __future__ import annotations

import pytest
from PIL import ImageFont

from bottega.data.image.caption import fit_captions, to_printable


def count_characters(text: str) -> float:
    """Return the width of a text in a font whose characters are one pixel wide."""
    return float(len(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer", "grosser"),
        ("Zürich\n  Ñandú", "Zurich Nandu"),
        ("smørrebrød – “łódź”", 'smorrebrod - "lodz"'),
        ("left\u200f\u202e \x07bell", "left bell"),
        ("a star 🌟 ♥ of «gold»", "a star of «gold»"),
        ("½ … ™", "1⁄2 ... TM"),
        ("日本", "?"),
        ("", ""),
    ],
)
def test_unsupported_characters_are_replaced(text: str, shown: str) -> None:
    assert to_printable(text) == shown


def test_default_font_draws_every_printable_character() -> None:
    font = ImageFont.load_default(size=11)
    box = bytes(font.getmask("\u0fff"))
    assert bytes(font.getmask("ü")) == box, "with a font that has this letter, the replacement is unnecessary"
    everything = "".join(chr(code) for code in range(1, 0x20000) if not 0xD800 <= code < 0xE000)
    assert [letter for letter in set(to_printable(everything)) if bytes(font.getmask(letter)) == box] == []


def test_long_captions_wrap_between_words() -> None:
    assert fit_captions(["digit=3 direction=left", "x"], 14, count_characters) == [["digit=3", "direction=left"], ["x"]]
    assert fit_captions(["short", ""], 14, count_characters) == [["short"], [""]]


def test_common_text_is_dropped_before_captions_are_cut() -> None:
    texts = [f"a small drawing of a {colour} square on the left" for colour in ("red", "dark green")]
    assert fit_captions(texts, 12, count_characters) == [["...red..."], ["...dark", "green..."]]
    assert fit_captions(texts, 60, count_characters) == [[text] for text in texts], "complete if there is space"
    assert fit_captions(["the very same text"] * 2, 8, count_characters) == [["the very", "same..."]] * 2


def test_no_line_is_wider_than_its_image() -> None:
    texts = ["word" * 30, "a b " * 40, "all alike " * 9, "x"]
    for width in (5, 12, 31):
        for lines in fit_captions(texts, width, count_characters):
            assert len(lines) <= 2
            assert max(map(len, lines)) <= width
