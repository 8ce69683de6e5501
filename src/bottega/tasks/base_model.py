"""What a model starts from: the folder of its weights, and the tokenizer that lies beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bottega.config.conflicts import find_injecting_technique, find_injection
from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, CheckpointError, UsageError
from bottega.core.rundir import RunDirectory
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.models.folders.resolve import ADAPTER, CONFIG, find_own_adapter, not_exported_error, resolve_model
from bottega.tasks import dependencies
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.recipes import load_recipe

BASE_FOLDER = "start"
"""In the environment.json of a run, the folder that it began from; a hub name leaves none."""


def resolve_base_folder(name: str, *, is_local: bool = False) -> Path:
    """The transformers folder to start from: a run's export, a folder, or a hub name unless it is known to be none."""
    base = resolve_model(name, key="model.from", local_only=is_local, required_file=None)
    if (base.path / CONFIG).is_file():
        return base.path
    if base.origin == "run":
        if _is_narrow(base.path.parent):  # and so another export would hold no more
            raise _no_whole(name, base.path / ADAPTER)
        raise not_exported_error(name, key="model.from")
    adapter = find_own_adapter(base.path)
    if adapter is not None:
        raise _no_whole(name, adapter)
    return base.path


def _no_whole(name: str, adapter: Path) -> UsageError:
    return UsageError(
        f"model.from: {name} holds an adapter alone, which is no whole model; name its base there, and {adapter} as "
        "techniques.adapter.start"
    )


def _is_narrow(run: Path) -> bool:
    """Whether it put narrow layers into its base, of which nothing else is ever exported."""
    try:
        techniques = load_recipe([run / "recipe.yaml"]).recipe.techniques
        return find_injecting_technique([one.name for one in techniques]) == "adapter"
    except BottegaError:
        return False


def find_base_folder(recipe: Recipe, *, processor: Path | None = None) -> Path | None:
    """Where the weights lie that the model is built on, or None.

    `codec` is that of a finished run. It has its own weights, and where it started from may be gone; unless it only holds
    what was put into those, which may have moved beside it.
    """
    name: str | None = recipe.model.from_  # type: ignore[attr-defined]
    if name is None or (processor is not None and find_injection(recipe) is None):
        return None
    if processor is None:
        return resolve_base_folder(dependencies.resolve_reference(recipe, name), is_local=_is_of_runs(recipe, name))
    return _found_again(recipe, name, processor)[1]


def relocate_base_model(recipe: Recipe, processor: Path) -> Recipe:
    """The recipe of a run that goes on, with the place where its base lies by now."""
    name: str | None = getattr(recipe.model, "from_", None)
    if name is None:
        return recipe
    place, _ = _found_again(recipe, name, processor)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"from_": place})})


def local_base_folder(recipe: Recipe) -> str | None:
    """The folder here that the model begins from, for those who look for it from elsewhere; None for a hub name."""
    name: str | None = getattr(recipe.model, "from_", None)
    folder = Path(name).expanduser() if name is not None else None
    return str(folder.absolute()) if folder is not None and folder.is_dir() else None


def _found_again(recipe: Recipe, name: str, processor: Path) -> tuple[str, Path]:
    """What a run began from: where it was, under the same name beside the run, or by the path of that time."""
    runs = processor.absolute().parent.parent
    known = _recorded(processor)
    is_local = known is not None or _is_of_runs(recipe, name)
    places = [
        dependencies.resolve_reference(recipe, name),
        dependencies.resolve_reference(recipe, name, beside=runs),
        str(runs / Path(name).name),
    ]
    problems: list[str] = []
    for place in [*places, *([known] if known is not None else [])]:
        try:
            # Only the name itself can be one of the hub.
            return place, resolve_base_folder(place, is_local=is_local or place != name)
        except BottegaError as error:
            if Path(place).is_dir() or (place == name and not is_local):
                problems.append(str(error).removeprefix("model.from: "))
    why = "; ".join(dict.fromkeys(problems))
    raise CheckpointError(f"the base of this run is gone: model.from {name}; put it back{f' ({why})' if why else ''}")


def _is_of_runs(recipe: Recipe, name: str) -> bool:
    """Whether a name reads as one of this recipe's runs, such as runs/base, and so not as a hub's owner and model."""
    return name.startswith(dependencies.PREFIX) or ("/" in name and Path(name).parent == Path(recipe.output_dir))


def _recorded(processor: Path) -> str | None:
    try:
        found: Any = json.loads(RunDirectory(processor.parent).environment.read_bytes())[BASE_FOLDER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def resolve_tokenizer_spec(recipe: LanguageRecipe | ClassifyRecipe, *, processor: Path | None = None) -> TokenizerSpec:
    """`codec` is that of a finished run, which has kept the tokenizer of what it began from."""
    chosen = recipe.data.tokenizer
    if processor is not None and (recipe.model.from_ is not None or chosen.kind == "pretrained"):
        return TokenizerSpec(kind="pretrained", path=str(processor))
    if recipe.model.from_ is not None and chosen.kind != "pretrained":
        # Pretrained weights know one vocabulary only; a parent recipe may name another.
        return TokenizerSpec(kind="pretrained", path=str(find_base_folder(recipe)))
    given = {key: getattr(chosen, key, None) for key in ("vocab_size", "min_frequency")}
    if chosen.kind == "words" and chosen.vocab_size is None:
        # Words beyond the rows of the embedding would have none.
        given["vocab_size"] = recipe.model.vocab_size
    return TokenizerSpec(kind=chosen.kind, path=chosen.path, **{k: v for k, v in given.items() if v is not None})
