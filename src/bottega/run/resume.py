"""Which state a run starts from: its own newest good checkpoint, one given by hand, or none."""

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
"""Keys a resumed run may change: it then goes on by samples, and is no longer equal bit for bit."""

BATCHES = ("training.batch_size", "training.gradient_accumulation_steps")
"""Keys that would move the turns of a sequence, and with them what was remembered at their ends; and of a stream, what
comes again."""

ROUNDING = (
    "training.micro_batch_size",
    "training.compile",
    "training.gradient_checkpointing",
    "deterministic",
    "cpu_threads",
)
"""Keys that change a result by rounding, or the draws of dropout."""

LENGTH = ("training.max_steps", "training.num_epochs")


def find_checkpoint(
    run: RunDirectory, resume_from: Path | None, say: Callable[[str], None]
) -> tuple[Path, checkpoint.Manifest] | None:
    """The verified checkpoint to load. One asked for by name is used or refused, never silently replaced."""
    own = checkpoint.list_checkpoints(run.checkpoints)
    if resume_from is not None and own and run.path.resolve() not in resume_from.resolve().parents:
        # The same command again, perhaps by a scheduler: the run has gone on since it was started from there.
        say(f"{run.path} has checkpoints of its own; going on from those, not from {resume_from}")
        resume_from = None
    if resume_from is None:
        good = checkpoint.find_newest_valid(run.checkpoints, say)
        if good is None and has_begun(run):
            raise CheckpointError(f"no checkpoint in {run.checkpoints} can be trusted; start over with --fresh")
        return good
    path = resolve_checkpoint_path(resume_from)
    return path, checkpoint.verify(path)


def resolve_checkpoint_path(path: Path) -> Path:
    """A checkpoint folder from what a person gives: the folder itself, or a run (its last one)."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder with a MANIFEST.json, and pickles are never read"
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
    """Refuse to go on under another recipe; return what may differ and does, in words.

    Where nothing was saved yet there is nothing to go on from, and the run begins under the new one.
    """
    if not run.recipe.is_file() or not has_begun(run):
        return []
    old = load_saved_recipe(run.recipe)
    refused, noted = [], []
    curriculum = recipe.data.curriculum
    # Stages that are a share of the run would move with its end, and with them what was seen already.
    is_sequence = recipe.data.mixture == "sequence"
    is_ordered = is_sequence or recipe.data.online is not None
    can_differ = not is_sequence and (curriculum is None or not curriculum.depends_on_run_length)
    for key, before, after in diff_recipes(old, recipe):
        if key in LENGTH and (before or 0) < (after or 0) and can_differ:
            noted.append(f"{key}: {before} -> {after}")
        elif key in LENGTH and can_differ and before is not None and after is not None:
            noted.append(f"{key}: {before} -> {after}; the run ends there, or now if it is past that")
        elif key in MAY_CHANGE and not (is_ordered and key in BATCHES):
            noted.append(f"{key}: {before} -> {after}, going on by samples; no longer bit for bit the same run")
        else:
            refused.append(f"{key}: {_said(before)} -> {_said(after)}")
    for key in ROUNDING:
        before, after = _value(old, key), _value(recipe, key)
        if before != after:
            noted.append(f"{key}: {before} -> {after}; no longer bit for bit the same run")
    if refused:
        raise UsageError(
            f"{run.path} was started with another recipe ({'; '.join(refused)}); choose another name or say --fresh"
        )
    return noted


def has_begun(run: RunDirectory) -> bool:
    """Whether there is a checkpoint, be it a damaged one."""
    return bool(checkpoint.list_step_folders(run.checkpoints))


def _said(value: Any) -> Any:
    """Of a list of blocks what tells them apart, which is enough where one was added or taken away."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return f"[{', '.join(str(item.get('name') or item.get('path') or item) for item in value)}]"
    return value


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_data_unchanged(
    manifest: checkpoint.Manifest, now: Mapping[str, Any], *, allow: bool, say: Callable[[str], None]
) -> None:
    before = manifest.fingerprint
    if before.get("data") != now.get("data"):
        text = (
            f"the data has changed since the checkpoint ({str(before.get('data'))[:12]} -> {str(now.get('data'))[:12]})"
        )
        if not allow:
            raise DataError(f"{text}; undo the change, start over with --fresh, or say --allow-data-change")
        say(f"{text}; going on as asked")
    elif "derived" in before and before["derived"] != now.get("derived"):
        text = "a model says something else of the same data than when this run began (other keywords)"
        if not allow:
            raise DataError(f"{text}; go on where it began, start over with --fresh, or say --allow-data-change")
        say(f"{text}; going on as asked")
    other = [key for key in ("packages", "device", "world") if before.get(key) != now.get(key)]
    if other:
        changes = "; ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in other)
        say(f"resumed elsewhere ({changes}): the same samples in the same order, but not bit for bit the same numbers")


def check_frozen_unchanged(manifest: checkpoint.Manifest, now: Mapping[str, Any]) -> None:
    """The weights mean nothing beside another autoencoder, tokenizer or text encoder, whatever is allowed of the data."""
    before = manifest.fingerprint.get("frozen")
    if before is None:  # a checkpoint of an earlier version; what lies in codec/ is compared later
        return
    for name in sorted({*before, *now["frozen"]}):
        was, found = str(before.get(name))[:12], str(now["frozen"].get(name))[:12]
        check_same_model(
            name,
            now=now["frozen"].get(name),
            before=before.get(name),
            name=RECIPE_KEYS.get(name, name),
            previous=f"content {was}, now {found}",
        )


def load_progress(path: Path, *, loader: Loader, total: int, say: Callable[[str], None]) -> Progress:
    """Where the checkpoint stood. With another batch size the run goes on by samples."""
    progress = Progress.from_json(checkpoint.read_progress(path))
    progress.total = total
    if progress.samples != loader.samples_before(progress.step):
        # Steps are counted anew, so the number of the best one means nothing any more.
        progress.step = progress.evaluated = loader.step_at(progress.samples)
        progress.best_step, progress.skip_steps = 0, []
        say(
            f"batches are of {loader.batch_size_at(progress.step)} samples now: {progress.samples} samples seen make this step {progress.step}"
        )
    return progress
