"""Which samples an evaluation measures: a part of the run's own data, or other data; training samples only on request."""

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
READING = ("label_field", "label_separator", "condition_field")
"""Keys of a data section, beside those of its source, that say how a row is read."""
INHERITED = ("field", "label", "columns", "delimiter", "pattern")
"""What a held-out source takes from the training source beside it."""


@dataclass(frozen=True)
class DataRequest:
    """What a person names to be measured. Nothing is the run's own validation part."""

    path: str | list[str] | None = None
    """One path, or several that are one source."""
    config: str | None = None
    """A recipe file whose data is meant."""
    settings: Sequence[tuple[str, str, str]] = ()
    """Keys of the data section, such as data.train.field."""
    split: str | None = None

    @property
    def is_own(self) -> bool:
        return self.path is None and self.config is None


@dataclass(frozen=True)
class EvaluationData:
    """What is measured."""

    split: str | None
    """Of the run's own data, or of what was given; None is all of it."""
    given: ExternalData | None = None
    """None is the run's own."""
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> str | None:
        return self.given.path if self.given is not None else None

    def source(self, workload: Workload) -> Source:
        """Its samples."""
        if self.given is not None:
            return workload.data.read_external(self.given)
        assert self.split is not None
        samples = workload.data.split(self.split)
        if samples is None:
            raise UsageError(f"this run has no {self.split} data; name other data with --data")
        return samples


def choose_data(workload: Workload, recipe: Recipe, request: DataRequest) -> EvaluationData:
    """What `request` comes to for a run. Data that the run has learnt from is measured by what was held back of it."""
    if request.split is not None and request.split not in SPLITS:
        raise UsageError(f"--split {request.split}: there is {', '.join(SPLITS)}")
    if request.is_own:
        if request.settings:
            raise UsageError(
                f"{request.settings[0][0]}: says how other data is read; name that with --data or leave it out"
            )
        return EvaluationData(request.split or "validation")
    given, split = _given(recipe, request)
    data = workload.data
    if isinstance(data, MultitaskData):
        if request.path is None:
            raise UsageError(f"--data_config {request.config}: name data of one part with --data PART=PATH")
        name, path = data.parse_part_path(given.path)
        inner = replace(given, source=given.source.model_copy(update={"path": path}))
        shared, notes = _shared_files(inner, data.parts[name].data)
    else:
        given, split = _named_part(given, split, explicit=request.split)
        shared, notes = _shared_files(given, data)
    if not shared:
        return EvaluationData(split, given, notes)
    return _held_back(workload, given, shared, request.split or split or "validation")


def _held_back(workload: Workload, given: ExternalData, shared: str, split: str) -> EvaluationData:
    """The run's own part in place of data that it has learnt from."""
    if shared != "all":
        raise UsageError(
            f"--data {given.path}: {shared} is training data of this run; name files that it has not seen, or leave "
            "--data out to measure what was held back"
        )
    if split == "train":
        return EvaluationData("train", None, [f"{given.path} is what this run has learnt from: training samples"])
    if workload.data.split(split) is None:
        raise UsageError(
            f"{given.path} is what this run has learnt from, and no {split} part of it was held back; name other data, "
            "or say --split train to measure training samples"
        )
    note = f"{given.path} is what this run has learnt from; measured is the run's {split} part, which was held back"
    return EvaluationData(split, None, [note])


def _given(recipe: Recipe, request: DataRequest) -> tuple[ExternalData, str | None]:
    """The data that is named, and which part of it."""
    if request.config is None and not request.settings:
        return ExternalData(_source({"path": request.path})), None
    data = _section(recipe, request)
    fields = {key: getattr(data, key) for key in READING if key in data.model_fields_set}
    if request.path is not None:
        return ExternalData(_source({**_said(data.train), "path": request.path}), fields=fields), None
    wanted = [request.split] if request.split not in (None, "train") else ["test", "validation"]
    for name in wanted if request.split != "train" else ():
        part = getattr(data, str(name), None) if name in data.model_fields_set else None
        if part is not None:
            return replace(_part(data, part, str(name)), fields=fields), name
    if data.train.path is None and data.train.kind == "auto":
        raise UsageError(f"{request.config} names no data: data.test.path or data.train.path")
    return ExternalData(data.train, fields=fields), None


