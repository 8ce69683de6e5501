"""Tokenizers: exact text to ids and back, by one `tokenizers` backend for every kind, so that they open in transformers.

Text is never normalised, and text that happens to spell `<|endoftext|>` is text: only the id `end_of_text`, which no
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
# Tried in turn where a tokenizer_config.json does not say which token ends a text.
COMMON_EOS_TOKENS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
COMMON_PAD_TOKENS = ("[PAD]", "<pad>", "<|padding|>")
COMMON_UNK_TOKENS = (UNKNOWN_TOKEN, "[UNK]")
# Tokenizers without a maximum length have a larger number in their configuration.
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
        self._fast: BatchEncoder | None = None
        self._is_slow = False
        self.eos_token_id = _end_of_text(backend, config)
        paddings = (_token_of_role(config, "pad_token"), backend_padding, *COMMON_PAD_TOKENS)
        self.pad_token_id: int = _first_id(backend, paddings, self.eos_token_id)
        """The padding token; end of text if the tokenizer has none."""
        unknown = _first_id(backend, (_token_of_role(config, "unk_token"), *COMMON_UNK_TOKENS), -1)
        self.unk_token_id: int | None = unknown if unknown >= 0 else None
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
            around = self.backend.encode("").ids
            plain, framed = (self.backend.encode("a b", add_special_tokens=special).ids for special in (False, True))
        for at in range(len(around) + 1):
            if [*around[:at], *plain, *around[at:]] == framed:
                return tuple(around[:at]), tuple(around[at:])
        raise DataError(
            f"the tokenizer turns the ids {plain} into {framed}; only tokens before and after a text are supported"
        )

    @property
    def model_max_length(self) -> int | None:
        """The maximum input length of the tokenizer's model; None if unknown."""
        length = self.config.get("model_max_length")
        return int(length) if isinstance(length, int | float) and 0 < length < NO_MAX_LENGTH else None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, and end of text its name."""
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        if self.bytes_by_id is None:
            return self.backend.decode(numbers, skip_special_tokens=False)
        return b"".join([self.bytes_by_id[i] for i in numbers]).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes of text of each id; 0 for special tokens."""
        lengths = [len(piece) for piece in self.bytes_by_id or map(_approximate_bytes, self._tokens)]
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
                core = tokenizers.Tokenizer.from_str(read_tokenizer(path))
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer: {error}") from error
        config_path = path.with_name("tokenizer_config.json")
        config = _read_object(config_path) if config_path.is_file() else {}
        config.pop("auto_map", None)  # names code to run; nothing here may
        kind = config.pop("bottega_kind", "pretrained")
        if kind not in get_args(Kind):
            raise DataError(f"{config_path}: bottega_kind is {kind!r}, not one of {', '.join(get_args(Kind))}")
        return cls(core, kind=kind, config=config)

    @cached_property
    def _tokens(self) -> list[str]:
        return [self.backend.id_to_token(number) or "" for number in range(self.vocab_size)]

    def _encode(self, texts: Iterable[str], problem: type[BottegaError]) -> Iterator[np.ndarray]:
        if self.kind == "bytes":
            return (np.frombuffer(_utf8(text, problem), np.uint8).astype(self.dtype) for text in texts)
        if self.kind == "characters":
            return (self._look_up(text, problem) for text in texts)
        return self._encode_groups(texts, problem)

    def _look_up(self, text: str, problem: type[BottegaError]) -> np.ndarray:
        _utf8(text, problem)
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = self._id_of_point[points]
        if len(ids) and ids.min() < 0:
            unknown = [chr(point) for point in np.unique(points[ids < 0])]
            listed = ", ".join(map(repr, unknown[:8])) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            raise problem(
                f"the character vocabulary of {self.vocab_size - 1} characters has no {listed}; "
                "remove them, or use a bytes or bpe tokenizer"
            )
        return ids.astype(self.dtype)

    @cached_property
    def _id_of_point(self) -> np.ndarray:
        table = np.full(0x110000, -1, np.int32)
        for number, token in enumerate(self._tokens):
            if number != self.eos_token_id:
                table[ord(token)] = number
        return table

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        # Verifying the fast encoder costs as much as encoding half a megabyte of text.
        if self._fast is None and not self._is_slow and sum(map(len, texts)) > FAST_ENCODER_MIN_CHARACTERS:
            self._fast = load_fast_encoder(self.backend)
            self._is_slow = self._fast is None
        if self._fast is not None:
            return [ids.astype(self.dtype) for ids in self._fast(texts)]
        with convert_panics("a text cannot be encoded"):
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _encode_groups(self, texts: Iterable[str], problem: type[BottegaError]) -> Iterator[np.ndarray]:
        """Encode pieces of several texts in one call, and join the ids of each text again."""
        group: list[str] = []
        ends: list[bool] = []  # is this piece the last of its text?
        waiting = 0
        done: list[np.ndarray] = []

        def flush() -> Iterator[np.ndarray]:
            for ids, last in zip(self._ids(group), ends, strict=True):
                done.append(ids)
                if last:
                    yield done[0] if len(done) == 1 else np.concatenate(done)
                    done.clear()
            group.clear()
            ends.clear()

        for text in texts:
            _utf8(text, problem)
            # Only our own pre-tokenizer is known to allow cuts.
            pieces = (
                list(split_at_safe_points(text, PIECE_CHARACTERS))
                if self.kind == "bpe" and len(text) > PIECE_CHARACTERS
                else [text]
            )
            for number, piece in enumerate(pieces or [text]):
                group.append(piece)
                ends.append(number >= len(pieces) - 1)
                waiting += len(piece)
                if waiting >= BATCH_CHARACTERS:
                    yield from flush()
                    waiting = 0
        yield from flush()


