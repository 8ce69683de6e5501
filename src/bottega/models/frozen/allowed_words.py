"""Constrained decoding to a list of allowed words: a prefix tree of their tokens, walked during generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from bottega.core.errors import UsageError

SEPARATOR = ","


class _Node:
    __slots__ = ("children", "word", "words")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.word: int | None = None
        """Index of the word that ends here; longer words may continue."""
        self.words: set[int] = set()
        """Indices of all words in this subtree."""

    def add(self, tokens: Sequence[int], word: int) -> None:
        node = self
        node.words.add(word)
        for token in tokens:
            node = node.children.setdefault(token, _Node())
            node.words.add(word)
        if node.word is None:  # of two words with the same tokens, the first wins
            node.word = word

    def next_tokens(self, used: Sequence[int]) -> list[int]:
        """Return the tokens that lead to a word not yet used."""
        return [
            token for token, child in self.children.items() if len(child.words) > sum(w in child.words for w in used)
        ]


@final
class AllowedWords:
    """Answers of at most `max_words` words, none repeated, separated by commas; an answer may end after each word."""

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]], *, max_words: int) -> None:
        """`encode` returns the token ids of a text, without special tokens."""
        self.words = tuple(dict.fromkeys(word.strip() for word in words))
        self.max_words = min(max_words, len(self.words))
        self._first_tree, self._next_tree = _Node(), _Node()
        for index, word in enumerate(self.words):
            if not word or SEPARATOR in word or "\n" in word:
                raise UsageError(
                    f"model.keywords.allowed: {word!r} is not a word; words may not be empty or contain commas or "
                    "line breaks"
                )
            # The first word follows a colon and a space, or the start of a chat turn without a space.
            self._first_tree.add(_encode_after(":", f" {word}", encode), index)
            self._first_tree.add(list(encode(word)), index)
            self._next_tree.add(_encode_after("a", f"{SEPARATOR} {word}", encode), index)
        num_ambiguous = len(self._next_tree.words) - len(_find_complete_words(self._next_tree))
        if num_ambiguous:
            raise UsageError(
                f"model.keywords.allowed: {num_ambiguous} of the words have the same tokens as others, so the tokenizer "
                "cannot tell them apart; remove them"
            )

    def allowed_next(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Return the tokens that may follow, and whether the answer may end here."""
        used, node = self._walk(tokens)
        if node.word is None or node.word in used:
            return node.next_tokens(used), False
        used = [*used, node.word]
        next_word = self._next_tree.next_tokens(used) if len(used) < self.max_words else []
        return list(dict.fromkeys([*node.next_tokens(used), *next_word])), True

    def decode_words(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the words of an answer, without an incomplete last one."""
        used, node = self._walk(tokens)
        if node.word is not None and node.word not in used:
            used = [*used, node.word]
        return tuple(self.words[index] for index in used)

    def _walk(self, tokens: Sequence[int]) -> tuple[list[int], _Node]:
        """Return the indices of the complete words, and the node of the word in progress."""
        used: list[int] = []
        node = self._first_tree
        for token in tokens:
            if token not in node.children and node.word is not None:
                used.append(node.word)
                node = self._next_tree
            node = node.children.get(token, _Node())
        return used, node


def _encode_after(before: str, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return the tokens of `text` when it follows `before`.

    The tokens of `text` alone may differ: SentencePiece marks the space before a word, and adds one at the start of a text.
    """
    before_tokens, all_tokens = list(encode(before)), list(encode(before + text))
    if all_tokens[: len(before_tokens)] == before_tokens and len(all_tokens) > len(before_tokens):
        return all_tokens[len(before_tokens) :]
    return list(encode(text))


def _find_complete_words(node: _Node) -> set[int]:
    """Return the indices of all words that end in this subtree."""
    own_word = {node.word} if node.word is not None else set()
    return own_word.union(*(_find_complete_words(child) for child in node.children.values()))
