"""Export of a run: the model in the layout of its ecosystem, with a model card, written atomically and read back."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.core.engine import Engine
from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.rundir import RunDirectory, is_run
from bottega.core.types import Models
from bottega.data.output_files import explain_write_errors
from bottega.models.decoder.layout import OWN_MODEL_TYPE, explain_own_layout, shape_from_config
from bottega.models.folders.tensors import check_tensors
from bottega.redaction import redact_text
from bottega.run.model_size import describe_parameters
from bottega.storage.durable import remove_leftovers, writing_folder
from bottega.tasks.workload import Workload

if TYPE_CHECKING:
    from bottega.techniques.injected_layers import InjectedTask

MODEL_CARD = "README.md"
"""Written last, so it marks a complete export."""
EXPORT_TAG = "tags: [bottega]"
ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA or adapter layers in an export."""


@dataclass(frozen=True)
class RunExporter:
    """Writes the export of one opened run."""

    directory: RunDirectory
    recipe: Recipe
    workload: Workload
    engine: Engine
    progress: Mapping[str, Any]
    """Contents of the checkpoint's progress.json."""
    injected: InjectedTask | None
    """The task with LoRA or adapter layers, if the run has any."""
    base_hash: str | None
    """The hash of the frozen base model under those layers."""

    def export(self, folder: Path | None) -> Path:
        """Export to `folder`, or to `final` of the run; return the folder.

        The export is written beside the folder, checked, and renamed: an earlier export stays until the new one is complete.
        """
        target = folder if folder is not None else self.directory.final
        if target.resolve() == self.directory.final.resolve():
            self.directory.check_no_links()
        else:
            _check_replaceable(target)
        with explain_write_errors(target):
            resolved = target.resolve()  # if the user's folder is a link, it stays a link
            resolved.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(resolved.parent, resolved.name)
            with writing_folder(resolved) as temporary:
                self._write_export(temporary)
                _copy_other_files(resolved, temporary)
        return target

    def _write_export(self, folder: Path) -> None:
        with self.engine.sampling() as models:
            metadata = self._write_model(models, folder)
        (folder / MODEL_CARD).write_text(redact_text(self.build_model_card(metadata)), encoding="utf-8")
        _make_readable(folder)
        check_export(folder)

    def _write_model(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write model and adapter; return the metadata of the model card."""

        def export_whole() -> dict[str, Any]:
            return self.workload.export(models, folder)

        if self.injected is None:
            return export_whole()
        return self.injected.export(
            models["model"], folder / ADAPTER_FOLDER, origin=self._find_base_origin(), export_whole=export_whole
        )

    def _find_base_origin(self) -> str | None:
        """Return where others find the base model: a hub name or folder as in the recipe, or the export of a run."""
        from_: str | None = getattr(self.recipe.model, "from_", None)
        folder: str | None = getattr(self.workload.task, "pretrained", None)
        is_export = folder is not None and is_run(Path(folder).parent)
        return folder if is_export else from_

    def build_model_card(self, metadata: dict[str, Any]) -> str:
        """Return the README.md of the export."""
        progress = self.progress
        best, best_step = progress.get("best"), progress.get("best_step")
        has_best = best is not None and best_step  # step 0: the best checkpoint is not in this run
        score = f"- best {self.recipe.evaluation.metric} {best:.4f} at step {best_step}\n" if has_best else ""
        requirement = f"- needs {metadata['needs']}\n" if "needs" in metadata else ""
        front_matter = "".join(f"{name}: {value}\n" for name, value in metadata.items() if name != "needs")
        return (
            f"---\n{front_matter}{EXPORT_TAG}\n---\n\n"
            f"# {self.directory.path.name}\n\n"
            f"Trained with Bottega, task `{self.recipe.task}`.\n\n"
            f"- {describe_parameters(self.engine)}, checkpoint at step {progress['step']}\n{score}"
            f"{self._describe_base()}{requirement}{self._describe_data()}"
        )

    def _describe_base(self) -> str:
        if self.injected is None:
            return ""
        origin = self._find_base_origin()
        base = f"`{origin}`" if origin is not None else f"random weights of seed {self.recipe.seed}"
        return (
            f"- `{ADAPTER_FOLDER}/` contains the trained parameters; {self.injected.export_note}\n"
            f"- base: {base}, sha256 {self.base_hash}\n"
        )

    def _describe_data(self) -> str:
        """Return a line with the settings of each data source."""
        data = self.recipe.data
        sources = [source.model_dump(mode="json", exclude_defaults=True) for source in data.sources or (data.train,)]
        lines = [
            "; ".join(f"{key} `{_format_value(value)}`" for key, value in source.items())
            for source in sources
            if source
        ]
        return "".join(f"- data: {line}\n" for line in lines)


def check_export(folder: Path) -> None:
    """Read the files of an export back, so that an unreadable export never replaces a readable one."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            check_tensors(path)
        elif path.suffix == ".json":
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise EnvironmentProblem(f"cannot write {path}: it reads back damaged ({error}); try again") from None


def list_export_notes(folder: Path) -> list[str]:
    """Return a note for each model of an export that no other library can load."""
    notes = []
    for path in sorted(folder.rglob("config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") == OWN_MODEL_TYPE:
            prefix = "" if path.parent == folder else f"{path.parent.relative_to(folder)}: "
            notes.append(
                f"{prefix}written in Bottega's own layout ({OWN_MODEL_TYPE}), which model.from reads; transformers has no class "
                f"for it, because {explain_own_layout(shape_from_config(config, path))}"
            )
    return notes


def _check_replaceable(folder: Path) -> None:
    """Raise unless the folder is absent, empty or an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()):
        card = folder / MODEL_CARD
        if not card.is_file() or EXPORT_TAG not in card.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"{folder} exists and is not an export of Bottega; choose another folder, or empty it")


def _copy_other_files(old_folder: Path, new_folder: Path) -> None:
    """Copy files that the user added to an earlier export, such as notes."""
    for path in sorted(old_folder.rglob("*")) if old_folder.is_dir() else ():
        target = new_folder / path.relative_to(old_folder)
        if not path.is_dir() and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)


def _make_readable(folder: Path) -> None:
    """Give every file the permissions of a new file: safetensors files are written readable by their owner only."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with suppress(PermissionError):  # another user's file in a shared folder
                path.chmod(mode)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
