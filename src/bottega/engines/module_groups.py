"""The modules under which statistics of parameters are reported: few enough to look at, and named as a person would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MAX_MODULES = 64
Statistics = dict[str, dict[str, float]]
"""module -> statistic -> value."""


def group_by_module(names: Sequence[str], *, max_modules: int = MAX_MODULES) -> dict[str, str]:
    """Return the module that each parameter is reported under: the block that a person would name, such as `layers.0`.

    It is the module of the parameter, cut after the first number in its path. If there are more than `max_modules`, the
    deepest paths without a number are shortened, and then neighbouring blocks are joined, as in `layers.0-1`. A leading
    `model.`, the wrapper of transformers' models, is left out if the names stay distinct.
    """
    paths = {name: _cut_after_number(name.split(".")[:-1] or [name]) for name in names}
    while len(set(paths.values())) > max_modules:
        depths = [len(path) for path in paths.values() if not path[-1].isdecimal()]
        if max(depths, default=1) == 1:
            break
        paths = {
            name: path[:-1] if len(path) == max(depths) and not path[-1].isdecimal() else path
            for name, path in paths.items()
        }
    modules = _join_neighbours({name: ".".join(path) for name, path in paths.items()}, max_modules)
    short_names = {module: module.removeprefix("model.") for module in modules.values()}
    is_distinct = len(set(short_names.values())) == len(short_names)
    return {name: short_names[module] if is_distinct else module for name, module in modules.items()}


def _cut_after_number(path: list[str]) -> tuple[str, ...]:
    number = next((i for i, part in enumerate(path) if part.isdecimal()), len(path))
    return tuple(path[: number + 1])


def _join_neighbours(modules: Mapping[str, str], max_modules: int) -> dict[str, str]:
    """Join as many consecutive numbers of each list of blocks as it takes to have at most about `max_modules`."""
    blocks: dict[str, list[int]] = {}
    for module in dict.fromkeys(modules.values()):
        parent, _, last = module.rpartition(".")
        if last.isdecimal():
            blocks.setdefault(parent, []).append(int(last))
    num_blocks = sum(map(len, blocks.values()))
    num_others = len(set(modules.values())) - num_blocks
    size = math.ceil(num_blocks / max(1, max_modules - num_others))
    if size <= 1:
        return dict(modules)
    joined: dict[str, str] = {}
    for parent, numbers in blocks.items():
        for start in range(0, len(numbers), size):
            part = sorted(numbers)[start : start + size]
            for number in part:
                prefix = f"{parent}." if parent else ""
                joined[f"{prefix}{number}"] = f"{prefix}{part[0]}-{part[-1]}" if len(part) > 1 else f"{prefix}{number}"
    return {name: joined.get(module, module) for name, module in modules.items()}
