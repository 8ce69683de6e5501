"""Encode with gigatoken in place of `tokenizers`, if it is installed and gives the same ids.

On two cores it prepares text 7 times as fast (docs/benchmarks.md). It is new, so it is verified first: it
must give the same ids for every token of the vocabulary and for difficult texts. Texts that spell a special token, which
it would not treat as text, are encoded by `tokenizers`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import tokenizers
from tokenizers import models

# Joined with spaces and without: contractions, digits, white space of all kinds, signs, scripts, accents, emoji.
PROBE_TEXTS = (
    "it's we'll I'VE don't 'tis o'clock",
    "a  b   c\t\td \n\n e\r\n f\u00a0g\u2003h\u3000i",
    "1234567 3.14 1,000,000 ٣٤ Ⅻ ½",
    "!!! ... -- ==> <|x|> {}[]() \\n `code` #tag @me",
    "naïve café e\u0301 straße İstanbul ǅ ﬁ",
    "漢字かな交じり文 한국어 кириллица עברית العربية ไทย हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 \u200b\u200d\ufeff \U000e0020",
    "  leading and trailing  ",
    "\x00\x07\x1b\x7f \x85 \u2028",
)

BatchEncoder = Callable[[list[str]], list[np.ndarray]]


def load_fast_encoder(core: tokenizers.Tokenizer) -> BatchEncoder | None:
    """Return a function that encodes many texts exactly as `core` does; None if gigatoken is missing or differs."""
    if not isinstance(core.model, models.BPE) or os.environ.get("BOTTEGA_FAST_BPE") == "0":
        return None
    try:
        import awkward
        import gigatoken
    except ImportError:
        return None
    try:
        fast = gigatoken.Tokenizer.from_json(core.to_str())
    except Exception:  # its errors for unsupported tokenizers have no common type
        return None
    special = [token.content for token in core.get_added_tokens_decoder().values()]
    spelled = re.compile("|".join(map(re.escape, special))) if special else None

    def encode(texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        ids = fast.encode_batch(texts, parallel=_use_threads())
        flat = awkward.to_numpy(awkward.flatten(ids))
        parts = np.split(flat, np.cumsum(awkward.to_numpy(awkward.num(ids)))[:-1])
        for number in [i for i, text in enumerate(texts) if spelled is not None and spelled.search(text)]:
            parts[number] = np.array(core.encode(texts[number], add_special_tokens=False).ids, np.uint32)
        return parts

    return encode if _gives_same_ids(encode, core) else None


def _gives_same_ids(encode: BatchEncoder, core: tokenizers.Tokenizer) -> bool:
    added = {token.content for token in core.get_added_tokens_decoder().values()}
    numbers = [number for token, number in core.get_vocab().items() if token not in added]
    words = core.decode_batch([[number] for number in numbers], skip_special_tokens=False)
    mixed = [f"{a} {b}{a}" for a, b in pairwise(PROBE_TEXTS)]
    # A hundred tokens at once: alone, 32,000 of them take half a second.
    lists = [joint.join(words[i : i + 100]) for i in range(0, len(words), 100) for joint in ("", " ")]
    probes = [*PROBE_TEXTS, *mixed, *lists]
    expected = [encoding.ids for encoding in core.encode_batch_fast(probes, add_special_tokens=False)]
    try:
        actual = encode(probes)
    except Exception:
        return False
    return all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


def _use_threads() -> bool:
    """Return whether to use threads; worker processes use all cores already."""
    return "BOTTEGA_WORKER" not in os.environ
