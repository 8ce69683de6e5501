"""What stands below a picture can be read, and tells it from its neighbours."""

from __future__ import annotations

import pytest
from PIL import ImageFont

from bottega.data.image.caption import fit_captions, to_printable


def letters(text: str) -> float:
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
def test_letters_that_the_font_lacks_become_those_it_has(text: str, shown: str) -> None:
    assert to_printable(text) == shown


def test_pillows_font_draws_what_is_left() -> None:
    font = ImageFont.load_default(size=11)
    box = bytes(font.getmask("\u0fff"))
    assert bytes(font.getmask("ü")) == box, "a font with more letters needs no other ones"
    everything = "".join(chr(code) for code in range(1, 0x20000) if not 0xD800 <= code < 0xE000)
    assert [letter for letter in set(to_printable(everything)) if bytes(font.getmask(letter)) == box] == []


def test_long_captions_are_broken_between_words() -> None:
    assert fit_captions(["digit=3 direction=left", "x"], 14, letters) == [["digit=3", "direction=left"], ["x"]]
    assert fit_captions(["short", ""], 14, letters) == [["short"], [""]]


def test_what_all_have_in_common_is_dropped_before_anything_is_cut() -> None:
    texts = [f"a small drawing of a {colour} square on the left" for colour in ("red", "dark green")]
    assert fit_captions(texts, 12, letters) == [["...red..."], ["...dark", "green..."]]
    assert fit_captions(texts, 60, letters) == [[text] for text in texts], "all of it where there is room"
    assert fit_captions(["the very same text"] * 2, 8, letters) == [["the very", "same..."]] * 2


def test_no_line_is_wider_than_its_picture() -> None:
    texts = ["word" * 30, "a b " * 40, "all alike " * 9, "x"]
    for width in (5, 12, 31):
        for lines in fit_captions(texts, width, letters):
            assert len(lines) <= 2
            assert max(map(len, lines)) <= width
