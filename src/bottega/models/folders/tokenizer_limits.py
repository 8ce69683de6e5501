"""What a tokenizer.json from anywhere may ask of this machine, checked in the file before the library reads it.

The library takes the file at its word: it makes room for the highest id, lets normalizers multiply a text, and searches
with whatever pattern is there. Too much of either ends the process without an exception.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError

MAX_BYTES = 256 << 20
MAX_ID = 1 << 22
"""Four times the largest vocabulary in use. (Of an id of 2^31 the library makes a table of 8 GB.)"""
MAX_GROWTH = 64
"""How many times longer normalizers may make a text."""
MAX_STEPS = 64
"""Of a normalizer or decoder."""
MAX_TEXT = 1 << 16
"""Characters of a pattern, a token or a piece that is put in."""
MAX_FRAME = 64
"""Tokens that a post-processor may put around a text."""
PROBE_SECONDS = 30.0
# A repeated group is where a search may take exponentially long; without one it takes a power of the length.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_ALPHABET = "aA0 \n_.-é中"


def read_tokenizer(path: Path) -> str:
    """Return the text of a tokenizer.json that keeps to the limits; raise DataError for any other."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes; a tokenizer.json has {MAX_BYTES:,} at most")
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path} is not a tokenizer: {reason}") from None
    if not isinstance(fields, dict):
        raise DataError(f"{path} is not a tokenizer: it holds a {type(fields).__name__} where an object was expected")
    _check_ids(fields, path)
    _check_growth(fields, path)
    _check_frame(fields.get("post_processor"), path)
    _check_patterns(fields, path)
    return text


def check_tokenizer(folder: Path) -> None:
    """Check the tokenizer.json of a folder, where it has one, before a library opens it."""
    if (folder / "tokenizer.json").is_file():
        read_tokenizer(folder / "tokenizer.json")


@contextmanager
def convert_panics(what: str) -> Iterator[None]:
    """Turn a panic of the library, which is no Exception, into a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: the tokenizers library failed ({error}); use another tokenizer") from None


def _check_ids(fields: dict[str, Any], path: Path) -> None:
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        numbers = list(vocabulary.items())
    else:
        numbers = [("the last entry", len(vocabulary) - 1)] if isinstance(vocabulary, list) and vocabulary else []
    added = fields.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            numbers.append((str(token.get("content")), token.get("id")))
    for name, number in numbers:
        if not isinstance(number, int) or not 0 <= number < MAX_ID:
            raise DataError(
                f"{path}: the token {_short(name)} has the id {_short(number)}; ids are whole numbers below {MAX_ID:,}"
            )
        if len(name) > MAX_TEXT:
            raise DataError(f"{path}: the token {_short(name)} has {len(name):,} characters; {MAX_TEXT:,} is the most")


def _check_growth(fields: dict[str, Any], path: Path) -> None:
    """Normalizers and decoders, in a row, multiply."""
    for part in ("normalizer", "decoder"):
        steps = list(_steps(fields.get(part)))
        first_table = next((at for at, step in enumerate(steps) if step.get("type") == "Precompiled"), None)
        growth = 1.0
        for at, step in enumerate(steps):
            # One table of characters makes 18 of one at most; another after it would do the same to each of these.
            growth *= _growth(step) if at != first_table else max(1.0, _growth(step) / MAX_GROWTH)
            if growth > MAX_GROWTH or len(steps) > MAX_STEPS:
                raise DataError(
                    f"{path}: its {part} can make a text more than {MAX_GROWTH} times as long ({_short(step)}); "
                    "use another tokenizer"
                )


def _growth(step: dict[str, Any]) -> float:
    """How many times longer one step can make a text, again and again. (Unicode's forms do so once: repeated, they change
    nothing.)"""
    if step.get("type") == "Precompiled":
        return float(max(1, _longest_entry(step.get("precompiled_charsmap"))))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    # A pattern may match a single character; an empty one matches between any two.
    return max(1.0, len(content) / len(text)) if isinstance(text, str) and text else 1.0 + len(content)


def _longest_entry(charsmap: Any) -> int:
    """Bytes of the longest text that SentencePiece's table of characters puts in."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return 0  # the library says what is wrong with it
    start = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[start:].split(b"\0")))


def _check_frame(processor: Any, path: Path) -> None:
    for step in _steps(processor):
        for name in ("single", "pair"):
            template = step.get(name)
            special = step.get("special_tokens")
            ids = [len(one.get("ids", ())) for one in special.values()] if isinstance(special, dict) else []
            length = len(template) if isinstance(template, list) else 0
            if length > MAX_FRAME or max(ids, default=0) > MAX_FRAME:
                raise DataError(
                    f"{path}: its post_processor puts more than {MAX_FRAME} tokens around a text; use another tokenizer"
                )


def _check_patterns(fields: dict[str, Any], path: Path) -> None:
    """Search texts that are hard for repeated groups, in a process of its own: a search that takes too long ends it."""
    patterns = [
        pattern["Regex"]
        for part in ("normalizer", "pre_tokenizer", "decoder")
        for step in _steps(fields.get(part))
        if isinstance(pattern := step.get("pattern"), dict) and isinstance(pattern.get("Regex"), str)
    ]
    for pattern in patterns:
        if len(pattern) > MAX_TEXT:
            raise DataError(f"{path}: a pattern has {len(pattern):,} characters; {MAX_TEXT:,} is the most")
        if _REPEATED_GROUP.search(pattern) and not _ends(pattern):
            raise DataError(
                f"{path}: to search for the pattern {_short(pattern)} can take for ever, because it repeats a group that "
                "can match the same text in several ways; use another tokenizer"
            )


_PROBE = """
import json, sys
from tokenizers import Regex, pre_tokenizers
pattern, texts = json.load(sys.stdin)
split = pre_tokenizers.Split(Regex(pattern), "isolated")
for text in texts:
    split.pre_tokenize_str(text)
"""


def _ends(pattern: str) -> bool:
    """Whether the library gets through texts that make a bad pattern try every way to match."""
    letters = dict.fromkeys([*re.sub(r"\\p\{.*?\}|\\.|[^\w\s]", "", pattern)[:40], *_ALPHABET])
    # What the pattern names must be there, or the library does not even begin.
    named = "".join(dict.fromkeys(re.sub(r"\\.", "", pattern)))[:60]
    texts = [letter * 60 + end for letter in letters for end in ("", "!", "b", "\0", f"{named}\0")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            input=json.dumps([pattern, texts]).encode(),
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    # A pattern that is none is an Exception there, and the library says so when it reads the file.
    return done.returncode >= 0 and b"PanicException" not in done.stderr


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer, decoder or post-processor, those of sequences in their order."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            inner = part.get(name)
            for one in inner if isinstance(inner, list) else ():
                yield from _steps(one)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
