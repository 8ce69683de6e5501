"""What a recipe asks for that techniques cannot stand beside, as far as it alone tells: neither data nor torch is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.config.layers import BUILTIN_KINDS
from bottega.config.technique_spec import TECHNIQUES, TECHNIQUES_KEY, Conflict
from bottega.core.errors import UsageError

if TYPE_CHECKING:
    from bottega.config.recipe import Recipe
    from bottega.config.techniques import Technique

AUTOENCODER_TASKS = ("image_vae", "image_tokens")
"""Tasks whose model others are built on by its whole export."""
GENERATED_DATA_TASK = "recall"
"""The task whose data has neither labels nor sources."""


def find_technique_conflicts(recipe: Recipe) -> list[Conflict]:
    """What the techniques of a recipe do not go with, in the words of their own."""
    names: list[str] = [technique.name for technique in recipe.techniques]
    if not names:
        return []
    alone = [name for name in names if not TECHNIQUES[name].supports_multitask]
    if recipe.task == "multitask" and alone:
        return [(TECHNIQUES_KEY, TECHNIQUES_KEY, f"{alone[0]} does not go with several tasks; leave it out")]
    apart = [name for name in names if TECHNIQUES[name].needs_sources]
    if recipe.task == GENERATED_DATA_TASK and apart:
        why = "whose facts are made up as they are needed, without sources or labels"
        return [(TECHNIQUES_KEY, "task", f"{apart[0]} does not go with {GENERATED_DATA_TASK}, {why}; leave it out")]
    known = list(dict.fromkeys(names))
    twice = [
        (TECHNIQUES_KEY, TECHNIQUES_KEY, f"{name} is listed {names.count(name)} times; keep one")
        for name in known
        if names.count(name) > 1
    ]
    return [*twice, *(clash for name in known for clash in TECHNIQUES[name].find_conflicts(recipe, names))]


def find_injection(recipe: Recipe) -> Technique | None:
    """The technique that puts parts into the model (LoRA, adapters), where there is one."""
    injecting = [one for one in recipe.techniques if TECHNIQUES[one.name].inject is not None]
    if len(injecting) > 1:
        names = " and ".join(one.name for one in injecting)
        raise UsageError(f"techniques: {names} change the same layers; keep one")
    return injecting[0] if injecting else None


def find_injecting_technique(names: list[str]) -> str | None:
    """The technique that puts parts into a model, among others."""
    return next((name for name in names if TECHNIQUES[name].inject is not None), None)


def find_sequential_technique(names: list[str]) -> str | None:
    """The technique about sources that come one after the other, among others."""
    return next((name for name in names if TECHNIQUES[name].is_sequential), None)


def find_injection_conflicts(recipe: Recipe, name: str) -> Iterator[Conflict]:
    """What a technique does not go with that puts parts into a model."""
    if recipe.task in AUTOENCODER_TASKS:
        yield TECHNIQUES_KEY, "task", f"{name} is not for {recipe.task}; train it in full"
    yield from _beside_routers(recipe, name)


def find_sequence_conflicts(recipe: Recipe, names: list[str], name: str, *, in_stream: str) -> Iterator[Conflict]:
    """What a technique does not go with that is about sources in turn; `in_stream` is why it does not suit a stream."""
    is_in_turn = recipe.data.mixture == "sequence" or recipe.data.online is not None
    if "maml" not in names and not is_in_turn and _has_data(recipe):
        yield (
            TECHNIQUES_KEY,
            "data.mixture",
            f"{name} is about sources that come one after the other; say data.mixture: sequence, with two "
            "data.sources or more",
        )
    if recipe.data.online is not None:
        yield TECHNIQUES_KEY, "data.online", in_stream


def _beside_routers(recipe: Recipe, name: str) -> Iterator[Conflict]:
    left, balance = (getattr(recipe.model, key, None) for key in ("expert_dropout", "balance"))
    if left:
        yield (
            "model.expert_dropout",
            TECHNIQUES_KEY,
            f"{left}, and {name} leaves routers as they are, with all experts; leave it out",
        )
    if balance == "bias":
        yield (
            "model.balance",
            TECHNIQUES_KEY,
            f"bias, and {name} leaves routers as they are, with the bias they have; leave it out",
        )


def _has_data(recipe: Recipe) -> bool:
    """A part of a recipe may leave its data, and their order, to another file."""
    data = recipe.data
    return data.sources is not None or data.train.path is not None or data.train.kind in BUILTIN_KINDS


def list_missing_teachers(recipe: Recipe) -> list[str]:
    """Folders that techniques name and that are not there. Not among the clashes: a finished run is opened without them, and
    the run itself, which cannot teach itself, is refused as such."""
    own = Path(recipe.output_dir) / recipe.run_name()
    teachers = [str(one.options.teacher) for one in recipe.techniques if hasattr(one.options, "teacher")]
    return [
        f"techniques.distill.teacher: there is no run and no folder at {name}"
        for name in teachers
        if not name.startswith("needs.")
        and not Path(name).expanduser().is_dir()
        and Path(name).expanduser().resolve() != own.resolve()
    ]
