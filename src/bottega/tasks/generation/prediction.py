"""The model's prediction in a sampler of torch: weights in the dtype of autocast, and on a GPU one CUDA graph per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bottega.models.cuda_graph import CapturedGraph, report_failed_capture, without_autocast_cache
from bottega.models.dit.torch import DiT
from bottega.models.generator.torch import Generator
from bottega.tasks.generation.solvers import Predict

MIN_GRAPH_EVALUATIONS = 4
"""Evaluations of the model from which they are captured; a capture takes the host as long as one."""


def use_cast_weights(model: Any) -> Callable[..., Tensor]:
    """Return the model with its matrices in the dtype of autocast, which otherwise converts all of them at every call.

    Only for a DiT, whose linear layers all compute in that dtype; other models are returned as they are.
    """
    if not (isinstance(model, Generator) and isinstance(model.backbone, DiT) and torch.is_autocast_enabled("cuda")):
        return model
    dtype = torch.get_autocast_dtype("cuda")
    cast_weights = {
        f"backbone.{path}.{name}": parameter.detach().to(dtype)
        for path, module in model.backbone.named_modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
    }

    def call_model(*args: Tensor, **condition: Tensor) -> Tensor:
        return torch.func.functional_call(model, cast_weights, args, condition)

    return call_model


@contextmanager
def captured_prediction(predict: Predict, start: Tensor, *, num_evaluations: int) -> Iterator[Predict]:
    """Context with the prediction for batches like `start` as a CUDA graph, or as it is where that is not possible."""
    if not start.is_cuda or num_evaluations < MIN_GRAPH_EVALUATIONS:
        yield predict
        return
    captured = _CapturedPrediction(predict, start)
    try:
        yield captured
    finally:
        captured.release()


class _CapturedPrediction:
    """A prediction whose inputs and output have fixed addresses: the first call loads the kernels, the second captures them."""

    def __init__(self, predict: Predict, start: Tensor) -> None:
        self._predict = predict
        self._x = torch.empty_like(start, dtype=torch.float32, memory_format=torch.contiguous_format)
        self._time = torch.zeros(len(start), device=start.device)
        self._output = self._x
        self._num_calls = 0
        self._graph: CapturedGraph | None = None

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        self._x.copy_(x)
        self._time.copy_(time)
        self._num_calls += 1
        if self._num_calls == 2:
            self._capture()
        if self._graph is None:
            with without_autocast_cache():
                self._compute()
        else:
            self._graph.replay()
        return self._output.clone()  # the next call overwrites it

    def _compute(self) -> None:
        with torch.no_grad():
            self._output = self._predict(self._x, self._time)

    def _capture(self) -> None:
        try:
            self._graph = CapturedGraph(self._compute, is_warm=True)
        except Exception as error:
            report_failed_capture("samples are drawn", error)

    def release(self) -> None:
        if self._graph is not None:
            self._graph.release()


def count_evaluations(method: str, steps: int) -> int:
    """Return how often a sampler evaluates the model."""
    return 2 * steps - 1 if method == "heun" else steps
