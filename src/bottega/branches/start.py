"""What a model starts from: the folder of its weights, the tokenizer that lies beside them, and what is put into a model
that stays as it is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.core.errors import BottegaError, CheckpointError, UsageError
from bottega.core.task import Task
from bottega.data.vocabulary import TokenizerSpec
from bottega.schema import needs
from bottega.schema.classify import ClassifyRecipe
from bottega.schema.language import LanguageRecipe
from bottega.schema.recipe import Recipe
from bottega.schema.techniques import AdapterOptions, LoraOptions

if TYPE_CHECKING:
    from bottega.techniques.inject import Injected

INJECTED = ("lora", "adapter")
"""Techniques whose runs hold what they have put into a base, and the base is where it was."""


def start_folder(name: str) -> Path:
    """The transformers folder to start from: a run's export, a folder, or a hub name."""
    run = Path(name)
    if not (run / "recipe.yaml").is_file():
        # Loads torch, which preparing text from scratch does without.
        from bottega.models.pretrained import fetch_folder

        return fetch_folder(name)
    if not (run / "final" / "config.json").is_file():
        raise UsageError(f"model.from: {name} is a run that was not exported; say bottega export {name} first")
    return run / "final"


def folder_of(recipe: Recipe, *, codec: Path | None = None) -> Path | None:
    """Where the weights lie that the model is built on, or None.

    `codec` is that of a finished run. It has its own weights, and where it started from may be gone; unless it only holds
    what was put into those, which may have moved beside it.
    """
    name: str | None = recipe.model.from_  # type: ignore[attr-defined]
    if name is None or (codec is not None and injection(recipe) is None):
        return None
    if codec is None:
        return start_folder(needs.place(recipe, name))
    runs = codec.absolute().parent.parent
    places = [needs.place(recipe, name), needs.place(recipe, name, beside=runs), str(runs / Path(name).name)]
    problems: list[str] = []
    for place in places:
        try:
            return start_folder(place)
        except BottegaError as error:
            problems.append(str(error))
    raise CheckpointError(f"the base of this run is gone: model.from {name}; put it back ({problems[0]})")


def tokenizer_of(recipe: LanguageRecipe | ClassifyRecipe) -> TokenizerSpec:
    chosen = recipe.data.tokenizer
    if recipe.model.from_ is not None and chosen.kind != "pretrained":
        # Pretrained weights know one vocabulary only; a parent recipe may name another.
        return TokenizerSpec(kind="pretrained", path=str(folder_of(recipe)))
    given = {key: getattr(chosen, key, None) for key in ("vocab_size", "min_frequency")}
    if chosen.kind == "words" and chosen.vocab_size is None:
        # Words beyond the rows of the embedding would have none.
        given["vocab_size"] = recipe.model.vocab_size
    return TokenizerSpec(kind=chosen.kind, path=chosen.path, **{k: v for k, v in given.items() if v is not None})


def injection(recipe: Recipe) -> LoraOptions | AdapterOptions | None:
    """The options of what is put into the model, where something is."""
    found: list[Any] = [one for one in recipe.techniques if one.name in INJECTED]
    if len(found) > 1:
        raise UsageError("techniques: lora and adapter change the same layers; keep one")
    return found[0].options if found else None


def injected(task: Task, options: LoraOptions | AdapterOptions, *, of: Task, again: bool = False) -> Injected:
    """The task with parts put into its model. `of` is the branch's own; `again` is for a finished run, which has them."""
    from bottega.techniques.adapter import Adapter
    from bottega.techniques.lora import Lora

    full: dict[str, Any] = {"train": options.train} if options.train is not None else {"fresh": fresh_parts(of)}
    if isinstance(options, AdapterOptions):
        return Adapter(inner=task, size=options.size, targets=options.targets, **full)
    return Lora(
        inner=task,
        rank=options.rank,
        alpha=options.alpha if options.alpha is not None else 2.0 * options.rank,
        dropout=options.dropout,
        targets=options.targets,
        start=options.start if not again else None,
        **full,
    )


def fresh_parts(task: Task) -> tuple[str, ...]:
    """What learns in full beside, because it begins at random, or at 0 and would pass no gradient on."""
    from bottega.models.generator import read_generator
    from bottega.schema.generator import UNetShape
    from bottega.tasks.classify import Classification
    from bottega.tasks.generation import Generation

    if isinstance(task, Classification):
        # An encoder that was trained to fill in words has nothing before the head either.
        return ("head", "pooling", *(("backbone.pooler",) if _lacks_pooler(task.pretrained) else ()))
    if not isinstance(task, Generation):
        return ()
    if task.pretrained is None:
        is_unet = isinstance(task.shape.backbone, UNetShape)
        last = ("backbone.unet.conv_out",) if is_unet else ("backbone.out", "backbone.modulation_out")
        return (*last, "condition")
    has_condition = any(name.startswith("condition.") for name in read_generator(Path(task.pretrained)))
    return () if has_condition else ("condition",)


def _lacks_pooler(folder: str | None) -> bool:
    if folder is None:
        return False
    from safetensors import safe_open

    from bottega.models.pretrained import fetch_folder

    for file in fetch_folder(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if any("pooler." in name for name in tensors.keys()):  # noqa: SIM118 (it has no other way)
                return False
    return True
