"""A finished run opened from its directory: evaluate it, predict, generate, export."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bottega.config.conflicts import find_injection
from bottega.config.data import get_source_names
from bottega.config.recipe import Recipe
from bottega.core import checkpoint as checkpoints
from bottega.core.engine import Engine
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.core.rundir import RunDirectory, split_checkpoint_path
from bottega.core.trainer import evaluate_with_rows
from bottega.core.types import Rows
from bottega.data.loading.loader import iter_eval_batches
from bottega.data.sources.source import Source
from bottega.engines.backend import open_backend
from bottega.run.export import RunExporter
from bottega.tasks import plugins, registry
from bottega.tasks.data_paths import DataMissing
from bottega.tasks.evaluation_data import DataRequest, EvaluationData, choose_data
from bottega.tasks.frozen_models import BASE
from bottega.tasks.prediction import NewSamples
from bottega.tasks.recipes import load_saved_recipe
from bottega.tasks.workload import Workload
from bottega.techniques.continual.per_source_metrics import PerSourceMetrics
from bottega.terminal import print_notice

if TYPE_CHECKING:
    from bottega.techniques.injected_layers import InjectedTask

TensorReader = Callable[[Path], Mapping[str, Any]]
"""Reads a safetensors file as tensors of the engine, by name."""
WEIGHT_FILES = ("model.safetensors", "ema.safetensors")
"""Files of a checkpoint that a saved run is loaded from."""
NUM_ATTEMPTS = 5
"""Attempts to read a checkpoint: a training process may delete an old one at any moment."""


@dataclass(frozen=True)
class SavedRun:
    """A trained run, returned by `bottega.load`. `model` is a torch module, with averaged weights if the run has them."""

    directory: RunDirectory
    checkpoint: Path
    recipe: Recipe
    workload: Workload
    engine: Engine
    progress: dict[str, Any] = field(default_factory=dict)
    """Contents of the checkpoint's progress.json."""
    injected: InjectedTask | None = None
    """The task with LoRA or adapter layers, if the run has any."""
    base_hash: str | None = None
    """The hash of the frozen base model under those layers."""

    def __repr__(self) -> str:
        """Return the run, its task and the checkpoint in one line."""
        return f"<SavedRun {self.directory.path}: {self.recipe.task}, {self.checkpoint.name}>"

    @property
    def task(self) -> Any:
        """The run's task."""
        return self.workload.task

    @property
    def model(self) -> Any:
        """The trained model; a torch module with the torch engine."""
        return self.engine.model

    def evaluate(self, data: str | Path | None = None, *, split: str | None = None) -> dict[str, float]:
        """Return the metrics over the run's own validation or test split, or over other data."""
        path = str(data) if data is not None else None
        try:
            return self.evaluate_data(self.select_data(DataRequest(path, split=split)))[0]
        except UsageError as error:
            raise strip_flag_dashes(error) from None

    def select_data(self, request: DataRequest) -> EvaluationData:
        """Return the data that a request names: a split of the run's own data, or other data."""
        try:
            return choose_data(self.workload, self.recipe, request)
        except DataMissing as error:
            raise DataError(f"{error}, or give other data") from None

    def evaluate_data(self, data: EvaluationData) -> tuple[dict[str, float], Rows, Source]:
        """Return the metrics over `data`, the rows of results per sample, and the source of the samples."""
        try:
            source = data.open_source(self.workload)
        except DataMissing as error:
            raise DataError(f"{error}, or evaluate other data with --data") from None
        batch_size = self.recipe.evaluation.batch_size or self.recipe.training.batch_size
        means, rows = evaluate_with_rows(self.engine, iter_eval_batches(source, batch_size))
        return self.workload.summarise({**means, **(self.task.score(rows) if rows else {})}), rows, source

    def predict(
        self,
        inputs: str | Sequence[str] = (),
        *,
        data: str | Path | None = None,
        part: str | None = None,
        standard_input: TextIO | None = None,
    ) -> list[dict[str, Any]]:
        """Return a prediction with probabilities for each text, file or row of numbers; options as in `bottega.predict`."""
        items = [inputs] if isinstance(inputs, str | Path) else inputs
        with self.engine.sampling() as models:
            samples = NewSamples(list(map(str, items)), str(data) if data is not None else None, standard_input)
            return self.workload.predict_samples(models, samples, part=part, device=self.engine.device)

    def generate(self, prompt: str | list[str] | None = None, **request: Any) -> Any:
        """Generate texts from prompts, or an array of samples; options as listed by `bottega generate --help`."""
        if prompt is not None:
            request["prompt"] = prompt
        try:
            return self.generate_samples(request, stream=request.pop("stream", None))
        except UsageError as error:
            raise strip_flag_dashes(error) from None

    def generate_samples(self, request: dict[str, Any], **display: Any) -> Any:
        """Generate for the command line; `display` are the callbacks `stream` and `progress`."""
        self.workload.sampler.check_request(request)
        with self.engine.sampling() as models:
            return self.workload.sampler.generate(models, device=self.engine.device, **request, **display)

    def export(self, folder: str | Path | None = None) -> Path:
        """Export the model in the layout of its ecosystem to `folder`, or to `final` of the run; return the folder."""
        exporter = RunExporter(
            self.directory, self.recipe, self.workload, self.engine, self.progress, self.injected, self.base_hash
        )
        return exporter.export(Path(folder) if folder is not None else None)


