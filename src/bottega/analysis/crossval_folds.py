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

DEFAULT_NUM_FOLDS = 5


@dataclass(frozen=True)
class Fold:
    """One run of a cross-validation; `number` counts over all repeats."""

    number: int
    recipe: Recipe
    run: RunDirectory


def resolve_splitting(
    recipe: Recipe, *, folds: int | None, by: str | None, field: str | None
) -> tuple[Splitting, list[str]]:
    """Return how the data is split, and notes.

    The arguments have priority over the recipe; the default is stratified by class if there are classes, else by fraction.
    """
    recipe_split = recipe.data.split or Splitting()
    num_folds = folds if folds is not None else recipe_split.folds or DEFAULT_NUM_FOLDS
    if num_folds < 2:
        raise UsageError(f"--folds {num_folds}: expected 2 or more, such as {DEFAULT_NUM_FOLDS}")
    is_multi_label = getattr(recipe.data, "multi_label", False)
    has_classes = find_spec(recipe).has_labels and not is_multi_label
    default_by = (
        recipe_split.by if "by" in recipe_split.model_fields_set else "stratified" if has_classes else "fraction"
    )
    split_by = by or ("group" if field is not None else default_by)
    group_field = field or (recipe_split.field if split_by == recipe_split.by else None)
    if split_by == "group" and group_field is None:
        raise UsageError("--by group needs the field whose rows stay together; add --field, such as --field user")
    if split_by == "stratified" and is_multi_label:
        raise UsageError(
            "--by stratified needs one class per text, but data.multi_label allows several; use --by fraction"
        )
    if field is not None and split_by not in ("group", "hash"):
        raise UsageError(f"--field {field}: applies to --by group or hash, not to {split_by}; remove it")
    notes = []
    validation = recipe.data.validation
    if validation is not None and (
        validation.path is not None or isinstance(validation.split, str) or validation.kind == "embedded"
    ):
        notes.append(
            f"data.validation ({_describe_held_out(validation)}) is not used; each fold of the training data is held out in turn"
        )
    options = {"by": split_by, "field": group_field, "seed": recipe_split.seed, "folds": num_folds}
    return Splitting(**options), notes


def _describe_held_out(part: HeldOut) -> str:
    return str(part.path or part.split or part.kind)


def plan_folds(recipe: Recipe, split: Splitting, *, repeats: int, out: Path | None) -> list[Fold]:
    """Return every fold of every repeat, each with a complete recipe that differs from the others only in its split."""
    assert split.folds is not None

    def build_fold_recipe(number: int, folder: str) -> Recipe:
        position = {"seed": split.seed + number // split.folds, "fold": number % split.folds}  # type: ignore[operator]
        data = {"data.validation": None, "data.split": {**split.model_dump(), **position}}
        # `load_recipe` also checks that the split fits the data.
        return load_recipe([recipe.to_plain_dict(), {**data, "output_dir": folder, "name": f"fold-{number}"}]).recipe

    # Another number of folds is another recipe, and so has another default name.
    name = recipe.name or build_fold_recipe(0, "runs").model_copy(update={"name": None}).run_name()
    root = out or Path(recipe.output_dir) / f"{name}-crossval"
    planned_folds = []
    for number in range(split.folds * repeats):
        fold_recipe = build_fold_recipe(number, str(root))
        dependencies.check_dependencies(fold_recipe)
        planned_folds.append(Fold(number, fold_recipe, RunDirectory(root / f"fold-{number}")))
    return planned_folds


def check_same_recipe(root: RunDirectory, folds: list[Fold]) -> None:
    """Raise `UsageError` if the folder has runs of another recipe, or of more folds."""
    for fold in folds:
        resume.check_recipe_unchanged(fold.run, fold.recipe)
    names = {fold.run.path.name for fold in folds}
    other_folds = sorted(
        path.parent.name for path in root.path.glob("fold-*/recipe.yaml") if path.parent.name not in names
    )
    if other_folds:
        raise UsageError(
            f"{root.path} has {other_folds[0]} from more folds or repeats; use the same numbers, or another --out"
        )


def prepare_fold(recipe: Recipe, report_progress: Any) -> PreparedData | None:
    """Prepare the data of a fold, which training then reads from the cache; None if a dependency must be trained first."""
    data = recipe.data
    path = Path(data.train.path).expanduser() if data.train.path is not None else None
    if data.train.kind == "shards" or (path is not None and is_prepared(path)):
        raise UsageError(f"{path} contains shards, which are already split; give the data they were prepared from")
    if str(getattr(recipe.model, "from_", None)).startswith(dependencies.REFERENCE_PREFIX):
        return None
    if getattr(data, "latents", False):  # these need the autoencoder; the split does not
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"latents": False})})
    try:
        return prepare_recipe(recipe, report_progress)
    except DataError as error:
        if not find_spec(recipe).rows_are_samples and str(error).startswith("splitting 1 rows "):
            raise DataError(
                f"{path or 'the data'} is one text, which cannot be split across folds; give several files, or a "
                "table with a text in each row"
            ) from None
        message = str(error).replace("data.split.folds=", "--folds ").replace("lower folds", "lower it")
        raise DataError(message.replace("set data.split.by=", "use --by ")) from None


