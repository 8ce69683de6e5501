"""A run after training: evaluate it, sample from it, export it."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bottega.config.conflicts import find_injection
from bottega.config.data import get_source_names
from bottega.config.recipe import Recipe
from bottega.core import checkpoint as checkpoints
from bottega.core.engine import Engine
from bottega.core.errors import CheckpointError, DataError, EnvironmentProblem, UsageError
from bottega.core.rundir import RunDirectory, is_run, split_checkpoint_path
from bottega.core.trainer import evaluate_with_rows
from bottega.core.types import Models, Rows
from bottega.data.loading.loader import iter_eval_batches
from bottega.data.output_files import explain_write_errors
from bottega.data.sources.source import Source
from bottega.engines.backend import open_backend
from bottega.models.decoder.layout import OWN_MODEL_TYPE, explain_own_layout, shape_from_config
from bottega.models.folders.tensors import check_tensors, read_tensors
from bottega.storage.durable import remove_leftovers, writing_folder
from bottega.tasks import plugins, registry
from bottega.tasks.data_paths import DataMissing
from bottega.tasks.evaluation_data import DataRequest, EvaluationData, choose_data
from bottega.tasks.frozen_models import BASE
from bottega.tasks.prediction import NewSamples
from bottega.tasks.recipes import load_saved_recipe
from bottega.tasks.workload import Workload
from bottega.techniques.apply_injection import build_injected_task
from bottega.techniques.continual.per_source_metrics import PerSourceMetrics
from bottega.techniques.injected_layers import InjectedTask
from bottega.terminal import print_notice

CARD = "README.md"
"""The last thing an export writes, and so the sign that it is whole."""
TAG = "tags: [bottega]"
ADAPTER = "adapter"
"""In an export, the folder of what was put into a base."""
WEIGHTS = ("model.safetensors", "ema.safetensors")
"""The files of a checkpoint that a saved run is opened from."""
TRIES = 5
"""How often a checkpoint is looked for: a training beside us may delete the one that was the last a moment ago."""


@dataclass(frozen=True)
class SavedRun:
    """`bottega.load` gives one. `model` is the plain torch module, with averaged weights where the run kept them."""

    directory: RunDirectory
    checkpoint: Path
    recipe: Recipe
    workload: Workload
    engine: Engine
    progress: dict[str, Any] = field(default_factory=dict)
    """Where the checkpoint stood."""
    injected: InjectedTask | None = None
    """What was put into the model, where something was."""
    base_hash: str | None = None
    """The hash of what the model is then built on and does not train."""

    def __repr__(self) -> str:
        """One line: the run, its task and the checkpoint that was opened."""
        return f"<SavedRun {self.directory.path}: {self.recipe.task}, {self.checkpoint.name}>"

    @property
    def task(self) -> Any:
        return self.workload.task

    @property
    def model(self) -> Any:
        return self.engine.model

    def evaluate(self, data: str | Path | None = None, *, split: str | None = None) -> dict[str, float]:
        """Means over the run's own validation or test part, or over other data."""
        path = str(data) if data is not None else None
        try:
            return self.evaluate_data(self.select_data(DataRequest(path, split=split)))[0]
        except UsageError as error:
            raise without_flag_dashes(error) from None

    def select_data(self, request: DataRequest) -> EvaluationData:
        """What of the run's own data, or of other data, a request means."""
        try:
            return choose_data(self.workload, self.recipe, request)
        except DataMissing as error:
            raise DataError(f"{error}, or name data that it has not seen") from None

    def evaluate_data(self, chosen: EvaluationData) -> tuple[dict[str, float], Rows, Source]:
        """The metrics over some data, with what was found for each example, and the examples."""
        try:
            source = chosen.source(self.workload)
        except DataMissing as error:
            raise DataError(f"{error}, or measure other data with --data") from None
        size = self.recipe.evaluation.batch_size or self.recipe.training.batch_size
        means, rows = evaluate_with_rows(self.engine, iter_eval_batches(source, size))
        return self.workload.summarise({**means, **(self.task.score(rows) if rows else {})}), rows, source

    def predict(
        self,
        inputs: str | Sequence[str] = (),
        *,
        data: str | Path | None = None,
        part: str | None = None,
        standard_input: TextIO | None = None,
    ) -> list[dict[str, Any]]:
        """The class of each text, file or row of numbers, with the probabilities of all; options as of `bottega.predict`."""
        words = [inputs] if isinstance(inputs, str | Path) else inputs
        with self.engine.sampling() as models:
            new = NewSamples(list(map(str, words)), str(data) if data is not None else None, standard_input)
            return self.workload.predict_samples(models, new, part=part, device=self.engine.device)

    def generate(self, prompt: str | list[str] | None = None, **asked: Any) -> Any:
        """Texts that go on from the prompts, or an array of samples; options as `bottega generate --help` lists them."""
        if prompt is not None:
            asked["prompt"] = prompt
        try:
            return self.generate_samples(asked, stream=asked.pop("stream", None))
        except UsageError as error:
            raise without_flag_dashes(error) from None

    def generate_samples(self, asked: dict[str, Any], **shown: Any) -> Any:
        """The same for the command line. `shown` is how the work is followed: `stream`, `say`."""
        self.workload.check_request(asked)
        with self.engine.sampling() as models:
            return self.workload.generate(models, device=self.engine.device, **asked, **shown)

    def export(self, folder: str | Path | None = None) -> Path:
        """The model in the layout of its ecosystem, with a card that says where it comes from. It is written beside the
        folder, checked, and put in its place: an earlier export is there until the new one is whole."""
        target = Path(folder) if folder is not None else self.directory.final
        if target.resolve() == self.directory.final.resolve():
            self.directory.check_no_links()
        else:
            _refuse_foreign(target)
        with explain_write_errors(target):
            place = target.resolve()  # a link of the user's stays a link
            place.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(place.parent, place.name)
            with writing_folder(place) as temporary:
                self._export_to(temporary)
                _copy_others(place, temporary)
        return target

    def _export_to(self, folder: Path) -> None:
        with self.engine.sampling() as models:
            facts = self._written(models, folder)
        (folder / CARD).write_text(self._card(facts), encoding="utf-8")
        _share(folder)
        check_export(folder)

    def _written(self, models: Models, folder: Path) -> dict[str, Any]:
        def whole() -> dict[str, Any]:
            return self.workload.export(models, folder)

        if self.injected is None:
            return whole()
        return self.injected.export(models["model"], folder / ADAPTER, origin=self._start(), whole=whole)

    def _start(self) -> str | None:
        """The base as others would find it: a hub name or a folder as the recipe has it, and of a run its export."""
        named: str | None = getattr(self.recipe.model, "from_", None)
        folder: str | None = getattr(self.workload.task, "pretrained", None)
        is_export = folder is not None and is_run(Path(folder).parent)
        return folder if is_export else named

    def _about_base(self) -> str:
        if self.injected is None:
            return ""
        named = self._start()
        base = f"`{named}`" if named is not None else f"random weights of seed {self.recipe.seed}"
        return (
            f"- `{ADAPTER}/` holds the parameters that learnt; {self.injected.export_note}\n"
            f"- base: {base}, sha256 {self.base_hash}\n"
        )

    def _about_data(self) -> str:
        """Of each source what was said of it."""
        data = self.recipe.data
        said = [one.model_dump(mode="json", exclude_defaults=True) for one in data.sources or (data.train,)]
        lines = ["; ".join(f"{key} `{_word(value)}`" for key, value in one.items()) for one in said if one]
        return "".join(f"- data: {line}\n" for line in lines)

    def _card(self, facts: dict[str, Any]) -> str:
        progress = self.progress
        every = self.engine.parameters().values()
        learnt, total = sum(one.size for one in every if one.is_trainable), sum(one.size for one in every)
        parameters = f"{total:,} parameters" if learnt == total else f"{learnt:,} of {total:,} parameters learnt"
        best = progress.get("best")
        measured = (
            f"- best {self.recipe.evaluation.metric} {best:.4f} at step {progress['best_step']}\n" if best else ""
        )
        needed = f"- needs {facts['needs']}\n" if "needs" in facts else ""
        head = "".join(f"{name}: {value}\n" for name, value in facts.items() if name != "needs")
        return (
            f"---\n{head}{TAG}\n---\n\n"
            f"# {self.directory.path.name}\n\n"
            f"Trained with Bottega, task `{self.recipe.task}`.\n\n"
            f"- {parameters}, checkpoint at step {progress['step']}\n{measured}"
            f"{self._about_base()}{needed}{self._about_data()}"
        )


