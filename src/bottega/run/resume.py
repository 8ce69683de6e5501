"""Resuming a run: the checkpoint to start from, and what may have changed since."""

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

MAY_CHANGE = ("training.batch_size", "training.gradient_accumulation_steps", "training.mixed_precision")
"""Keys that may change when a run is resumed; it then continues by samples and is no longer equal bit for bit."""

BATCHES = ("training.batch_size", "training.gradient_accumulation_steps")
"""Keys that may not change in a sequence of sources or a stream: they would move its borders, or what is replayed."""

ROUNDING = (
    "training.micro_batch_size",
    "training.compile",
    "training.gradient_checkpointing",
    "deterministic",
    "cpu_threads",
)
"""Keys that change a result only by rounding, or by the draws of dropout."""

LENGTH = ("training.max_steps", "training.num_epochs")


def find_checkpoint(
    run: RunDirectory, resume_from: Path | None, report: Callable[[str], None]
) -> tuple[Path, checkpoint.Manifest] | None:
    """Return the verified checkpoint to load, if any. One given by `resume_from` is never silently replaced."""
    own = checkpoint.list_checkpoints(run.checkpoints)
    if resume_from is not None and own and run.path.resolve() not in resume_from.resolve().parents:
        # The same command again, perhaps by a scheduler: the run has continued since it was started from there.
        report(f"{run.path} has its own checkpoints; continuing from those, not from {resume_from}")
        resume_from = None
    if resume_from is None:
        good = checkpoint.find_newest_valid(run.checkpoints, report)
        if good is None and has_begun(run):
            raise CheckpointError(f"every checkpoint in {run.checkpoints} is damaged; start over with --fresh")
        return good
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
    last = checkpoint.find_newest(path / "checkpoints")
    if last is not None:
        return last
    step = re.fullmatch(r"checkpoint-(\d+)", path.name)  # as other trainers name it
    if step is not None and (path.parent / "checkpoints" / checkpoint.step_folder_name(int(step[1]))).is_dir():
        return path.parent / "checkpoints" / checkpoint.step_folder_name(int(step[1]))
    name = checkpoint.step_folder_name(int(step[1]) if step is not None else 500)
    raise UsageError(f"no checkpoint at {path}: give a run directory or a folder such as runs/NAME/checkpoints/{name}")


def check_recipe_unchanged(run: RunDirectory, recipe: Recipe) -> list[str]:
    """Raise UsageError if the run has another recipe; return notes on the changes that are allowed.

    A run without a checkpoint starts over with the new recipe.
    """
    if not run.recipe.is_file() or not has_begun(run):
        return []
    old = load_saved_recipe(run.recipe)
    refused, noted = [], []
    curriculum = recipe.data.curriculum
    # Stages given as a fraction of the run would move with its end, and change which samples were seen.
    is_sequence = recipe.data.mixture == "sequence"
    is_ordered = is_sequence or recipe.data.online is not None
    can_differ = not is_sequence and (curriculum is None or not curriculum.depends_on_run_length)
    for key, before, after in diff_recipes(old, recipe):
        if key in LENGTH and (before or 0) < (after or 0) and can_differ:
            noted.append(f"{key}: {before} -> {after}")
        elif key in LENGTH and can_differ and before is not None and after is not None:
            noted.append(f"{key}: {before} -> {after}; the run ends there, or now if it is already past it")
        elif key in MAY_CHANGE and not (is_ordered and key in BATCHES):
            noted.append(f"{key}: {before} -> {after}; continuing by samples, no longer bit for bit the same run")
        else:
            refused.append(f"{key}: {_shorten(before)} -> {_shorten(after)}")
    for key in ROUNDING:
        before, after = _value(old, key), _value(recipe, key)
        if before != after:
            noted.append(f"{key}: {before} -> {after}; no longer bit for bit the same run")
    if refused:
        raise UsageError(
            f"{run.path} was started with another recipe ({'; '.join(refused)}); choose another name, or start over "
            "with --fresh"
        )
    return noted


def has_begun(run: RunDirectory) -> bool:
    """Return whether the run has a checkpoint, even a damaged one."""
    return bool(checkpoint.list_step_folders(run.checkpoints))


def _shorten(value: Any) -> Any:
    """Return a list of sections as their names or paths, which shows which one was added or removed."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return f"[{', '.join(str(item.get('name') or item.get('path') or item) for item in value)}]"
    return value


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_data_unchanged(
    manifest: checkpoint.Manifest, now: Mapping[str, Any], *, allow: bool, report: Callable[[str], None]
) -> None:
    """Raise DataError if the data has changed since the checkpoint, unless allowed; report other differences."""
    before = manifest.fingerprint
    if before.get("data") != now.get("data"):
        text = (
            f"the data has changed since the checkpoint ({str(before.get('data'))[:12]} -> {str(now.get('data'))[:12]})"
        )
        if not allow:
            raise DataError(f"{text}; undo the change, start over with --fresh, or use --allow-data-change")
        report(f"{text}; continuing because of --allow-data-change")
    elif "derived" in before and before["derived"] != now.get("derived"):
        text = "the keywords that a model derives from the data differ from those at the start of this run"
        if not allow:
            raise DataError(
                f"{text}; resume on the machine it started on, start over with --fresh, or use --allow-data-change"
            )
        report(f"{text}; continuing because of --allow-data-change")
    changed = [key for key in ("packages", "device", "world") if before.get(key) != now.get(key)]
    if changed:
        changes = "; ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed)
        report(
            f"resumed in another environment ({changes}): the same samples in the same order, but not bit for bit equal"
        )


def check_frozen_unchanged(manifest: checkpoint.Manifest, now: Mapping[str, Any]) -> None:
    """Raise if a frozen model (autoencoder, tokenizer, text encoder, base) is not the one the run was trained with."""
    before = manifest.fingerprint.get("frozen")
    if before is None:  # a checkpoint of an earlier version; the processor folder is compared later
        return
    for name in sorted({*before, *now["frozen"]}):
        old_hash, new_hash = str(before.get(name))[:12], str(now["frozen"].get(name))[:12]
        check_same_model(
            name,
            current_hash=now["frozen"].get(name),
            recorded_hash=before.get(name),
            name=RECIPE_KEYS.get(name, name),
            recorded=f"content {old_hash}, now {new_hash}",
        )


def load_progress(path: Path, *, loader: Loader, total: int, report: Callable[[str], None]) -> Progress:
    """Return the progress of a checkpoint. With another batch size the run continues by samples."""
    progress = Progress.from_json(checkpoint.read_progress(path))
    progress.total = total
    if progress.samples != loader.samples_before(progress.step):
        # Steps are renumbered, so the number of the best step is no longer valid.
        progress.step = progress.evaluated = loader.step_at(progress.samples)
        progress.best_step, progress.skip_steps = 0, []
        report(
            f"the batch size is now {loader.batch_size_at(progress.step)}: {progress.samples} samples make this step {progress.step}"
        )
    return progress
