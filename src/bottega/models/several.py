"""Joins several models into one module with shared layers: layers of equal name and shape are one, except last layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bottega.config.parameter_groups import assign_layers
from bottega.core.errors import UsageError

TRUNK = "model."
"""Prefix of all parameters but the head's in transformers."""
PARTS = "parts"
"""The module that holds each part's model under its name."""
SAME = {"embed_tokens": "embedding"}
"""Layers that have different names in two families of models."""

Plan = dict[str, dict[str, str]]
"""Name of a shared layer -> part -> module path in that part's model."""


class Several(nn.Module):
    """`forward(part, ...)` is that part's model. A shared layer stands once among the names, under `shared.`; what a part
    has for itself stands under `parts.NAME.`.

    Layers are shared and not whole blocks: how much a part drops and how far it reads is no weight, and stays its own.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, first: Sequence[str] = (), log_variances: bool = False
    ) -> None:
        """A shared layer has the weights of the part that comes first: in `first`, else in `models`. With `log_variances`
        each part has one number more, which says how far its loss is to be trusted."""
        super().__init__()
        self.plan = shared_layers(models)
        names = tuple(models)
        preferred = list(dict.fromkeys((*first, *names)))
        self.shared, self.parts = nn.Module(), nn.Module()
        self.aliases: dict[str, str] = {}
        for shared, places in self.plan.items():
            owner = min(places, key=preferred.index)
            layer = models[owner].get_submodule(places[owner])
            _put(self.shared, shared, layer)
            for part, path in places.items():
                _put(models[part], path, layer)
                self.aliases[f"{PARTS}.{part}.{path}"] = f"shared.{shared}"
        for name, model in models.items():
            _named(self.parts, name).add_module(name, model)
        self.log_variance = nn.Module()
        if log_variances:
            for name in names:
                _named(self.log_variance, name).register_parameter(name, nn.Parameter(torch.zeros(())))
        self.register_state_dict_post_hook(_once)
        self.register_load_state_dict_pre_hook(_everywhere)

    def part(self, name: str) -> Any:
        """The model of one part, whole."""
        return self.parts.get_submodule(name)

    def forward(self, part: str | None, *args: Any, **named: Any) -> Any:
        """Of no part: how much each of them is trusted, exp(-log variance) [parts]."""
        return self._trust() if part is None else self.part(part)(*args, **named)

    def _trust(self) -> Tensor:
        return torch.exp(-torch.stack(list(self.log_variance.parameters())))

    @property
    def checkpoint_blocks(self) -> bool:
        return any(model.checkpoint_blocks for model in self._offering("checkpoint_blocks"))

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        for model in self._offering("checkpoint_blocks"):
            model.checkpoint_blocks = value

    def compile_blocks(self) -> None:
        """Each model as it offers it; what the device would replay by itself is one forward, and here are several."""
        for model in self.parts.children():
            if hasattr(model, "compile_whole"):
                model.compile_whole(graphs=False)  # type: ignore[operator]
            elif hasattr(model, "compile_blocks"):
                model.compile_blocks()  # type: ignore[operator]

    def _offering(self, attribute: str) -> list[Any]:
        return [model for model in self.parts.children() if hasattr(model, attribute)]


def shared_layers(models: Mapping[str, nn.Module]) -> Plan:
    """Which layers are one: those of the same name, kind and form in two models or more, but never a model's last layer
    (as `layers_of` counts), where the tasks part. A model that shares nothing is an error."""
    groups: dict[tuple[str, Any], dict[str, str]] = {}
    for part, model in models.items():
        layers = assign_layers([name for name, _ in model.named_parameters()])
        last = max(layers.values())
        for path, layer in model.named_modules():
            own = dict(layer.named_parameters(recurse=False))
            if own and not list(layer.children()) and all(layers.get(f"{path}.{name}", last) < last for name in own):
                groups.setdefault((_key(path), _form(layer)), {})[part] = path
    plan: Plan = {}
    for (key, _), places in groups.items():
        if len(places) > 1:
            plan[key if key not in plan else f"{next(iter(places))}.{key}"] = places
    for part in models:
        if not any(part in places for places in plan.values()):
            raise UsageError(
                f"data.parts.{part}: its model has no layer that another part has too; give the parts one kind of model "
                "and one size, such as model.hidden_size"
            )
    return plan


def _key(path: str) -> str:
    return ".".join(SAME.get(name, name) for name in path.removeprefix(TRUNK).split("."))


def _form(layer: nn.Module) -> Any:
    """All that decides what a layer computes, but for its weights."""
    plain = {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and name != "training" and isinstance(value, int | float | str | tuple)
    }
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters(recurse=False)]
    return type(layer), tuple(sorted(plain.items())), tuple(shapes)


def _put(root: nn.Module, path: str, layer: nn.Module) -> None:
    """The layer at a dotted place of a tree, which is made as far as it is not there."""
    *above, last = path.split(".")
    for name in above:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root._modules[last] = layer


def _named(root: nn.Module, name: str) -> nn.Module:
    if hasattr(root, name):
        raise UsageError(f"data.parts.{name}: a module of torch has something of this name; choose another")
    return root


def _once(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """What is saved names each tensor once."""
    assert isinstance(module, Several)
    for key in [key for key in state if key.removeprefix(prefix).rpartition(".")[0] in module.aliases]:
        del state[key]


def _everywhere(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """What is loaded is looked for under every name."""
    assert isinstance(module, Several)
    for alias, shared in module.aliases.items():
        for kind in module.get_submodule(shared).state_dict():
            if f"{prefix}{shared}.{kind}" in state:
                state[f"{prefix}{alias}.{kind}"] = state[f"{prefix}{shared}.{kind}"]
