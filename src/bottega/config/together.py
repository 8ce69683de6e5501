"""What a recipe asks for that techniques cannot stand beside, as far as it alone tells: neither data nor torch is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.flat import PATHLESS
from bottega.core.errors import UsageError

if TYPE_CHECKING:
    from bottega.config.recipe import Recipe
    from bottega.config.techniques import AdapterOptions, LoraOptions

Clash = tuple[str, str, str]
"""(key, other key, message). The methods say the same in the same words, to whoever comes to them without a file."""

KEY = "techniques"
IN_TURN = ("ewc", "replay")
"""Techniques about sources that come one after the other."""
INJECTED = ("lora", "adapter")
"""Techniques whose runs hold what they have put into a base, and the base is where it was."""
PLASTICITY = "plasticity"
CODERS = ("image_vae", "image_tokens")
MADE_UP = "recall"
"""The task whose data has neither labels nor sources."""


def clashes(recipe: Recipe) -> list[Clash]:
    names: list[str] = [technique.name for technique in recipe.techniques]
    if not names:
        return []
    alone = [name for name in names if name != PLASTICITY]
    if recipe.task == "multitask" and alone:
        return [(KEY, KEY, f"{alone[0]} does not go with several tasks; leave it out")]
    apart = [name for name in names if name in (*IN_TURN, "maml")]
    if recipe.task == MADE_UP and apart:
        why = "whose facts are made up as they are needed, without sources or labels"
        return [(KEY, "task", f"{apart[0]} does not go with {MADE_UP}, {why}; leave it out")]
    return [*_among(names), *_beside(recipe, names), *(_with_maml(recipe, names) if "maml" in names else ())]


def injection(recipe: Recipe) -> LoraOptions | AdapterOptions | None:
    """The options of what is put into the model, where something is."""
    found: list[Any] = [one for one in recipe.techniques if one.name in INJECTED]
    if len(found) > 1:
        raise UsageError("techniques: lora and adapter change the same layers; keep one")
    return found[0].options if found else None


def _among(names: list[str]) -> Iterator[Clash]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield KEY, KEY, f"{name} is listed {names.count(name)} times; keep one"
    if set(INJECTED) <= set(names):
        yield KEY, KEY, "lora and adapter change the same layers; keep one"
    if {"distill", "maml"} <= set(names):
        yield KEY, KEY, "distill and maml do not go together, since the teacher knows no episode; keep one"
    if PLASTICITY in names:
        yield from _beside_plasticity(names)


def _beside_plasticity(names: list[str]) -> Iterator[Clash]:
    injected = next((name for name in names if name in INJECTED), None)
    if injected is not None:
        yield KEY, KEY, f"{injected} keeps the weights as they are that plasticity changes; keep one"
    if "maml" in names:
        yield KEY, KEY, "maml has several sets of weights in a step, and plasticity changes one; keep one"
    if "distill" in names and names.index("distill") > names.index(PLASTICITY):
        yield KEY, KEY, "plasticity listens to what the student does for its teacher too; list it after distill"


def _beside(recipe: Recipe, names: list[str]) -> Iterator[Clash]:
    for name in names:
        if name in INJECTED and recipe.task in CODERS:
            yield KEY, "task", f"{name} is not for {recipe.task}; train it in full"
        if name in INJECTED:
            yield from _beside_routers(recipe, name)
        is_in_turn = recipe.data.mixture == "sequence" or recipe.data.online is not None
        if name in IN_TURN and "maml" not in names and not is_in_turn and _has_data(recipe):
            yield (
                KEY,
                "data.mixture",
                f"{name} is about sources that come one after the other; say data.mixture: sequence, with two "
                "data.sources or more",
            )
    if recipe.data.online is not None:
        yield from _beside_stream(names)
    if recipe.training.compile is True and any(getattr(one.options, "hidden", 0) for one in recipe.techniques):
        yield (
            "training.compile",
            KEY,
            "true, and techniques.distill.hidden listens inside the model, which is then not compiled; leave one of "
            "them out",
        )
    if recipe.training.compile is True and PLASTICITY in names:
        text = "true, and plasticity listens inside the model, which is then not compiled; leave one of them out"
        yield "training.compile", KEY, text
    if recipe.task == "multitask" and any(
        getattr(one.options, "reward", "none") != "none" for one in recipe.techniques
    ):
        yield KEY, "task", "plasticity.reward is of one task, and here are several; set it to none"


def _beside_routers(recipe: Recipe, name: str) -> Iterator[Clash]:
    left, balance = (getattr(recipe.model, key, None) for key in ("expert_dropout", "balance"))
    if left:
        yield (
            "model.expert_dropout",
            KEY,
            f"{left}, and {name} leaves routers as they are, with all experts; leave it out",
        )
    if balance == "bias":
        yield (
            "model.balance",
            KEY,
            f"bias, and {name} leaves routers as they are, with the bias they have; leave it out",
        )


def _beside_stream(names: list[str]) -> Iterator[Clash]:
    """A stream has no borders between tasks, at which weights could be held, and what it repeats it says itself."""
    said = {
        "ewc": "ewc holds weights at the end of each source, and a stream (data.online) has no end of one; leave one out",
        "replay": "replay is of a sequence of sources; in a stream (data.online) say data.online.replay: 0.2",
        "maml": "maml draws episodes, and a stream (data.online) takes samples as they come; leave one out",
    }
    yield from ((KEY, "data.online", said[name]) for name in names if name in said)


def _has_data(recipe: Recipe) -> bool:
    """A part of a recipe may leave its data, and their order, to another file."""
    data = recipe.data
    return data.sources is not None or data.train.path is not None or data.train.kind in PATHLESS


def _with_maml(recipe: Recipe, names: list[str]) -> Iterator[Clash]:
    other = next((name for name in names if name in IN_TURN), None)
    if other is not None:
        yield KEY, KEY, f"{other} goes through its sources in order, and maml draws episodes; keep one"
    elif names[-1] != "maml":
        yield KEY, KEY, f"maml adapts what the others have made; list it after {names[-1]}"
    if recipe.data.curriculum is not None:
        yield "data.curriculum", KEY, "maml draws its tasks evenly, in an order of its own; leave it out"
    if recipe.training.gradient_checkpointing:
        key = "training.gradient_checkpointing"
        yield key, KEY, "maml would compute blocks again with other weights; leave it out"
    if recipe.training.mixed_precision == "fp16":
        yield "training.mixed_precision", KEY, "the inner steps of maml have no loss scale; use bf16 or fp32"


def absent(recipe: Recipe) -> list[str]:
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
