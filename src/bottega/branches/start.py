"""What a text model starts from: the folder of its weights, and the tokenizer that lies beside them."""

from __future__ import annotations

from pathlib import Path

from bottega.core.errors import UsageError
from bottega.data.vocabulary import TokenizerSpec
from bottega.schema.classify import ClassifyRecipe
from bottega.schema.language import LanguageRecipe


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


def tokenizer_of(recipe: LanguageRecipe | ClassifyRecipe) -> TokenizerSpec:
    chosen = recipe.data.tokenizer
    if recipe.model.from_ is not None and chosen.kind != "pretrained":
        # Pretrained weights know one vocabulary only; a parent recipe may name another.
        return TokenizerSpec(kind="pretrained", path=str(start_folder(recipe.model.from_)))
    given = {key: getattr(chosen, key, None) for key in ("vocab_size", "min_frequency")}
    if chosen.kind == "words" and chosen.vocab_size is None:
        # Words beyond the rows of the embedding would have none.
        given["vocab_size"] = recipe.model.vocab_size
    return TokenizerSpec(kind=chosen.kind, path=chosen.path, **{k: v for k, v in given.items() if v is not None})
