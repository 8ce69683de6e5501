"""The workload of several tasks: the workloads of its parts, each with its own data, processor and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, UsageError
from bottega.core.types import Models
from bottega.data.prepare.jobs import ProgressCallback
from bottega.models.build import build_models
from bottega.similar_names import find_similar_names
from bottega.tasks import registry
from bottega.tasks.metadata import MetadataUnreadable, read_metadata
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.multitask.data import MultitaskData
from bottega.tasks.multitask.part_recipes import (
    build_part_recipe,
    get_tokenizer_rank,
    read_saved_recipe,
    reads_text,
    use_tokenizer,
)
from bottega.tasks.multitask.processor import PARTS_FILE, SHARED_TOKENIZER_KEY, MultitaskProcessor
from bottega.tasks.multitask.sampler import MultitaskSampler, select_part
from bottega.tasks.multitask.task import Multitask, add_prefix, get_part_modules, strip_prefix
from bottega.tasks.prediction import NewSamples
from bottega.tasks.workload import Workload


def open_workload(recipe: Recipe, *, progress: ProgressCallback) -> MultitaskWorkload:
    """Open all parts for training; texts of all parts are read with the tokenizer of the first that has one."""
    assert isinstance(recipe, MultitaskRecipe)
    recipes: dict[str, Any] = {name: build_part_recipe(recipe, name) for name in recipe.data.parts}
    parts: dict[str, Workload] = {}
    tokenizer: str | None = None
    parts_with_shared_tokenizer: list[str] = []
    for name in sorted(recipes, key=lambda name: get_tokenizer_rank(recipes[name])):
        part_recipe = recipes[name]
        if reads_text(part_recipe) and tokenizer is not None and part_recipe.model.from_ is None:
            recipes[name] = use_tokenizer(part_recipe, tokenizer)
            parts_with_shared_tokenizer.append(name)
        parts[name] = _call_for_part(name, partial(registry.open_workload, recipes[name], progress=progress))
        if reads_text(part_recipe) and tokenizer is None:
            tokenizer = str(parts[name].data.prepared.folder / "tokenizer")  # type: ignore[attr-defined]
    ordered_parts = {name: parts[name] for name in recipes}
    workload = MultitaskWorkload(
        recipe, recipes, ordered_parts, parts_with_shared_tokenizer=parts_with_shared_tokenizer
    )
    workload.check_parts()
    return workload


def reopen_workload(recipe: Recipe, processor_folder: Path, fingerprint: str) -> MultitaskWorkload:
    """Open all parts of a finished run from the folder of its saved processor."""
    assert isinstance(recipe, MultitaskRecipe)
    metadata = read_metadata(processor_folder / PARTS_FILE, json.loads)
    recipes, parts = {}, {}
    for name in recipe.data.parts:
        part_recipe = read_saved_recipe(processor_folder, name)
        if part_recipe is None:
            raise MetadataUnreadable(
                f"cannot read {processor_folder / name}.yaml; run the training command again to rewrite it"
            )
        if name in metadata[SHARED_TOKENIZER_KEY]:
            # The cache that the tokenizer came from may be gone.
            part_recipe = use_tokenizer(part_recipe, str(processor_folder / name))
        recipes[name] = part_recipe
        parts[name] = registry.reopen_workload(part_recipe, processor_folder / name, str(metadata["data"][name]))
    return MultitaskWorkload(recipe, recipes, parts, parts_with_shared_tokenizer=metadata[SHARED_TOKENIZER_KEY])


def _call_for_part(name: str, function: Callable[[], Any]) -> Any:
    """Call `function`; an error message names the part."""
    try:
        return function()
    except BottegaError as error:
        raise type(error)(f"data.parts.{name}: {error}") from error


@final
class MultitaskWorkload(Workload):
    """Several workloads whose models share a trunk, trained together."""

    def __init__(
        self,
        recipe: MultitaskRecipe,
        recipes: Mapping[str, Recipe],
        parts: Mapping[str, Workload],
        *,
        parts_with_shared_tokenizer: Sequence[str],
    ) -> None:
        """Join the parts, whose complete recipes are `recipes`.

        `parts_with_shared_tokenizer` names those that use the tokenizer of another part.
        """
        self.recipe, self.recipes, self.parts = recipe, dict(recipes), dict(parts)
        self.weights = {name: part.weight for name, part in recipe.data.parts.items()}
        self.task = Multitask(
            parts={name: part.task for name, part in parts.items()}, weights=self.weights, balance=recipe.data.weights
        )
        self.unit = next(iter(parts.values())).unit
        self.data = MultitaskData(recipe, self.parts, lambda: self.sharing_summary)
        self.processor = MultitaskProcessor(self.recipes, self.parts, self.data, parts_with_shared_tokenizer)
        self.sampler = MultitaskSampler(recipe, self.parts)

    def check_parts(self) -> None:
        """Raise UsageError for parts that do not fit together, before anything is trained."""
        tokenizers = {
            name: part.tokenizer.fingerprint for name, part in self.parts.items() if hasattr(part, "tokenizer")
        }
        if len(set(tokenizers.values())) > 1:
            raise UsageError(
                f"data.parts: {', '.join(tokenizers)} read text with different tokenizers, so a token of one means nothing "
                "to the others; start them from the same weights, or remove model.from"
            )
        for name, part in self.recipe.data.parts.items():
            metrics = self.parts[name].metrics
            if part.metric not in metrics:
                similar = find_similar_names(part.metric, metrics)
                hint = f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(metrics)}"
                raise UsageError(f"data.parts.{name}.metric: {part.metric} is not measured; {hint}")
        assert self.sharing_summary is not None, "a part that shares nothing raises an error"

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        evaluated = [name for name, part in self.parts.items() if part.data.validation() is not None]
        return ("loss", *(f"{name}/{metric}" for name in evaluated for metric in self.parts[name].metrics))

    @property
    def headline(self) -> tuple[str, ...]:
        """The total loss, then the main metric and the own headline of each part."""
        part_metrics = [
            f"{name}/{metric}"
            for name, part in self.parts.items()
            for metric in dict.fromkeys((self.recipe.data.parts[name].metric, *(part.headline or ())))
        ]
        return ("loss", *part_metrics)

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return {
            f"{name}: {model}": value
            for name, part in self.parts.items()
            for model, value in part.frozen_hashes.items()
        }

    @cached_property
    def sharing_summary(self) -> str:
        """How many layers and parameters the parts share, as a line for the user."""
        model = build_models(self.task, self.recipe.seed)["model"]
        sizes = {name: sum(p.numel() for p in model.part(name).parameters()) for name in self.parts}
        num_shared = sum(p.numel() for p in model.shared.parameters())
        groups: dict[tuple[str, ...], int] = {}
        for names in model.plan.values():
            groups[tuple(names)] = groups.get(tuple(names), 0) + 1
        shared = "; ".join(f"{count} layers by {', '.join(parts)}" for parts, count in groups.items())
        part_sizes = ", ".join(f"{name} {number:,}" for name, number in sizes.items())
        return f"shared: {shared}: {num_shared:,} parameters (each part in total: {part_sizes})"

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the weighted sum of the parts' losses, the main metric of each part, and all metrics of the parts."""
        by_part = {
            name: part.summarise(part_metrics)
            for name, part in self.parts.items()
            if (part_metrics := strip_prefix(name, metrics))
        }
        total = sum(
            self.weights[name] * part_metrics["loss"]
            for name, part_metrics in by_part.items()
            if "loss" in part_metrics
        )
        main_metrics = {
            f"{name}/{metric}": part_metrics[metric]
            for name, part_metrics in by_part.items()
            if (metric := self.recipe.data.parts[name].metric) in part_metrics
        }
        all_metrics = {
            key: value
            for name, part_metrics in by_part.items()
            for key, value in add_prefix(name, part_metrics).items()
        }
        return {"loss": total, **main_metrics, **all_metrics}

    def predict_samples(
        self, models: Models, new_samples: NewSamples, *, part: str | None, device: Any
    ) -> list[dict[str, Any]]:
        inputs = {workload.predictor.input for workload in self.parts.values() if workload.predictor is not None}
        ordered_inputs = [kind for kind in ("texts", "rows", "files") if kind in inputs]
        accepted_inputs = ordered_inputs if part is not None else ordered_inputs[:1]

        def can_predict(workload: Workload) -> bool:
            return workload.predictor is not None and workload.predictor.input in accepted_inputs

        name = select_part(self.parts, part, is_able=can_predict, verb="predict")
        return self.parts[name].predict_samples(get_part_modules(models, name), new_samples, part=None, device=device)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write a folder for each part, each in the layout of its own task."""
        for name, part in self.parts.items():
            part.export(get_part_modules(models, name), folder / name)
        return {"library_name": "bottega", "pipeline_tag": "multitask"}
