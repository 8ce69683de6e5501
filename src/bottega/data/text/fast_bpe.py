"""Encode with gigatoken in place of `tokenizers`, if it is installed and gives the same ids.

On two cores it prepares text 7 times as fast (docs/benchmarks.md). It is new, so it is verified first: it must give the
same ids for every token of the vocabulary and for difficult texts. Texts that spell a special token are encoded by
`tokenizers`, because gigatoken would encode them as that token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import tokenizers
from tokenizers import models

# Difficult texts, compared alone and joined: contractions, white space of all kinds, digits, symbols, accents, scripts, emoji.
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


def load_fast_encoder(backend: tokenizers.Tokenizer) -> BatchEncoder | None:
    """Return a function that encodes many texts exactly as `backend` does; None if gigatoken is missing or differs."""
    if not isinstance(backend.model, models.BPE) or os.environ.get("BOTTEGA_FAST_BPE") == "0":
        return None
    try:
        import awkward
        import gigatoken
    except ImportError:
        return None
    try:
        fast_tokenizer = gigatoken.Tokenizer.from_json(backend.to_str())
    except Exception:  # its errors for unsupported tokenizers have no common type
        return None
    special_tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
    special_pattern = re.compile("|".join(map(re.escape, special_tokens))) if special_tokens else None

    def encode(texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        ids = fast_tokenizer.encode_batch(texts, parallel=_may_use_threads())
        flat_ids = awkward.to_numpy(awkward.flatten(ids))
        ids_by_text = np.split(flat_ids, np.cumsum(awkward.to_numpy(awkward.num(ids)))[:-1])
        for number in [
            i for i, text in enumerate(texts) if special_pattern is not None and special_pattern.search(text)
        ]:
            ids_by_text[number] = np.array(backend.encode(texts[number], add_special_tokens=False).ids, np.uint32)
        return ids_by_text

    return encode if _gives_same_ids(encode, backend) else None


def _gives_same_ids(encode: BatchEncoder, backend: tokenizers.Tokenizer) -> bool:
    added_tokens = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = [token_id for token, token_id in backend.get_vocab().items() if token not in added_tokens]
    tokens = backend.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    joined_probes = [f"{first} {second}{first}" for first, second in pairwise(PROBE_TEXTS)]
    # A hundred tokens in each text: 32,000 texts of one token take half a second.
    token_probes = [separator.join(tokens[i : i + 100]) for i in range(0, len(tokens), 100) for separator in ("", " ")]
    probes = [*PROBE_TEXTS, *joined_probes, *token_probes]
    expected = [encoding.ids for encoding in backend.encode_batch_fast(probes, add_special_tokens=False)]
    try:
        actual = encode(probes)
    except Exception:
        return False
    return all(np.array_equal(*pair) for pair in zip(actual, expected, strict=True))


def _may_use_threads() -> bool:
    """Return whether this process may use threads; a worker process may not, because the workers use all cores already."""
    return "BOTTEGA_WORKER" not in os.environ
