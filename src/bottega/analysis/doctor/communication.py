"""Check that two processes of this machine can sum tensors, by gloo and, with two GPUs, by NCCL."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from bottega.analysis.doctor.check_result import CheckResult, Problem
from bottega.analysis.doctor.communication_probe import NUM_RANKS
from bottega.analysis.doctor.probes import ProbeResult, build_probe_command, run_probes

COMMUNICATION_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""Seconds after which a rank is ended that torch's own time limit, which says more, has not ended."""
REMEDIES = {
    "gloo": "one process still trains; if the host name does not resolve or a firewall blocks it, set GLOO_SOCKET_IFNAME=lo",
    "nccl": "one process still trains; NCCL_DEBUG=INFO shows the reason, NCCL_P2P_DISABLE=1 or a larger /dev/shm often helps",
}


def check_communication(
    num_gpus: int, *, on_step: Callable[[str], None], seconds: float = COMMUNICATION_SECONDS
) -> CheckResult:
    """Run two processes for each library of collectives; a failure is a problem of multi-process training alone."""
    lines, problems, rows = [], [], []
    for backend in ("gloo", "nccl") if num_gpus >= NUM_RANKS else ("gloo",):
        measurement, error = measure_communication(backend, on_step=on_step, seconds=seconds)
        rows.append({"backend": backend, **measurement, "error": error})
        devices = "two GPUs" if backend == "nccl" else "two processes"
        if error is None:
            latency, bandwidth = 1e6 * measurement["latency"], measurement["bandwidth"] / 1e9
            lines.append((backend, f"{devices} sum correctly; latency {latency:,.0f} µs, {bandwidth:.2f} GB/s"))
        else:
            lines.append((backend, "failed"))
            message = f"{devices} cannot communicate by {backend}, so training with several processes fails: {error}"
            problems.append(Problem("communication", message, REMEDIES[backend]))
    return CheckResult("communication", tuple(lines), {"communication": rows}, tuple(problems))


def measure_communication(
    backend: str, *, on_step: Callable[[str], None], seconds: float
) -> tuple[dict[str, float], str | None]:
    """Return latency in seconds and bandwidth in bytes/s of an all-reduce, and the error if it failed."""
    # The parent listens, so that no other process can take the port in between.
    with socket.create_server(("127.0.0.1", 0)) as server:
        can_inherit = sys.platform != "win32"
        options: dict[str, Any] = {
            "backend": backend,
            "port": server.getsockname()[1],
            "listener": server.fileno() if can_inherit else None,
            "seconds": seconds,
        }
        if not can_inherit:
            server.close()
        results = run_probes(
            [build_rank_command(rank, options) for rank in range(NUM_RANKS)],
            seconds=seconds + GRACE_SECONDS,
            pass_fds=[server.fileno()] if can_inherit else [],
            on_step=on_step,
        )
    if (error := _describe_failure(results)) is not None:
        return {}, error
    latency, bandwidth = (
        choose(row[name] for result in results for row in result.select("sum"))
        for choose, name in ((max, "latency"), (min, "bandwidth"))
    )
    return {"latency": latency, "bandwidth": bandwidth}, None


def build_rank_command(rank: int, options: dict[str, Any]) -> list[str]:
    """Return the command of one rank."""
    return build_probe_command("communication_probe", {**options, "rank": rank})


def _describe_failure(results: list[ProbeResult]) -> str | None:
    """Return which rank failed, why and at what; None if both summed correctly."""
    for rank, result in enumerate(results):
        if result.error is not None:
            step = f" ({result.last_step})" if result.last_step else ""
            return f"rank {rank}: {result.error}{step}"
    return None
