"""Resuming a run: the checkpoint to start from, and the changes that are allowed since it was saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bottega.config.recipe import Recipe, diff_recipes
from bottega.core import checkpoint
from bottega.core.callback import Progress
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.core.rundir import RunDirectory
from bottega.data.loading.loader import Loader
from bottega.tasks.frozen_models import RECIPE_KEYS, check_same_model
from bottega.tasks.recipes import load_saved_recipe

CHANGEABLE_KEYS = ("training.batch_size", "training.gradient_accumulation_steps", "training.mixed_precision")
"""Keys that may change when a run is resumed; it then continues by samples and is no longer equal bit for bit."""

BATCH_SIZE_KEYS = ("training.batch_size", "training.gradient_accumulation_steps")
"""Keys that may not change in a sequence of sources or a stream: the sources would begin elsewhere, or other samples be replayed."""

ROUNDING_KEYS = (
    "training.micro_batch_size",
    "training.compile",
    "training.gradient_checkpointing",
    "deterministic",
    "cpu_threads",
)
"""Keys that change a result only by rounding, or by the draws of dropout."""

LENGTH_KEYS = ("training.max_steps", "training.num_epochs")


def find_checkpoint(
    run: RunDirectory, resume_from: Path | None, report: Callable[[str], None]
) -> tuple[Path, checkpoint.Manifest] | None:
    """Return the folder and manifest of the verified checkpoint to load, if any.

    The checkpoint `resume_from` is never silently replaced.
    """
    own_checkpoints = checkpoint.list_checkpoints(run.checkpoints)
    if resume_from is not None and own_checkpoints and run.path.resolve() not in resume_from.resolve().parents:
        # The same command again, perhaps by a scheduler: the run has continued since it was started from there.
        report(f"{run.path} has its own checkpoints; continuing from those, not from {resume_from}")
        resume_from = None
    if resume_from is None:
        newest = checkpoint.find_newest_valid(run.checkpoints, report)
        if newest is None and has_begun(run):
            raise CheckpointError(f"every checkpoint in {run.checkpoints} is damaged; start over with --fresh")
        return newest
    path = resolve_checkpoint_path(resume_from)
    return path, checkpoint.verify(path)


def resolve_checkpoint_path(path: Path) -> Path:
    """Return the checkpoint folder that `path` names: the folder itself, or the newest one of a run directory."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; give a checkpoint folder with a MANIFEST.json (pickled checkpoints are never read)"
        )
    if (path / "MANIFEST.json").is_file():
        return path
    newest = checkpoint.find_newest(path / "checkpoints")
    if newest is not None:
        return newest
    step_match = re.fullmatch(r"checkpoint-(\d+)", path.name)  # the name in other trainers
    name = checkpoint.step_folder_name(int(step_match[1]) if step_match is not None else 500)
    if step_match is not None and (path.parent / "checkpoints" / name).is_dir():
        return path.parent / "checkpoints" / name
    raise UsageError(f"no checkpoint at {path}: give a run directory or a folder such as runs/NAME/checkpoints/{name}")


def check_recipe_unchanged(run: RunDirectory, recipe: Recipe) -> list[str]:
    """Raise UsageError if the run has another recipe; return notes on the changes that are allowed.

    A run without a checkpoint starts over with the new recipe.
    """
    if not run.recipe.is_file() or not has_begun(run):
        return []
    old_recipe = load_saved_recipe(run.recipe)
    refusals, notes = [], []
    curriculum = recipe.data.curriculum
    # Stages given as a fraction of the run would move if its length changed, and other samples would have been seen.
    is_sequence = recipe.data.mixture == "sequence"
    has_fixed_batches = is_sequence or recipe.data.online is not None
    can_change_length = not is_sequence and (curriculum is None or not curriculum.depends_on_run_length)
    for key, old_value, new_value in diff_recipes(old_recipe, recipe):
        if key in LENGTH_KEYS and (old_value or 0) < (new_value or 0) and can_change_length:
            notes.append(f"{key}: {old_value} -> {new_value}")
        elif key in LENGTH_KEYS and can_change_length and old_value is not None and new_value is not None:
            notes.append(
                f"{key}: {old_value} -> {new_value}; the run ends at the new length, or now if it is already past it"
            )
        elif key in CHANGEABLE_KEYS and not (has_fixed_batches and key in BATCH_SIZE_KEYS):
            notes.append(
                f"{key}: {old_value} -> {new_value}; continuing by samples, no longer bit for bit the same run"
            )
        else:
            refusals.append(f"{key}: {_shorten_sections(old_value)} -> {_shorten_sections(new_value)}")
    for key in ROUNDING_KEYS:
        old_value, new_value = _get_value(old_recipe, key), _get_value(recipe, key)
        if old_value != new_value:
            notes.append(f"{key}: {old_value} -> {new_value}; no longer bit for bit the same run")
    if old_recipe.engine != recipe.engine:
        # Both draw the same noise, but each has its own generator for dropout.
        has_dropout = bool(getattr(recipe.model, "dropout", 0.0))
        difference = "and the masks of dropout differ" if has_dropout else "which changes results by rounding only"
        notes.append(f"engine: {old_recipe.engine} -> {recipe.engine}, {difference}")
    if refusals:
        raise UsageError(
            f"{run.path} was started with another recipe ({'; '.join(refusals)}); choose another name, or start over "
            "with --fresh"
        )
    return notes


