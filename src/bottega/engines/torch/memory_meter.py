"""Live memory of tensors, counted operation by operation: what the allocator of a GPU would report, without one.

It is used on fake tensors, which have a shape and a lifetime but no data. A compiled function is counted as the compiler
of a GPU would run it: see `FusedGraph`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATION_UNIT = 512
"""Bytes that the allocator of a GPU rounds each tensor up to."""
ACTIVATIONS, WORKSPACE = "activations", "compile workspace"
CACHED_CASTS = "cached casts"
"""Weights in the precision of the computation, which live until the backward pass."""


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that are created while it is active and not freed yet, by category."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {}
        """Category -> bytes."""
        self.peak: dict[str, int] = {}
        """`live` at the moment of the largest total."""
        self._category = ACTIVATIONS
        self._total = self._peak_total = 0
        self._storages: dict[int, list[Any]] = {}
        """Id of a storage -> its weak reference, category and bytes."""
        self.is_paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if not self.is_paused:
            self.count(output, CACHED_CASTS if is_cast_of_weight(function, args) else None)
        return output

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that functions are compiled although this mode is active."""
        return True

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Count what is created in this block under `name`."""
        previous, self._category = self._category, name
        try:
            yield
        finally:
            self._category = previous

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is created in this block."""
        previous, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = previous

    def count(self, value: Any, category: str | None = None) -> None:
        """Count the tensors in a value that are not counted yet."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._add(tensor.untyped_storage(), category or self._category)
        self._update_peak()

    def reclassify(self, tensor: Tensor, category: str) -> None:
        """Move the bytes of a tensor that is counted already to another category."""
        entry = self._storages.get(id(tensor.untyped_storage()))
        if entry is not None:
            self.live[entry[1]] -= entry[2]
            self.live[category] = self.live.get(category, 0) + entry[2]
            entry[1] = category

    def reset_peak(self) -> None:
        """Forget the peak, so that the next one is that of what follows."""
        self._peak_total = 0
        self._update_peak()

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = id(storage)
        if key in self._storages:
            return
        size = -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT
        self._storages[key] = [weakref.ref(storage, lambda _: self._remove(key)), category, size]
        self.live[category] = self.live.get(category, 0) + size
        self._total += size

    def _remove(self, key: int) -> None:
        _, category, size = self._storages.pop(key)
        self.live[category] -= size
        self._total -= size

    def _update_peak(self) -> None:
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, dict(self.live)


def is_cast_of_weight(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation copies a parameter, as autocast does for each weight that it uses."""
    return function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)


FUSIBLE_NAMESPACES = ("aten", "prims")
EXTERN_OPERATIONS = re.compile(
    r"\w*mm|convolution\w*|\w*attention\w*|index_put_?|scatter\w*|sort|topk|cumsum|embedding_dense_backward"
)
"""Operations that the compiler calls as a kernel of a library: their inputs and outputs are tensors in memory."""


class FusedGraph(fx.Interpreter):
    """Runs a graph of the compiler and counts the tensors that its kernels would write.

    A chain of element-wise operations becomes one kernel whose intermediate values stay in registers. So only these
    tensors are counted: outputs of the graph, outputs and inputs of library kernels, and results of reductions.
    """

    def __init__(self, graph: fx.GraphModule, meter: MemoryMeter) -> None:
        super().__init__(graph)
        self.meter = meter
        self._boxed_call = True  # the compiler passes the inputs as a list, which is emptied, so that they can be freed
        outputs = {_find_base(node) for node in graph.graph.output_node().all_input_nodes}
        written = set(outputs)
        for node in graph.graph.nodes:
            if _is_extern(node):
                written |= {node, *map(_find_base, node.all_input_nodes)}
            elif _is_reduction(node):
                written.add(node)
        self._category = {
            node: ACTIVATIONS if node in outputs else WORKSPACE for node in written if node.op == "call_function"
        }

    def __call__(self, arguments: list[Any]) -> Any:
        try:
            return self.boxed_run(arguments)
        finally:
            self.env = {}  # it would hold the outputs until the next call

    def run_node(self, node: fx.Node) -> Any:
        is_cast = _get_name(node) == "convert_element_type" and isinstance(
            self.env.get(node.all_input_nodes[0]), torch.nn.Parameter
        )
        with self.meter.paused():
            result = super().run_node(node)
        if node in self._category:
            self.meter.count(result, CACHED_CASTS if is_cast else self._category[node])
        return result


def _find_base(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _get_name(node: fx.Node) -> str:
    """Return the name of an operation without its overload, such as mm."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.name().partition("::")[2].partition(".")[0]
    return getattr(target, "__name__", "")


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    if _get_name(node) == "getitem":
        return True
    return isinstance(target, torch._ops.OpOverload) and target.is_view and bool(node.all_input_nodes)


def _is_extern(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return EXTERN_OPERATIONS.fullmatch(_get_name(node)) is not None or target.namespace not in FUSIBLE_NAMESPACES


def _is_reduction(node: fx.Node) -> bool:
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.reduction in target.tags


@contextmanager
def compile_for_meter(meter: MemoryMeter) -> Iterator[None]:
    """Replace torch.compile in this block: compiled functions are traced and partitioned as for a GPU, and counted by `meter`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> FusedGraph:
        return FusedGraph(graph, meter)

    backend = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    original = torch.compile

    def compile_function(model: Any = None, **options: Any) -> Any:
        options.pop("mode", None)
        return original(model, **{**options, "backend": backend})

    torch.compile = compile_function
    try:
        yield
    finally:
        torch.compile = original
