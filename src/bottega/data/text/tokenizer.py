"""Tokenizers: convert text to ids and back exactly. Every kind has a `tokenizers` backend, so that transformers can load it.

Text is never normalised, and text that happens to spell `<|endoftext|>` is text: only `eos_token_id`, which no
text encodes to, ends a document. The exception is `words`, which is for classifiers: it lower-cases text and has one id
for all unknown words, so it cannot be decoded exactly.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np
import tokenizers
from tokenizers import decoders

from bottega.core.errors import BottegaError, DataError, UsageError
from bottega.data.text.bytelevel import decode_token_bytes, split_at_safe_points
from bottega.data.text.fast_bpe import BatchEncoder, load_fast_encoder
from bottega.models.folders.tokenizer_limits import convert_panics, read_tokenizer

END_OF_TEXT = "<|endoftext|>"
UNKNOWN_TOKEN = "<unk>"
Kind = Literal["bytes", "characters", "bpe", "words", "pretrained"]

# Characters encoded in one call of the library: enough for all cores, few enough that its token objects fit in memory.
BATCH_CHARACTERS = 4_000_000
# Length of the pieces of a long text: in pieces, 8 MB are encoded 2.5 times as fast on two cores.
PIECE_CHARACTERS = 32_000
FAST_ENCODER_MIN_CHARACTERS = 500_000
# Tried in turn if tokenizer_config.json does not say which token ends a text.
COMMON_EOS_TOKENS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
COMMON_PAD_TOKENS = ("[PAD]", "<pad>", "<|padding|>")
COMMON_UNK_TOKENS = (UNKNOWN_TOKEN, "[UNK]")
# Tokenizers without a maximum length have a number of at least this as model_max_length.
NO_MAX_LENGTH = 1 << 24


@final
class Tokenizer:
    """A tokenizer, built by the functions of vocabulary.py or opened by `Tokenizer.load`."""

    def __init__(self, backend: tokenizers.Tokenizer, *, kind: Kind, config: dict[str, Any]) -> None:
        backend_padding = backend.padding["pad_token"] if backend.padding is not None else None
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self.backend = backend
        self.kind = kind
        self.config = config
        self._fast_encoder: BatchEncoder | None = None
        self._has_no_fast_encoder = False
        self.eos_token_id = _find_eos_token_id(backend, config)
        pad_candidates = (_get_special_token(config, "pad_token"), backend_padding, *COMMON_PAD_TOKENS)
        self.pad_token_id: int = _find_first_id(backend, pad_candidates, self.eos_token_id)
        """The padding token; end of text if the tokenizer has none."""
        unk_token_id = _find_first_id(backend, (_get_special_token(config, "unk_token"), *COMMON_UNK_TOKENS), -1)
        self.unk_token_id: int | None = unk_token_id if unk_token_id >= 0 else None
        """The token for text that is not in the vocabulary."""
        # Ids may have holes, and a model needs a row for the highest one.
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, without special tokens."""
        return next(self._encode([text], UsageError))

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text, equal to `encode`, using all cores if that helps."""
        return self._encode(texts, DataError)

    @cached_property
    def special_tokens_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer's own post-processor puts before and after one text: [CLS] and [SEP] of BERT."""
        with convert_panics("the tokenizer cannot frame a text"):
            special_ids = self.backend.encode("").ids
            text_ids, framed_ids = (
                self.backend.encode("a b", add_special_tokens=is_framed).ids for is_framed in (False, True)
            )
        for num_before in range(len(special_ids) + 1):
            if [*special_ids[:num_before], *text_ids, *special_ids[num_before:]] == framed_ids:
                return tuple(special_ids[:num_before]), tuple(special_ids[num_before:])
        raise DataError(
            f"the tokenizer turns the ids {text_ids} into {framed_ids}; only tokens before and after a text are supported"
        )

    @property
    def model_max_length(self) -> int | None:
        """The maximum input length of the tokenizer's model; None if unknown."""
        length = self.config.get("model_max_length")
        return int(length) if isinstance(length, int | float) and 0 < length < NO_MAX_LENGTH else None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, and the end-of-text id becomes the text of its token."""
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        if self.bytes_by_id is None:
            return self.backend.decode(numbers, skip_special_tokens=False)
        return b"".join([self.bytes_by_id[i] for i in numbers]).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes of the text of each id; 0 for special tokens."""
        lengths = [len(token_bytes) for token_bytes in self.bytes_by_id or map(_approximate_bytes, self._tokens)]
        for number, token in self.backend.get_added_tokens_decoder().items():
            if token.special:
                lengths[number] = 0
        return np.array(lengths, dtype=np.int32)

    @cached_property
    def bytes_by_id(self) -> list[bytes] | None:
        """The bytes of each id; None if they depend on the neighbouring ids."""
        if self.kind == "characters":
            return [token.encode() for token in self._tokens]
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return [decode_token_bytes(token) for token in self._tokens]
        return None

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Save so that `transformers.AutoTokenizer.from_pretrained(folder)` gives the same ids and texts."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = json.dumps({**self.config, "bottega_kind": self.kind}, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Open what `save` wrote, or any tokenizer.json or its folder (kind `pretrained`)."""
        path = folder if folder.is_file() else folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{folder} has no tokenizer.json; give a folder that has one")
        try:
            with convert_panics(str(path)):
                backend = tokenizers.Tokenizer.from_str(read_tokenizer(path))
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer: {error}") from error
        config_path = path.with_name("tokenizer_config.json")
        config = _read_json_object(config_path) if config_path.is_file() else {}
        config.pop("auto_map", None)  # it names code to run, and no code of a tokenizer is run here
        kind = config.pop("bottega_kind", "pretrained")
        if kind not in get_args(Kind):
            raise DataError(f"{config_path}: bottega_kind is {kind!r}, not one of {', '.join(get_args(Kind))}")
        return cls(backend, kind=kind, config=config)

    @cached_property
    def _tokens(self) -> list[str]:
        return [self.backend.id_to_token(number) or "" for number in range(self.vocab_size)]

    def _encode(self, texts: Iterable[str], error_class: type[BottegaError]) -> Iterator[np.ndarray]:
        if self.kind == "bytes":
            return (np.frombuffer(_encode_utf8(text, error_class), np.uint8).astype(self.dtype) for text in texts)
        if self.kind == "characters":
            return (self._encode_characters(text, error_class) for text in texts)
        return self._encode_in_batches(texts, error_class)

    def _encode_characters(self, text: str, error_class: type[BottegaError]) -> np.ndarray:
        _encode_utf8(text, error_class)
        code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = self._id_by_code_point[code_points]
        if len(ids) and ids.min() < 0:
            unknown = [chr(code_point) for code_point in np.unique(code_points[ids < 0])]
            listed = ", ".join(map(repr, unknown[:8])) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            raise error_class(
                f"the character vocabulary of {self.vocab_size - 1} characters has no {listed}; "
                "remove them, or use a bytes or bpe tokenizer"
            )
        return ids.astype(self.dtype)

    @cached_property
    def _id_by_code_point(self) -> np.ndarray:
        table = np.full(0x110000, -1, np.int32)
        for number, token in enumerate(self._tokens):
            if number != self.eos_token_id:
                table[ord(token)] = number
        return table

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # Verifying the fast encoder costs as much as encoding half a megabyte of text.
        if (
            self._fast_encoder is None
            and not self._has_no_fast_encoder
            and sum(map(len, texts)) > FAST_ENCODER_MIN_CHARACTERS
        ):
            self._fast_encoder = load_fast_encoder(self.backend)
            self._has_no_fast_encoder = self._fast_encoder is None
        if self._fast_encoder is not None:
            return [ids.astype(self.dtype) for ids in self._fast_encoder(texts)]
        with convert_panics("a text cannot be encoded"):
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _encode_in_batches(self, texts: Iterable[str], error_class: type[BottegaError]) -> Iterator[np.ndarray]:
        """Yield the ids of each text; pieces of several texts are encoded in one call, and their ids are joined again."""
        batch: list[str] = []
        is_last: list[bool] = []  # whether each piece is the last of its text
        num_characters = 0
        encoded_pieces: list[np.ndarray] = []

        def flush() -> Iterator[np.ndarray]:
            for ids, is_text_end in zip(self._encode_batch(batch), is_last, strict=True):
                encoded_pieces.append(ids)
                if is_text_end:
                    yield encoded_pieces[0] if len(encoded_pieces) == 1 else np.concatenate(encoded_pieces)
                    encoded_pieces.clear()
            batch.clear()
            is_last.clear()

        for text in texts:
            _encode_utf8(text, error_class)
            # Only for our own pre-tokenizer is it known that cuts do not change the ids.
            pieces = (
                list(split_at_safe_points(text, PIECE_CHARACTERS))
                if self.kind == "bpe" and len(text) > PIECE_CHARACTERS
                else [text]
            )
            for number, piece in enumerate(pieces or [text]):
                batch.append(piece)
                is_last.append(number >= len(pieces) - 1)
                num_characters += len(piece)
                if num_characters >= BATCH_CHARACTERS:
                    yield from flush()
                    num_characters = 0
        yield from flush()


