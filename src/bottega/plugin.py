"""The API of plugins: files with tasks that `bottega train my.yaml --plugin my_task.py` adds.

docs/extend.md builds one step by step.
"""

from __future__ import annotations

from pydantic import Field

from bottega.config.credentials import read_secret
from bottega.config.data import Data
from bottega.config.recipe import Model, Recipe
from bottega.config.section import Number, Positive, Probability, Section, Whole
from bottega.config.task_spec import TaskSpec
from bottega.core.errors import DataError, UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models, Rows
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.preview import Preview
from bottega.data.records.record import Record, Unreadable
from bottega.data.sources.source import Source
from bottega.data.tables.shards import BYTES, TEXT, Column
from bottega.tasks.processor import Processor
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_training import TableRows, TableTraining
from bottega.tasks.task_data import TaskData
from bottega.tasks.workload import Predictor, Workload

__all__ = [
    "BYTES",
    "TEXT",
    "Batch",
    "Column",
    "Data",
    "DataError",
    "Encoder",
    "Field",
    "Initial",
    "Loss",
    "Model",
    "ModelSpec",
    "Models",
    "Noise",
    "Number",
    "Positive",
    "Predictor",
    "Preview",
    "Probability",
    "Processor",
    "Recipe",
    "Record",
    "Rows",
    "Sampler",
    "Section",
    "Source",
    "TableRows",
    "TableTraining",
    "Task",
    "TaskData",
    "TaskSpec",
    "Unreadable",
    "UsageError",
    "Whole",
    "Workload",
    "read_secret",
]