def _section(recipe: Recipe, request: DataRequest) -> Data:
    """The data section that a file and settings make, with the schema of the run's own."""
    base: dict[str, Any] = {"task": recipe.task}
    if hasattr(recipe.data, "input"):
        base["data"] = {"input": recipe.data.input}
    foreign = [key for key, _, _ in request.settings if not _is_of_data(key)]
    if foreign:
        raise UsageError(f"{foreign[0]}: only keys of the data can be given here, such as data.train.field")
    files = [request.config] if request.config is not None else []
    return check_recipe([base, *files], request.settings, check_conflicts=False).recipe.data


def _is_of_data(key: str) -> bool:
    from bottega.config.aliases import resolve_alias

    return all(spelled.startswith("data.") for spelled in resolve_alias(key, 0))


def _part(data: Data, part: HeldOut, name: str) -> ExternalData:
    if isinstance(part.split, float) or (part.path is None and part.kind == "auto" and part.split is None):
        return ExternalData(data.train, table=name, held_out=part, split=data.split)
    options = {key: getattr(part, key) for key in part.model_fields_set}
    if part.path is None and part.kind == "auto":  # another named part of where train is from
        return ExternalData(_source({**_said(data.train), **options}))
    return ExternalData(_source({**{k: v for k, v in _said(data.train).items() if k in INHERITED}, **options}))


def _said(source: SourceOptions) -> dict[str, Any]:
    return {key: getattr(source, key) for key in source.model_fields_set}


def _source(values: Mapping[str, Any]) -> SourceOptions:
    return SourceOptions(**values)


def _named_part(given: ExternalData, split: str | None, *, explicit: str | None) -> tuple[ExternalData, str | None]:
    """Where a folder holds train and test, or prepared tables, the part that is asked for."""
    source = given.source
    if source.path is None or "://" in source.path or source.kind not in ("auto", "shards"):
        return given, split
    folder = Path(source.path).expanduser()
    if is_prepared(folder):
        tables = open_prepared(folder, task=_task_of(folder)).tables
        wanted = [explicit] if explicit is not None else ["validation", "test"]
        table = next((name for name in wanted if name in tables), "train")
        return replace(given, table=table), table
    if explicit is None or source.split is not None or not folder.is_dir():
        return given, split
    files = find_files(source)
    if files.split_name is None or normalize_split_name(explicit) not in (files.split_name, *files.other_splits):
        return given, split
    return replace(given, source=source.model_copy(update={"split": explicit})), explicit


def _task_of(folder: Path) -> str:
    import json

    return str(json.loads((folder / "meta.json").read_bytes())["task"])


def _shared_files(given: ExternalData, own_data: TaskData) -> tuple[str | None, list[str]]:
    """Whether the files of `given` are training files of the run: "all", or the first of some; with notes."""
    if not isinstance(own_data, TableData):
        return None, []
    folder = Path(given.path).expanduser()
    if (
        is_prepared(folder)
        and open_prepared(folder, task=_task_of(folder)).fingerprint == own_data.recorded_fingerprint
    ):
        return "all", []
    data = own_data.located_recipe().data
    own = [*(data.sources or (data.train,)), *([data.replay] if data.replay is not None else [])]
    merged = given.replace_in(data).train
    if merged.kind in ("embedded", "synthetic"):
        return ("all" if merged.kind in [one.kind for one in own] else None), []
    try:
        learnt = {content for one in own for content in _contents(one).values()}
    except (DataError, UsageError, OSError):
        reason = f"{own_data.describe_source()} is not there any more"
        return None, [f"whether {given.path} was learnt from cannot be told: {reason}"]
    contents = _contents(merged)
    shared = [name for name, content in contents.items() if content in learnt]
    if not shared:
        return None, []
    return ("all" if len(shared) == len(contents) == len(learnt) else shared[0]), []


def _contents(source: SourceOptions) -> dict[str, str]:
    """The files of a source with a hash of each; a data set of a hub stands for itself."""
    if source.kind == "embedded":
        return {}
    listing = find_files(source)
    if listing.kind == "huggingface":
        return {str(source.path): listing.fingerprint}
    files = [file for file in listing.paths if file.stat().st_size]
    return dict(zip(map(str, files), hash_files(files), strict=True))
