"""A base class for tasks over rows of a table; a subclass adds the encoder of a row, the task, and predictions."""

from __future__ import annotations

import hashlib
import inspect
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from bottega.config.recipe import Recipe
from bottega.config.task_spec import TaskSpec
from bottega.core.errors import DataError, UsageError
from bottega.core.task import Task
from bottega.core.types import Models
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.inputs import check_medium, collect_inputs, find_utf8_files
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparationPlan, PreparedData, open_if_prepared, prepare
from bottega.data.prepare.rules import Rules
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table
from bottega.storage.cache_folder import default_cache
from bottega.tasks.metadata import read_metadata
from bottega.tasks.prediction import NewSamples, is_missing
from bottega.tasks.processor import FileProcessor
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import PredictionInput, Predictor, Workload

STATISTICS = "statistics.json"


class TableRows(Source):
    """The numeric columns of a table, each as one array."""

    def __init__(self, table: Table, content: str) -> None:
        self.table, self.content = table, content
        self.names = [name for name, column in table.columns.items() if column.holds == "numbers"]

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {name: self.array(name)[index] for name in self.names}

    def array(self, name: str) -> np.ndarray:
        """Return all values of a column (n, ...), memory-mapped; rows of a varying column must have the same length here."""
        values = np.asarray(self.table.values(name))
        if not self.table.columns[name].varying:
            return values
        lengths = self.table.lengths(name)
        mismatched = np.flatnonzero(lengths != lengths[:1])
        if len(mismatched):
            raise DataError(
                f"{self.table.row('key', int(mismatched[0]))}: {name} has {lengths[mismatched[0]]} values, but "
                f"{self.table.row('key', 0)} has {lengths[0]}; all rows must have the same number of values"
            )
        return values.reshape(len(self), -1, *values.shape[1:]) if len(self) else values

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        rows = self.rows(np.array([index]), np.array([epoch]))
        values = (f"{name}: {np.array2string(row[0], threshold=32)}" for name, row in rows.items())
        return "\n".join((f"row {index} of {len(self)}: {self.table.row('key', index)}", *values))


