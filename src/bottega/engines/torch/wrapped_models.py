"""The models as a training step calls them: compiled or eager, and wrapped in DDP if there are several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from bottega.engines.torch.wrapping import compile_frozen_models, compile_model, uncompile_models, wrap_in_ddp
from bottega.models.device import get_device_type


class WrappedModels:
    """Wraps the models of one process, and switches them between eager and compiled between two steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        frozen: Mapping[str, Any],
        *,
        device: torch.device,
        needs_ddp: bool,
        graphs: bool,
        always: bool,
    ) -> None:
        """`graphs` allows CUDA graphs, and `always` compiles frozen models even if they are small."""
        self.model, self.frozen, self.device, self.needs_ddp = model, frozen, device, needs_ddp
        is_gpu = get_device_type(device) == "cuda"
        self.is_gpu, self.graphs, self.always = is_gpu, graphs and is_gpu, always
        self.is_compiled = self.has_run_compiled = False
        """Whether the models are compiled, and whether a step has run so."""
        self._local_model: Any = model
        self._trained_model: Any = None
        self.models: dict[str, Any] = {}
        """All models by name."""

    @property
    def is_fused(self) -> bool:
        """Whether the noise of a step is compiled too, which pays on a GPU only."""
        return self.is_compiled and self.is_gpu

    def switch(self, is_compiled: bool) -> None:
        """Compile the models or undo it, unless they are so already."""
        if is_compiled == self.is_compiled and self.models:
            return
        previous = self._local_model
        if is_compiled:
            self._local_model = compile_model(self.model, graphs=self.graphs)
            compile_frozen_models(self.frozen, always=self.always)
        elif self.is_compiled:
            uncompile_models((self.model, *self.frozen.values()))
            self._local_model = self.model
        self.is_compiled, self.has_run_compiled = is_compiled, False
        if self._local_model is not previous or not self.models:
            self.wrap()

    def wrap(self) -> None:
        """Wrap the model in DDP, also again: DDP waits for the parameters that were trainable when it was built."""
        self._trained_model = wrap_in_ddp(self._local_model, self.device) if self.needs_ddp else self._local_model
        self.models = {**self.frozen, "model": self._trained_model}

    def sync_context(self, *, is_last: bool) -> Any:
        """Context of a micro-batch: DDP synchronises the gradients in the last one of a step only."""
        return self._trained_model.no_sync() if self.needs_ddp and not is_last else contextlib.nullcontext()

    def close(self) -> None:
        """Release the wrappers, which keep the process group alive."""
        self._trained_model, self.models = None, {}
