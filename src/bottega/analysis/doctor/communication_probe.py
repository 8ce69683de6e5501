"""One rank of the communication check: joins the other one, sums tensors with it, and measures latency and bandwidth."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from bottega.analysis.doctor.probes import emit, run_probe_main

NUM_RANKS = 2
LARGE_BYTES = 16 << 20
NUM_SMALL, NUM_LARGE = 50, 5


def probe(options: dict[str, Any]) -> None:
    """Emit `sum` with the latency in seconds and the bandwidth in bytes/s; raise if a sum is wrong or the other rank is lost."""
    rank, backend, limit = options["rank"], options["backend"], timedelta(seconds=options["seconds"])
    # Nothing is emitted before: the time limit of the communication begins with the first event.
    import torch
    import torch.distributed as dist

    emit("start", step=f"join 2 processes by {backend}")
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    listener = options["listener"] if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", options["port"], NUM_RANKS, rank == 0, timeout=limit, master_listen_fd=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=NUM_RANKS, timeout=limit)
    emit("start", step=f"all-reduce between 2 processes by {backend}")
    values = torch.arange(1000, dtype=torch.float32, device=device) + rank
    dist.all_reduce(values)
    if values.tolist() != [2.0 * i + 1 for i in range(1000)]:
        raise ArithmeticError("the sum over two processes is wrong")
    latency = _measure(dist, torch.ones(1, device=device), NUM_SMALL)
    seconds = _measure(dist, torch.ones(LARGE_BYTES // 4, device=device), NUM_LARGE)
    dist.barrier()
    emit("sum", latency=latency, bandwidth=LARGE_BYTES / seconds)
    dist.destroy_process_group()


def _measure(dist: Any, tensor: Any, count: int) -> float:
    """Return the median seconds of an all-reduce, which other processes of the machine disturb least."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            tensor.flatten()[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[count // 2]


if __name__ == "__main__":
    sys.exit(run_probe_main(probe))