def open_run(path: Path, *, checkpoint: str | int = "best", device: str = "auto", needs_best: bool = False) -> SavedRun:
    """Verify, rebuild and load a run, or one of its checkpoints by its path. Averaged weights replace the others where the
    run kept them.

    Where the best checkpoint is gone or damaged the newest good one takes its place, and a line says so; with `needs_best`
    that is an error.
    """
    path, checkpoint = resolve_run_and_checkpoint(path, checkpoint)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the run's directory. Pickled checkpoints are never read")
    directory = RunDirectory(path).must_exist()
    folder, manifest, progress, state = _read(directory, str(checkpoint), needs_best=needs_best)
    recipe = load_saved_recipe(directory.recipe)
    if (changed := plugins.plugin_change_note(recipe, directory.path)) is not None:
        print_notice(f"bottega: {changed}")
    here = recipe if device == "auto" else recipe.model_copy(update={"device": device})
    workload = registry.reopen_workload(here, directory.processor, str(manifest.fingerprint.get("data")))
    # Trained in fp16 on a GPU, it can still be read where there is none.
    precision = recipe.training.mixed_precision if recipe.training.mixed_precision != "fp16" else "auto"
    training = recipe.training.model_copy(update={"ema": None, "compile": False, "mixed_precision": precision})
    technique = find_injection(recipe)
    parts = build_injected_task(workload.task, technique, of=workload.task) if technique is not None else None
    task = parts or workload.task
    if recipe.data.mixture == "sequence":  # measured as training measures it
        task = PerSourceMetrics(inner=task, names=tuple(get_source_names(recipe.data.sources or ())))
    backend = open_backend(recipe.engine)
    backend.limit_threads(recipe.cpu_threads)
    engine = backend.build_engine(task, training, seed=recipe.seed, device=device)
    base = parts.hash_base(engine.model) if parts is not None else None
    before = (manifest.fingerprint.get("frozen") or {}).get(BASE)
    if base != before:
        named = getattr(recipe.model, "from_", None)
        raise CheckpointError(
            f"{directory.path}: model.from {named} is another base than this run was trained with "
            f"({str(before)[:12]}, now {str(base)[:12]}); put that one back"
        )
    engine.load_weights(state, folder)
    return SavedRun(directory, folder, recipe, workload, engine, progress, parts, base)