@final
class StreamDecoder:
    """Decodes ids one by one: `push` returns the text that an id completes, `finish` the incomplete rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self.stream = decoders.DecodeStream(skip_special_tokens=False)
        self.ids: list[int] = []
        self.num_returned = 0

    def push(self, number: int) -> str:
        """Return the text that this id completes; empty inside a character."""
        if self.tokenizer.bytes_by_id is not None:
            return self.bytes.decode(self.tokenizer.bytes_by_id[number])
        self.ids.append(int(number))
        text = self.stream.step(self.tokenizer.backend, int(number)) or ""
        self.num_returned += len(text)
        return text

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters replaced."""
        if self.tokenizer.bytes_by_id is not None:
            return self.bytes.decode(b"", final=True)
        return self.tokenizer.decode(self.ids)[self.num_returned :]


def _utf8(text: str, problem: type[BottegaError]) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise problem(
            f"the text has an unpaired surrogate ({text[error.start]!r}) at character {error.start}; it is not valid "
            "Unicode"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DataError(f"{path} is not readable JSON: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(fields).__name__}")
    return fields


def _token_of_role(config: dict[str, Any], role: str) -> str | None:
    """Return the token of a role, which a configuration gives as text or as an object."""
    token = config.get(role)
    return token.get("content") if isinstance(token, dict) else token


def _first_id(core: tokenizers.Tokenizer, tokens: Iterable[str | None], otherwise: int) -> int:
    ids = (core.token_to_id(token) for token in tokens if token is not None)
    return next((number for number in ids if number is not None), otherwise)


def _end_of_text(core: tokenizers.Tokenizer, config: dict[str, Any]) -> int:
    configured = _token_of_role(config, "eos_token")
    for token in (configured,) if configured else COMMON_EOS_TOKENS:
        number = core.token_to_id(token)
        if number is not None:
            return number
    tried = repr(configured) if configured else "none of " + ", ".join(COMMON_EOS_TOKENS)
    raise DataError(
        f"the tokenizer has no token that ends a text (tried {tried}); set eos_token in tokenizer_config.json"
    )


def _approximate_bytes(token: str) -> bytes:
    """Return the approximate bytes of a SentencePiece or WordPiece token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return b"?"
    return token.removeprefix("##").replace("▁", " ").encode()