def check_metric_available(recipe: Recipe, report_progress: Any) -> None:
    """Raise an error if the recipe's metric is not computed, before every fold fails for this reason."""
    from bottega.run.compose import build_training_plan, check_metrics
    from bottega.tasks import registry

    if dependencies.find_referenced_dependencies(recipe) or getattr(recipe.data, "latents", False):
        return  # the workload cannot be opened before dependencies are trained and latents computed
    # On the CPU: nothing is computed here, and the folds need the GPU memory.
    resolved = dependencies.resolve_references(recipe.model_copy(update={"device": "cpu"}))
    workload = registry.open_workload(resolved, progress=report_progress)
    metrics = build_training_plan(resolved, workload).metrics if recipe.techniques else workload.metrics
    check_metrics(recipe, metrics, has_validation=True)


def check_class_counts(prepared: PreparedData | None, split: Splitting) -> None:
    """Raise `DataError` if a class has fewer samples than there are folds; texts are checked during preparation."""
    if prepared is None or split.by != "stratified" or split.folds is None:
        return
    counts: Counter[str] = Counter()
    for name in (*prepared.training_tables, "validation"):
        labels = prepared.class_ids(name)
        counts.update(prepared.classes.names[label] for label in ([] if labels is None else labels.tolist()))
    rarest = min(counts, key=lambda name: (counts[name], name), default=None)
    if rarest is not None and counts[rarest] < split.folds:
        raise DataError(
            f"class {rarest!r} has {counts[rarest]} samples, fewer than {split.folds} folds; lower --folds, or use "
            "--by fraction"
        )


def check_same_data(folds: list[Fold], prepared: list[PreparedData | None]) -> None:
    """Raise `DataError` if a fold was trained on data that has changed since."""
    for fold, current in zip(folds, prepared, strict=True):
        manifest_of_run = next((manifest for _, manifest in checkpoints.list_checkpoints(fold.run.checkpoints)), None)
        if (
            manifest_of_run is not None
            and current is not None
            and manifest_of_run.fingerprint.get("data") != current.fingerprint
        ):
            raise DataError(
                f"the data has changed since {fold.run.path} was trained; undo the change, or start over with --fresh"
            )


def is_trained(fold: Fold) -> bool:
    """Return whether the run of a fold is complete under the current recipe; such a run is not trained again."""
    newest = checkpoints.find_newest(fold.run.checkpoints)
    if newest is None or diff_recipes(load_saved_recipe(fold.run.recipe), fold.recipe):
        return False
    progress, early_stopping = checkpoints.read_progress(newest), fold.recipe.training.early_stopping
    num_waited = progress.get("notes", {}).get("early_stop", {}).get("waited", 0)
    return bool(
        progress["step"] >= progress["total"] or (early_stopping is not None and num_waited >= early_stopping.patience)
    )