def resolve_run_and_checkpoint(path: Path, checkpoint: str | int = "best") -> tuple[Path, str]:
    """A run directory and which checkpoint of it, where the path may name both."""
    run, named = split_checkpoint_path(path)
    if named is not None and str(checkpoint) not in ("best", named):
        raise UsageError(f"--checkpoint {checkpoint}: {path} is a checkpoint already; leave one of them out")
    return run, named or str(checkpoint)


def _read(
    directory: RunDirectory, which: str, *, needs_best: bool
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    """A verified checkpoint with its weights by file; looked for again where it was deleted while it was read."""
    for left in reversed(range(TRIES)):
        folder = choose_checkpoint(directory, which, needs_best=needs_best)
        try:
            return _read_folder(folder)
        except (CheckpointError, OSError) as error:
            if not folder.is_dir() and left:
                continue
            if which == "best" and not needs_best:
                return _read_instead(directory, folder, error)
            others = [
                str(m.step)
                for path, m in reversed(checkpoints.list_checkpoints(directory.checkpoints))
                if path != folder
            ]
            remedy = f"the steps {', '.join(others)} are there too" if others else "no other is there; train it again"
            raise CheckpointError(f"{directory.path}: {error}; {remedy}") from None
    raise AssertionError("the last try returns or raises")


def _read_folder(folder: Path) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    manifest = checkpoints.verify(folder, only=(*WEIGHTS, "progress.json"))
    # What the manifest does not list was not verified, so a file that merely lies there is not read.
    files = [name for name in WEIGHTS if name in manifest.files]
    weights = {name: read_tensors(folder / name) for name in files}
    return folder, manifest, checkpoints.read_progress(folder), weights


def _read_instead(
    directory: RunDirectory, damaged: Path, problem: Exception
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    """The newest good checkpoint, because the best one cannot be used."""
    good = checkpoints.find_newest_valid(directory.checkpoints, lambda text: None)
    if good is None:
        raise CheckpointError(f"{directory.path}: {problem}; no other is there; train it again")
    print_notice(
        f"bottega: warning: {directory.path}: {problem}; using {good[0].name}, the newest good checkpoint, in place of the best"
    )
    return _read_folder(good[0])


def check_export(folder: Path) -> None:
    """Read back what was written, so that an export that cannot be opened never takes the place of one that can."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            check_tensors(path)
        elif path.suffix == ".json":
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise EnvironmentProblem(f"cannot write {path}: it reads back damaged ({error}); try again") from None


def _copy_others(before: Path, after: Path) -> None:
    """What else lies in an exported folder, such as notes, stays there."""
    for path in sorted(before.rglob("*")) if before.is_dir() else ():
        other = after / path.relative_to(before)
        if not path.is_dir() and not os.path.lexists(other):
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, other, follow_symlinks=False)


def _share(folder: Path) -> None:
    """Every file as readable as a new one is here: safetensors are written for their owner alone."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with suppress(PermissionError):  # of somebody else, who shares the folder
                path.chmod(mode)


def list_export_notes(folder: Path) -> list[str]:
    """What who opens an export elsewhere must know: which models of it no other library computes."""
    found = []
    for path in sorted(folder.rglob("config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") == OWN_MODEL_TYPE:
            where = "" if path.parent == folder else f"{path.parent.relative_to(folder)}: "
            found.append(
                f"{where}written in our own layout ({OWN_MODEL_TYPE}), which model.from reads; transformers has no class for it, "
                f"because {explain_own_layout(shape_from_config(config, path))}"
            )
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def without_flag_dashes(error: UsageError) -> UsageError:
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


def choose_checkpoint(directory: RunDirectory, which: str, *, needs_best: bool = False) -> Path:
    """best (or last where nothing was evaluated), last, or a step number."""
    folder = directory.checkpoints
    if which in ("best", "last"):
        newest = checkpoints.find_newest(folder)
        if newest is None:
            is_empty = not checkpoints.list_step_folders(folder)
            problem = "has no checkpoint yet" if is_empty else "has no checkpoint with a readable MANIFEST.json"
            raise CheckpointError(f"{directory.path} {problem}")
        return newest if which == "last" else _choose_best(directory, newest, needs_best=needs_best)
    if not which.isdigit():
        raise UsageError(f"--checkpoint {which}: expected best, last or a step number")
    path = folder / checkpoints.step_folder_name(int(which))
    if not path.is_dir():
        kept = ", ".join(str(m.step) for _, m in reversed(checkpoints.list_checkpoints(folder)))
        raise UsageError(f"{directory.path} has no checkpoint at step {which}; there is {kept or 'none'}")
    return path


def _choose_best(directory: RunDirectory, newest: Path, *, needs_best: bool) -> Path:
    best, step = checkpoints.find_best(directory.checkpoints)
    if not step or (best is not None and checkpoints.read_manifest(best).step == step):
        return best or newest
    instead = best or newest
    problem = f"{directory.path}: the best checkpoint, step {step}, is gone"
    if needs_best:
        other = checkpoints.read_manifest(instead).step
        raise CheckpointError(f"{problem}; say --checkpoint {other} to take {instead.name}")
    print_notice(f"bottega: warning: {problem}; using {instead.name} in its place")
    return instead
