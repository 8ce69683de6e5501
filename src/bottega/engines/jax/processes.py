"""Several processes of JAX: joining them, and the values that they share."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bottega.core.errors import EnvironmentProblem, PeerLost, UsageError, first_line
from bottega.signals import exit_immediately
from bottega.world import World, list_missing_variables

Array = Any
HEARTBEAT_SECONDS, SHUTDOWN_SECONDS = 30, 10
"""Seconds after which a process that is silent counts as lost, and for which a process waits for the others at its end."""
LOST_PROCESS = re.compile(
    r"Gloo|NCCL|[Cc]onnection (reset|refused|closed)|coordination service|heartbeat|Socket closed|UNAVAILABLE|DEADLINE_EXCEEDED"
)


def join_processes(world: World) -> None:
    """Join the processes that a launcher has started; nothing for one process, or if they are joined.

    The variables are those of torchrun, whose own store listens on MASTER_PORT: the coordinator of JAX uses the next port.
    """
    if world.size == 1 or jax.distributed.is_initialized():
        return
    if missing := list_missing_variables():
        raise UsageError(
            f"WORLD_SIZE is {world.size}, but these variables are not set: {', '.join(missing)}; start the processes with torchrun"
        )
    port = int(os.environ["MASTER_PORT"]) + ("TORCHELASTIC_RUN_ID" in os.environ)
    # Each process has the GPU of its local rank; on a CPU all its devices are its own.
    devices = (
        [world.local_rank]
        if world.local_size > 1 and not os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
        else None
    )
    try:
        jax.distributed.initialize(
            f"{os.environ['MASTER_ADDR']}:{port}",
            world.size,
            world.rank,
            local_device_ids=devices,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"cannot join the {world.size} processes at {os.environ['MASTER_ADDR']}:{port}: {first_line(error)}; start them all with "
            "the same MASTER_ADDR and MASTER_PORT"
        ) from None


def any_process(flag: bool) -> bool:
    """Return True on all processes if `flag` is true on any."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def all_processes_equal(text: str) -> bool:
    """Return whether `text` is the same on all processes."""
    if jax.process_count() == 1:
        return True
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return len(np.unique(multihost_utils.process_allgather(digest), axis=0)) == 1


def describe_lost_process(error: BaseException) -> str | None:
    """Return that another process was lost if that is why a collective failed, else None."""
    if jax.process_count() == 1 or not LOST_PROCESS.search(str(error)):
        return None
    return (
        f"another process was lost ({first_line(error)[:160]}); the log of each process says why, and the same command resumes "
        "the run"
    )


@contextmanager
def exit_with_lost_process() -> Iterator[None]:
    """Context that ends this process at once if another one is lost: JAX would wait for it at exit, and then abort."""
    try:
        yield
    except PeerLost as error:
        exit_immediately(f"rank {jax.process_index()}: {error}", PeerLost.code)
