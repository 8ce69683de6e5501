"""Resource limits for a tokenizer.json from an untrusted source, checked before the tokenizers library reads it.

The library trusts the file: it allocates a table up to the highest id, lets normalizers multiply the length of a text, and
runs any regular expression. Too much of any of these ends the process without an exception.
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
"""Token ids must be below this: four times the largest vocabulary in use. An id of 2^31 makes the library allocate 8 GB."""
MAX_GROWTH = 64
"""Factor by which normalizers may lengthen a text."""
MAX_STEPS = 64
"""Maximum number of steps of a normalizer or decoder."""
MAX_TEXT_LENGTH = 1 << 16
"""Maximum number of characters of a pattern or token."""
MAX_ADDED_TOKENS = 64
"""Maximum number of special tokens that a post-processor may add to a text."""
PROBE_SECONDS = 30.0
"""Time limit for trying one pattern."""
# Only a repeated group can make a search exponential in the length of the text; other patterns are polynomial.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_PROBE_CHARACTERS = "aA0 \n_.-é中"


def read_tokenizer(path: Path) -> str:
    """Return the text of a tokenizer.json; raise DataError if it exceeds the limits."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes; a tokenizer.json may have at most {MAX_BYTES:,}")
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path} is not a tokenizer: {reason}") from None
    if not isinstance(fields, dict):
        raise DataError(f"{path} is not a tokenizer: expected a JSON object, got a {type(fields).__name__}")
    _check_ids(fields, path)
    _check_growth(fields, path)
    _check_added_tokens(fields.get("post_processor"), path)
    _check_patterns(fields, path)
    return text


def check_tokenizer(folder: Path) -> None:
    """Check the tokenizer.json of a folder, if there is one, before a library opens it."""
    if (folder / "tokenizer.json").is_file():
        read_tokenizer(folder / "tokenizer.json")


@contextmanager
def convert_panics(action: str) -> Iterator[None]:
    """Turn a Rust panic of the tokenizers library, which is not an Exception, into a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{action}: the tokenizers library failed ({error}); use another tokenizer") from None


def _check_ids(fields: dict[str, Any], path: Path) -> None:
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        token_ids = list(vocabulary.items())
    else:
        token_ids = [("the last entry", len(vocabulary) - 1)] if isinstance(vocabulary, list) and vocabulary else []
    added_tokens = fields.get("added_tokens")
    for token in added_tokens if isinstance(added_tokens, list) else ():
        if isinstance(token, dict):
            token_ids.append((str(token.get("content")), token.get("id")))
    for name, token_id in token_ids:
        if not isinstance(token_id, int) or not 0 <= token_id < MAX_ID:
            raise DataError(
                f"{path}: the token {_shorten(name)} has the id {_shorten(token_id)}; ids are whole numbers below {MAX_ID:,}"
            )
        if len(name) > MAX_TEXT_LENGTH:
            raise DataError(
                f"{path}: the token {_shorten(name)} has {len(name):,} characters; the limit is {MAX_TEXT_LENGTH:,}"
            )


def _check_growth(fields: dict[str, Any], path: Path) -> None:
    """Refuse a sequence of normalizers or decoders that is too long, or whose growth factors multiply beyond the limit."""
    for part in ("normalizer", "decoder"):
        steps = list(_iterate_steps(fields.get(part)))
        if len(steps) > MAX_STEPS:
            raise DataError(
                f"{path}: its {part} has {len(steps):,} steps; the limit is {MAX_STEPS}; use another tokenizer"
            )
        first_table = next((index for index, step in enumerate(steps) if step.get("type") == "Precompiled"), None)
        growth = 1.0
        for index, step in enumerate(steps):
            # One character table replaces a character by up to 18, which is allowed; a second would multiply these again.
            growth *= _compute_growth(step) if index != first_table else max(1.0, _compute_growth(step) / MAX_GROWTH)
            if growth > MAX_GROWTH:
                raise DataError(
                    f"{path}: its {part} can make a text more than {MAX_GROWTH} times as long ({_shorten(step)}); "
                    "use another tokenizer"
                )


def _compute_growth(step: dict[str, Any]) -> float:
    """Return the factor by which one step can lengthen a text each time it is applied.

    Unicode normal forms count as 1: applied again they change nothing.
    """
    if step.get("type") == "Precompiled":
        return float(max(1, _find_longest_entry(step.get("precompiled_charsmap"))))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    # A pattern may match a single character; an empty one matches between any two.
    return max(1.0, len(content) / len(text)) if isinstance(text, str) and text else 1.0 + len(content)


def _find_longest_entry(charsmap: Any) -> int:
    """Return the number of bytes of the longest replacement in SentencePiece's character table."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return 0  # the library reports what is wrong with it
    start = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[start:].split(b"\0")))


def _check_added_tokens(processor: Any, path: Path) -> None:
    for step in _iterate_steps(processor):
        for name in ("single", "pair"):
            template = step.get(name)
            special_tokens = step.get("special_tokens")
            id_counts = (
                [len(token.get("ids", ())) for token in special_tokens.values()]
                if isinstance(special_tokens, dict)
                else []
            )
            length = len(template) if isinstance(template, list) else 0
            if length > MAX_ADDED_TOKENS or max(id_counts, default=0) > MAX_ADDED_TOKENS:
                raise DataError(
                    f"{path}: its post_processor adds more than {MAX_ADDED_TOKENS} tokens to a text; use another tokenizer"
                )


def _check_patterns(fields: dict[str, Any], path: Path) -> None:
    """Try each pattern with repeated groups on difficult texts, in a subprocess that is ended at a time limit."""
    patterns = [
        pattern["Regex"]
        for part in ("normalizer", "pre_tokenizer", "decoder")
        for step in _iterate_steps(fields.get(part))
        if isinstance(pattern := step.get("pattern"), dict) and isinstance(pattern.get("Regex"), str)
    ]
    for pattern in patterns:
        if len(pattern) > MAX_TEXT_LENGTH:
            raise DataError(f"{path}: a pattern has {len(pattern):,} characters; the limit is {MAX_TEXT_LENGTH:,}")
        if _REPEATED_GROUP.search(pattern) and not _search_terminates(pattern):
            raise DataError(
                f"{path}: searching for the pattern {_shorten(pattern)} can take exponential time, because it repeats a group "
                "that can match the same text in several ways; use another tokenizer"
            )


_PROBE = """
import json, sys
from tokenizers import Regex, pre_tokenizers
pattern, texts = json.load(sys.stdin)
split = pre_tokenizers.Split(Regex(pattern), "isolated")
for text in texts:
    split.pre_tokenize_str(text)
"""


def _search_terminates(pattern: str) -> bool:
    """Return whether the library finishes searching texts that make a bad pattern backtrack over every way to match."""
    letters = dict.fromkeys([*re.sub(r"\\p\{.*?\}|\\.|[^\w\s]", "", pattern)[:40], *_PROBE_CHARACTERS])
    # The literals of the pattern must occur in the text, or the library skips the search.
    literals = "".join(dict.fromkeys(re.sub(r"\\.", "", pattern)))[:60]
    texts = [letter * 60 + end for letter in letters for end in ("", "!", "b", "\0", f"{literals}\0")]
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE],
            input=json.dumps([pattern, texts]).encode(),
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    # An invalid pattern raises an Exception there, and again with a message when the library reads the file.
    return result.returncode >= 0 and b"PanicException" not in result.stderr


def _iterate_steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer, decoder or post-processor, and those inside sequences, in order."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            inner = part.get(name)
            for step in inner if isinstance(inner, list) else ():
                yield from _iterate_steps(step)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
