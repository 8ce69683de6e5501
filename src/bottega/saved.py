"""A run after training: evaluate it, sample from it, export it."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega import branches
from bottega.branches.branch import Branch
from bottega.core import checkpoint as checkpoints
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.loop import evaluated
from bottega.core.rundir import RunDirectory
from bottega.core.types import Rows
from bottega.data.loader import evaluate_batches
from bottega.data.present import writing
from bottega.data.source import Source
from bottega.engines.tensors import compare, read_tensors
from bottega.engines.torch import TorchEngine
from bottega.schema.load import load_recipe
from bottega.schema.recipe import Recipe

CARD = "README.md"
"""The last thing an export writes, and so the sign that it is whole."""
TAG = "tags: [bottega]"
TRIES = 5
"""How often a checkpoint is looked for: a training beside us may delete the one that was the last a moment ago."""


@dataclass(frozen=True)
class SavedRun:
    """`bottega.load` gives one. `model` is the plain torch module, with averaged weights where the run kept them."""

    directory: RunDirectory
    checkpoint: Path
    recipe: Recipe
    branch: Branch
    engine: TorchEngine
    progress: dict[str, Any] = field(default_factory=dict)
    """Where the checkpoint stood."""

    @property
    def task(self) -> Any:
        return self.branch.task

    @property
    def model(self) -> Any:
        return self.engine.model

    def evaluate(self, data: str | Path | None = None, *, split: str = "validation") -> dict[str, float]:
        """Means over the run's own validation or test part, or over other data."""
        return self.examined(data, split=split)[0]

    def examined(self, data: str | Path | None = None, *, split: str) -> tuple[dict[str, float], Rows, Source]:
        """The same, with what was found for each example, and the examples."""
        if data is not None:
            source: Source | None = self.branch.other(str(data))
        else:
            source = self.branch.test() if split == "test" else self.branch.validation()
        if source is None:
            raise UsageError(f"this run has no {split} data; give some with --data")
        size = self.recipe.evaluation.batch_size or self.recipe.training.batch_size
        means, rows = evaluated(self.engine, evaluate_batches(source, size))
        return self.branch.summarise({**means, **(self.task.score(rows) if rows else {})}), rows, source

    def generate(self, prompt: str | list[str] | None = None, **asked: Any) -> Any:
        """Texts that go on from the prompts, or an array of samples; options as `bottega generate --help` lists them."""
        if prompt is not None:
            asked["prompt"] = prompt
        try:
            return self.answer(asked, stream=asked.pop("stream", None))
        except UsageError as error:
            raise without_dashes(error) from None

    def answer(self, asked: dict[str, Any], **shown: Any) -> Any:
        """The same for the command line. `shown` is how the work is followed: `stream`, `say`."""
        self.branch.check_asked(asked)
        with self.engine.sampling() as models:
            return self.branch.generate(models, device=self.engine.device, **asked, **shown)

    def export(self, folder: Path | None = None) -> Path:
        """The model in the layout of its ecosystem, with a card that says where it comes from. A new folder appears
        whole or not at all; in the run's own that is there, the card is gone until the rest is written."""
        target = folder or self.directory.final
        is_own = target.resolve() == self.directory.final.resolve()
        if not is_own:
            _refuse_foreign(target)
        with writing(target):
            return self._exported(target, is_own=is_own)

    def _exported(self, target: Path, *, is_own: bool) -> Path:
        if target.exists():
            if is_own:
                (target / CARD).unlink(missing_ok=True)
            self._export_to(target)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            temporary.mkdir()
            self._export_to(temporary)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return target

    def _export_to(self, folder: Path) -> None:
        with self.engine.sampling() as models:
            facts = self.branch.export(models, folder)
        (folder / CARD).write_text(self._card(facts), encoding="utf-8")

    def _card(self, facts: dict[str, Any]) -> str:
        progress = self.progress
        parameters = sum(p.numel() for p in self.model.parameters())
        best = progress.get("best")
        measured = (
            f"- best {self.recipe.evaluation.metric} {best:.4f} at step {progress['best_step']}\n" if best else ""
        )
        head = "".join(f"{name}: {value}\n" for name, value in facts.items())
        return (
            f"---\n{head}{TAG}\n---\n\n"
            f"# {self.directory.path.name}\n\n"
            f"Trained with Bottega, task `{self.recipe.task}`.\n\n"
            f"- {parameters:,} parameters, checkpoint at step {progress['step']}\n{measured}"
            f"- data: `{json.dumps(self.recipe.plain()['data']['train'])}`\n"
        )


