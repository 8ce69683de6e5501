"""The composition root: recipe -> parts -> session; and what the library offers of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.core.errors import UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.schema import needs
from bottega.schema.load import Resolved, check_recipe, global_batch, load_recipe, parse_overrides, to_yaml
from bottega.schema.recipe import BUILT_TASKS, Recipe
from bottega.session import Run, Session

if TYPE_CHECKING:
    from bottega.saved import SavedRun

__all__ = ["Run", "load", "part", "refuse_unbuilt", "train", "train_command"]


def train(
    recipe: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
    *,
    quiet: bool = True,
    fresh: bool = False,
) -> Run:
    """Train a recipe by name, file or dict; later ones and overrides win. The same call resumes the same run."""
    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    resolved = load_recipe([*sources, overrides or {}])
    return _train(resolved, quiet=quiet, fresh=fresh)


def load(path: str | Path, *, checkpoint: str | int = "best", device: str = "auto") -> SavedRun:
    """A run back from its directory: its task, its model, and what one can do with them."""
    from bottega.saved import open_run

    return open_run(Path(path), checkpoint=checkpoint, device=device)


def train_command(
    words: list[str], *, fresh: bool, resume_from: Path | None, allow_data_change: bool, quiet: bool
) -> dict[str, Any]:
    """`bottega train`: the result as --json prints it."""
    sources, overrides = parse_overrides(words)
    if not sources:
        raise UsageError("say what to train: bottega train RECIPE, such as bottega train language")
    resolved = check_recipe(sources, overrides)
    if len(resolved.task_candidates) == 1:
        refuse_unbuilt(resolved.recipe)  # before asking for what such a task would need
    run = _train(
        load_recipe(sources, overrides),
        quiet=quiet,
        fresh=fresh,
        resume_from=resume_from,
        allow_data_change=allow_data_change,
    )
    return {"run": str(run.path), "step": run.step, "metrics": run.metrics}


def _train(
    resolved: Resolved,
    *,
    quiet: bool,
    fresh: bool = False,
    resume_from: Path | None = None,
    allow_data_change: bool = False,
) -> Run:
    recipe = resolved.recipe
    refuse_unbuilt(recipe)
    global_batch(recipe, int(os.environ.get("WORLD_SIZE", 1)))  # before anybody waits for the other processes
    for name in needs.referenced(recipe):
        part(recipe, name, quiet=quiet)
    is_main = int(os.environ.get("RANK", 0)) == 0
    directory = RunDirectory(Path(recipe.output_dir) / recipe.run_name())
    if not is_main:
        return Session(recipe, directory, quiet=True, resume_from=resume_from, allow=allow_data_change).run()
    if fresh and directory.path.exists():
        _set_aside(directory.path)
    directory.create()
    with Lock(directory):
        session = Session(recipe, directory, quiet=quiet, resume_from=resume_from, allow=allow_data_change)
        for note in resolved.notes:
            session.console.say(note)
        return session.run()


def part(recipe: Recipe, name: str, *, quiet: bool = True, beside: Path | None = None) -> Path:
    """The finished, exported run of a need; trained first where it is not there yet, and then only once."""
    run = needs.part_run(recipe, name, beside=beside)
    if recipe.needs[name].run is not None:
        RunDirectory(run).must_exist()
        return run
    if not _is_exported(run):
        wanted = needs.part_recipe(recipe, name).model_copy(update={"output_dir": str(run.parent)})
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            if not quiet:
                sys.stderr.write(f"bottega: needs.{name} is trained first: {run}\n")
            _train(Resolved(wanted, (wanted.task,)), quiet=quiet)
            load(run).export()
        elif int(os.environ.get("RANK", 0)) == 0:
            _train_apart(wanted, run)
        else:
            while not _is_exported(run):  # a launcher ends everybody if the one that trains it fails
                time.sleep(0.5)
    return run


def _is_exported(run: Path) -> bool:
    return (run / "final" / "README.md").is_file()  # the card is the last thing an export writes


def _train_apart(recipe: Recipe, run: Path) -> None:
    """A part is one process's work; inside a launched group it needs an environment without the group."""
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.parent / f"{run.name}.yaml"
    file.write_text(to_yaml(recipe), encoding="utf-8")
    grouped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    alone = {
        key: value for key, value in os.environ.items() if key not in grouped and not key.startswith("TORCHELASTIC")
    }
    for words in (["train", str(file), f"name={run.name}"], ["export", str(run)]):
        done = subprocess.run([sys.executable, "-m", "bottega", *words], env=alone, check=False)
        if done.returncode:
            raise UsageError(f"{run} could not be made: bottega {words[0]} ended with {done.returncode}")


def refuse_unbuilt(recipe: Recipe) -> None:
    """What has its schema but no code behind it yet is refused by name, before anything heavy is imported."""
    if recipe.task not in BUILT_TASKS:
        raise UsageError(f"task: {recipe.task} cannot be trained yet; there is {', '.join(BUILT_TASKS)}")
    for key, is_asked in {
        f"engine: {recipe.engine}": recipe.engine != "torch",
        "techniques": bool(recipe.techniques),
        "distributed.backend": recipe.distributed.backend != "auto",
        "distributed.strategy: fsdp": recipe.distributed.strategy == "fsdp",
        "distributed.offload": recipe.distributed.offload,
        "training.label_smoothing": recipe.training.label_smoothing > 0 and recipe.task != "classify",
    }.items():
        if is_asked:
            raise UsageError(f"{key} is understood but not built yet; leave it out")
    wanted, world = recipe.distributed.processes, int(os.environ.get("WORLD_SIZE", 1))
    if wanted is not None and wanted != world:
        start = f"torchrun --nproc_per_node {wanted} -m bottega train …"
        raise UsageError(f"distributed.processes: {wanted} asked for, {world} started; start them with {start}")


def _set_aside(path: Path) -> None:
    """--fresh loses nothing: the old run keeps its files under another name."""
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with Lock(RunDirectory(path)):
        os.rename(path, other)
    sys.stderr.write(f"bottega: the old run is kept as {other}\n")
