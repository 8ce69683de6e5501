"""The processor of a multitask run: the processors of its parts, with their recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core.errors import DataError
from bottega.storage.durable import replacing_file
from bottega.tasks.multitask.data import MultitaskData
from bottega.tasks.multitask.part_recipes import read_saved_recipe
from bottega.tasks.processor import Processor
from bottega.tasks.workload import Workload

PARTS_FILE = "parts.json"
SHARED_TOKENIZER_KEY = "given_tokenizer"
"""Key in that file: the parts that use the tokenizer of another part."""


@final
class MultitaskProcessor(Processor):
    """The processors and recipes of all parts; `parts_with_shared_tokenizer` use another part's tokenizer."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        parts: Mapping[str, Workload],
        data: MultitaskData,
        parts_with_shared_tokenizer: Sequence[str],
    ) -> None:
        self.recipes, self.parts, self.data = recipes, parts, data
        self.parts_with_shared_tokenizer = list(parts_with_shared_tokenizer)

    def save(self, folder: Path) -> None:
        """Save each part's processor and recipe: the recipe file that it came from may change or disappear."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in self.parts.items():
            saved_recipe = read_saved_recipe(folder, name)
            differences = diff_recipes(saved_recipe, self.recipes[name]) if saved_recipe is not None else []
            changes = [difference for difference in differences if _affects_part(difference[0])]
            if changes:
                key, old_value, new_value = changes[0]
                raise DataError(
                    f"data.parts.{name}: {key} changed from {old_value} to {new_value} since this run began; undo the change, or start over with --fresh"
                )
            part.processor.save(folder / name)
            with replacing_file(folder / f"{name}.yaml") as file:
                file.write_text(to_yaml(self.recipes[name]), encoding="utf-8")
        with replacing_file(folder / PARTS_FILE) as file:
            metadata = {
                "data": self.data.part_fingerprints(),
                SHARED_TOKENIZER_KEY: self.parts_with_shared_tokenizer,
            }
            file.write_text(json.dumps(metadata, indent=1) + "\n")


def _affects_part(key: str) -> bool:
    """Whether a key of a part's recipe has an effect.

    Training and evaluation settings are those of the whole run, except label smoothing, which changes the loss of a part. The
    path of a tokenizer from another part lies in the cache and may change.
    """
    return not key.startswith(("training.", "evaluation.", "data.tokenizer.path")) or key == "training.label_smoothing"
