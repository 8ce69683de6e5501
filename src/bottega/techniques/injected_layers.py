"""Small parts that learn, put into the layers of a model that does not: it keeps its names, its weights and its bytes.

A layer becomes one of a class that computes more and stays the same object. What calls it, what hooks into it and what
its weights are called do not change, so a base is loaded, grouped, hashed and exported as if nothing were there.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.task import Task
from bottega.core.types import Models
from bottega.similar_names import find_similar_names
from bottega.techniques.wrapped_task import WrappedTask

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""These hand the weights of their layers to a kernel of their own and may never call the layers."""
HEADS = ("head", "lm_head", "classifier", "score", "out", "proj_out", "conv_out")
"""What tells the answer, after the blocks, as we and others call it."""


class InjectedTask(WrappedTask):
    """A task whose model is a base that stays, with parts put in that learn."""

    key: ClassVar[str]
    """Its options, as messages name them."""
    export_note: ClassVar[str]
    """What an export holds beside the folder of the parts, in words for its card."""
    inner: Task
    train: tuple[str, ...] = ()
    """Parts of the base that learn in full, by the beginning of their names or by a pattern over whole names."""
    fresh: tuple[str, ...] = ()
    """The same, where the model may lack some of them: parts that would begin at random and stay so."""
    start: str | None = None
    """The folder of an adapter to start from; only `read_start` opens it."""

    @abstractmethod
    def is_injected(self, name: str) -> bool:
        """Whether a parameter is of the parts that are put in."""

    @abstractmethod
    def inject(self, model: nn.Module, seed: int) -> None: ...

    @abstractmethod
    def load_adapter(self, folder: Path, model: nn.Module) -> None:
        """Fill the parts from the folder of an adapter that fits this model, these options and this base."""

    @abstractmethod
    def export(
        self, model: nn.Module, folder: Path, *, origin: str | None, whole: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the folder of the parts, of a base that came from `origin`, and what a card says first. `whole` writes the
        model beside it, where that can be told without the parts."""

    def load_start(self, model: nn.Module) -> bool:
        """Fill the parts from where they start; and whether they start anywhere. Not for a run that goes on: it has all that
        learns, and its start may be gone."""
        if self.start is not None:
            self.load_adapter(Path(self.start), model)
        return self.start is not None

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        return {**specs, "model": specs["model"].changed(self._put_in)}

    def notes(self, model: nn.Module) -> list[str]:
        """What somebody should know of these options on this model."""
        return []

    def check_patterns(self, words: Iterable[str], model: nn.Module, *, key: str) -> None:
        """Refuse parts and patterns that mean what stays and nothing that learns; those that mean nothing are told elsewhere."""
        names = [name for name, _ in model.named_parameters()]
        for word in words:
            check_pattern(word, key=key)
            meant = [name for name in names if matches_part(word, name)]
            if meant and not any(map(self.is_trainable, meant)):
                raise UsageError(
                    f"{key}: {word!r} is {meant[0]}, of the base, which {self.key} keeps as it is; leave it out, or let it "
                    f"learn by {self.key}.train"
                )

    def hash_base(self, model: nn.Module) -> str:
        """The hash of what stays."""
        return combine_hashes(self.hash_frozen_tensors(model))

    def hash_frozen_tensors(self, model: nn.Module) -> dict[str, str]:
        """Of each tensor that stays."""
        return hash_frozen_tensors(model, self.is_trainable)

    def is_trainable(self, name: str) -> bool:
        return self.is_injected(name) or (self.is_fully_trained(name) and self.inner.is_trainable(name))

    def is_fully_trained(self, name: str) -> bool:
        return any(matches_part(word, name) for word in (*self.train, *self.fresh))

    def _put_in(self, models: Models, seed: int) -> None:
        model = models["model"]
        names = [name for name, _ in model.named_parameters()]
        for word in self.train:
            check_pattern(word, key=f"{self.key}.train")
            if not any(matches_part(word, name) for name in names):
                parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
                raise UsageError(
                    f"{self.key}.train: {word!r} is no part of the model and matches no parameter; there is {parts}"
                )
        self.inject(model, seed)


def matches_part(word: str, name: str) -> bool:
    """Whether a parameter or layer is of a part, such as `head` or `layers.0`, or its whole name matches a pattern."""
    return name == word or name.startswith(f"{word}.") or re.fullmatch(word, name) is not None


def hash_frozen(model: nn.Module, learns: Callable[[str], bool]) -> str:
    """One sha256 for all that does not learn."""
    return combine_hashes(hash_frozen_tensors(model, learns))


def hash_frozen_tensors(model: nn.Module, learns: Callable[[str], bool]) -> dict[str, str]:
    """sha256 of each tensor that does not learn, by name. One for all would say nothing once more or less of it learns."""
    found = dict[str, str]()
    for name, tensor in sorted(model.state_dict().items()):
        if not learns(name):
            digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            found[name] = digest.hexdigest()
    return found


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """One sha256 for all of them, with their names."""
    return hashlib.sha256("".join(f"{name} {found}\n" for name, found in hashes.items()).encode()).hexdigest()


def is_in_block(name: str) -> bool:
    """Whether a layer is of a numbered part, such as `layers.3.mlp.down_proj`."""
    return any(part.isdigit() for part in name.split("."))


def find_injectable_layers(
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


def select_layers(able: Iterable[str], targets: Sequence[str], *, key: str, layers: Iterable[str]) -> list[str]:
    """The layers that the words name, each by the end of its name or by a pattern over it; `layers` are all there are."""
    able, found = list(able), set[str]()
    for word in targets:
        check_pattern(word, key=key)
        mine = {name for name in able if _names(word, name)}
        if not mine:
            others = [name for name in layers if _names(word, name)]
            if not others and word in HEADS:
                raise UsageError(
                    f"{key}: the model has no {word} of its own: its head is the matrix of the embedding, which a change "
                    "would reach by one of its two uses only; leave it out"
                )
            if others:
                raise UsageError(
                    f"{key}: {word!r} is {others[0]}, whose weight is read elsewhere or learns in full; leave it out"
                )
            raise UsageError(f"{key}: {word!r} matches no layer of the model; {_there_is(word, able)}")
        found |= mine
    return [name for name in able if name in found]


def name_suffixes(names: Iterable[str]) -> list[str]:
    """The last words of names, with the one before where that is a number."""
    return sorted({re.sub(r"^.*?([^.]+(\.\d+)?)$", r"\1", name) for name in names})


def _there_is(word: str, able: Sequence[str]) -> str:
    there = name_suffixes(able)
    near = find_similar_names(word, there)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(there) or 'none that could carry anything'}"


def _names(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}") or re.fullmatch(word, name) is not None


def check_pattern(word: str, *, key: str) -> None:
    try:
        re.compile(word)
    except re.error as error:
        raise UsageError(f"{key}: {word!r} is not a regular expression: {error}") from None
