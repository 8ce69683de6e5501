"""Groups of runs that differ in seed or fold alone: reading them and their metrics, and checking that they are comparable."""

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

import numpy as np

from bottega.config.metrics import infer_metric_mode
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core import checkpoint
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import RunDirectory, read_metrics
from bottega.core.trainer import BestMetric
from bottega.tasks.recipes import load_saved_recipe
from bottega.tasks.registry import find_spec

FOLD_KEY, FOLD_SEED_KEY = "data.split.fold", "data.split.seed"
TRAIN_SPLIT_KEYS = ("data.train", "data.sources", "data.split", "data.validation", "data.test")
"""Keys that choose the held-out rows where these are a share of train."""
ROW_SELECTION_KEYS = (
    *("data.limit", "data.input", "data.label_field", "data.clean", "data.filter", "data.deduplicate"),
    *("data.bad_records", "data.max_bad"),
)
"""Keys that choose rows wherever these come from."""
TRAINING_ONLY_KEYS = ("data.augmentation", "data.replay", "data.curriculum", "data.mixture", "data.temperature")
"""Keys that change the data's fingerprint and leave what is held out as it is."""
LABEL_KEYS = ("model.num_labels", "model.num_classes", "model.condition")
"""Keys of a model that change how its data is prepared, though not which rows there are."""

RESULTS_FILE = Path("results", "metrics.json")
"""Where `bottega evaluate RUN --out RUN/results` writes what it measured."""


@dataclass(frozen=True)
class GroupMember:
    path: Path
    recipe: Recipe
    fold: int | None
    data_fingerprint: str | None
    """The fingerprint of its data; None where no checkpoint says it."""
    held_out: Mapping[str, str] = field(default_factory=dict)
    """Split -> hash of the keys and labels that were held back, and SPLIT.content -> hash of the files that these come from;
    empty before that was recorded."""


@dataclass(frozen=True)
class Group:
    label: str
    name: str
    members: tuple[GroupMember, ...]
    num_folds: int | None
    """How many parts the data was cut into, where the members are folds and not seeds."""

    @property
    def kind(self) -> str:
        return "fold" if self.num_folds else "seed"

    @property
    def test_train_ratio(self) -> float | None:
        """n_test / n_train of a fold."""
        return 1 / (self.num_folds - 1) if self.num_folds else None

    @property
    def members_by_key(self) -> dict[int, GroupMember]:
        """The members by what they are paired by."""
        return {(m.fold or 0) if self.num_folds else m.recipe.seed: m for m in self.members}


def read_groups(names: Sequence[str]) -> list[Group]:
    """Each name is a run, a pattern or a list of runs, or a folder of folds."""
    groups = [_read_group(name, group_label(number)) for number, name in enumerate(names)]
    seen: dict[Path, str] = {}
    for group in groups:
        for path in (member.path.resolve() for member in group.members):
            if path in seen:
                raise UsageError(f"{path} is given twice, in {seen[path]} and in {group.name}; leave one out")
            seen[path] = group.name
    for group in groups:
        _check_alike(group)
    return [
        replace(group, members=tuple(group.members_by_key[key] for key in sorted(group.members_by_key)))
        for group in groups
    ]


