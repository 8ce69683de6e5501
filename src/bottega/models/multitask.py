"""Joins several models into one module that shares the layers of equal name and shape, except last layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bottega.config.parameter_groups import assign_layers
from bottega.core.errors import UsageError

TRUNK_PREFIX = "model."
"""Prefix of all parameters but the head's in transformers."""
PARTS = "parts"
"""The module that holds each part's model under its name."""
LAYER_ALIASES = {"embed_tokens": "embedding"}
"""Name of a layer -> its name in other families of models, under which the two are shared."""

Plan = dict[str, dict[str, str]]
"""Name of a shared layer -> part -> module path in that part's model."""


class MultitaskModel(nn.Module):
    """Several models with shared layers; `forward(part, ...)` calls the model of that part.

    A shared layer is registered once, under `shared.`; the others under `parts.NAME.`. Layers are shared rather than
    whole blocks, because settings that are not weights, such as dropout and context length, may differ between parts.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, priority: Sequence[str] = (), log_variances: bool = False
    ) -> None:
        """A shared layer has the initial weights of the first part that has it, in the order of `priority`, then of `models`.

        `log_variances` adds a parameter per part that weights its loss by its uncertainty.
        """
        super().__init__()
        self.plan = find_shared_layers(models)
        names = tuple(models)
        part_order = list(dict.fromkeys((*priority, *names)))
        self.shared, self.parts = nn.Module(), nn.Module()
        self.aliases: dict[str, str] = {}
        for shared, paths in self.plan.items():
            owner = min(paths, key=part_order.index)
            layer = models[owner].get_submodule(paths[owner])
            _set_layer(self.shared, shared, layer)
            for part, path in paths.items():
                _set_layer(models[part], path, layer)
                self.aliases[f"{PARTS}.{part}.{path}"] = f"shared.{shared}"
        for name, model in models.items():
            _check_name(self.parts, name).add_module(name, model)
        self.log_variance = nn.Module()
        if log_variances:
            for name in names:
                _check_name(self.log_variance, name).register_parameter(name, nn.Parameter(torch.zeros(())))
        self.register_state_dict_post_hook(_remove_aliases)
        self.register_load_state_dict_pre_hook(_restore_aliases)

    def part(self, name: str) -> Any:
        """Return the model of one part."""
        return self.parts.get_submodule(name)

    def forward(self, part: str | None, *args: Any, **kwargs: Any) -> Any:
        """Call the model of `part`; for None, return the loss weights exp(-log variance) of all parts, (parts,)."""
        return self._compute_loss_weights() if part is None else self.part(part)(*args, **kwargs)

    def _compute_loss_weights(self) -> Tensor:
        return torch.exp(-torch.stack(list(self.log_variance.parameters())))

    @property
    def checkpoint_blocks(self) -> bool:
        return any(model.checkpoint_blocks for model in self._find_models_with("checkpoint_blocks"))

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        for model in self._find_models_with("checkpoint_blocks"):
            model.checkpoint_blocks = value

    def compile_blocks(self) -> None:
        """Compile each model as it supports; without CUDA graphs, which replay a single forward: here there are several."""
        for model in self.parts.children():
            if hasattr(model, "compile_whole"):
                model.compile_whole(use_cuda_graphs=False)  # type: ignore[operator]
            elif hasattr(model, "compile_blocks"):
                model.compile_blocks()  # type: ignore[operator]

    def _find_models_with(self, attribute: str) -> list[Any]:
        return [model for model in self.parts.children() if hasattr(model, attribute)]


def find_shared_layers(models: Mapping[str, nn.Module]) -> Plan:
    """Return the layers to share: those of equal name, type and shape in two or more models, except a model's last layer.

    Layers are numbered by `assign_layers`. Raises `UsageError` if a model shares no layer.
    """
    groups: dict[tuple[str, Any], dict[str, str]] = {}
    for part, model in models.items():
        layer_numbers = assign_layers([name for name, _ in model.named_parameters()])
        last_number = max(layer_numbers.values())
        for path, layer in model.named_modules():
            parameters = dict(layer.named_parameters(recurse=False))
            if (
                parameters
                and not list(layer.children())
                and all(layer_numbers.get(f"{path}.{name}", last_number) < last_number for name in parameters)
            ):
                groups.setdefault((_canonicalize_name(path), _compute_signature(layer)), {})[part] = path
    plan: Plan = {}
    for (key, _), paths in groups.items():
        if len(paths) > 1:
            plan[key if key not in plan else f"{next(iter(paths))}.{key}"] = paths
    for part in models:
        if not any(part in paths for paths in plan.values()):
            raise UsageError(
                f"data.parts.{part}: its model shares no layer with another part; give the parts the same kind of model "
                "and the same sizes, such as model.hidden_size"
            )
    return plan


def _canonicalize_name(path: str) -> str:
    return ".".join(LAYER_ALIASES.get(name, name) for name in path.removeprefix(TRUNK_PREFIX).split("."))


def _compute_signature(layer: nn.Module) -> Any:
    """Return the type, settings and parameter shapes of a layer: all that affects its output, except its weights."""
    settings = {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and name != "training" and isinstance(value, int | float | str | tuple)
    }
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters(recurse=False)]
    return type(layer), tuple(sorted(settings.items())), tuple(shapes)


def _set_layer(root: nn.Module, path: str, layer: nn.Module) -> None:
    """Set the layer at a dotted path of a module, creating missing parents."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root._modules[last] = layer


def _check_name(root: nn.Module, name: str) -> nn.Module:
    if hasattr(root, name):
        raise UsageError(f"data.parts.{name}: torch.nn.Module has an attribute of this name; choose another name")
    return root


def _remove_aliases(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove aliases from a state dict, so that it names each tensor once."""
    assert isinstance(module, MultitaskModel)
    for key in [key for key in state if key.removeprefix(prefix).rpartition(".")[0] in module.aliases]:
        del state[key]


def _restore_aliases(module: nn.Module, state: dict[str, Any], prefix: str, *hook_arguments: Any) -> None:
    """Copy shared tensors to their aliases in a state dict before it is loaded."""
    assert isinstance(module, MultitaskModel)
    for alias, shared in module.aliases.items():
        for kind in module.get_submodule(shared).state_dict():
            if f"{prefix}{shared}.{kind}" in state:
                state[f"{prefix}{alias}.{kind}"] = state[f"{prefix}{shared}.{kind}"]
