"""Which parameters move, how fast, and from when on: one table of rows, first match wins, and shorthands over it.

A model is read as a sequence of layers, in the order of its parameters' names: what comes before the first numbered
part (embeddings) is layer 0, each numbered part (`blocks.3.`) is the next, and what comes after them (the head) the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bottega.config.training import Training
from bottega.config.units import Interval
from bottega.core.errors import UsageError

BACKBONE = "backbone"
_NUMBERED = re.compile(r"(.*?\.?\d+)\.")


@dataclass(frozen=True)
class ParameterRule:
    """Parameters whose whole name matches `pattern` learn at `scale` times the rate, from step `starts` on; None means
    never."""

    pattern: str
    scale: float | None = 1.0
    weight_decay: float | None = None
    start_step: int = 0


@dataclass(frozen=True)
class ParameterSetting:
    """What the table says of one parameter."""

    scale: float | None
    weight_decay: float | None = None
    start_step: int = 0


def resolve_parameter_settings(
    training: Training,
    names: Sequence[str],
    *,
    total: int = 1,
    steps_per_epoch: int = 1,
    is_trainable: Callable[[str], bool] = lambda name: True,
) -> dict[str, ParameterSetting]:
    """The recipe's rows and shorthands as one setting for each parameter, with durations in steps. `names` are in the order
    of the model; the table does not list what the task does not train."""

    def steps(duration: Interval | None) -> int:
        return 0 if duration is None else duration.to_steps(total, max(1, steps_per_epoch))

    own = [name for name in names if is_trainable(name)]
    rows = apply_parameter_rules(
        own,
        [
            ParameterRule(group.pattern, group.scale, group.weight_decay, steps(group.starts))
            for group in training.groups
        ],
        freeze=training.freeze or (),
        unfreeze_every=steps(training.unfreeze.layers_per) if training.unfreeze is not None else None,
        layer_decay=training.layer_decay,
    )
    return {name: rows.get(name, ParameterSetting(scale=None)) for name in names}


def apply_parameter_rules(
    names: Sequence[str],
    rows: Sequence[ParameterRule],
    *,
    freeze: Sequence[str] = (),
    unfreeze_every: int | None = None,
    layer_decay: float | None = None,
) -> dict[str, ParameterSetting]:
    """Of each parameter, by name. `freeze` names parts or patterns; with `unfreeze_every` the last layer learns first, and
    so many steps later the one before it; `layer_decay` multiplies the rate once for each layer below the last."""
    chosen = match_rules(names, rows)
    layers = assign_layers(names)
    last = max(layers.values())
    found: dict[str, ParameterSetting] = {}
    for name in names:
        row, below = rows[chosen[name]], last - layers[name]
        scale, starts = row.scale, row.start_step
        if scale is not None and layer_decay is not None:
            scale *= layer_decay**below
        if unfreeze_every is not None:
            starts = max(starts, below * unfreeze_every)
        found[name] = ParameterSetting(scale, row.weight_decay, starts)
    for word in freeze:
        for name in _named(word, names, layers):
            found[name] = replace(found[name], scale=None)
    if all(one.scale is None for one in found.values()):
        raise UsageError("training.freeze: every parameter is frozen, so nothing would learn")
    return found


def assign_layers(names: Sequence[str]) -> dict[str, int]:
    """The layer of each parameter, counted from 0; see above."""
    found: dict[str, int] = {}
    seen: list[str] = []
    for name in names:
        numbered = _NUMBERED.match(name)
        if numbered is not None and numbered[1] not in seen:
            seen.append(numbered[1])
        found[name] = seen.index(numbered[1]) + 1 if numbered is not None else 0
    after = False
    for name in names:  # what has no number and comes after the first that has one
        after = after or found[name] > 0
        if after and found[name] == 0:
            found[name] = len(seen) + 1
    return found


def match_rules(names: Sequence[str], rows: Sequence[ParameterRule]) -> dict[str, int]:
    """Row number of each parameter. A parameter without a row, or a row without a parameter, is an error."""
    patterns = [_compiled(row.pattern, "training.groups") for row in rows]
    chosen: dict[str, int] = {}
    for name in names:
        row = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if row is None:
            raise UsageError(f"training.groups: no row matches the parameter {name}; add a last row with pattern '.*'")
        chosen[name] = row
    for i, row_ in enumerate(rows):
        if i not in chosen.values():
            raise UsageError(f"training.groups: the pattern {row_.pattern!r} matches no parameter, such as {names[0]}")
    if all(rows[i].scale is None for i in chosen.values()):
        raise UsageError("training.groups: every parameter is frozen, so nothing would learn")
    return chosen


def _named(word: str, names: Sequence[str], layers: Mapping[str, int]) -> list[str]:
    """The parameters of a part, such as `backbone` or `encoder.layer.0`, or those whose whole name a pattern matches."""
    found = [name for name in names if name == word or name.startswith(word + ".")]
    if not found:
        pattern = _compiled(word, "training.freeze")
        found = [name for name in names if pattern.fullmatch(name)]
    if not found and word == BACKBONE:
        last = max(layers.values())
        found = [name for name in names if layers[name] < last]
    if not found:
        parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise UsageError(
            f"training.freeze: {word!r} is no part of the model and matches no parameter; there is {parts}"
        )
    return found


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