@final
class StreamDecoder:
    """Decodes one id at a time: `push` returns the text that an id completes, `finish` the text that is still incomplete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stream = decoders.DecodeStream(skip_special_tokens=False)
        self.ids: list[int] = []
        self.num_returned = 0

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty if the id ends inside a character."""
        if self.tokenizer.bytes_by_id is not None:
            return self.byte_decoder.decode(self.tokenizer.bytes_by_id[token_id])
        self.ids.append(int(token_id))
        text = self.stream.step(self.tokenizer.backend, int(token_id)) or ""
        self.num_returned += len(text)
        return text

    def finish(self) -> str:
        """Return the text not yet returned, with incomplete characters replaced by U+FFFD."""
        if self.tokenizer.bytes_by_id is not None:
            return self.byte_decoder.decode(b"", final=True)
        return self.tokenizer.decode(self.ids)[self.num_returned :]


def _encode_utf8(text: str, error_class: type[BottegaError]) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise error_class(
            f"the text has an unpaired surrogate ({text[error.start]!r}) at character {error.start}, which is "
            "not valid Unicode; remove it"
        ) from error


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DataError(f"{path} is not readable JSON: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(fields).__name__}")
    return fields


def _get_special_token(config: dict[str, Any], role: str) -> str | None:
    """Return the token of a role such as eos_token, which a configuration gives as text or as an object with `content`."""
    token = config.get(role)
    return token.get("content") if isinstance(token, dict) else token


def _find_first_id(backend: tokenizers.Tokenizer, tokens: Iterable[str | None], default: int) -> int:
    ids = (backend.token_to_id(token) for token in tokens if token is not None)
    return next((token_id for token_id in ids if token_id is not None), default)


def _find_eos_token_id(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> int:
    configured = _get_special_token(config, "eos_token")
    for token in (configured,) if configured else COMMON_EOS_TOKENS:
        token_id = backend.token_to_id(token)
        if token_id is not None:
            return token_id
    tried = repr(configured) if configured else "none of " + ", ".join(COMMON_EOS_TOKENS)
    raise DataError(
        f"the tokenizer has no token that ends a text (tried {tried}); set eos_token in tokenizer_config.json"
    )


def _approximate_bytes(token: str) -> bytes:
    """Return the approximate bytes of a SentencePiece or WordPiece token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return b"?"
    return token.removeprefix("##").replace("▁", " ").encode()
