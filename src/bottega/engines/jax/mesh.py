"""The mesh of devices, and where parameters, state and batches are placed on it.

Along `replicate` and `shard` devices train on different samples; along `shard` each also holds only a part of the parameters,
gradients and optimizer state; along `tensor` they share the matrix products of a layer on the same samples. The compiler
inserts the communication that these placements need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from bottega.core.errors import UsageError
from bottega.engines.jax.devices import get_device_type
from bottega.world import AXES, World

Array = Any
DATA_AXES = ("replicate", "shard")
COLUMN_LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "to_q", "to_k", "to_v", "up", "linear1")
"""Layers whose outputs are split over `tensor`: each device has some heads, or some of the inner width of an MLP."""
ROW_LAYERS = ("o_proj", "down_proj", "to_out", "down", "linear2", "out_proj")
"""Layers whose inputs are those outputs, so that the parts of their products are added up."""


class DeviceMesh:
    """Devices in the axes of `distributed`; with all sizes 1 a single device."""

    def __init__(self, devices: Sequence[Any], axes: Mapping[str, int]) -> None:
        sizes = tuple(axes.get(axis, 1) for axis in AXES)
        count = math.prod(sizes)
        if count > len(devices):
            keys = ", ".join(f"{axis}: {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
            raise UsageError(
                f"distributed: {{{keys}}} needs {count} devices, but jax has {len(devices)}; lower them, or start more "
                "devices (for tests on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=N)"
            )
        if jax.process_count() > 1 and count != len(devices):
            raise UsageError(
                f"distributed: the {jax.process_count()} processes have {len(devices)} devices, but replicate x shard x tensor is "
                f"{count}; set distributed.replicate={len(devices) // (sizes[1] * sizes[2])}"
            )
        self.mesh = Mesh(np.array(devices[:count]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self.num_devices, self.num_data, self.sizes = count, sizes[0] * sizes[1], dict(zip(AXES, sizes, strict=True))
        self.replicated: Sharding = NamedSharding(self.mesh, PartitionSpec())
        if count == 1:  # placing an array by a mesh takes the host longer
            self.replicated = SingleDeviceSharding(devices[0])

    @property
    def data_rank(self) -> int:
        """Index of this process's part of a global batch; processes that share a layer have the same one."""
        return jax.process_index() * self.data_size // jax.process_count()

    @property
    def data_size(self) -> int:
        """Number of parts that processes split a global batch into."""
        return min(jax.process_count(), self.num_data)

    def put(self, value: Any, sharding: Sharding) -> Array:
        """Place a value of the host that is the same on all processes."""
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def gather(self, tensors: Any) -> Any:
        """Return arrays that this process has in full; with several processes all must call it."""
        if jax.process_count() == 1:
            return tensors
        return jax.jit(lambda values: values, out_shardings=self.replicated)(tensors)

    def get_sharding(self, name: str, shape: tuple[int, ...]) -> Sharding:
        """Return where a parameter is placed, and its optimizer state of the same shape."""
        if self.num_devices == 1:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*self._choose_axes(name, shape)))

    def _choose_axes(self, name: str, shape: tuple[int, ...]) -> list[str | None]:
        axes: list[str | None] = [None] * len(shape)
        layer = name.rpartition(".")[0].rpartition(".")[2]
        dimension = 0 if layer in COLUMN_LAYERS else 1 if layer in ROW_LAYERS and len(shape) > 1 else None
        if dimension is not None and self._divides("tensor", shape[dimension]):
            axes[dimension] = "tensor"
        free = [i for i, size in enumerate(shape) if axes[i] is None and self._divides("shard", size)]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "shard"
        return axes

    def _divides(self, axis: str, size: int) -> bool:
        return self.sizes[axis] > 1 and size % self.sizes[axis] == 0

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError if no parameter can be split along an axis: its devices would all do the same work."""
        used = {axis for name, shape in shapes.items() for axis in self._choose_axes(name, shape)}
        for axis in ("shard", "tensor"):
            if self.sizes[axis] > 1 and axis not in used:
                what = "heads and no inner width of a layer" if axis == "tensor" else "side of a parameter"
                raise UsageError(
                    f"distributed.{axis}: {self.sizes[axis]} divides no {what} of this model; choose a number that does, or remove it"
                )

    def describe(self) -> str:
        """Return the devices, such as "cuda:0", or "4 cuda devices (shard 2 x tensor 2)"."""
        device = self.mesh.devices.flat[0]
        kind = get_device_type(device)
        if self.num_devices == 1:
            return kind if kind == "cpu" else f"{kind}:{device.id}"
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return f"{self.num_devices} {kind} devices ({axes})"

    def put_parameters(self, tensors: Mapping[str, Any]) -> dict[str, Array]:
        """Place parameters, or tensors of their shapes, by name."""
        return {
            name: self.put(value, self.get_sharding(name, tuple(np.shape(value)))) for name, value in tensors.items()
        }

    def put_states(self, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Place the optimizer state of each parameter: tensors of its shape like itself, others on every device."""
        return {
            name: {key: self.put(value, self._get_state_sharding(name, value, shapes)) for key, value in s.items()}
            for name, s in states.items()
        }

    def _get_state_sharding(self, name: str, value: Any, shapes: Mapping[str, Any]) -> Sharding:
        is_like_parameter = tuple(np.shape(value)) == tuple(shapes[name])
        return self.get_sharding(name, tuple(shapes[name])) if is_like_parameter else self.replicated

    def constrain(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Keep new parameters, or tensors of their shapes, where the old ones are; for use in a jitted function."""
        if self.num_devices == 1:
            return dict(parameters)
        return {
            name: jax.lax.with_sharding_constraint(value, self.get_sharding(name, value.shape))
            for name, value in parameters.items()
        }

    def constrain_states(self, states: Mapping[str, Mapping[str, Array]], shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Keep new optimizer state where the old one is; for use in a jitted function."""
        if self.num_devices == 1:
            return {name: dict(state) for name, state in states.items()}
        return {
            name: {
                key: jax.lax.with_sharding_constraint(value, self._get_state_sharding(name, value, shapes))
                for key, value in state.items()
            }
            for name, state in states.items()
        }

    def place_examples(self, x: Array) -> Array:
        """Split an activation (examples, ...) over the data-parallel devices; for use in a jitted function."""
        if x.shape[0] % self.num_data:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(DATA_AXES)))

    def put_batch(self, batch: Any, *, axis: int = 0) -> Any:
        """Place arrays whose examples are along `axis`: each data-parallel device has a part of them.

        Arrays without that axis, and batches that the devices do not divide, are on every device.
        """
        if self.num_devices == 1:
            return jax.device_put(batch, self.replicated)

        def place(value: Any) -> Any:
            if np.ndim(value) <= axis:
                return self.put(value, self.replicated)
            sharding = NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, DATA_AXES))
            if jax.process_count() > 1:  # `value` is the part of this process
                return jax.make_array_from_process_local_data(sharding, np.asarray(value))
            return jax.device_put(value, self.replicated if np.shape(value)[axis] % self.num_data else sharding)

        return jax.tree.map(place, batch)

    def put_count(self, count: float) -> Array:
        """Place this process's part of a count, as an array whose sum over the devices is that of all processes."""
        if jax.process_count() == 1:
            return np.float32(count)
        parts = np.zeros(self.num_data // self.data_size, np.float32)
        parts[0] = count
        return self.put_batch(parts)

    def check_batch(self, size: int, *, key: str) -> None:
        """Raise UsageError if the data-parallel devices do not divide a number of examples."""
        if size % self.num_data:
            raise UsageError(
                f"{key}: {size} is not divisible by the {self.num_data} devices of distributed.replicate x shard; use a "
                f"multiple of {self.num_data}"
            )


def resolve_axes(axes: Mapping[str, int], world: World, num_devices: int) -> Mapping[str, int]:
    """Return the axes of a run; several processes without axes have copies of the model on all their devices."""
    if world.size > 1 and math.prod(axes.values()) == 1:
        return {"replicate": num_devices}
    return axes