def has_begun(run: RunDirectory) -> bool:
    """Return whether the run has a checkpoint, even a damaged one."""
    return bool(checkpoint.list_step_folders(run.checkpoints))


def _shorten_sections(value: Any) -> Any:
    """Return a list of sections as their names or paths, which shows which one was added or removed."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return f"[{', '.join(str(item.get('name') or item.get('path') or item) for item in value)}]"
    return value


def _get_value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def check_data_unchanged(
    manifest: checkpoint.Manifest, current: Mapping[str, Any], *, allow: bool, report: Callable[[str], None]
) -> None:
    """Raise DataError if the data has changed since the checkpoint, unless allowed; report other differences."""
    recorded = manifest.fingerprint
    if recorded.get("data") != current.get("data"):
        text = f"the data has changed since the checkpoint ({str(recorded.get('data'))[:12]} -> {str(current.get('data'))[:12]})"
        if not allow:
            raise DataError(f"{text}; undo the change, start over with --fresh, or use --allow-data-change")
        report(f"{text}; continuing because of --allow-data-change")
    elif "derived" in recorded and recorded["derived"] != current.get("derived"):
        text = "the keywords that a model derives from the data differ from those at the start of this run"
        if not allow:
            raise DataError(
                f"{text}; resume on the machine it started on, start over with --fresh, or use --allow-data-change"
            )
        report(f"{text}; continuing because of --allow-data-change")
    changed_keys = [key for key in ("packages", "device", "world") if recorded.get(key) != current.get(key)]
    if _has_torch(recorded) != _has_torch(current):  # the change of engine is reported by itself
        changed_keys = [key for key in changed_keys if key != "packages"]
    if changed_keys:
        changes = "; ".join(f"{key}: {recorded.get(key)} -> {current.get(key)}" for key in changed_keys)
        report(
            f"resumed in another environment ({changes}): the same samples in the same order, but not bit for bit equal"
        )


def _has_torch(fingerprint: Mapping[str, Any]) -> bool:
    return "torch" in (fingerprint.get("packages") or {})


def check_frozen_unchanged(manifest: checkpoint.Manifest, current: Mapping[str, Any]) -> None:
    """Raise if a frozen model (autoencoder, tokenizer, text encoder, base) is not the one the run was trained with."""
    recorded = manifest.fingerprint.get("frozen")
    if recorded is None:  # a checkpoint of an earlier version; the processor folder is compared later
        return
    for name in sorted({*recorded, *current["frozen"]}):
        old_hash, new_hash = str(recorded.get(name))[:12], str(current["frozen"].get(name))[:12]
        check_same_model(
            name,
            current_hash=current["frozen"].get(name),
            recorded_hash=recorded.get(name),
            name=RECIPE_KEYS.get(name, name),
            recorded=f"content {old_hash}, now {new_hash}",
        )


def load_progress(path: Path, *, loader: Loader, total: int, report: Callable[[str], None]) -> Progress:
    """Return the progress of a checkpoint. With another batch size the run continues by samples."""
    progress = Progress.from_json(checkpoint.read_progress(path))
    progress.total = total
    if progress.samples != loader.samples_before(progress.step):
        # Steps are renumbered, so the number of the best step is no longer valid.
        progress.step = progress.evaluated_step = loader.step_at(progress.samples)
        progress.best_step, progress.skip_steps = 0, []
        report(
            f"the batch size changed to {loader.batch_size_at(progress.step)}, so steps are renumbered: the run continues after "
            f"{progress.samples} samples, which is now step {progress.step}"
        )
    return progress
