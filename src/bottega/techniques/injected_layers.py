"""Trainable layers injected into a frozen base model (LoRA, adapters), which keeps its names and weights.

A layer changes its class to one that computes more, and stays the same object. Callers, hooks and parameter names do not
change, so the base model is loaded, grouped, hashed and exported as if nothing were injected.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.task import Task
from bottega.core.types import Models
from bottega.similar_names import find_similar_names
from bottega.techniques.tensor_hashes import combine_hashes, hash_tensor
from bottega.techniques.wrapped_task import WrappedTask

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FUSED_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that pass the weights of their layers to a fused kernel and may never call the layers."""
HEADS = ("head", "lm_head", "classifier", "score", "out", "proj_out", "conv_out")
"""Names of output layers after the blocks, here and in other libraries."""


class InjectedTask(WrappedTask):
    """A task whose model is a frozen base model with injected trainable layers."""

    key: ClassVar[str]
    """Recipe key of its options, for messages."""
    export_note: ClassVar[str]
    """What an export contains beside the adapter folder, for the model card."""
    inner: Task
    train: tuple[str, ...] = ()
    """Modules of the base model that are trained in full: prefixes of names, or patterns over whole names."""
    random_modules: tuple[str, ...] = ()
    """Randomly initialised modules, such as a new head, that are trained in full as well; the model may lack some of them."""
    start: str | None = None
    """The folder of an adapter to start from; only `load_start` reads it."""

    @abstractmethod
    def is_injected(self, name: str) -> bool:
        """Return whether a parameter belongs to an injected layer."""

    @abstractmethod
    def inject(self, model: nn.Module, seed: int) -> None:
        """Inject the trainable layers into the model, in place."""

    @abstractmethod
    def load_adapter(self, folder: Path, model: nn.Module) -> None:
        """Load the injected layers from an adapter folder that fits the model, the options and the base."""

    @abstractmethod
    def export(
        self, model: nn.Module, folder: Path, *, origin: str | None, export_whole: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the adapter folder and return the metadata of the model card.

        `origin` is where the base model came from. `export_whole` exports the model itself, if it can be exported.
        """

    def load_start(self, model: nn.Module) -> bool:
        """Load the adapter of `start`; return whether there is one.

        Not called for a resumed run: its checkpoint has all trainable weights, and the folder may no longer exist.
        """
        if self.start is not None:
            self.load_adapter(Path(self.start), model)
        return self.start is not None

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        return {**specs, "model": specs["model"].with_change(self._check_and_inject)}

    def notes(self, model: nn.Module) -> list[str]:
        """Return notes for the user on these options with this model."""
        return []

    def check_patterns(self, patterns: Iterable[str], model: nn.Module, *, key: str) -> None:
        """Raise UsageError if a pattern matches only frozen parameters; patterns without a match are reported elsewhere."""
        names = [name for name, _ in model.named_parameters()]
        for pattern in patterns:
            check_pattern(pattern, key=key)
            matches = [name for name in names if matches_module(pattern, name)]
            if matches and not any(map(self.is_trainable, matches)):
                raise UsageError(
                    f"{key}: {pattern!r} matches {matches[0]} of the base model, which {self.key} freezes; remove it, or "
                    f"train it with {self.key}.train"
                )

    def hash_base(self, model: nn.Module) -> str:
        """Return one SHA-256 over the frozen tensors."""
        return combine_hashes(self.hash_frozen_tensors(model))

    def hash_frozen_tensors(self, model: nn.Module) -> dict[str, str]:
        """Return the SHA-256 of each frozen tensor."""
        return hash_frozen_tensors(model, self.is_trainable)

    def is_trainable(self, name: str) -> bool:
        return self.is_injected(name) or (self.is_fully_trained(name) and self.inner.is_trainable(name))

    def is_fully_trained(self, name: str) -> bool:
        """Return whether a parameter of the base model is trained in full, by `train` or `random_modules`."""
        return any(matches_module(pattern, name) for pattern in (*self.train, *self.random_modules))

    def _check_and_inject(self, models: Models, seed: int) -> None:
        model = models["model"]
        names = [name for name, _ in model.named_parameters()]
        for pattern in self.train:
            check_pattern(pattern, key=f"{self.key}.train")
            if not any(matches_module(pattern, name) for name in names):
                modules = ", ".join(sorted({name.partition(".")[0] for name in names}))
                raise UsageError(
                    f"{self.key}.train: {pattern!r} is not a module and matches no parameter; the model has {modules}"
                )
        self.inject(model, seed)


def matches_module(pattern: str, name: str) -> bool:
    """Return whether a parameter or layer is inside the module `pattern`, such as `layers.0`, or matches it as a
    regular expression."""
    return name == pattern or name.startswith(f"{pattern}.") or re.fullmatch(pattern, name) is not None


def hash_frozen(model: nn.Module, is_trainable: Callable[[str], bool]) -> str:
    """Return one SHA-256 over all tensors that are not trained."""
    return combine_hashes(hash_frozen_tensors(model, is_trainable))


def hash_frozen_tensors(model: nn.Module, is_trainable: Callable[[str], bool]) -> dict[str, str]:
    """Return the SHA-256 of each tensor that is not trained, by name.

    One hash for all would not be comparable once more or fewer of them are trained.
    """
    hashes = dict[str, str]()
    for name, tensor in sorted(model.state_dict().items()):
        if not is_trainable(name):
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            hashes[name] = hash_tensor(str(tensor.dtype), tensor.shape, values)
    return hashes


def is_in_block(name: str) -> bool:
    """Return whether a layer is inside a numbered block, as in `layers.3.mlp.down_proj`."""
    return any(part.isdigit() for part in name.split("."))


def find_injectable_layers(
    model: nn.Module, *, kinds: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
) -> dict[str, nn.Module]:
    """Return the layers that can be injected into, by name.

    Excludes layers whose weight is read without calling them: a head inside a fused loss, a matrix tied to an embedding.
    An injected layer would have no effect there, or only on one of the two uses.
    """
    num_owners: dict[int, int] = {}
    read_directly: set[int] = set()
    fused_modules: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                num_owners[id(parameter)] = num_owners.get(id(parameter), 0) + 1
        head = getattr(module, "head_weight", None)
        if isinstance(head, Tensor):
            read_directly.add(id(head))
        if isinstance(module, FUSED_MODULES):
            fused_modules |= {id(inner) for inner in module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds
        and getattr(module, "groups", 1) == 1
        and id(module) not in fused_modules
        and id(module.weight) not in read_directly
        and num_owners[id(module.weight)] == 1
    }


def select_layers(candidates: Iterable[str], targets: Sequence[str], *, key: str, layers: Iterable[str]) -> list[str]:
    """Return the injectable layers that `targets` name, by a suffix of the name or a pattern; `layers` are all layers."""
    candidates, selected = list(candidates), set[str]()
    for pattern in targets:
        check_pattern(pattern, key=key)
        matches = {name for name in candidates if _matches_target(pattern, name)}
        if not matches:
            other_layers = [name for name in layers if _matches_target(pattern, name)]
            if not other_layers and pattern in HEADS:
                raise UsageError(
                    f"{key}: the model has no separate {pattern}: it is tied to the embedding, and a change would affect only "
                    "one of the two uses; remove it"
                )
            if other_layers:
                raise UsageError(
                    f"{key}: {pattern!r} matches {other_layers[0]}, whose weight is read elsewhere or trained in full; remove it"
                )
            raise UsageError(
                f"{key}: {pattern!r} matches no layer of the model; {_suggest_layers(pattern, candidates)}"
            )
        selected |= matches
    return [name for name in candidates if name in selected]


def list_name_suffixes(names: Iterable[str]) -> list[str]:
    """Return the last components of names, with the one before if the last is a number."""
    return sorted({re.sub(r"^.*?([^.]+(\.\d+)?)$", r"\1", name) for name in names})


def _suggest_layers(pattern: str, candidates: Sequence[str]) -> str:
    suffixes = list_name_suffixes(candidates)
    similar_names = find_similar_names(pattern, suffixes)
    return f"did you mean {similar_names[0]}?" if similar_names else f"choose from {', '.join(suffixes) or 'none'}"


def _matches_target(pattern: str, name: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


def check_pattern(pattern: str, *, key: str) -> None:
    """Raise UsageError if `pattern` is not a valid regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
