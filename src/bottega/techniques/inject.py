"""Small parts that learn, put into the layers of a model that does not: it keeps its names, its weights and its bytes.

A layer becomes one of a class that computes more and stays the same object. What calls it, what hooks into it and what
its weights are called do not change, so a base is loaded, grouped, hashed and exported as if nothing were there.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.task import Task
from bottega.techniques.wrapped import Wrapped

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""These hand the weights of their layers to a kernel of their own and may never call the layers."""
HEADS = ("head", "lm_head", "classifier", "score", "out", "proj_out", "conv_out")
"""What tells the answer, after the blocks, as we and others call it."""


class Injected(Wrapped):
    """A task whose model is a base that stays, with parts put in that learn."""

    inner: Task
    train: tuple[str, ...] = ()
    """Parts of the base that learn in full, by the beginning of their names or by a pattern over whole names."""
    fresh: tuple[str, ...] = ()
    """The same, where the model may lack some of them: parts that would begin at random and stay so."""
    _made: dict[int, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @abstractmethod
    def is_own(self, name: str) -> bool:
        """Whether a parameter is of the parts that are put in."""

    @abstractmethod
    def inject(self, model: nn.Module, seed: int) -> None: ...

    def build(self, seed: int) -> dict[str, Any]:
        made = self._made.pop(seed, None)
        return self._build(seed) if made is None else made

    def base(self, seed: int) -> str:
        """The hash of what stays, as it is built. A large model takes a while, so the next `build` gives this very one."""
        made = self._made[seed] = self._build(seed)
        return hash_of(made["model"], self.learns)

    def learns(self, name: str) -> bool:
        return self.is_own(name) or (self.is_full(name) and self.inner.learns(name))

    def is_full(self, name: str) -> bool:
        return any(is_part(word, name) for word in (*self.train, *self.fresh))

    def _build(self, seed: int) -> dict[str, Any]:
        models = self.inner.build(seed)
        model = models["model"]
        names = [name for name, _ in model.named_parameters()]
        for word in self.train:
            if not any(is_part(word, name) for name in names):
                parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
                raise UsageError(f"train: {word!r} is no part of the model and matches no parameter; there is {parts}")
        self.inject(model, seed)
        return models


def is_part(word: str, name: str) -> bool:
    """Whether a parameter or layer is of a part, such as `head` or `layers.0`, or its whole name matches a pattern."""
    return name == word or name.startswith(f"{word}.") or _pattern(word).fullmatch(name) is not None


def hash_of(model: nn.Module, learns: Callable[[str], bool]) -> str:
    """sha256 over the names and bytes of all that does not learn."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not learns(name):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def in_blocks(name: str) -> bool:
    """Whether a layer is of a numbered part, such as `layers.3.mlp.down_proj`."""
    return any(part.isdigit() for part in name.split("."))


def carriers(
    model: nn.Module, *, kinds: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
) -> dict[str, nn.Module]:
    """The layers that a part can be put into, by name.

    Not those whose weight is read by somebody who never calls them: a head inside a fused loss, a matrix shared with an
    embedding. What is put into them would silently do nothing, or be missing from the other use.
    """
    owners: dict[int, int] = {}
    read: set[int] = set()
    inside: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        head = getattr(module, "head_weight", None)
        if isinstance(head, Tensor):
            read.add(id(head))
        if isinstance(module, READ_INSIDE):
            inside |= {id(one) for one in module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds
        and getattr(module, "groups", 1) == 1
        and id(module) not in inside
        and id(module.weight) not in read
        and owners[id(module.weight)] == 1
    }


def chosen(able: Iterable[str], targets: Sequence[str], *, key: str, layers: Iterable[str]) -> list[str]:
    """The layers that the words name, each by the end of its name or by a pattern over it; `layers` are all there are."""
    able, found = list(able), set[str]()
    for word in targets:
        mine = {name for name in able if _names(word, name)}
        if not mine:
            others = [name for name in layers if _names(word, name)]
            if others:
                raise UsageError(
                    f"{key}: {word!r} is {others[0]}, whose weight is read elsewhere or learns in full; leave it out"
                )
            raise UsageError(f"{key}: {word!r} matches no layer of the model; {_there_is(word, able)}")
        found |= mine
    return [name for name in able if name in found]


def ends(names: Iterable[str]) -> list[str]:
    """The last words of names, with the one before where that is a number."""
    return sorted({re.sub(r"^.*?([^.]+(\.\d+)?)$", r"\1", name) for name in names})


def _there_is(word: str, able: Sequence[str]) -> str:
    there = ends(able)
    near = difflib.get_close_matches(word, there, 1)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(there) or 'none that could carry anything'}"


def _names(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}") or _pattern(word).fullmatch(name) is not None


def _pattern(word: str) -> re.Pattern[str]:
    try:
        return re.compile(word)
    except re.error as error:
        raise UsageError(f"{word!r} is not a regular expression: {error}") from None
