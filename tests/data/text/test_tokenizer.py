"""Tokenizers: exact round trips (except words), end of text never inside a text, the same ids in transformers."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.formats.embedded import list_standard_library
from bottega.data.text import tokenizer as tokenizer_module
from bottega.data.text.bytelevel import SYMBOLS, split_at_safe_points
from bottega.data.text.tokenizer import END_OF_TEXT, UNKNOWN_TOKEN, Tokenizer
from bottega.data.text.vocabulary import (
    TokenizerSpec,
    build_byte_tokenizer,
    build_character_tokenizer,
    build_tokenizer,
    load_pretrained_tokenizer,
    train_bpe,
    train_word_tokenizer,
)
from operations import count_operations

CORPUS = [text for file in list_standard_library().files[:25] if (text := file.read_text(encoding="utf-8"))][:20]
BYTES = build_byte_tokenizer()
BPE = train_bpe(CORPUS, vocab_size=600)
DIFFICULT_TEXTS = [
    "",
    "\n",
    " ",
    "\r\n\r\n  \t\x0b",
    "\x00\x01\x1c\x7f\x85\xa0\u2028\ufeff",
    "naïve e\u0301 ﬁ Å 한국어 \U0001f469‍\U0001f469‍\U0001f467 \U00010ffff",
    f"a{END_OF_TEXT}b{END_OF_TEXT}",
    "do n't stop . Why ? I 'm , it 's here !",
    "don't 'S  x =  [1,  2]\n\n\n    return  \n",
]
unicode_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab 1'\n\t\r,é\u2028s")


@settings(max_examples=300, deadline=None)
@given(unicode_text)
def test_any_text_round_trips(text: str) -> None:
    for tokenizer in (BYTES, BPE, build_character_tokenizer([text])):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
        stream = tokenizer.stream_decoder()
        assert "".join([*map(stream.push, ids.tolist()), stream.finish()]) == text


@pytest.mark.parametrize("text", DIFFICULT_TEXTS)
def test_difficult_texts_round_trip(text: str) -> None:
    for tokenizer in (BYTES, BPE, build_character_tokenizer([text])):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids


def test_ids_and_vocabulary_sizes() -> None:
    assert BYTES.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (BYTES.vocab_size, BYTES.eos_token_id) == (257, 256)
    characters = build_character_tokenizer(["ba\n", "cab"])
    assert characters.encode("\nabc").tolist() == [0, 1, 2, 3]
    assert (characters.vocab_size, characters.eos_token_id) == (5, 4)
    assert BPE.vocab_size == 600
    for tokenizer in (BYTES, BPE, characters):
        assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
        assert tokenizer.byte_lengths[tokenizer.eos_token_id] == 0
        assert tokenizer.decode([tokenizer.eos_token_id]) == END_OF_TEXT


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert train_bpe(CORPUS, vocab_size=600).fingerprint == BPE.fingerprint
    assert train_bpe(CORPUS[:10], vocab_size=600).fingerprint != BPE.fingerprint


@settings(max_examples=200, deadline=None)
@given(st.lists(unicode_text, max_size=5), st.integers(1, 8), st.integers(1, 20))
def test_pieces_and_groups_do_not_change_the_ids(texts: list[str], piece: int, group: int) -> None:
    expected = [BPE.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert all("".join(split_at_safe_points(text, piece)) == text for text in texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PIECE_CHARACTERS", piece)
        patch.setattr(tokenizer_module, "BATCH_CHARACTERS", group)
        assert [ids.tolist() for ids in BPE.encode_documents(texts)] == expected


def test_pieces_of_real_text_do_not_change_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [BPE.backend.encode(text, add_special_tokens=False).ids for text in CORPUS]
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(tokenizer_module, "BATCH_CHARACTERS", 1000)
    assert [ids.tolist() for ids in BPE.encode_documents(CORPUS)] == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 599)))
def test_streamed_text_is_the_decoded_text_even_for_broken_utf8(ids: list[int]) -> None:
    stream = BPE.stream_decoder()
    assert "".join([*map(stream.push, ids), stream.finish()]) == BPE.decode(ids)
    assert BPE.decode(ids) == BPE.backend.decode(ids, skip_special_tokens=False)


def test_streaming_waits_for_whole_characters_only() -> None:
    stream = BYTES.stream_decoder()
    assert [stream.push(byte) for byte in "é!".encode()] == ["", "é", "!"]


def test_unknown_characters_are_named() -> None:
    tokenizer = build_character_tokenizer(["abc"])
    with pytest.raises(UsageError, match=r"3 characters has no 'é', '😀'; .* bytes or bpe"):
        tokenizer.encode("aé😀b")
    with pytest.raises(DataError, match="'z'"):
        list(tokenizer.encode_documents(["abc", "abz"]))


def test_unpaired_surrogate_is_refused() -> None:
    for tokenizer in (BYTES, BPE, build_character_tokenizer(["ab"])):
        with pytest.raises(UsageError, match="character 1"):
            tokenizer.encode("a\ud800b")


def test_a_large_vocabulary_has_wide_ids() -> None:
    wide = build_character_tokenizer(["".join(chr(0x20000 + i) for i in range(70_000))])
    assert wide.encode("\U00020001").dtype == np.uint32


def test_tokenizer_save_load_round_trip(tmp_path: Path) -> None:
    for tokenizer in (BYTES, BPE, build_character_tokenizer(CORPUS)):
        tokenizer.save(tmp_path / tokenizer.kind)
        loaded = Tokenizer.load(tmp_path / tokenizer.kind)
        assert (loaded.kind, loaded.vocab_size, loaded.eos_token_id) == (
            tokenizer.kind,
            tokenizer.vocab_size,
            tokenizer.eos_token_id,
        )
        assert loaded.fingerprint == tokenizer.fingerprint
        assert np.array_equal(loaded.encode(CORPUS[0]), tokenizer.encode(CORPUS[0]))


def test_saved_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for tokenizer in (BYTES, BPE, build_character_tokenizer([*CORPUS, *DIFFICULT_TEXTS])):
        tokenizer.save(tmp_path / tokenizer.kind)
        reference = AutoTokenizer.from_pretrained(tmp_path / tokenizer.kind)
        assert reference.eos_token_id == tokenizer.eos_token_id
        assert len(reference) == tokenizer.vocab_size
        for text in [*DIFFICULT_TEXTS, CORPUS[1][:3000]]:
            ids = tokenizer.encode(text).tolist()
            assert reference(text)["input_ids"] == ids, (tokenizer.kind, text)
            assert reference.decode(ids) == text
        assert reference.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_words_are_lower_cased_split_and_numbered_by_frequency() -> None:
    texts = ["The cat's mat; the CAT didn't", "do n't — the mat, caf\u00e9 cafe\u0301 it\u2019s"]
    words = train_word_tokenizer(texts, vocab_size=None)
    # Equally frequent words are in alphabetical order.
    assert [words.backend.id_to_token(n) for n in range(words.vocab_size)] == [
        *(UNKNOWN_TOKEN, END_OF_TEXT, "the", "'s", "café", "cat", "mat"),
    ]
    assert (words.unk_token_id, words.eos_token_id, words.pad_token_id, words.special_tokens_around) == (
        0,
        1,
        1,
        ((), ()),
    )
    all_words = train_word_tokenizer(texts, vocab_size=None, min_frequency=1)
    assert all_words.decode(all_words.encode("Don't, DIDN'T do n't the cats")) == "<unk> , didn't do n't the <unk>"
    assert all_words.encode(" \n").tolist() == []
    # Text that spells a special token is encoded as text.
    assert not {1} & set(all_words.encode(f"{END_OF_TEXT} {UNKNOWN_TOKEN}").tolist())
    assert train_word_tokenizer(texts, vocab_size=4).backend.get_vocab().keys() == {
        UNKNOWN_TOKEN,
        END_OF_TEXT,
        "the",
        "'s",
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab c'.", max_size=12), min_size=2, max_size=6), st.randoms())
def test_word_vocabulary_does_not_depend_on_the_order_of_words_and_texts(texts: list[str], rng: random.Random) -> None:
    texts = ["a a b b", *texts]
    shuffled = [" ".join(rng.sample(text.split(" "), len(text.split(" ")))) for text in texts]
    rng.shuffle(shuffled)
    for size in (None, 4):
        first, second = (train_word_tokenizer(corpus, vocab_size=size) for corpus in (texts, shuffled))
        assert first.fingerprint == second.fingerprint


def test_word_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = train_word_tokenizer([*CORPUS, *DIFFICULT_TEXTS], vocab_size=500)
    assert words.vocab_size == 500
    words.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.kind, loaded.fingerprint, loaded.unk_token_id, loaded.pad_token_id) == (
        "words",
        words.fingerprint,
        0,
        1,
    )
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(reference, PreTrainedTokenizerFast)
    assert (reference.unk_token_id, reference.pad_token_id, len(reference)) == (0, 1, 500)
    for text in [*DIFFICULT_TEXTS, CORPUS[1][:3000]]:
        assert reference(text)["input_ids"] == loaded.encode(text).tolist() == words.encode(text).tolist()


def test_word_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(DataError, match=r"no word occurs 2 times .* data\.tokenizer\.min_frequency"):
        train_word_tokenizer(["one two", "three"], vocab_size=None)
    with pytest.raises(UsageError, match=r"vocab_size: expected at least 3 .* got 2"):
        train_word_tokenizer(["a a"], vocab_size=2)


def test_default_vocabulary_size_of_each_kind() -> None:
    assert TokenizerSpec().vocab_size == TokenizerSpec(kind="bpe", vocab_size=None).vocab_size == 4096
    assert TokenizerSpec(kind="words").vocab_size is None
    assert TokenizerSpec(vocab_size=300).vocab_size == 300


def test_special_tokens_around_come_from_the_post_processor() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[PAD]": 4}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for template, special_tokens in {"$A": ((), ()), "<s> $A </s> </s>": ((0,), (1, 1)), "$A </s>": ((), (1,))}.items():
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        tokenizer = Tokenizer(backend, kind="pretrained", config={"eos_token": "</s>"})
        assert tokenizer.special_tokens_around == special_tokens
        assert tokenizer.encode("a b").tolist() == [2, 3]
        assert tokenizer.pad_token_id == 4
    backend.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 0)])
    with pytest.raises(DataError, match="only tokens before and after"):
        _ = Tokenizer(backend, kind="pretrained", config={"eos_token": "</s>"}).special_tokens_around


@pytest.mark.parametrize(
    ("model_max_length", "config", "expected"),
    [
        (512, None, 512),
        (10**30, None, None),
        (None, {"model_type": "bert", "max_position_embeddings": 512}, 512),
        # RoBERTa never uses the first two of its 514 positions.
        (10**30, {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        (128, {"model_type": "bert", "max_position_embeddings": 512}, 128),
        (None, {"model_type": "t5"}, None),
    ],
)
def test_model_max_length_comes_from_tokenizer_and_model_config(
    tmp_path: Path, model_max_length: int | None, config: dict[str, object] | None, expected: int | None
) -> None:
    BPE.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    changes = {} if model_max_length is None else {"model_max_length": model_max_length}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_pretrained_tokenizer(str(tmp_path)).model_max_length == expected


def test_pretrained_tokenizer_is_loaded_without_remote_code(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "▁the": 2, "▁cat": 3, "<0x0A>": 9}))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "auto_map": {"AutoTokenizer": "evil.Code"}})
    )
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_pretrained_tokenizer(str(path))
        assert tokenizer.kind == "pretrained"
        assert tokenizer.eos_token_id == 1
        assert tokenizer.vocab_size == 10  # ids have gaps
        assert tokenizer.encode("the cat").tolist() == [2, 3]
        assert tokenizer.byte_lengths.tolist() == [0, 0, 4, 4, 0, 0, 0, 0, 0, 1]
        stream = tokenizer.stream_decoder()
        assert "".join([*map(stream.push, [2, 3, 9, 2]), stream.finish()]) == tokenizer.decode([2, 3, 9, 2])
    tokenizer.save(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())


def test_invalid_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        load_pretrained_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_pretrained_tokenizer(str(tmp_path))
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no token that ends a text"):
        load_pretrained_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="expected a JSON object"):
        load_pretrained_tokenizer(str(tmp_path))
    with pytest.raises(UsageError, match=r"needs a tokenizer\.json"):
        build_tokenizer(TokenizerSpec(kind="pretrained"), [])
    with pytest.raises(UsageError, match=r"vocab_size: expected at least 257 .* got 100"):
        train_bpe(["a"], vocab_size=100)


def test_unreachable_hub_name_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        EnvironmentProblem, match=r"'someone/some' .* hub: no network; correct the name, or check the network$"
    ):
        load_pretrained_tokenizer("someone/some")


def test_byte_alphabet_matches_the_library() -> None:
    assert sorted(SYMBOLS) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_bytes_and_characters_are_encoded_without_a_loop() -> None:
    text = "".join(CORPUS)
    for tokenizer in (BYTES, build_character_tokenizer(CORPUS)):
        tokenizer.encode(text)
        short, long = (count_operations(partial(tokenizer.encode, part)) for part in (text[:1000], text))
        assert long == short < 100
