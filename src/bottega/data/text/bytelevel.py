"""Byte-level BPE: the symbol of each byte, and where text can be split without changing its tokens."""

from __future__ import annotations

from collections.abc import Iterator

# GPT-2's table: printable Latin-1 stands for itself, every other byte for a symbol from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_BY_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_UNPRINTABLE)
}
SYMBOLS = [symbol for symbol, _ in sorted(BYTE_BY_SYMBOL.items(), key=lambda pair: pair[1])]


def decode_token_bytes(token: str) -> bytes:
    """Return the bytes of a token; a token with a symbol outside the table (an added token) is its own text."""
    try:
        return bytes(BYTE_BY_SYMBOL[symbol] for symbol in token)
    except KeyError:
        return token.encode()


def split_at_safe_points(text: str, size: int) -> Iterator[str]:
    """Split a text into pieces of at least `size` characters whose concatenated tokens are those of the whole text.

    Cut before a newline that follows something other than white space. No alternative of the pre-tokenizer's pattern
    matches across such a place: words, numbers and punctuation contain no newline, and a run of white space starts at the
    newline. The pattern looks ahead only from white space to what follows it, and the cut has no white space before it.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        # str.isspace covers more characters than the white space of the pattern, which only makes some cuts later.
        while end != -1 and text[end - 1].isspace():
            end = text.find("\n", end + 1)
        end = len(text) if end == -1 else end
        yield text[start:end]
        start = end