def open_run(path: Path, *, checkpoint: str | int = "best", device: str = "auto") -> SavedRun:
    """Verify, rebuild and load. Averaged weights replace the others where the run kept them."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the run's directory. Pickled checkpoints are never read")
    directory = RunDirectory(path).must_exist()
    folder, manifest, progress, state = _read(directory, str(checkpoint))
    recipe = load_recipe([directory.recipe]).recipe
    branch = branches.reopen(recipe, directory.codec, str(manifest.fingerprint.get("data")))
    # Trained in fp16 on a GPU, it can still be read where there is none.
    precision = recipe.training.mixed_precision if recipe.training.mixed_precision != "fp16" else "auto"
    training = recipe.training.model_copy(update={"ema": None, "compile": False, "mixed_precision": precision})
    engine = TorchEngine(branch.task, training, rate=lambda step: 0.0, seed=recipe.seed, device=device)
    compare(state["model.safetensors"], engine.model.state_dict(), folder / "model.safetensors")
    engine.model.load_state_dict({**state["model.safetensors"], **state.get("ema.safetensors", {})})
    return SavedRun(directory, folder, recipe, branch, engine, progress)


def _read(
    directory: RunDirectory, which: str
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    """A verified checkpoint with its weights by file; looked for again where it was deleted while it was read."""
    for left in reversed(range(TRIES)):
        try:
            folder = choose(directory, which)
        except CheckpointError:
            if left and checkpoints.candidates(directory.checkpoints):  # the link was read, and then its target moved
                continue
            raise
        try:
            manifest = checkpoints.verify(folder)
            # What the manifest does not list was not verified, so a file that merely lies there is not read.
            files: list[str] = [name for name in ("model.safetensors", "ema.safetensors") if name in manifest.files]
            weights = {name: read_tensors(folder / name) for name in files}
            return folder, manifest, checkpoints.read_progress(folder), weights
        except (CheckpointError, OSError) as error:
            if not folder.is_dir() and left:
                continue
            others = [
                str(m.step) for path, m in reversed(checkpoints.candidates(directory.checkpoints)) if path != folder
            ]
            remedy = f"the steps {', '.join(others)} are there too" if others else "no other is there; train it again"
            raise CheckpointError(f"{directory.path}: {error}; {remedy}") from None
    raise AssertionError("the last try returns or raises")


def without_dashes(error: UsageError) -> UsageError:
    """Who calls from Python has given a name, not a flag."""
    return UsageError(re.sub(r"(?<!\S)--(?=[a-z])", "", str(error)))


def _refuse_foreign(folder: Path) -> None:
    """An export replaces an earlier export, and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; name a folder to export to")
    if folder.is_dir() and any(folder.iterdir()):
        card = folder / CARD
        if not card.is_file() or TAG not in card.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"{folder}: exists already and is no export of ours; choose another folder, or empty it")


def choose(directory: RunDirectory, which: str) -> Path:
    """best (or last where nothing was evaluated), last, or a step number."""
    folder = directory.checkpoints
    if which in ("best", "last"):
        found = (checkpoints.follow(folder, "best") if which == "best" else None) or checkpoints.follow(folder, "last")
        if found is None:
            raise CheckpointError(f"{directory.path} has no checkpoint yet")
        return found
    if not which.isdigit():
        raise UsageError(f"--checkpoint {which}: expected best, last or a step number")
    path = folder / checkpoints.step_name(int(which))
    if not path.is_dir():
        kept = ", ".join(str(m.step) for _, m in reversed(checkpoints.candidates(folder)))
        raise UsageError(f"{directory.path} has no checkpoint at step {which}; there is {kept or 'none'}")
    return path
