"""The samples of an evaluation: a split of the run's own data, or other data; training samples only on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bottega.config.data import Data, HeldOut
from bottega.config.data import Source as SourceOptions
from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import find_files
from bottega.data.formats.fingerprint import hash_files
from bottega.data.formats.split_names import normalize_split_name
from bottega.data.prepare.prepared import is_prepared, open_prepared
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.tasks.multitask.data import MultitaskData
from bottega.tasks.recipes import check_recipe
from bottega.tasks.table_data import TableData
from bottega.tasks.task_data import TaskData
from bottega.tasks.workload import Workload

SPLITS = ("validation", "test", "train")
ROW_KEYS = ("label_field", "label_separator", "condition_field")
"""Keys of a data section, beside those of its source, that decide how a row is read."""
INHERITED_KEYS = ("field", "label", "columns", "delimiter", "pattern")
"""Keys that a held-out source inherits from the training source."""


@dataclass(frozen=True)
class DataRequest:
    """The data that a user names for an evaluation; by default the run's own validation split."""

    path: str | list[str] | None = None
    """One path, or several that are one source."""
    config: str | None = None
    """A recipe file whose data section is used."""
    settings: Sequence[tuple[str, str, str]] = ()
    """(key, value, origin) of each key of the data section that is set, such as data.train.field."""
    split: str | None = None

    @property
    def uses_own_data(self) -> bool:
        """Whether the run's own data is evaluated."""
        return self.path is None and self.config is None


@dataclass(frozen=True)
class EvaluationData:
    """The samples of one evaluation."""

    split: str | None
    """Split of the run's own data or of `external`; None is all of it."""
    external: ExternalData | None = None
    """Other data; None is the run's own."""
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> str | None:
        """The path of external data; None for the run's own."""
        return self.external.path if self.external is not None else None

    def open_source(self, workload: Workload) -> Source:
        """Return the samples."""
        if self.external is not None:
            return workload.data.read_external(self.external)
        assert self.split is not None
        samples = workload.data.split(self.split)
        if samples is None:
            raise UsageError(f"this run has no {self.split} data; give other data with --data")
        return samples


def choose_data(workload: Workload, recipe: Recipe, request: DataRequest) -> EvaluationData:
    """Return the samples that `request` selects. If it names training data of the run, the held-out split is used instead."""
    if request.split is not None and request.split not in SPLITS:
        raise UsageError(f"--split {request.split}: expected one of {', '.join(SPLITS)}")
    if request.uses_own_data:
        if request.settings:
            raise UsageError(
                f"{request.settings[0][0]} applies to other data only; give that data with --data, or remove it"
            )
        return EvaluationData(request.split or "validation")
    external, split = _open_request(recipe, request)
    data = workload.data
    if isinstance(data, MultitaskData):
        if request.path is None:
            raise UsageError(
                f"--data_config {request.config} does not apply to a run with several tasks; use --data PART=PATH for the data "
                "of one part"
            )
        name, path = data.parse_part_path(external.path)
        part_data = replace(external, source=external.source.model_copy(update={"path": path}))
        shared, notes = _find_shared_files(part_data, data.parts[name].data)
    else:
        external, split = _select_split(external, split, requested_split=request.split)
        shared, notes = _find_shared_files(external, data)
    if not shared:
        return EvaluationData(split, external, notes)
    return _use_held_out(workload, external, shared, request.split or split or "validation")


def _use_held_out(workload: Workload, external: ExternalData, shared: str, split: str) -> EvaluationData:
    """Return the run's own held-out split in place of its training data.

    `shared` is what `_find_shared_files` returned: "all", or one file of `external` that is training data.
    """
    if shared != "all":
        raise UsageError(
            f"--data {external.path}: {shared} is training data of this run; give other files, or remove "
            "--data to evaluate on the held-out split"
        )
    if split == "train":
        return EvaluationData("train", None, [f"{external.path} is training data of this run"])
    if workload.data.split(split) is None:
        raise UsageError(
            f"{external.path} is training data of this run, which has no {split} split; give other data, "
            "or use --split train to evaluate on training samples"
        )
    note = f"{external.path} is training data of this run; its held-out {split} split is evaluated instead"
    return EvaluationData(split, None, [note])


def _open_request(recipe: Recipe, request: DataRequest) -> tuple[ExternalData, str | None]:
    """Return the external data of a request, and which split of it."""
    if request.config is None and not request.settings:
        return ExternalData(_build_source({"path": request.path})), None
    data = _read_data_section(recipe, request)
    fields = {key: getattr(data, key) for key in ROW_KEYS if key in data.model_fields_set}
    if request.path is not None:
        return ExternalData(_build_source({**_explicit_options(data.train), "path": request.path}), fields=fields), None
    names = [request.split] if request.split not in (None, "train") else ["test", "validation"]
    for name in names if request.split != "train" else ():
        held_out = getattr(data, str(name), None) if name in data.model_fields_set else None
        if held_out is not None:
            return replace(_open_held_out(data, held_out, str(name)), fields=fields), name
    if data.train.path is None and data.train.kind == "auto":
        raise UsageError(f"{request.config} has no data; set data.test.path or data.train.path")
    return ExternalData(data.train, fields=fields), None


