"""Groups of runs that differ only in seed or fold: read them and their metrics, and check that they are comparable."""

from __future__ import annotations

import glob
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bottega.analysis.compare_predictions import read_predictions
from bottega.config.metrics import infer_metric_mode
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core import checkpoint
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import RunDirectory, is_run
from bottega.core.trainer import BestMetric
from bottega.metrics_log import read_metrics
from bottega.tasks.recipes import load_saved_recipe
from bottega.tasks.registry import find_spec

FOLD_KEY, FOLD_SEED_KEY = "data.split.fold", "data.split.seed"
TRAIN_SPLIT_KEYS = ("data.train", "data.sources", "data.split", "data.validation", "data.test")
"""Keys that select the held-out rows if these are a fraction of the training data."""
ROW_SELECTION_KEYS = (
    *("data.limit", "data.input", "data.label_field", "data.clean", "data.filter", "data.deduplicate"),
    *("data.bad_records", "data.max_bad"),
)
"""Keys that select rows of any split."""
TRAINING_ONLY_KEYS = ("data.augmentation", "data.replay", "data.curriculum", "data.mixture", "data.temperature")
"""Keys that change the fingerprint of the data but not the held-out samples."""
LABEL_KEYS = ("model.num_labels", "model.num_classes", "model.condition")
"""Keys of a model that change how its data is prepared, but not which rows there are."""

RESULTS_FILE = Path("results", "metrics.json")
"""Where `bottega evaluate RUN --out RUN/results` writes its metrics."""