def open_run(
    path: Path,
    *,
    checkpoint: str | int = "best",
    device: str = "auto",
    needs_best: bool = False,
    engine: str | None = None,
) -> SavedRun:
    """Verify, rebuild and load a run, or one of its checkpoints given by path, with averaged weights if the run has them.

    If the best checkpoint is missing or damaged, the newest valid one is used with a warning; with `needs_best` that is an
    error. `engine` opens it in another framework than it was trained in.
    """
    path, checkpoint = resolve_run_and_checkpoint(path, checkpoint)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the run's directory (pickled checkpoints are never read)")
    directory = RunDirectory(path).must_exist()
    recipe = load_saved_recipe(directory.recipe)
    if engine is not None:
        recipe = recipe.model_copy(update={"engine": engine})
    backend = open_backend(recipe.engine)
    folder, manifest, progress, weights = _read_checkpoint(
        directory, str(checkpoint), backend.read_tensors, needs_best=needs_best
    )
    if (plugin_note := plugins.describe_plugin_change(recipe, directory.path)) is not None:
        print_notice(f"bottega: {plugin_note}")
    device_recipe = recipe if device == "auto" else recipe.model_copy(update={"device": device})
    workload = registry.reopen_workload(device_recipe, directory.processor, str(manifest.fingerprint.get("data")))
    # A run trained in fp16 on a GPU can still be loaded on a CPU.
    precision = recipe.training.mixed_precision if recipe.training.mixed_precision != "fp16" else "auto"
    training = recipe.training.model_copy(update={"ema": None, "compile": False, "mixed_precision": precision})
    technique = find_injection(recipe)
    injected: InjectedTask | None = None
    if technique is not None:
        if recipe.engine == "jax":
            raise UsageError(
                f"{directory.path}: engine: jax has no {technique.name}; export the run, and give the folder of its export"
            )
        from bottega.techniques.apply_injection import build_injected_task  # imports torch

        injected = build_injected_task(workload.task, technique, workload_task=workload.task)
    task = injected or workload.task
    if recipe.data.mixture == "sequence":  # the same metrics as in training
        task = PerSourceMetrics(inner=task, names=tuple(get_source_names(recipe.data.sources or ())))
    backend.limit_threads(recipe.cpu_threads)
    built = backend.build_engine(task, training, seed=recipe.seed, device=device)
    base_hash = injected.hash_base(built.model) if injected is not None else None
    expected_hash = (manifest.fingerprint.get("frozen") or {}).get(BASE)
    if base_hash != expected_hash:
        from_ = getattr(recipe.model, "from_", None)
        raise CheckpointError(
            f"{directory.path}: model.from {from_} is not the base model that this run was trained with "
            f"({str(expected_hash)[:12]}, now {str(base_hash)[:12]}); restore it"
        )
    built.load_weights(weights, folder)
    return SavedRun(directory, folder, recipe, workload, built, progress, injected, base_hash)


