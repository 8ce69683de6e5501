"""`bottega predict` of rows of numbers: the label of each, and the expert that was asked, by a run of the task routing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bottega.branches.multitask import MultitaskBranch
from bottega.branches.routing import RoutingBranch
from bottega.core.errors import UsageError
from bottega.core.rundir import RunDirectory
from bottega.saved import open_run
from bottega.schema.classify import ClassifyRecipe
from bottega.schema.load import load_recipe, load_saved_recipe
from bottega.schema.multitask import MultitaskRecipe
from bottega.schema.recipe import Recipe
from bottega.schema.routing import RoutingRecipe
from bottega.tasks.multitask import whole


def reads_numbers(run: Path, part: str | None) -> bool:
    """Whether what is asked for is a row's label; of several tasks, where one is named or nothing else can be asked."""
    recipe = load_saved_recipe(RunDirectory(run).must_exist().recipe)
    if not isinstance(recipe, MultitaskRecipe):
        return isinstance(recipe, RoutingRecipe)
    parts = {name: part_recipe(run, name) for name in recipe.data.parts}
    if part is not None:
        return isinstance(parts.get(part), RoutingRecipe)
    kinds = [type(one) for one in parts.values()]
    return RoutingRecipe in kinds and ClassifyRecipe not in kinds


def part_recipe(run: Path, name: str) -> Recipe:
    return load_recipe([RunDirectory(run).codec / f"{name}.yaml"]).recipe


def predict_numbers(
    run: Path, data: str | None, *, part: str | None, checkpoint: str | int, device: str
) -> list[dict[str, Any]]:
    """For each row {"row", "predicted", "probability", "expert"}; where several are asked, "expert" is a list of them."""
    if data is None:
        raise UsageError(f"{run} tells labels of rows of numbers; give a table with --data FILE")
    saved = open_run(run, checkpoint=checkpoint, device=device)
    branch = saved.branch
    if isinstance(branch, MultitaskBranch):
        part = branch.of(part, wanted=lambda one: isinstance(one, RoutingBranch), verb="predict")
        branch = branch.parts[part]
    elif part is not None:
        raise UsageError(f"--part {part}: {run} is a run of one task; leave it out")
    assert isinstance(branch, RoutingBranch), "its recipe says so"
    keys, x = branch.read(data)
    with saved.engine.sampling() as models:
        own = models if part is None else whole(models, part)
        chances, chosen = branch.answered(own, x, device=saved.engine.device)
    names = branch.classes.names
    return [
        {
            "row": key,
            "predicted": names[int(row.argmax())],
            "probability": float(row.max()),
            "expert": experts[0] if len(experts) == 1 else experts,
        }
        for key, row, experts in zip(keys, chances, chosen.tolist(), strict=True)
    ]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A line each: label, how likely it is, the expert, and the row."""
    lines = []
    for row in rows:
        experts = row["expert"] if isinstance(row["expert"], list) else [row["expert"]]
        asked = ", ".join(f"e{number}" for number in experts)
        lines.append("\t".join((row["predicted"], f"{row['probability']:.3f}", asked, row["row"])))
    return "\n".join(lines)
