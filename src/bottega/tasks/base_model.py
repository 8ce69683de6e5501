"""The base model that training starts from: the folder of its weights and its tokenizer."""

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
"""Key in environment.json of a run: the local folder that training started from; absent for a hub name."""


def resolve_base_folder(name: str, *, is_local: bool = False) -> Path:
    """Return the transformers folder of a run's export, a local folder or, unless `is_local`, a hub name."""
    base = resolve_model(name, key="model.from", local_only=is_local, required_file=None)
    if (base.path / CONFIG).is_file():
        return base.path
    if base.origin == "run":
        if _exports_adapter_only(base.path.parent):  # exporting again would not add the other weights
            raise _adapter_only_error(name, base.path / ADAPTER)
        raise not_exported_error(name, key="model.from")
    adapter = find_own_adapter(base.path)
    if adapter is not None:
        raise _adapter_only_error(name, adapter)
    return base.path


def _adapter_only_error(name: str, adapter: Path) -> UsageError:
    return UsageError(
        f"model.from: {name} contains only an adapter, not a complete model; set model.from to its base model and "
        f"techniques.adapter.start to {adapter}"
    )


def _exports_adapter_only(run: Path) -> bool:
    """Return whether a run trained adapter layers in its base model, so that its export holds nothing else."""
    try:
        techniques = load_recipe([run / "recipe.yaml"]).recipe.techniques
        return find_injecting_technique([technique.name for technique in techniques]) == "adapter"
    except BottegaError:
        return False


def find_base_folder(recipe: Recipe, *, processor_folder: Path | None = None) -> Path | None:
    """Return the folder of the weights that the model is built on, or None if it needs none.

    `processor_folder` holds the saved processor of a finished run. Such a run has all its weights and needs
    no base, unless it saved injected layers only; its base may then have moved beside the run.
    """
    name: str | None = recipe.model.from_  # type: ignore[attr-defined]
    if name is None or (processor_folder is not None and find_injection(recipe) is None):
        return None
    if processor_folder is None:
        return resolve_base_folder(dependencies.resolve_reference(recipe, name), is_local=_refers_to_run(recipe, name))
    return _locate_base_model(recipe, name, processor_folder)[1]


def relocate_base_model(recipe: Recipe, processor_folder: Path) -> Recipe:
    """Return the recipe of a resumed run with the current path of its base model."""
    name: str | None = getattr(recipe.model, "from_", None)
    if name is None:
        return recipe
    path, _ = _locate_base_model(recipe, name, processor_folder)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"from_": path})})


def find_local_base_folder(recipe: Recipe) -> str | None:
    """Return the absolute local folder that the model starts from; None for a hub name."""
    name: str | None = getattr(recipe.model, "from_", None)
    folder = Path(name).expanduser() if name is not None else None
    return str(folder.absolute()) if folder is not None and folder.is_dir() else None


def _locate_base_model(recipe: Recipe, name: str, processor_folder: Path) -> tuple[str, Path]:
    """Return (reference, folder) of a run's base model: at its path, beside the run, or at its recorded path."""
    runs_folder = processor_folder.absolute().parent.parent  # of RUNS/RUN/processor
    recorded = _read_recorded_folder(processor_folder)
    is_local = recorded is not None or _refers_to_run(recipe, name)
    candidates = [
        dependencies.resolve_reference(recipe, name),
        dependencies.resolve_reference(recipe, name, runs_folder=runs_folder),
        str(runs_folder / Path(name).name),
    ]
    problems: list[str] = []
    for candidate in [*candidates, *([recorded] if recorded is not None else [])]:
        try:
            # Only the name as the recipe gives it can be a hub name.
            return candidate, resolve_base_folder(candidate, is_local=is_local or candidate != name)
        except BottegaError as error:
            if Path(candidate).is_dir() or (candidate == name and not is_local):
                problems.append(str(error).removeprefix("model.from: "))
    why = "; ".join(dict.fromkeys(problems))
    raise CheckpointError(
        f"the base model of this run, model.from {name}, no longer exists; restore it{f' ({why})' if why else ''}"
    )


def _refers_to_run(recipe: Recipe, name: str) -> bool:
    """Return whether a name refers to one of this recipe's runs, such as runs/base, rather than to owner/model of a hub."""
    return name.startswith(dependencies.REFERENCE_PREFIX) or (
        "/" in name and Path(name).parent == Path(recipe.output_dir)
    )


def _read_recorded_folder(processor_folder: Path) -> str | None:
    try:
        folder: Any = json.loads(RunDirectory(processor_folder.parent).environment.read_bytes())[BASE_FOLDER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if isinstance(folder, str) else None


def resolve_tokenizer_spec(
    recipe: LanguageRecipe | ClassifyRecipe, *, processor_folder: Path | None = None
) -> TokenizerSpec:
    """Return the tokenizer of a text recipe: that of its base model if it has one.

    `processor_folder` holds the saved processor of a finished run, and in it a copy of a pretrained tokenizer.
    """
    tokenizer = recipe.data.tokenizer
    if processor_folder is not None and (recipe.model.from_ is not None or tokenizer.kind == "pretrained"):
        return TokenizerSpec(kind="pretrained", path=str(processor_folder))
    if recipe.model.from_ is not None and tokenizer.kind != "pretrained":
        # Pretrained weights fit one vocabulary only; a parent recipe may name another.
        return TokenizerSpec(kind="pretrained", path=str(find_base_folder(recipe)))
    options = {key: getattr(tokenizer, key, None) for key in ("vocab_size", "min_frequency")}
    if tokenizer.kind == "words" and getattr(recipe.model, "kind", None) == "ngrams":
        # A model of n-grams does not read the vocabulary, so that texts of words that occur once are no error.
        options["min_frequency"] = options["min_frequency"] or 1
    if tokenizer.kind == "words" and tokenizer.vocab_size is None:
        # Words beyond the rows of the embedding would have no vector.
        options["vocab_size"] = recipe.model.vocab_size
    return TokenizerSpec(
        kind=tokenizer.kind, path=tokenizer.path, **{k: v for k, v in options.items() if v is not None}
    )
