"""Inspection of training steps: module statistics and histograms of the steps that the trainer selects, at a limited cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bottega.core.engine import Inspection
from bottega.engines.torch.histograms import DeviceHistogram, compute_histogram, fetch_histograms
from bottega.engines.torch.module_statistics import ModuleStatistics

MAX_SHARE = 0.02
"""Share of the time of a run that module statistics may take."""


class TimeBudget:
    """Limits repeated work to a share of the time: work of c seconds is available again c / share seconds after its start.

    So whatever the work costs, it takes at most `share` of the time from one start to the next.
    """

    def __init__(self, *, share: float = MAX_SHARE, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share, self.clock = share, clock
        self._available_at = -float("inf")

    def is_available(self) -> bool:
        """Return whether the work may start now; the first time always."""
        return self.clock() >= self._available_at

    def spend(self, seconds: float) -> None:
        """Record work of `seconds` that ends now."""
        self._available_at = self.clock() - seconds + seconds / self.share


class StepInspector:
    """Inspects a step if `request` selected it; the results stay on the device until `fetch`.

    Histograms are not limited in time: the recipe asks for them at a cadence of its own.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, is_active: bool) -> None:
        """Only rank 0 is active, since the gradients of all ranks are equal."""
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.statistics = ModuleStatistics(model, self._names)
        self._is_active, self._is_cuda = is_active, device.type == "cuda"
        self.budget = TimeBudget()
        self._wants_modules = self._wants_histograms = self._has_modules = False
        self._histograms: dict[str, DeviceHistogram] = {}
        self._host_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def request(self, *, modules: bool, histograms: bool) -> None:
        """Select what is recorded of the step that begins; module statistics only if the budget allows."""
        self._wants_modules = modules and self._is_active and self.budget.is_available()
        self._wants_histograms = histograms and self._is_active
        self._has_modules, self._histograms = False, {}
        self._host_seconds, self._events = 0.0, []

    def before_update(self, parameters: Sequence[Tensor], *, scale: Tensor | None) -> None:
        """Record gradients and weights after the backward pass, before clipping changes the gradients."""
        if self._wants_histograms:
            self._histograms = self._compute_histograms(parameters, scale=scale)
        # A step may leave all parameters without a gradient; there is nothing to inspect then.
        self._wants_modules = self._wants_modules and any(p.grad is not None and p.numel() for p in parameters)
        if self._wants_modules:
            with self._measured():
                self.statistics.record_gradients(parameters, scale=scale)

    def after_update(self) -> None:
        """Record the change of the weights after the optimizer step."""
        if self._wants_modules:
            with self._measured():
                self.statistics.record_update()
            self._has_modules = True

    def fetch(self) -> Inspection:
        """Return the statistics by module and the histograms of the last step."""
        modules: dict[str, dict[str, float]] = {}
        if self._has_modules:
            with self._measured():
                modules = self.statistics.fetch()
            device_seconds = sum(start.elapsed_time(end) / 1000 for start, end in self._events[:2])
            self.budget.spend(max(self._host_seconds, device_seconds))
        inspection = Inspection(modules, fetch_histograms(self._histograms))
        self.request(modules=False, histograms=False)
        return inspection

    def _compute_histograms(self, parameters: Sequence[Tensor], *, scale: Tensor | None) -> dict[str, DeviceHistogram]:
        histograms: dict[str, DeviceHistogram] = {}
        for p in parameters:
            if p.grad is not None and p.numel():
                name = self._names[id(p)]
                histograms[f"weights/{name}"] = compute_histogram(p)
                histograms[f"gradients/{name}"] = compute_histogram(p.grad, scale=scale)
        return histograms

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Add the time of the block on the host, and let events measure it on a GPU, which reads them after the step."""
        started = self.budget.clock()
        if self._is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            yield
        self._host_seconds += self.budget.clock() - started