def resolve_run_and_checkpoint(path: Path, checkpoint: str | int = "best") -> tuple[Path, str]:
    """Return the run directory and the checkpoint, either of which `path` may name."""
    run, checkpoint_name = split_checkpoint_path(path)
    if checkpoint_name is not None and str(checkpoint) not in ("best", checkpoint_name):
        raise UsageError(f"--checkpoint {checkpoint}: {path} is already a checkpoint; keep one of the two")
    return run, checkpoint_name or str(checkpoint)


def _read_checkpoint(
    directory: RunDirectory, which: str, read: TensorReader, *, needs_best: bool
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the folder, manifest, progress and weights (file -> name -> tensor) of a verified checkpoint.

    `which` is best, last or a step number. Another attempt follows if the checkpoint was deleted while it was read.
    """
    for attempts_left in reversed(range(NUM_ATTEMPTS)):
        folder = choose_checkpoint(directory, which, needs_best=needs_best)
        try:
            return _read_checkpoint_folder(folder, read)
        except (CheckpointError, OSError) as error:
            if not folder.is_dir() and attempts_left:
                continue
            if which == "best" and not needs_best:
                return _read_newest_valid(directory, error, read)
            other_steps = [
                str(other.step)
                for path, other in reversed(checkpoints.list_checkpoints(directory.checkpoints))
                if path != folder
            ]
            remedy = (
                f"choose from the steps {', '.join(other_steps)} with --checkpoint"
                if other_steps
                else "there is no other checkpoint; train the run again"
            )
            raise CheckpointError(f"{directory.path}: {error}; {remedy}") from None
    raise AssertionError("the last attempt returns or raises")


def _read_checkpoint_folder(
    folder: Path, read: TensorReader
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    manifest = checkpoints.verify(folder, only=(*WEIGHT_FILES, "progress.json"))
    # A file that the manifest does not list was not verified, so it is not read.
    files = [name for name in WEIGHT_FILES if name in manifest.files]
    weights = {name: dict(read(folder / name)) for name in files}
    return folder, manifest, checkpoints.read_progress(folder), weights


def _read_newest_valid(
    directory: RunDirectory, problem: Exception, read: TensorReader
) -> tuple[Path, checkpoints.Manifest, dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the newest valid checkpoint, because `problem` prevents the use of the best one, and print a warning."""
    newest_valid = checkpoints.find_newest_valid(directory.checkpoints, lambda text: None)
    if newest_valid is None:
        raise CheckpointError(f"{directory.path}: {problem}; there is no other checkpoint; train the run again")
    print_notice(
        f"bottega: warning: {directory.path}: {problem}; using {newest_valid[0].name}, the newest valid checkpoint, instead of the best"
    )
    return _read_checkpoint_folder(newest_valid[0], read)


def strip_flag_dashes(error: UsageError) -> UsageError:
    """Return the error without the dashes of flags, for a caller of the Python API."""
    return UsageError(re.sub(r"(?<!\S)--(?=[a-z])", "", str(error)))


def choose_checkpoint(directory: RunDirectory, which: str, *, needs_best: bool = False) -> Path:
    """Return the checkpoint that `which` names: best (or last, if nothing was evaluated), last, or a step number."""
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
        steps = ", ".join(str(manifest.step) for _, manifest in reversed(checkpoints.list_checkpoints(folder)))
        raise UsageError(f"{directory.path} has no checkpoint at step {which}; it has {steps or 'none'}")
    return path


def _choose_best(directory: RunDirectory, newest: Path, *, needs_best: bool) -> Path:
    """Return the best checkpoint, or `newest` if nothing was evaluated.

    If the best one no longer exists, warn and return another, or raise `CheckpointError` with `needs_best`.
    """
    best, step = checkpoints.find_best(directory.checkpoints)
    if not step or (best is not None and checkpoints.read_manifest(best).step == step):
        return best or newest
    substitute = best or newest
    problem = f"{directory.path}: the best checkpoint, of step {step}, no longer exists"
    if needs_best:
        substitute_step = checkpoints.read_manifest(substitute).step
        raise CheckpointError(f"{problem}; use --checkpoint {substitute_step} for {substitute.name}")
    print_notice(f"bottega: warning: {problem}; using {substitute.name} instead")
    return substitute
