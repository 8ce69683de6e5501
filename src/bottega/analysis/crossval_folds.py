"""Plan the runs of a cross-validation: how the data is split, and the checks before the first run starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.config.data import HeldOut, Splitting
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core import checkpoint as checkpoints
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import RunDirectory
from bottega.data.prepare.prepared import PreparedData, is_prepared
from bottega.run import resume
from bottega.run.prepare import prepare_recipe
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe, load_saved_recipe
from bottega.tasks.registry import find_spec

DEFAULT_FOLDS = 5


@dataclass(frozen=True)
class Fold:
    """One of the runs. `number` counts over all repeats."""

    number: int
    recipe: Recipe
    run: RunDirectory


def resolve_splitting(
    recipe: Recipe, *, folds: int | None, by: str | None, field: str | None
) -> tuple[Splitting, list[str]]:
    """How the data is cut: as asked for, else as the recipe says, else by class where there is one, else as it comes."""
    said = recipe.data.split or Splitting()
    number = folds if folds is not None else said.folds or DEFAULT_FOLDS
    if number < 2:
        raise UsageError(f"--folds {number}: expected 2 or more, such as {DEFAULT_FOLDS}")
    is_several = getattr(recipe.data, "multi_label", False)
    has_classes = find_spec(recipe).has_labels and not is_several
    usual = said.by if "by" in said.model_fields_set else "stratified" if has_classes else "fraction"
    chosen = by or ("group" if field is not None else usual)
    named = field or (said.field if chosen == said.by else None)
    if chosen == "group" and named is None:
        raise UsageError("--by group: whose rows stay together? say --field, such as --field user")
    if chosen == "stratified" and is_several:
        raise UsageError("--by stratified: goes by one class a text, and data.multi_label gives several; use fraction")
    if field is not None and chosen not in ("group", "hash"):
        raise UsageError(f"--field {field}: goes with --by group or hash, not {chosen}; leave one out")
    notes = []
    held = recipe.data.validation
    if held is not None and (held.path is not None or isinstance(held.split, str) or held.kind == "embedded"):
        notes.append(f"data.validation ({_named(held)}) is not used: what is held out is a fold of the training data")
    options = {"by": chosen, "field": named, "seed": said.seed, "folds": number}
    return Splitting(**options), notes


def _named(part: HeldOut) -> str:
    return str(part.path or part.split or part.kind)


def plan_folds(recipe: Recipe, split: Splitting, *, repeats: int, out: Path | None) -> list[Fold]:
    """Every fold of every repeat, each a whole recipe that differs from the others in its split alone."""
    assert split.folds is not None

    def recipe_of(number: int, folder: str) -> Recipe:
        place = {"seed": split.seed + number // split.folds, "fold": number % split.folds}  # type: ignore[operator]
        data = {"data.validation": None, "data.split": {**split.model_dump(), **place}}
        # Through the loader, which checks that such a split fits such data.
        return load_recipe([recipe.to_plain_dict(), {**data, "output_dir": folder, "name": f"fold-{number}"}]).recipe

    # Another number of folds is another recipe, and so another name unless there is one.
    name = recipe.name or recipe_of(0, "runs").model_copy(update={"name": None}).run_name()
    root = out or Path(recipe.output_dir) / f"{name}-crossval"
    found = []
    for number in range(split.folds * repeats):
        one = recipe_of(number, str(root))
        dependencies.check_dependencies(one)
        found.append(Fold(number, one, RunDirectory(root / f"fold-{number}")))
    return found


# What must be so before the first step.


def check_same_recipe(root: RunDirectory, folds: list[Fold]) -> None:
    for fold in folds:
        resume.check_recipe_unchanged(fold.run, fold.recipe)
    known = {fold.run.path.name for fold in folds}
    others = sorted(path.parent.name for path in root.path.glob("fold-*/recipe.yaml") if path.parent.name not in known)
    if others:
        raise UsageError(
            f"{root.path} has {others[0]} of more folds or repeats than now; ask for as many, or choose another --out"
        )


def prepare_fold(recipe: Recipe, report_progress: Any) -> PreparedData | None:
    """The data of a fold, which its training then finds in the cache; None where a part must be trained before."""
    data = recipe.data
    path = Path(data.train.path).expanduser() if data.train.path is not None else None
    if data.train.kind == "shards" or (path is not None and is_prepared(path)):
        raise UsageError(f"{path} holds shards, which are split already; give the data that they were made of")
    if str(getattr(recipe.model, "from_", None)).startswith(dependencies.PREFIX):
        return None
    if getattr(data, "latents", False):  # which an autoencoder computes
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"latents": False})})
    try:
        return prepare_recipe(recipe, report_progress)
    except DataError as error:
        if not find_spec(recipe).rows_are_samples and str(error).startswith("splitting 1 rows "):
            raise DataError(
                f"{path or 'the data'} is one text, and folds are made of whole ones; give several files, or a table with "
                "a text in each row"
            ) from None
        said = str(error).replace("data.split.folds=", "--folds ").replace("lower folds", "lower it")
        raise DataError(said.replace("set data.split.by=", "say --by ")) from None


def check_metric_available(recipe: Recipe, report_progress: Any) -> None:
    """What is watched must be measured: each fold would find that out for itself, one after the other."""
    from bottega.run.compose import build_training_plan, check_metrics
    from bottega.tasks import registry

    if dependencies.referenced_dependencies(recipe) or getattr(recipe.data, "latents", False):
        return  # a part may have to be trained before, or latents to be computed
    # Nothing is computed here, and the memory of a GPU is for the folds.
    placed = dependencies.resolve_references(recipe.model_copy(update={"device": "cpu"}))
    workload = registry.open_workload(placed, progress=report_progress)
    metrics = build_training_plan(placed, workload).metrics if recipe.techniques else workload.metrics
    check_metrics(recipe, metrics, has_validation=True)


def check_class_counts(prepared: PreparedData | None, split: Splitting) -> None:
    """Each fold must hold some of each class; of texts the preparation has seen to it."""
    if prepared is None or split.by != "stratified" or split.folds is None:
        return
    counts: Counter[str] = Counter()
    for name in (*prepared.training_tables, "validation"):
        labels = prepared.class_ids(name)
        counts.update(prepared.classes.names[label] for label in ([] if labels is None else labels.tolist()))
    rarest = min(counts, key=lambda name: (counts[name], name), default=None)
    if rarest is not None and counts[rarest] < split.folds:
        raise DataError(
            f"class {rarest!r} has {counts[rarest]} samples, fewer than {split.folds} folds; lower --folds, or say "
            "--by fraction"
        )


def check_same_data(folds: list[Fold], prepared: list[PreparedData | None]) -> None:
    """Folds that were trained on other files would be other parts of other data."""
    for fold, now in zip(folds, prepared, strict=True):
        before = next((manifest for _, manifest in checkpoints.list_checkpoints(fold.run.checkpoints)), None)
        if before is not None and now is not None and before.fingerprint.get("data") != now.fingerprint:
            raise DataError(
                f"the data has changed since {fold.run.path} was trained; undo the change, or start over with --fresh"
            )


def is_trained(fold: Fold) -> bool:
    """To its end, by the recipe as it is now; such a run is not touched again."""
    last = checkpoints.find_newest(fold.run.checkpoints)
    if last is None or diff_recipes(load_saved_recipe(fold.run.recipe), fold.recipe):
        return False
    progress, early = checkpoints.read_progress(last), fold.recipe.training.early_stopping
    waited = progress.get("notes", {}).get("early_stop", {}).get("waited", 0)
    return bool(progress["step"] >= progress["total"] or (early is not None and waited >= early.patience))