class TableTraining(Workload, Sampler):
    """A workload over prepared tables.

    A subclass defines how a record becomes a row (`encoder`), statistics of the training rows (`fit_statistics`), the
    task (`build_task`) and, for `bottega predict`, `predict_rows`. Everything else works as for the bundled tasks:
    sources and mixtures, splits and folds, caching, resuming, evaluating other data, exporting.
    """

    predicts: ClassVar[PredictionInput | None] = None
    """Input of `bottega predict`; set it if `predict_rows` is defined."""
    version: ClassVar[int] = 1
    """Increase it when the same records give other rows and neither the encoder's fields nor its source show that."""

    def __init__(
        self,
        recipe: Any,
        statistics: Mapping[str, Any],
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
    ) -> None:
        self.recipe, self.statistics = recipe, statistics
        self.task: Task = self.build_task()
        self.data = TableData(
            recipe,
            prepare=lambda recipe: self.prepare(recipe, _ignore_progress),
            read_table=_read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
        )
        self.processor = FileProcessor(
            STATISTICS,
            json.dumps(statistics, indent=1) + "\n",
            parse=json.loads,
            is_same=lambda previous: bool(previous == statistics),
            mismatch="the statistics of the data differ from those of this run; start over with --fresh",
        )
        self.sampler = self
        self.predictor = Predictor(self.predicts or "rows", self._predict_new)

    @classmethod
    @abstractmethod
    def encoder(cls, recipe: Any, *, is_new: bool = False) -> Encoder:
        """Return the encoder, a frozen dataclass whose fields decide the rows. `is_new`: for unlabelled samples to predict."""

    @classmethod
    def fit_statistics(cls, recipe: Any, rows: TableRows) -> dict[str, Any]:
        """Return statistics of the training rows that the model needs, as JSON values; saved with the run."""
        return {}

    @abstractmethod
    def build_task(self) -> Task:
        """Return the task for `self.recipe` and `self.statistics`."""

    def predict_rows(self, models: Models, rows: Mapping[str, np.ndarray], *, device: Any) -> list[Any]:
        """Return a prediction for each row."""
        raise UsageError(f"this is a run of {self.recipe.task}, which makes no predictions")

    # Called by the task registry

    @classmethod
    def spec(cls, recipe: type[Recipe], **overrides: Any) -> TaskSpec:
        """Return the registry entry of a task of this class."""
        name = str(recipe.model_fields["task"].default)
        options: dict[str, Any] = {"open": cls.open, "reopen": cls.reopen, "prepare": cls.prepare}
        if cls.predicts is not None:
            options["example_input"] = lambda recipe, processor: recipe.data.train.path
        return TaskSpec(name=name, recipe=recipe, **{**options, "allowed_in_multitask": False, **overrides})

    @classmethod
    def open(cls, recipe: Recipe, *, progress: ProgressCallback) -> Self:
        """Return the workload of a new run: prepare the rows and fit the statistics of the training table."""
        prepared = cls.prepare(recipe, progress)
        statistics = cls.fit_statistics(recipe, _read_table(prepared, prepared.training_tables[0]))
        return cls(recipe, json.loads(json.dumps(statistics)), prepared)

    @classmethod
    def reopen(cls, recipe: Recipe, processor: Path, fingerprint: str) -> Self:
        """Return the workload of a finished run, with the statistics it saved."""
        return cls(recipe, read_metadata(processor / STATISTICS, json.loads), expected_fingerprint=fingerprint)

    @classmethod
    def prepare(cls, recipe: Recipe, progress: ProgressCallback, cache: Path | None = None) -> PreparedData:
        """Return the prepared rows of the recipe's data, from the cache if they are there."""
        prepared = open_if_prepared(recipe.data, task=recipe.task)
        if prepared is not None:
            return prepared
        inputs, fractions = collect_inputs(recipe.data)
        check_medium(inputs, "x")
        encoder = cls.encoder(recipe)
        plan = PreparationPlan(
            task=recipe.task,
            inputs=inputs,
            split_fractions=fractions,
            data=recipe.data,
            rules=Rules("x"),
            build_encoder=lambda texts, folder, progress: encoder,
            options=(encoder, cls.version, _hash_source(type(encoder))),
        )
        return prepare(plan, cache=cache or default_cache(), progress=progress)

    def _read_external(self, external: ExternalData) -> Source:
        recipe = self.recipe.model_copy(update={"data": external.replace_in(self.recipe.data)})
        return _read_table(self.prepare(recipe, _ignore_progress), external.table)

    def _predict_new(self, models: Models, new_samples: NewSamples, *, device: Any) -> list[dict[str, Any]]:
        if not new_samples.paths:
            raise UsageError("no table given; run bottega predict RUN FILE")
        for path in filter(is_missing, new_samples.paths):
            raise UsageError(f"{path} does not exist; give a table of rows to predict")
        encoder, rows = self.encoder(self.recipe, is_new=True), list[dict[str, Any]]()
        for record in self._read_records(new_samples.paths):
            try:
                rows += encoder.rows(record)
            except Unreadable as error:
                raise DataError(f"{record.where}: {error}") from None
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0] if name != "key"} if rows else {}
        predictions = self.predict_rows(models, arrays, device=device) if rows else []
        return [{"row": row["key"], "predicted": value} for row, value in zip(rows, predictions, strict=True)]

    def _read_records(self, paths: list[str]) -> list[Record]:
        options = self.recipe.data.train.model_dump(include={"field", "columns", "delimiter", "encoding"})
        records = []
        for path in paths:
            listing = find_utf8_files(type(self.recipe.data.train)(path=path, **options))
            for record in (record for piece in listing.list_pieces(1 << 20) for record in listing.read(piece)):
                if isinstance(record, BadRecord):
                    raise DataError(f"{record.where}: {record.reason}")
                records.append(record)
        return records

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Draw nothing while training; a subclass may."""

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write config.json, which describes the network completely, and model.safetensors."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": self.recipe.task,
            "model": self.recipe.model.model_dump(by_alias=True),
            **self.statistics,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega"}


def _read_table(prepared: PreparedData, name: str, *, is_training: bool = False) -> TableRows:
    return TableRows(prepared.table(name), f"{prepared.fingerprint} {name}")


def _ignore_progress(stage: str, done: int, total: int) -> None:
    pass


def _hash_source(encoder_class: type) -> str:
    """Hash the source of a class, so that editing an encoder invalidates the rows that it prepared."""
    try:
        return hashlib.sha256(inspect.getsource(encoder_class).encode()).hexdigest()
    except (OSError, TypeError):
        return ""
