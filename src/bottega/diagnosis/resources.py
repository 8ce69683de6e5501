"""Rules about the machine: waiting for data, an idle GPU, little memory left."""

from __future__ import annotations

import math

import numpy as np

from bottega.data.prepare.media import MAX_DECODED_BYTES
from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.series import get_metric
from bottega.measurements import format_bytes
from bottega.run_files.record import RunRecord

SLOW_DATA_SHARE = 0.2
"""Median share of the time spent waiting for data from which the loader limits the run. Healthy runs wait for up to 0.08."""
MIN_GPU_PERCENT = 30.0
"""Median use of the GPU, as the driver reports it, below which it mostly waits for the host. The driver counts the time in which
any kernel runs, however small, so the share of the GPU's compute that is used is far lower."""
MAX_MEMORY_SHARE = 0.92
"""Peak of the memory, as a share of all, from which a longer sample or a neighbour's process ends the run."""
MIN_ACTIVATION_SHARE = 0.25
"""Share of the peak that activations have to have for a smaller micro-batch to help."""
MIN_OPTIMIZER_SHARE = 0.2
"""Share of the peak that the optimizer's state has to have for adafactor, which has almost none, to help."""
MIN_BATCH_FACTOR, MAX_BATCH_FACTOR = 4, 16
"""Limits of the factor on the batch size that is advised for an idle GPU.

The use grows slowly with the batch: an H200 that trains a language model of a million parameters is in use for 11 % of the time
with a batch of 4, 12 % with 32, 32 % with 256, 38 % with 512."""
OUT_OF_MEMORY = "out of memory"


def find_slow_data(record: RunRecord) -> Finding | None:
    """The loader does not keep up: a step waits for its batch."""
    steps, share = _measure_wait(record)
    if share < SLOW_DATA_SHARE:
        return None
    return Finding(
        "slow-data",
        f"{100 * share:.0f} % of the time was spent waiting for data",
        steps,
        _suggest_faster_loading(record, share),
    )


def _measure_wait(record: RunRecord) -> tuple[tuple[int, int], float]:
    """Return the steps and the median share of their time that was spent waiting for data."""
    steps, waits = get_metric(record, "train", "data_wait", minimum=3)
    # Before the first log, worker processes start.
    return (int(steps[1]), int(steps[-1])), float(np.median(waits[1:]))


def _suggest_faster_loading(record: RunRecord, share: float) -> str:
    if _is_stored_encoded(record):
        return "data.store=decoded"  # each image is then decoded once, not in each epoch
    workers, cores = int(record.get("data.workers") or 0), int(record.environment.get("cores") or 2)
    if workers:
        # Beyond the cores, more processes help only if they wait for a disk or a network, which is then likely.
        return f"data.workers={2 * workers if workers >= cores else min(2 * workers, cores)}"
    # A batch takes share / (1 - share) of the time of its step, so this many processes build one in that time; one to spare.
    return f"data.workers={max(1, min(math.ceil(round(share / max(0.01, 1 - share), 6)) + 1, cores))}"


def _is_stored_encoded(record: RunRecord) -> bool:
    """Return whether images are decoded for each batch: `auto` stores those that take more than MAX_DECODED_BYTES so."""
    store, side = record.get("data.store"), record.get("data.image_size")
    num_samples = record.data.get("splits", {}).get("train")
    if store != "auto" or not isinstance(side, int) or not isinstance(num_samples, int):
        return bool(store == "encoded")
    return num_samples * side * side * int(record.get("data.channels") or 3) > MAX_DECODED_BYTES


def find_idle_gpu(record: RunRecord) -> Finding | None:
    """The GPU waits for the host although the data is there in time: its work comes in pieces that are too small."""
    if not _is_gpu(record):
        return None
    if record.log.get("train", "gpu_percent") is None:
        raise NotRecorded("the GPU's use was not logged; install the extra gpu (nvidia-ml-py)")
    steps, percents = get_metric(record, "train", "gpu_percent", minimum=3)
    _, wait = _measure_wait(record)
    percent = float(np.median(percents[1:]))  # before the first log, the model is compiled
    if percent >= MIN_GPU_PERCENT or wait >= SLOW_DATA_SHARE:
        return None
    return Finding(
        "idle-gpu",
        f"the GPU was in use for {percent:.0f} % of the time, and {100 * wait:.0f} % was spent waiting for data",
        (int(steps[1]), int(steps[-1])),
        _suggest_more_work_per_kernel(record, percent),
    )


def _is_gpu(record: RunRecord) -> bool:
    return str(record.environment.get("device", "")).startswith("cuda")


def _count_samples_per_process(record: RunRecord) -> int:
    """Return the samples of a step on one process; with gradient accumulation, the recipe's batch is already that of one."""
    batch_size = int(record.get("training.batch_size") or 1)
    accumulation = record.get("training.gradient_accumulation_steps")
    if isinstance(accumulation, int):
        return batch_size * accumulation
    return math.ceil(batch_size / max(1, int(record.environment.get("world") or 1)))


