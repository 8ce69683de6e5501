"""Learning rate factor, weight decay and first training step of each parameter, from `training.groups` and its shorthands.

A model is treated as a sequence of layers, in the order of its parameter names: parameters before the first numbered module
(embeddings) are layer 0, each numbered module (`blocks.3.`) is the next layer, and parameters after them (the head) are the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bottega.config.training import Training
from bottega.config.units import Interval
from bottega.core.errors import UsageError

BACKBONE = "backbone"
_NUMBERED_MODULE = re.compile(r"(.*?\.?\d+)\.")


@dataclass(frozen=True)
class ParameterRule:
    """Parameters whose full name matches `pattern` are trained at `scale` times the learning rate from `start_step` on.

    A scale of None freezes them.
    """

    pattern: str
    scale: float | None = 1.0
    weight_decay: float | None = None
    start_step: int = 0


@dataclass(frozen=True)
class ParameterSetting:
    """The resolved settings of one parameter; a scale of None freezes it."""

    scale: float | None
    weight_decay: float | None = None
    start_step: int = 0


def resolve_parameter_settings(
    training: Training,
    names: Sequence[str],
    *,
    total_steps: int = 1,
    steps_per_epoch: int = 1,
    is_trainable: Callable[[str], bool] = lambda name: True,
) -> dict[str, ParameterSetting]:
    """Return the settings of each parameter, with durations converted to steps.

    `names` are in the order of the model. Parameters that the task does not train are frozen and matched by no pattern.
    """

    def to_steps(duration: Interval | None) -> int:
        return 0 if duration is None else duration.to_steps(total_steps, max(1, steps_per_epoch))

    trainable = [name for name in names if is_trainable(name)]
    settings = apply_parameter_rules(
        trainable,
        [
            ParameterRule(group.pattern, group.scale, group.weight_decay, to_steps(group.starts))
            for group in training.groups
        ],
        freeze=training.freeze or (),
        unfreeze_every=to_steps(training.unfreeze.layers_per) if training.unfreeze is not None else None,
        layer_decay=training.layer_decay,
    )
    return {name: settings.get(name, ParameterSetting(scale=None)) for name in names}


def apply_parameter_rules(
    names: Sequence[str],
    rules: Sequence[ParameterRule],
    *,
    freeze: Sequence[str] = (),
    unfreeze_every: int | None = None,
    layer_decay: float | None = None,
) -> dict[str, ParameterSetting]:
    """Return the settings of each parameter by name.

    `freeze` lists modules or patterns. With `unfreeze_every`, a number of steps, the last layer is trained first, and one more
    layer after each interval. `layer_decay` multiplies the learning rate once for each layer below the last.
    """
    rule_indices = match_rules(names, rules)
    layers = assign_layers(names)
    last_layer = max(layers.values())
    settings: dict[str, ParameterSetting] = {}
    for name in names:
        rule, layers_from_last = rules[rule_indices[name]], last_layer - layers[name]
        scale, start_step = rule.scale, rule.start_step
        if scale is not None and layer_decay is not None:
            scale *= layer_decay**layers_from_last
        if unfreeze_every is not None:
            start_step = max(start_step, layers_from_last * unfreeze_every)
        settings[name] = ParameterSetting(scale, rule.weight_decay, start_step)
    for module_or_pattern in freeze:
        for name in _find_parameters(module_or_pattern, names, layers):
            settings[name] = replace(settings[name], scale=None)
    if all(setting.scale is None for setting in settings.values()):
        raise UsageError("training.freeze: every parameter is frozen; leave some trainable")
    return settings


def assign_layers(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each parameter's layer, as described at the top of this file."""
    layers: dict[str, int] = {}
    modules: list[str] = []
    for name in names:
        numbered = _NUMBERED_MODULE.match(name)
        if numbered is not None and numbered[1] not in modules:
            modules.append(numbered[1])
        layers[name] = modules.index(numbered[1]) + 1 if numbered is not None else 0
    is_after_numbered = False
    for name in names:
        is_after_numbered = is_after_numbered or layers[name] > 0
        if is_after_numbered and layers[name] == 0:
            layers[name] = len(modules) + 1
    return layers


def match_rules(names: Sequence[str], rules: Sequence[ParameterRule]) -> dict[str, int]:
    """Return the index of the first rule that matches each parameter.

    Raises UsageError for a parameter that no rule matches, or a rule that matches no parameter.
    """
    patterns = [_compile(rule.pattern, "training.groups") for rule in rules]
    rule_indices: dict[str, int] = {}
    for name in names:
        rule_index = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if rule_index is None:
            raise UsageError(
                f"training.groups: no pattern matches the parameter {name}; add a last group with pattern '.*'"
            )
        rule_indices[name] = rule_index
    for i, rule in enumerate(rules):
        if i not in rule_indices.values():
            raise UsageError(
                f"training.groups: the pattern {rule.pattern!r} matches no parameter; parameters are named like {names[0]}"
            )
    if all(rules[i].scale is None for i in rule_indices.values()):
        raise UsageError("training.groups: every parameter is frozen; leave some trainable")
    return rule_indices


def _find_parameters(module_or_pattern: str, names: Sequence[str], layers: Mapping[str, int]) -> list[str]:
    """Return the parameters of a module, such as `backbone` or `encoder.layer.0`, or those whose full name a pattern matches."""
    matching = [name for name in names if name == module_or_pattern or name.startswith(module_or_pattern + ".")]
    if not matching:
        pattern = _compile(module_or_pattern, "training.freeze")
        matching = [name for name in names if pattern.fullmatch(name)]
    if not matching and module_or_pattern == BACKBONE:
        last_layer = max(layers.values())
        matching = [name for name in names if layers[name] < last_layer]
    if not matching:
        modules = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise UsageError(
            f"training.freeze: {module_or_pattern!r} matches no module and no parameter; the modules are {modules}"
        )
    return matching


def _compile(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