@dataclass(frozen=True)
class GroupMember:
    """A run of a group, with its recipe and the hashes of its data."""

    path: Path
    recipe: Recipe
    fold: int | None
    data_fingerprint: str | None
    """The fingerprint of its data; None without a checkpoint."""
    held_out: Mapping[str, str] = field(default_factory=dict)
    """Split -> hash of the held-out keys and labels, SPLIT.content -> hash of their files; empty in runs of old versions."""


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ only in seed or fold."""

    label: str
    name: str
    members: tuple[GroupMember, ...]
    num_folds: int | None
    """Number of folds if the members are folds; None if they are seeds."""

    @property
    def kind(self) -> str:
        """What its runs differ in: "fold" or "seed"."""
        return "fold" if self.num_folds else "seed"

    @property
    def test_train_ratio(self) -> float | None:
        """n_test / n_train of a fold."""
        return 1 / (self.num_folds - 1) if self.num_folds else None

    @property
    def members_by_key(self) -> dict[int, GroupMember]:
        """The members by fold or seed, which pairs them with those of another group."""
        return {(m.fold or 0) if self.num_folds else m.recipe.seed: m for m in self.members}


def read_groups(names: Sequence[str]) -> list[Group]:
    """Read the groups that `names` denote: each is a run, a pattern, a comma-separated list of runs, or a folder of folds."""
    groups = [_read_group(name, group_label(number)) for number, name in enumerate(names)]
    group_names: dict[Path, str] = {}
    for group in groups:
        for path in (member.path.resolve() for member in group.members):
            if path in group_names:
                raise UsageError(f"{path} is given twice, in {group_names[path]} and in {group.name}; keep one")
            group_names[path] = group.name
    for group in groups:
        _check_group(group)
    return [
        replace(group, members=tuple(group.members_by_key[key] for key in sorted(group.members_by_key)))
        for group in groups
    ]


def group_label(number: int) -> str:
    """Return A, B, ... Z, A1, B1 and so on for the group of that index."""
    return string.ascii_uppercase[number % 26] + (str(number // 26) if number >= 26 else "")


def _read_group(name: str, label: str) -> Group:
    paths, is_folder = _find_group_runs(name)
    members = [read_member(path) for path in paths]
    if is_folder or len({m.fold for m in members}) > 1:
        fold_counts = [m.recipe.data.split.folds for m in members if m.recipe.data.split is not None]
        return Group(label, name, tuple(members), next(iter(fold_counts), None) or max(2, len(members)))
    return Group(label, name, tuple(members), None)


def _find_group_runs(name: str) -> tuple[list[Path], bool]:
    """Return the runs that `name` denotes, and whether they are the content of a folder of folds."""
    paths: list[Path] = []
    for piece in [name] if Path(name).is_dir() else filter(None, map(str.strip, name.split(","))):
        if Path(piece).is_dir() or not glob.has_magic(piece):
            paths.append(Path(piece))
            continue
        matched = [Path(path) for path in sorted(glob.glob(piece)) if is_run(Path(path)) or _list_folds(Path(path))]
        if not matched:
            raise UsageError(f"no run matches {piece}; a run is a folder with a recipe.yaml")
        paths += matched
    if not paths:
        raise UsageError(f"{name!r} is not a run; give a run directory, such as runs/NAME")
    folders = [path for path in paths if _list_folds(path)]
    if folders and len(paths) > 1:
        raise UsageError(f"{name}: a folder of folds is a group of its own; give {folders[0]} as a separate argument")
    return (_list_folds(folders[0]), True) if folders else (paths, False)


def _list_folds(path: Path) -> list[Path]:
    return sorted(inner for inner in path.glob("fold-*") if re.fullmatch(r"fold-\d+", inner.name) and is_run(inner))


def read_member(path: Path) -> GroupMember:
    """Read a run: its recipe, its fold, and the fingerprint of its newest checkpoint."""
    recipe = load_saved_recipe(RunDirectory(path).must_exist().recipe)
    fold_match, split = re.fullmatch(r"fold-(\d+)", path.name), recipe.data.split
    # The folder name has priority: repeats with different splits have several folds of the same number.
    fold = int(fold_match[1]) if fold_match else split.fold if split is not None and split.folds is not None else None
    saved = checkpoint.list_checkpoints(path / "checkpoints")
    fingerprint = saved[0][1].fingerprint if saved else {}
    data, held_out = fingerprint.get("data"), fingerprint.get("held_out")
    samples = held_out if isinstance(held_out, Mapping) else {}
    return GroupMember(path, recipe, fold, str(data) if data is not None else None, samples)


def _check_group(group: Group) -> None:
    first = group.members[0]
    paths: dict[int | None, Path] = {}
    for member in group.members:
        ignored_keys = ("seed", FOLD_KEY, FOLD_SEED_KEY) if group.num_folds else ("seed", FOLD_KEY)
        changed = [c for c in diff_recipes(first.recipe, member.recipe) if c[0] not in ignored_keys]
        if changed:
            raise UsageError(
                f"{group.name}: {first.path} and {member.path} differ in more than the {group.kind}: {_format_changes(changed)}; "
                "give them as separate groups"
            )
        key = member.fold if group.num_folds else member.recipe.seed
        if key in paths:
            raise UsageError(f"{group.name}: {paths[key]} and {member.path} are both {group.kind} {key}; keep one")
        paths[key] = member.path


def require_same_metric(groups: list[Group]) -> BestMetric:
    """Return the metric that selects the best checkpoint, which must be the same for all groups, as must the task."""
    first, first_recipe = groups[0], groups[0].members[0].recipe
    for group in groups[1:]:
        recipe = group.members[0].recipe
        if recipe.task != first_recipe.task:
            raise UsageError(
                f"{first.name} is of the task {first_recipe.task}, {group.name} of {recipe.task}; compare runs of one task"
            )
        first_options, options = first_recipe.evaluation, recipe.evaluation
        if (first_options.metric, first_options.resolved_mode) != (options.metric, options.resolved_mode):
            raise UsageError(
                f"{first.name} selects its best checkpoint by {first_options.metric} ({first_options.resolved_mode}), "
                f"{group.name} by {options.metric} ({options.resolved_mode}); train both with one evaluation.metric and mode"
            )
    return BestMetric(first_recipe.evaluation.metric, first_recipe.evaluation.is_maximised)


def metric_direction(metric: str, best_metric: BestMetric) -> str | None:
    """Return "max" or "min", whichever is better, or None if neither the runs nor the metric's name tell."""
    # The average over the sources of a sequence is an average of the metric of the run.
    if metric in (best_metric.metric, "average"):
        return "max" if best_metric.maximise else "min"
    return infer_metric_mode(metric)


