"""Use of the models without training: evaluation of one batch, with sums over ranks and rows per example, and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from bottega.core.batch import batch_length
from bottega.core.engine import EvaluationOutput
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Models, Sums
from bottega.engines.out_of_memory import build_out_of_memory_error
from bottega.engines.torch import ranks
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.micro_batches import is_out_of_memory
from bottega.engines.torch.sums import SAMPLE_INDEX, reduce_sums
from bottega.engines.torch.weight_average import WeightAverage

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

EVALUATION_STEP = -1
"""The step number of the noise in evaluations."""


@torch.no_grad()
def evaluate_batch(engine: TorchEngine, batch: Batch, task: Task, *, with_rows: bool) -> EvaluationOutput:
    """Return the sums of the metrics over one batch, and with `with_rows` the values of each example."""
    engine.model.eval()
    device, counts = engine.device, task.counts(batch)
    device_batch = move_batch(batch, device, pin=engine.pin_memory)
    # A sample has the same noise in every evaluation, whatever its batch, and never the noise of training.
    has_indices = SAMPLE_INDEX in device_batch
    positions = device_batch.pop(SAMPLE_INDEX) if has_indices else torch.arange(batch_length(batch), device=device)
    rng = Noise(engine.seed, EVALUATION_STEP, positions, torch)
    try:
        with engine.autocast():
            out = task.loss(engine.eager_models, device_batch, rng)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        activity = f"while evaluating {batch_length(batch)} examples"
        memory = engine.memory_use(at_peak=False)
        raise build_out_of_memory_error(memory, activity, advice="lower evaluation.batch_size") from error
    sums: Sums = {name: (total.detach().double(), float(counts[name])) for name, (total, _) in out.terms.items()}
    sums |= {name: (torch.as_tensor(v, device=device).double(), n) for name, (v, n) in out.metrics.items()}
    rows = dict(out.rows) if with_rows else {}
    if rows and has_indices:
        rows[SAMPLE_INDEX] = positions
    return EvaluationOutput(reduce_sums(sums, device), ranks.gather_rows(rows, device_batch.get("weight")))


@contextmanager
def open_for_sampling(models: Models, average: WeightAverage) -> Iterator[Models]:
    """Context in which the trained model is in evaluation mode and has its averaged weights, if there are any."""
    model = models["model"]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), average.averaged_weights():
            yield models
    finally:
        model.train(was_training)