def _count_samples_per_pass(record: RunRecord) -> int | None:
    """Return the samples of one forward pass on one process; None if training finds the size that fits."""
    micro_batch_size = record.get("training.micro_batch_size")
    if micro_batch_size == "auto":
        return None
    if not isinstance(micro_batch_size, int):
        is_accumulated = record.get("training.gradient_accumulation_steps") is not None
        micro_batch_size = record.get("training.batch_size") if is_accumulated else None
    per_process = _count_samples_per_process(record)
    return min(micro_batch_size, per_process) if isinstance(micro_batch_size, int) else per_process


def _is_eager(record: RunRecord) -> bool:
    """Return whether the last steps ran without compiling, by the recipe or because `auto` chose so; not if the compiler failed."""
    if record.log.get("train", "compile_failed") is not None:
        return False
    if record.get("training.compile") is not True and record.log.get("train", "compiled") is not None:
        _, flags = get_metric(record, "train", "compiled", minimum=1)
        return not flags[-1]
    return record.get("training.compile") is False


def _suggest_more_work_per_kernel(record: RunRecord, percent: float) -> str | None:
    """Return the override that gives the GPU more work at once, at first one that leaves the result as it is.

    None if neither memory nor data allow a batch of twice the size.
    """
    batch_size = int(record.get("training.batch_size") or 1)
    accumulation, samples_per_pass = record.get("training.gradient_accumulation_steps"), _count_samples_per_pass(record)
    is_split = samples_per_pass is not None and samples_per_pass < _count_samples_per_process(record)
    if is_split and isinstance(record.get("training.micro_batch_size"), int):
        return "training.micro_batch_size=auto"
    if accumulation is not None and accumulation > 1:
        # A step then has the same samples, in pieces as large as fit.
        size = batch_size * accumulation
        return f"training.batch_size={size} training.gradient_accumulation_steps=1 training.micro_batch_size=auto"
    if _is_eager(record):
        return "training.compile=true"
    factor = max(MIN_BATCH_FACTOR, min(MAX_BATCH_FACTOR, 2 ** math.ceil(1 + math.log2(80 / max(1.0, percent)))))
    peak, total = record.memory.get("peak"), record.memory.get("total")
    if isinstance(peak, int) and isinstance(total, int):  # the peak grows no faster than the batch
        factor = min(factor, int(MAX_MEMORY_SHARE * total / max(1, peak)))
    limits = [factor * batch_size, record.data.get("splits", {}).get("train")]  # a batch must not exceed the data
    if record.get("task") == "recall":
        limits.append(record.get("data.distance"))  # a query must come after the batch that states its fact
    size = min(limit for limit in limits if isinstance(limit, int))
    return f"training.batch_size={size}" if size >= 2 * batch_size else None


def find_memory_pressure(record: RunRecord) -> Finding | None:
    """Nearly all memory of the device was used at the peak, or it was too little."""
    peak, total = record.memory.get("peak"), record.memory.get("total")
    has_failed = OUT_OF_MEMORY in str(record.state.get("reason"))
    if not isinstance(peak, int) or not isinstance(total, int) or total <= 0:
        if not has_failed:
            is_finished = record.state.get("state") == "finished"
            raise NotRecorded(f"memory.json {'cannot be read' if is_finished else 'is written when training ends'}")
        peak = total = 0
    if not has_failed and peak < MAX_MEMORY_SHARE * total:
        return None
    evidence = (
        f"the peak was {format_bytes(peak)} of {format_bytes(total)} of {record.memory.get('device')}" if total else ""
    )
    step = int(record.state["step"])
    return Finding(
        "memory-pressure",
        " and ".join(filter(None, ["training ended because it was out of memory" if has_failed else "", evidence])),
        (0, step) if step else None,
        _suggest_less_memory(record, peak),
    )


def _suggest_less_memory(record: RunRecord, peak: int) -> str | None:
    """Return the override for the largest category that can be made smaller; None if only a smaller model is left."""
    categories = record.memory.get("categories") or {}
    activations, optimizer = categories.get("activations and workspace", peak), categories.get("optimizer", 0)
    adafactor = "training.optimizer.name=adafactor" if optimizer >= MIN_OPTIMIZER_SHARE * peak > 0 else None
    if activations < MIN_ACTIVATION_SHARE * peak and adafactor is not None:
        return adafactor
    samples_per_pass = _count_samples_per_pass(record)
    if samples_per_pass is not None and samples_per_pass > 1:
        return f"training.micro_batch_size={math.ceil(samples_per_pass / 2)}"
    if not record.get("training.gradient_checkpointing"):
        return "training.gradient_checkpointing=true"
    if adafactor is None and isinstance(length := record.get("data.sequence_length"), int) and length > 1:
        return f"data.sequence_length={length // 2}"
    return adafactor


RULES = {"slow-data": find_slow_data, "idle-gpu": find_idle_gpu, "memory-pressure": find_memory_pressure}