def check_same_data(first: GroupMember, second: GroupMember, *, metric: str, split: str | None) -> list[str]:
    """Refuse runs that were measured on different samples or labels; return notes on what could not be checked.

    Equal fingerprints mean equal data. Fingerprints also change with how samples are read and prepared; then the recorded
    hashes of held-out samples and labels decide, or the recipes if there are no hashes.
    """
    both, changed = f"{first.path} and {second.path}", diff_recipes(first.recipe, second.recipe)
    if split is None and _describe_limit(first.recipe) != _describe_limit(second.recipe):
        limits = f"{_describe_limit(first.recipe)} and {_describe_limit(second.recipe)}"
        raise UsageError(f"{both} were measured on {limits}; train them with the same evaluation.max_batches")
    if first.data_fingerprint is not None and first.data_fingerprint == second.data_fingerprint:
        return []
    measured_split = split or "validation"
    is_same = _have_same_samples(first, second, measured_split)
    selection_keys = _list_selection_keys(first, second, measured_split, is_same=is_same)
    selection_changes = [c for c in changed if _is_under(c[0], selection_keys)]
    if selection_changes or is_same is False:
        reason = _format_changes(selection_changes) if selection_changes else "the held-out samples or labels differ"
        raise UsageError(f"{both} were measured on different data: {reason}; give runs with the same held-out data")
    preparation_changes = [c for c in changed if _is_under(c[0], ("data", "model.from", *LABEL_KEYS))]
    read_keys = _list_held_out_keys(first, second, measured_split) if is_same else ()
    irrelevant_keys = (*TRAINING_ONLY_KEYS, *LABEL_KEYS, *(key for key in TRAIN_SPLIT_KEYS if key not in read_keys))
    encoding_changes = [c for c in preparation_changes if not _is_under(c[0], irrelevant_keys)]
    if encoding_changes and not find_spec(first.recipe).has_labels and metric != "bits_per_byte":
        hint = "; --metric bits_per_byte does not depend on it" if first.recipe.task == "language" else ""
        raise UsageError(f"{both}: {metric} is a mean over different units: {_format_changes(encoding_changes)}{hint}")
    if is_same and preparation_changes:
        keys = ", ".join(c[0] for c in preparation_changes)
        return [f"the data was read in different ways ({keys}); the samples measured and their labels are the same"]
    if first.data_fingerprint is None or second.data_fingerprint is None:
        return ["there is no checkpoint, so only the recipes were compared to check that the data is the same"]
    augmentation = getattr(first.recipe.data, "augmentation", None)
    is_augmented = augmentation is not None and augmentation.enabled
    if preparation_changes or (is_augmented and first.recipe.seed != second.recipe.seed):
        reason = ", ".join(c[0] for c in preparation_changes) or "data.augmentation, by the seed"
        return [
            f"the data was prepared in different ways ({reason}), so only the recipes were compared to check its files"
        ]
    fingerprints = f"fingerprints {first.data_fingerprint[:8]} and {second.data_fingerprint[:8]}"
    raise UsageError(
        f"{both} were measured on different data: its files have changed ({fingerprints}); train one again"
    )


def _have_same_samples(first: GroupMember, second: GroupMember, split: str) -> bool | None:
    """Return whether both held out the same samples with the same labels; None if that was not recorded."""
    if split in first.held_out and split in second.held_out:
        is_same = first.held_out[split] == second.held_out[split]
    else:
        labels = [_read_labels(member.path, split) for member in (first, second)]
        if None in labels:
            return None
        is_same = labels[0] == labels[1]
    contents = [member.held_out.get(f"{split}.content") for member in (first, second)]
    if None not in contents:
        return is_same and contents[0] == contents[1]
    # Files in different folders may have the same names and labels.
    return None if is_same and _uses_different_files(first, second, split) else is_same


def _uses_different_files(first: GroupMember, second: GroupMember, split: str) -> bool:
    """Return whether the recipes name different files for a split."""
    changed, keys = diff_recipes(first.recipe, second.recipe), _list_held_out_keys(first, second, split)
    return any(
        _is_under(key, keys) and key.rsplit(".", 1)[-1] in ("path", "more_paths", "sources") for key, *_ in changed
    )


