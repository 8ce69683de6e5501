"""Hostile tokenizers are refused by name before the library allocates or searches anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bottega.core.errors import DataError
from bottega.data.text.bytelevel import SYMBOLS
from bottega.data.text.tokenizer import END_OF_TEXT, Tokenizer
from bottega.models.folders.tokenizer_limits import MAX_ID, convert_panics


def build_byte_level_json() -> dict[str, Any]:
    backend = tokenizers.Tokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(SYMBOLS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return json.loads(backend.to_str())


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def charsmap(entry: bytes) -> dict[str, Any]:
    table = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + entry + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def save_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    fields = build_byte_level_json()
    change(fields)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "nested repeats": (
        lambda f: f.update(pre_tokenizer=split("(a+)+$")),
        r"pattern '\(a\+\)\+\$' can take exponential time",
    ),
    "ambiguous alternatives": (
        lambda f: f.update(pre_tokenizer=split(r"(?:\w|[a-z])*!$")),
        "can take exponential time",
    ),
    "pattern of a normalizer": (
        lambda f: f.update(normalizer={"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}),
        "can take exponential time",
    ),
    "id of the vocabulary": (lambda f: f["model"]["vocab"].update(zzz=2**31), f"'zzz' has the id {2**31}"),
    "id of an added token": (lambda f: f["added_tokens"][0].update(id=MAX_ID), f"below {MAX_ID:,}"),
    "negative id": (lambda f: f["model"]["vocab"].update(zzz=-1), "has the id -1"),
    "id that is text": (lambda f: f["model"]["vocab"].update(zzz="7"), "has the id '7'"),
    "repeated replacement": (
        lambda f: f.update(normalizer=sequence(*[replace("a", "a" * 50)] * 6)),
        "more than 64 times as long",
    ),
    "one large replacement": (lambda f: f.update(normalizer=replace("a", "b" * 10**6)), "more than 64 times"),
    "insertion between characters": (lambda f: f.update(normalizer=replace("", "b" * 100)), "more than 64 times"),
    "repeated table": (lambda f: f.update(normalizer=sequence(*[charsmap(b"a" * 60)] * 3)), "more than 64 times"),
    "large table": (lambda f: f.update(normalizer=charsmap(b"a" * 10**6)), "more than 64 times"),
    "decoder": (lambda f: f.update(decoder=replace("a", "a" * 10**6)), "its decoder can make"),
    "long template": (
        lambda f: f.update(
            post_processor={"type": "TemplateProcessing", "single": [{}] * 1000, "pair": [], "special_tokens": {}}
        ),
        "adds more than 64 tokens",
    ),
    "model that is not an object": (lambda f: f.update(model=[1, 2]), "is not a tokenizer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, reason = HOSTILE[name]
    with pytest.raises(DataError, match=reason) as caught:
        Tokenizer.load(save_tokenizer(tmp_path / "t", change))
    assert str(tmp_path / "t" / "tokenizer.json") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_deeply_nested_json_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_tokenizer(tmp_path / "t", lambda fields: None)
    (folder / name).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(DataError, match="nested too deeply"):
        Tokenizer.load(folder)


def test_patterns_of_published_tokenizers_are_accepted(tmp_path: Path) -> None:
    patterns = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        r"(?:\p{L}\p{M}*)+",
    ]
    for pattern in patterns:
        folder = save_tokenizer(tmp_path / "t", lambda f, pattern=pattern: f.update(pre_tokenizer=split(pattern)))  # type: ignore[misc]
        assert Tokenizer.load(folder).vocab_size == 257
    # ALBERT: quotes, Unicode normalisation, and SentencePiece's table, whose longest entry maps one letter to 18.
    albert = sequence(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "Lowercase"})
    folder = save_tokenizer(tmp_path / "t", lambda f: f.update(normalizer=albert))
    assert Tokenizer.load(folder).encode("a").tolist() == [SYMBOLS.index("a")]
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    assert Tokenizer.load(save_tokenizer(tmp_path / "t", lambda f: f.update(normalizer=llama))).vocab_size == 257


def test_panic_of_the_library_is_a_data_error() -> None:
    class PanicException(BaseException):  # like pyo3's, which does not derive from Exception
        pass

    with pytest.raises(DataError, match="x: the tokenizers library failed"), convert_panics("x"):
        raise PanicException("retry limit")
    with pytest.raises(KeyboardInterrupt), convert_panics("x"):
        raise KeyboardInterrupt