def group_label(number: int) -> str:
    return string.ascii_uppercase[number % 26] + (str(number // 26) if number >= 26 else "")


def _read_group(name: str, label: str) -> Group:
    paths, is_folder = _paths_of(name)
    members = [read_member(path) for path in paths]
    if is_folder or len({m.fold for m in members}) > 1:
        said = [m.recipe.data.split.folds for m in members if m.recipe.data.split is not None]
        return Group(label, name, tuple(members), said[0] if said and said[0] else max(2, len(members)))
    return Group(label, name, tuple(members), None)


def _paths_of(name: str) -> tuple[list[Path], bool]:
    """The runs that are meant, and whether they are what a folder of folds holds."""
    found: list[Path] = []
    for piece in [name] if Path(name).is_dir() else filter(None, map(str.strip, name.split(","))):
        if Path(piece).is_dir() or not glob.has_magic(piece):
            found.append(Path(piece))
            continue
        matched = [Path(path) for path in sorted(glob.glob(piece)) if _is_run(Path(path)) or _folds_in(Path(path))]
        if not matched:
            raise UsageError(f"{piece}: no run matches; a run is a folder with a recipe.yaml")
        found += matched
    if not found:
        raise UsageError(f"{name!r} names no run")
    folders = [path for path in found if _folds_in(path)]
    if folders and len(found) > 1:
        raise UsageError(f"{name}: a folder of folds is a group by itself; give {folders[0]} as an argument of its own")
    return (_folds_in(folders[0]), True) if folders else (found, False)


def _is_run(path: Path) -> bool:
    return RunDirectory(path).recipe.is_file()


def _folds_in(path: Path) -> list[Path]:
    return sorted(inner for inner in path.glob("fold-*") if re.fullmatch(r"fold-\d+", inner.name) and _is_run(inner))


def read_member(path: Path) -> GroupMember:
    recipe = load_saved_recipe(RunDirectory(path).must_exist().recipe)
    named, split = re.fullmatch(r"fold-(\d+)", path.name), recipe.data.split
    # The name comes first: where folds are repeated with other splits, there are several of one number.
    fold = int(named[1]) if named else split.fold if split is not None and split.folds is not None else None
    found = checkpoint.list_checkpoints(path / "checkpoints")
    fingerprint = found[0][1].fingerprint if found else {}
    data, held_out = fingerprint.get("data"), fingerprint.get("held_out")
    samples = held_out if isinstance(held_out, Mapping) else {}
    return GroupMember(path, recipe, fold, str(data) if data is not None else None, samples)


def _check_alike(group: Group) -> None:
    first = group.members[0]
    seen: dict[int | None, Path] = {}
    for member in group.members:
        own = ("seed", FOLD_KEY, FOLD_SEED_KEY) if group.num_folds else ("seed", FOLD_KEY)
        changed = [c for c in diff_recipes(first.recipe, member.recipe) if c[0] not in own]
        if changed:
            raise UsageError(
                f"{group.name}: {first.path} and {member.path} differ in more than the {group.kind}: {_listed(changed)}; "
                "give them as groups of their own"
            )
        key = member.fold if group.num_folds else member.recipe.seed
        if key in seen:
            raise UsageError(f"{group.name}: {seen[key]} and {member.path} are both {group.kind} {key}; leave one out")
        seen[key] = member.path


def require_same_metric(groups: list[Group]) -> BestMetric:
    """What all of them were trained for; only then was the best of each chosen alike."""
    first, mine = groups[0], groups[0].members[0].recipe
    for group in groups[1:]:
        theirs = group.members[0].recipe
        if theirs.task != mine.task:
            raise UsageError(
                f"{first.name} is of the task {mine.task}, {group.name} of {theirs.task}; compare one task"
            )
        one, other = mine.evaluation, theirs.evaluation
        if (one.metric, one.resolved_mode) != (other.metric, other.resolved_mode):
            raise UsageError(
                f"{first.name} kept its best by {one.metric} ({one.resolved_mode}), {group.name} by {other.metric} "
                f"({other.resolved_mode}); train them with the same evaluation.metric and mode"
            )
    return BestMetric(mine.evaluation.metric, mine.evaluation.is_maximised)


def metric_direction(metric: str, goal: BestMetric) -> str | None:
    """max or min, whichever is better; None where neither the runs nor the metric say it."""
    # The average over the sources of a sequence is one of the metric that was watched.
    if metric in (goal.metric, "average"):
        return "max" if goal.maximise else "min"
    return infer_metric_mode(metric)


def check_same_data(one: GroupMember, other: GroupMember, *, metric: str, split: str | None) -> list[str]:
    """Refuse runs that were measured on different samples or labels; return notes on what could not be checked.

    The fingerprint tells where it is equal. It also changes with how samples are read and prepared: then the samples and
    labels that were held out decide, and where nothing recorded them, the recipes.
    """
    both, changed = f"{one.path} and {other.path}", diff_recipes(one.recipe, other.recipe)
    if split is None and _limit(one.recipe) != _limit(other.recipe):
        limits = f"{_limit(one.recipe)} and {_limit(other.recipe)}"
        raise UsageError(f"{both} were measured on {limits}; train them with the same evaluation.max_batches")
    if one.data_fingerprint is not None and one.data_fingerprint == other.data_fingerprint:
        return []
    part = split or "validation"
    is_same = _have_same_samples(one, other, part)
    chosen = [c for c in changed if _under(c[0], _choosing(one, other, part, is_same=is_same))]
    if chosen or is_same is False:
        why = _listed(chosen) if chosen else "the samples or labels that were held out are not the same"
        raise UsageError(f"{both} were measured on different data: {why}; give runs with the same held-out data")
    prepared = [c for c in changed if _under(c[0], ("data", "model.from", *LABEL_KEYS))]
    read = _held_out_keys(one, other, part) if is_same else ()
    apart = (*TRAINING_ONLY_KEYS, *LABEL_KEYS, *(key for key in TRAIN_SPLIT_KEYS if key not in read))
    coded = [c for c in prepared if not _under(c[0], apart)]
    if coded and not find_spec(one.recipe).has_labels and metric != "bits_per_byte":
        hint = "; --metric bits_per_byte does not depend on it" if one.recipe.task == "language" else ""
        raise UsageError(f"{both}: {metric} is a mean over different numbers: {_listed(coded)}{hint}")
    if is_same and prepared:
        keys = ", ".join(c[0] for c in prepared)
        return [f"the data was read in different ways ({keys}); the samples measured and their labels are the same"]
    if one.data_fingerprint is None or other.data_fingerprint is None:
        return ["without a checkpoint, only the recipes say that the data was the same"]
    copies = getattr(one.recipe.data, "augmentation", None)
    if prepared or (copies is not None and copies.enabled and one.recipe.seed != other.recipe.seed):
        why = ", ".join(c[0] for c in prepared) or "data.augmentation, by the seed"
        return [
            f"the data was prepared in different ways ({why}), so that only the recipes say that its files are the same"
        ]
    prints = f"fingerprints {one.data_fingerprint[:8]} and {other.data_fingerprint[:8]}"
    raise UsageError(
        f"{both} were measured on different data: its files changed in between ({prints}); train one again"
    )


def _have_same_samples(one: GroupMember, other: GroupMember, part: str) -> bool | None:
    """Whether both held back the same samples with the same labels; None where that was not recorded."""
    if part in one.held_out and part in other.held_out:
        is_same = one.held_out[part] == other.held_out[part]
    else:
        answers = [_answered(member.path, part) for member in (one, other)]
        if None in answers:
            return None
        is_same = answers[0] == answers[1]
    contents = [member.held_out.get(f"{part}.content") for member in (one, other)]
    if None not in contents:
        return is_same and contents[0] == contents[1]
    # Files of other folders may bear the same names, and have the same labels.
    return None if is_same and _read_other_files(one, other, part) else is_same


def _read_other_files(one: GroupMember, other: GroupMember, part: str) -> bool:
    """Whether the recipes name different files for a split, as far as they say it."""
    changed, places = diff_recipes(one.recipe, other.recipe), _held_out_keys(one, other, part)
    return any(
        _under(key, places) and key.rsplit(".", 1)[-1] in ("path", "more_paths", "sources") for key, *_ in changed
    )


def _answered(run: Path, part: str) -> dict[str, str] | None:
    """Sample key -> label, as a classifier was evaluated on a split; None where it was not."""
    for folder in (run / "results" / part, run / "results"):
        try:
            fields = json.loads((folder / "metrics.json").read_bytes())
            is_of_part = fields.get("split") == part and fields.get("data") is None
        except (OSError, ValueError, AttributeError):
            continue
        answers = _predictions(folder) if is_of_part else None
        if answers is not None:
            return {key: label for key, (label, _) in answers.items()}
    return None


def _choosing(one: GroupMember, other: GroupMember, part: str, *, is_same: bool | None) -> tuple[str, ...]:
    """The keys by which two runs may have been measured on different samples."""
    if is_same:
        return (f"data.{part}.limit",)  # which is counted when the samples are measured
    return (*ROW_SELECTION_KEYS, *_held_out_keys(one, other, part))


def _held_out_keys(one: GroupMember, other: GroupMember, part: str) -> tuple[str, ...]:
    """The keys that say where a split comes from: its own files, or a share of train."""
    held = [getattr(member.recipe.data, part) for member in (one, other)]
    is_apart = all(one is not None and one.path is not None for one in held)
    return (f"data.{part}",) if is_apart else TRAIN_SPLIT_KEYS


def _limit(recipe: Recipe) -> str:
    options = recipe.evaluation
    if options.max_batches is None:
        return "all of it"
    return f"{options.max_batches} batches of {options.batch_size or recipe.training.batch_size}"


def _under(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _listed(changed: Sequence[tuple[str, Any, Any]]) -> str:
    shown = [f"{key} ({json.dumps(old)} and {json.dumps(new)})" for key, old, new in changed[:6]]
    return ", ".join(shown) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")


def read_best_value(run: Path, metric: str, goal: BestMetric) -> float:
    """The metric at the evaluation that the run itself kept as its best, so that nobody picks a better one here."""
    rows = [r for r in read_metrics(run / "metrics.jsonl") if isinstance(r, dict) and r.get("kind") == "eval"]
    if not rows:
        raise UsageError(f"{run} has no evaluation in metrics.jsonl; train it, with data.validation")
    best: dict[str, Any] = {}
    for row in rows:
        if _is_number(row.get(goal.metric)) and goal.is_better(row[goal.metric], best.get(goal.metric)):
            best = row
    # What follows from the whole run, such as the backward transfer of a sequence, stands in its last evaluation alone.
    chosen = rows[-1] if metric not in best and metric in rows[-1] else best or rows[-1]
    return _number(chosen, metric if best else goal.metric, where=run / "metrics.jsonl")


def read_result_value(run: Path, metric: str, split: str) -> tuple[float, bool]:
    """What `bottega evaluate` wrote beside the run, and whether it says of which split it is."""
    file, fields = run / RESULTS_FILE, read_results(run, split)
    return _number(dict(fields.get("metrics", fields)), metric, where=file), "split" in fields


def read_results(run: Path, split: str) -> dict[str, Any]:
    """Return what `bottega evaluate` wrote beside a run; refuse what it measured on another split or on other data."""
    file = run / RESULTS_FILE
    again = f"write it: bottega evaluate {run} --split {split} --out {file.parent}"
    try:
        fields: dict[str, Any] = json.loads(file.read_bytes())
        dict(fields.get("metrics", {}))
    except FileNotFoundError:
        raise UsageError(f"{file} is not there; {again}") from None
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"{file} is no JSON object; {again}") from None
    if fields.get("data") is not None:
        raise UsageError(f"{file} was measured on {fields['data']}, not on the {split} part of the run; {again}")
    if fields.get("split", split) != split:
        raise UsageError(f"{file} is of the split {fields['split']}, not {split}; {again}")
    return fields


def _number(row: dict[str, Any], metric: str, *, where: Path) -> float:
    if metric not in row:
        known = [name for name, value in row.items() if _is_number(value) and name not in ("step", "samples")]
        raise UsageError(f"{where} has no {metric}; --metric can be {', '.join(known) or 'nothing: it is empty'}")
    if not _is_number(row[metric]):
        raise UsageError(f"{where}: {metric} is {json.dumps(row[metric])} and no finite number; leave that run out")
    return float(row[metric])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_correctness(groups: list[Group]) -> dict[str, np.ndarray] | str:
    """Of single classifiers: label of the group -> whether each sample was right, in one order; or who has none."""
    answers: dict[str, dict[str, tuple[str, str]]] = {}
    for group in groups:
        found = _predictions(group.members[0].path / "results")
        if found is None:
            return str(group.members[0].path)
        answers[group.label] = found
    mine = {key: label for key, (label, _) in answers[groups[0].label].items()}
    for group in groups[1:]:
        theirs = {key: label for key, (label, _) in answers[group.label].items()}
        every = {**mine, **theirs}
        differing = [key for key in every if mine.get(key) != theirs.get(key)]
        if not mine.keys() & theirs.keys():
            raise UsageError(
                f"{groups[0].name} and {group.name} have predictions of different data: {len(mine):,} and {len(theirs):,} "
                "samples, none in common; evaluate both on the same data"
            )
        if differing:
            raise UsageError(
                f"{groups[0].name} and {group.name} have predictions of different samples or labels, {len(differing):,} of "
                f"{len(every):,}, the first {differing[0]!r}; evaluate both on the same data"
            )
    return {name: np.array([said[key][1] == label for key, label in mine.items()]) for name, said in answers.items()}


def _predictions(results: Path) -> dict[str, tuple[str, str]] | None:
    """Sample key -> (label, predicted) of a classifier that was evaluated; None where it was not."""
    file = results / "predictions.jsonl"
    if not file.is_file():
        return None
    found: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            key, answer = str(row["key"]), (str(row["label"]), str(row["predicted"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}:{number}: {type(error).__name__}: expected key, label and predicted") from None
        if key in found:
            raise DataError(f"{file}:{number}: the key {key!r} was there before; each sample is predicted once")
        found[key] = answer
    if not found:
        raise DataError(f"{file} is empty; write it again with bottega evaluate {results.parent} --out {results}")
    return found