def _read_labels(run: Path, split: str) -> dict[str, str] | None:
    """Return sample key -> label from the evaluation of a classifier on a split; None if there is none."""
    for folder in (run / "results" / split, run / "results"):
        try:
            fields = json.loads((folder / "metrics.json").read_bytes())
            is_of_split = fields.get("split") == split and fields.get("data") is None
        except (OSError, ValueError, AttributeError):
            continue
        predictions = read_predictions(folder) if is_of_split else None
        if predictions is not None:
            return {key: label for key, (label, _) in predictions.items()}
    return None


def _list_selection_keys(
    first: GroupMember, second: GroupMember, split: str, *, is_same: bool | None
) -> tuple[str, ...]:
    """Return the keys that may select different samples of a split for two runs."""
    if is_same:
        return (f"data.{split}.limit",)  # applied when the samples are evaluated
    return (*ROW_SELECTION_KEYS, *_list_held_out_keys(first, second, split))


def _list_held_out_keys(first: GroupMember, second: GroupMember, split: str) -> tuple[str, ...]:
    """Return the keys that define a split: those of its own files, or of a fraction of the training data."""
    sections = [getattr(member.recipe.data, split) for member in (first, second)]
    has_own_files = all(section is not None and section.path is not None for section in sections)
    return (f"data.{split}",) if has_own_files else TRAIN_SPLIT_KEYS


def _describe_limit(recipe: Recipe) -> str:
    options = recipe.evaluation
    if options.max_batches is None:
        return "all of it"
    return f"{options.max_batches} batches of {options.batch_size or recipe.training.batch_size}"


def _is_under(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _format_changes(changed: Sequence[tuple[str, Any, Any]]) -> str:
    descriptions = [f"{key} ({json.dumps(old)} and {json.dumps(new)})" for key, old, new in changed[:6]]
    return ", ".join(descriptions) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")


def read_best_value(run: Path, metric: str, best_metric: BestMetric) -> float:
    """Return the metric at the best evaluation of the run, selected by the run's own metric, not by `metric`."""
    rows = [r for r in read_metrics(run / "metrics.jsonl") if isinstance(r, dict) and r.get("kind") == "eval"]
    if not rows:
        raise UsageError(f"{run} has no evaluation in metrics.jsonl; train it, with data.validation")
    best: dict[str, Any] = {}
    for row in rows:
        value: Any = row.get(best_metric.metric)
        if _is_number(value) and best_metric.is_better(value, best.get(best_metric.metric)):
            best = row
    # Metrics of the whole run, such as the backward transfer of a sequence, are only in the last evaluation.
    source = rows[-1] if metric not in best and metric in rows[-1] else best or rows[-1]
    return _get_number(source, metric if best else best_metric.metric, where=run / "metrics.jsonl")


def read_result_value(run: Path, metric: str, split: str) -> tuple[float, bool]:
    """Return a metric that `bottega evaluate` wrote for the run, and whether the file names its split."""
    file, fields = run / RESULTS_FILE, read_results(run, split)
    return _get_number(dict(fields.get("metrics", fields)), metric, where=file), "split" in fields


def read_results(run: Path, split: str) -> dict[str, Any]:
    """Return the results that `bottega evaluate` wrote for a run; raise `UsageError` if they are of other data."""
    file = run / RESULTS_FILE
    remedy = f"write it: bottega evaluate {run} --split {split} --out {file.parent}"
    try:
        fields: dict[str, Any] = json.loads(file.read_bytes())
        dict(fields.get("metrics", {}))
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist; {remedy}") from None
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"{file} is not a JSON object; {remedy}") from None
    if fields.get("data") is not None:
        raise UsageError(f"{file} was measured on {fields['data']}, not on the {split} split of the run; {remedy}")
    if fields.get("split", split) != split:
        raise UsageError(f"{file} is of the split {fields['split']}, not {split}; {remedy}")
    return fields


def _get_number(row: dict[str, Any], metric: str, *, where: Path) -> float:
    if metric not in row:
        available = [name for name, value in row.items() if _is_number(value) and name not in ("step", "samples")]
        raise UsageError(f"{where} has no {metric}; it has {', '.join(available) or 'no metrics'}")
    if not _is_number(row[metric]):
        raise UsageError(f"{where}: {metric} is {json.dumps(row[metric])} and not a finite number; remove that run")
    return float(row[metric])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