def _read_data_section(recipe: Recipe, request: DataRequest) -> Data:
    """Return the data section of a recipe file and settings, checked with the schema of the run's own."""
    base: dict[str, Any] = {"task": recipe.task}
    if hasattr(recipe.data, "input"):
        base["data"] = {"input": recipe.data.input}
    other_keys = [key for key, _, _ in request.settings if not _is_data_key(key)]
    if other_keys:
        raise UsageError(f"{other_keys[0]}: only keys of the data section are accepted here, such as data.train.field")
    files = [request.config] if request.config is not None else []
    return check_recipe([base, *files], request.settings, check_conflicts=False).recipe.data


def _is_data_key(key: str) -> bool:
    from bottega.config.aliases import resolve_alias

    return all(full_key.startswith("data.") for full_key in resolve_alias(key, 0))


def _open_held_out(data: Data, held_out: HeldOut, name: str) -> ExternalData:
    has_own_path = held_out.path is not None or held_out.kind != "auto"
    if isinstance(held_out.split, float) or (not has_own_path and held_out.split is None):
        return ExternalData(data.train, table=name, held_out=held_out, split=data.split)
    options = {key: getattr(held_out, key) for key in held_out.model_fields_set}
    if not has_own_path:  # another split of the training source
        return ExternalData(_build_source({**_explicit_options(data.train), **options}))
    inherited = {key: value for key, value in _explicit_options(data.train).items() if key in INHERITED_KEYS}
    return ExternalData(_build_source({**inherited, **options}))


def _explicit_options(source: SourceOptions) -> dict[str, Any]:
    return {key: getattr(source, key) for key in source.model_fields_set}


def _build_source(values: Mapping[str, Any]) -> SourceOptions:
    return SourceOptions(**values)


def _select_split(
    external: ExternalData, split: str | None, *, requested_split: str | None
) -> tuple[ExternalData, str | None]:
    """Return the data and its split: the requested one if `external` is a folder of prepared tables or of several splits."""
    source = external.source
    if source.path is None or "://" in source.path or source.kind not in ("auto", "shards"):
        return external, split
    folder = Path(source.path).expanduser()
    if is_prepared(folder):
        tables = open_prepared(folder, task=_read_task_name(folder)).tables
        names = [requested_split] if requested_split is not None else ["validation", "test"]
        table = next((name for name in names if name in tables), "train")
        return replace(external, table=table), table
    if requested_split is None or source.split is not None or not folder.is_dir():
        return external, split
    files = find_files(source)
    if files.split_name is None or normalize_split_name(requested_split) not in (files.split_name, *files.other_splits):
        return external, split
    return replace(external, source=source.model_copy(update={"split": requested_split})), requested_split


def _read_task_name(folder: Path) -> str:
    import json

    return str(json.loads((folder / "meta.json").read_bytes())["task"])


def _find_shared_files(external: ExternalData, own_data: TaskData) -> tuple[str | None, list[str]]:
    """Return (files, notes): "all" if `external` is the training data of the run, else the first shared file or None."""
    if not isinstance(own_data, TableData):
        return None, []
    folder = Path(external.path).expanduser()
    if (
        is_prepared(folder)
        and open_prepared(folder, task=_read_task_name(folder)).fingerprint == own_data.recorded_fingerprint
    ):
        return "all", []
    data = own_data.located_recipe().data
    own_sources = [*(data.sources or (data.train,)), *([data.replay] if data.replay is not None else [])]
    merged = external.replace_in(data).train
    if merged.kind in ("embedded", "synthetic"):
        return ("all" if merged.kind in [source.kind for source in own_sources] else None), []
    try:
        training_hashes = {content for source in own_sources for content in _hash_contents(source).values()}
    except (DataError, UsageError, OSError):
        reason = f"{own_data.describe_source()} no longer exists"
        return None, [f"cannot check whether {external.path} is training data of this run: {reason}"]
    contents = _hash_contents(merged)
    shared = [name for name, content in contents.items() if content in training_hashes]
    if not shared:
        return None, []
    return ("all" if len(shared) == len(contents) == len(training_hashes) else shared[0]), []


def _hash_contents(source: SourceOptions) -> dict[str, str]:
    """Return file -> hash of its content for each file of a source; a hub dataset is one entry."""
    if source.kind == "embedded":
        return {}
    listing = find_files(source)
    if listing.kind == "huggingface":
        return {str(source.path): listing.fingerprint}
    files = [file for file in listing.paths if file.stat().st_size]
    return dict(zip(map(str, files), hash_files(files), strict=True))
