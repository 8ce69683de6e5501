"""Combinations of techniques and recipe keys that exclude each other, found from the recipe alone, without data or torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.layers import BUILTIN_KINDS
from bottega.config.technique_spec import ANY_VALUE, TECHNIQUES, TECHNIQUES_KEY, Conflict, KeyConflict
from bottega.core.errors import UsageError

if TYPE_CHECKING:
    from bottega.config.recipe import Recipe
    from bottega.config.techniques import Technique

AUTOENCODER_TASKS = ("image_vae", "image_tokens")
"""Tasks whose whole exported model is a dependency of other runs."""
GENERATED_DATA_TASK = "recall"
"""The task whose data is generated on the fly, without labels or sources."""

INJECTION_CONFLICTS = (
    *(
        KeyConflict("task", "{technique} does not support {value}; train it in full", task)
        for task in AUTOENCODER_TASKS
    ),
    KeyConflict("model.expert_dropout", "{technique} keeps the routers frozen with all experts; remove it"),
    KeyConflict(
        "model.balance", "{technique} keeps the routers frozen, with their current bias; remove {value}", "bias"
    ),
)
"""Conflicts of every technique that injects modules into a frozen model."""


def find_technique_conflicts(recipe: Recipe) -> list[Conflict]:
    """Return the conflicts that the specs of the recipe's techniques declare, with each other and with other keys."""
    names: list[str] = [technique.name for technique in recipe.techniques]
    if not names:
        return []
    unsupported = next((name for name in names if not TECHNIQUES[name].supports_multitask), None)
    if recipe.task == "multitask" and unsupported is not None:
        return [(TECHNIQUES_KEY, TECHNIQUES_KEY, f"{unsupported} does not support several tasks; remove it")]
    unsupported = next((name for name in names if TECHNIQUES[name].needs_sources), None)
    if recipe.task == GENERATED_DATA_TASK and unsupported is not None:
        reason = "whose data is generated on the fly, without sources or labels"
        return [(TECHNIQUES_KEY, "task", f"{unsupported} does not support {GENERATED_DATA_TASK}, {reason}; remove it")]
    conflicts = [
        (TECHNIQUES_KEY, TECHNIQUES_KEY, f"{name} is listed {names.count(name)} times; keep one")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    techniques = {technique.name: technique for technique in recipe.techniques}
    for technique in techniques.values():
        conflicts += _find_pair_conflicts(technique.name, names)
        conflicts += _find_key_conflicts(technique, recipe)
        conflicts += _find_missing_sequence(technique.name, names, recipe)
    return conflicts


def _find_pair_conflicts(name: str, names: list[str]) -> Iterator[Conflict]:
    spec = TECHNIQUES[name]
    for other in dict.fromkeys(names):
        if other in spec.conflicts:
            yield TECHNIQUES_KEY, TECHNIQUES_KEY, spec.conflicts[other]
        elif other in spec.must_follow and names.index(other) > names.index(name):
            yield TECHNIQUES_KEY, TECHNIQUES_KEY, spec.must_follow[other]


def _find_key_conflicts(technique: Technique, recipe: Recipe) -> Iterator[Conflict]:
    spec = TECHNIQUES[technique.name]
    for conflict in spec.key_conflicts:
        value = _get_value(recipe, conflict.key)
        is_unsupported = _is_set(value) if conflict.value is ANY_VALUE else _equals(value, conflict.value)
        if not is_unsupported or not _has_option(technique, conflict.option):
            continue
        message = conflict.message.format(technique=technique.name, value=value)
        # The message is reported at the technique, because the task is rarely the setting to change.
        is_task = conflict.key == "task"
        yield (TECHNIQUES_KEY, conflict.key, message) if is_task else (conflict.key, TECHNIQUES_KEY, message)


def _find_missing_sequence(name: str, names: list[str], recipe: Recipe) -> Iterator[Conflict]:
    """Yield a conflict if a technique needs a sequence of sources and the recipe sets other data.

    A partial recipe without data has no conflict, because another file may set it.
    """
    data = recipe.data
    has_data = data.sources is not None or data.train.path is not None or data.train.kind in BUILTIN_KINDS
    is_sequence = data.mixture == "sequence" or data.online is not None
    if TECHNIQUES[name].is_sequential and "maml" not in names and has_data and not is_sequence:
        yield (
            TECHNIQUES_KEY,
            "data.mixture",
            f"{name} needs sources that are trained on one after the other; set data.mixture: sequence, with two or more "
            "data.sources",
        )


def _get_value(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key, or None if the task does not have it."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != 0


def _equals(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _has_option(technique: Technique, option: str | None) -> bool:
    if option is None:
        return True
    options = technique.options
    return getattr(options, option) != type(options).model_fields[option].default  # type: ignore[union-attr]


def find_injection(recipe: Recipe) -> Technique | None:
    """Return the technique that injects modules into the model (LoRA, adapters), if the recipe lists one."""
    techniques = [technique for technique in recipe.techniques if TECHNIQUES[technique.name].inject is not None]
    if len(techniques) > 1:
        names = " and ".join(technique.name for technique in techniques)
        raise UsageError(f"techniques: {names} change the same layers; keep one")
    return techniques[0] if techniques else None


def find_injecting_technique(names: list[str]) -> str | None:
    """Return the first of `names` that injects modules into the model, if any."""
    return next((name for name in names if TECHNIQUES[name].inject is not None), None)


def list_missing_teachers(recipe: Recipe) -> list[str]:
    """Return a message for each teacher folder that does not exist.

    Separate from the conflicts, because a finished run is opened without its teacher. The run's own folder is left out: a run
    that names itself is refused with its own message.
    """
    own_folder = Path(recipe.output_dir) / recipe.run_name()
    teachers = [
        str(technique.options.teacher) for technique in recipe.techniques if hasattr(technique.options, "teacher")
    ]
    return [
        f"techniques.distill.teacher: {name} does not exist; give a run, needs.NAME or the folder of a model"
        for name in teachers
        if not name.startswith("needs.")
        and not Path(name).expanduser().is_dir()
        and Path(name).expanduser().resolve() != own_folder.resolve()
    ]
