"""The only words that an answer may hold: a tree of their tokens, walked while a language model speaks."""

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
        """The word that ends here; longer ones may go on."""
        self.words: set[int] = set()
        """All words below."""

    def put(self, tokens: Sequence[int], word: int) -> None:
        node = self
        node.words.add(word)
        for token in tokens:
            node = node.children.setdefault(token, _Node())
            node.words.add(word)
        if node.word is None:  # of two words with the same tokens, the first is meant
            node.word = word

    def open(self, said: Sequence[int]) -> list[int]:
        """Tokens that still lead to a word which was not said."""
        return [
            token for token, child in self.children.items() if len(child.words) > sum(w in child.words for w in said)
        ]


@final
class AllowedWords:
    """At most `count` of the words, none twice, with a comma between; the answer may end after each."""

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]], *, count: int) -> None:
        """`encode` is the tokenizer's, without marks around a text."""
        self.words = tuple(dict.fromkeys(word.strip() for word in words))
        self.count = min(count, len(self.words))
        self._first, self._next = _Node(), _Node()
        for number, word in enumerate(self.words):
            if not word or SEPARATOR in word or "\n" in word:
                raise UsageError(
                    f"model.keywords.allowed: {word!r} is no word; a comma or a line break separates words"
                )
            # The first one follows a colon and a space, or a turn of a conversation and none.
            self._first.put(_after(":", f" {word}", encode), number)
            self._first.put(list(encode(word)), number)
            self._next.put(_after("a", f"{SEPARATOR} {word}", encode), number)
        same = len(self._next.words) - len(_ends(self._next))
        if same:
            raise UsageError(
                f"model.keywords.allowed: {same} of the words have the same tokens as others; the tokenizer cannot tell "
                "them apart, so leave them out"
            )

    def allowed_next(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """What may be said next, and whether the answer may end here."""
        said, node = self._walk(tokens)
        if node.word is None or node.word in said:
            return node.open(said), False
        done = [*said, node.word]
        going_on = self._next.open(done) if len(done) < self.count else []
        return list(dict.fromkeys([*node.open(done), *going_on])), True

    def decode_words(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The words of an answer; one that was cut in the middle is not among them."""
        said, node = self._walk(tokens)
        if node.word is not None and node.word not in said:
            said = [*said, node.word]
        return tuple(self.words[number] for number in said)

    def _walk(self, tokens: Sequence[int]) -> tuple[list[int], _Node]:
        """The words that were said whole, and where in the next one we are."""
        said: list[int] = []
        node = self._first
        for token in tokens:
            if token not in node.children and node.word is not None:
                said.append(node.word)
                node = self._next
            node = node.children.get(token, _Node())
        return said, node


def _after(before: str, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The tokens of a text where it follows another: SentencePiece marks the space before a word, and puts one before a
    text too, so a text by itself has other tokens."""
    left, both = list(encode(before)), list(encode(before + text))
    if both[: len(left)] == left and len(both) > len(left):
        return both[len(left) :]
    return list(encode(text))


def _ends(node: _Node) -> set[int]:
    own = {node.word} if node.word is not None else set()
    return own.union(*(_ends(child) for child in node.children.values()))
