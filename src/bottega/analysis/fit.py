"""`bottega plan --fit 24GB`: which micro-batch, precision and gradient checkpointing fit into a given memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from bottega.analysis.prediction import MemoryPredictor
from bottega.config.training import Training
from bottega.core.errors import BottegaError, OutOfMemory, UsageError
from bottega.measurements import PredictionUnavailable, format_bytes
from bottega.run.compose import resolve_micro_batch_size

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
RESERVE = {"cuda": 1 << 30}
"""Bytes that are in use on a GPU before the first tensor: the CUDA context, kernels, the screen."""
MARGINS = {"cuda": 1.05}
"""Memory that is planned for, relative to the prediction: the allocator of a GPU has free pieces that are too small to use."""
DEFAULT_MARGIN = 1.25
"""The same on a CPU, whose heap is less predictable: with micro-batches, peaks were up to 1.21 times the prediction."""

USUAL_PREDICTIONS = 3
"""Predictions that find the largest micro-batch: the recipe's, one sample, and one between."""


class Fit(NamedTuple):
    """The largest micro-batch that fits with some settings. The fields are keys of `fit.rows` in `bottega plan --json`."""

    precision: str
    gradient_checkpointing: bool
    micro_batch_size: int | None
    """None if not even one sample fits."""
    peak: int
    """Predicted bytes at that micro-batch, or at one sample."""
    passes: int | None
    """Forward and backward passes of a step."""


def parse_memory(text: str) -> int:
    """Return the bytes that "24GB" or "24GiB" mean; a plain number is in GB, as on the box of a GPU."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UsageError(f"--fit {text}: expected a size of memory, such as 24GB or 80GiB")
    return int(float(match[1]) * UNITS[(match[2] or "G").upper()])


def fit_memory(
    predictor: MemoryPredictor, memory: int, *, report_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Return the largest micro-batch for each precision and checkpointing, and the overrides of the best choice.

    Raises OutOfMemory if nothing fits. The batch of the recipe stays as it is: a smaller micro-batch takes more passes.
    """
    reserve = RESERVE.get(predictor.device_type, 0)
    usable = max(0, memory - reserve) / MARGINS.get(predictor.device_type, DEFAULT_MARGIN)
    choices = _list_choices(predictor)
    rows: list[Fit] = []
    total = USUAL_PREDICTIONS * len(choices)
    for number, training in enumerate(choices):
        report_progress(USUAL_PREDICTIONS * number, total)
        count_prediction = _build_counter(report_progress, USUAL_PREDICTIONS * number, total)
        try:
            rows.append(_find_largest_micro_batch(predictor, training, usable, count_prediction=count_prediction))
        except (BottegaError, PredictionUnavailable) as reason:
            if number > 0:
                continue  # a model without gradient checkpointing
            if isinstance(reason, BottegaError):
                raise
            raise UsageError(f"--fit: the memory of this recipe cannot be predicted: {reason}; use --memory") from None
    report_progress(total, total)
    fitting = [row for row in rows if row.micro_batch_size is not None]
    if not fitting:
        smallest = min(rows, key=lambda row: row.peak)
        raise OutOfMemory(
            f"nothing fits in {format_bytes(memory)}: one sample in {smallest.precision}"
            f"{' with gradient checkpointing' if smallest.gradient_checkpointing else ''} is predicted to need "
            f"{format_bytes(smallest.peak)}, and {format_bytes(max(reserve, memory - usable))} are kept for "
            f"{'the driver of the GPU and fragmentation' if reserve else 'what the prediction may miss'}; use a smaller model, or train a part of it "
            "(techniques: lora)"
        )
    best = fitting[0]  # the one that recomputes least
    return {
        "memory": memory,
        "usable": int(usable),
        "device": predictor.device_type,
        "batch_size": predictor.batch_size,
        "rows": [row._asdict() for row in rows],
        "best": best._asdict(),
        "overrides": _list_overrides(predictor, best),
    }


def _build_counter(report_progress: Callable[[int, int], None], start: int, total: int) -> Callable[[], None]:
    """Return a function that advances the progress by one prediction, and by USUAL_PREDICTIONS at most."""
    positions = iter(range(start + 1, start + USUAL_PREDICTIONS))
    return lambda: report_progress(next(positions, start + USUAL_PREDICTIONS), total)


def _list_choices(predictor: MemoryPredictor) -> list[Training]:
    """Return the settings to try: those of the recipe first, then with bf16, each also with gradient checkpointing."""
    training = predictor.recipe.training
    precision = predictor.resolve_precision(training)
    precisions = [precision, "bf16"] if precision == "fp32" and predictor.device_type == "cuda" else [precision]
    checkpointings = [True] if training.gradient_checkpointing else [False, True]
    return [
        training.model_copy(update={"mixed_precision": name, "gradient_checkpointing": is_checkpointed})
        for is_checkpointed in checkpointings
        for name in precisions
    ]


def _find_largest_micro_batch(
    predictor: MemoryPredictor, training: Training, usable: float, *, count_prediction: Callable[[], None]
) -> Fit:
    """Return the largest power of two, or the recipe's own micro-batch, whose predicted peak fits.

    Memory grows by about the same bytes with each sample, so two predictions tell where to look, and a third confirms it.
    """

    def build_fit(size: int | None, peak: int) -> Fit:
        passes = None if size is None else math.ceil(predictor.batch_size / size)
        return Fit(predictor.resolve_precision(training), training.gradient_checkpointing, size, peak, passes)

    def predict(size: int) -> int:
        memory = predictor.predict(training, micro_batch_size=None if size == predictor.batch_size else size)
        count_prediction()
        return memory.peak

    largest = min(resolve_micro_batch_size(predictor.recipe) or predictor.batch_size, predictor.batch_size)
    peak = predict(largest)
    if peak <= usable:
        return build_fit(largest, peak)
    if largest == 1:
        return build_fit(None, peak)
    lowest = predict(1)
    if lowest > usable:
        return build_fit(None, lowest)
    per_sample = (peak - lowest) / (largest - 1)
    size = 1 << max(0, int(1 + (usable - lowest) / max(per_sample, 1)).bit_length() - 1)
    while size >= largest:
        size //= 2
    while size > 1 and (peak := predict(size)) > usable:
        size //= 2
    return build_fit(size, lowest if size == 1 else peak)


def _list_overrides(predictor: MemoryPredictor, fit: Fit) -> list[str]:
    """Return the words of a command line that set a choice; nothing where the recipe says the same."""
    training = predictor.recipe.training
    words = []
    if fit.micro_batch_size != min(
        resolve_micro_batch_size(predictor.recipe) or predictor.batch_size, predictor.batch_size
    ):
        words.append(f"training.micro_batch_size={fit.micro_batch_size}")
        if (predictor.evaluation_batch_size or 0) > (fit.micro_batch_size or 0):
            # Otherwise an evaluation may take more memory than training.
            words.append(f"evaluation.batch_size={fit.micro_batch_size}")
    if fit.precision != predictor.resolve_precision(training):
        words.append(f"training.mixed_precision={fit.precision}")
    if fit.gradient_checkpointing != training.gradient_checkpointing:
        words.append("training.gradient_checkpointing=true")
    return words


def format_fit(report: dict[str, Any]) -> str:
    """Format what fits for the terminal."""
    lines = [
        f"fits into {format_bytes(report['memory'])} on {report['device']}, batches of {report['batch_size']}",
        f"{'precision':>11}{'checkpointing':>15}{'micro-batch':>13}{'passes':>8}{'memory':>14}",
    ]
    for row in report["rows"]:
        size = "none" if row["micro_batch_size"] is None else row["micro_batch_size"]
        checkpointing = "yes" if row["gradient_checkpointing"] else "no"
        lines.append(
            f"{row['precision']:>11}{checkpointing:>15}{size:>13}{row['passes'] or '':>8}{format_bytes(row['peak']):>14}"
        )
    if not report["overrides"]:
        return "\n".join([*lines, "the recipe fits as it is"])
    return "\n".join([*lines, f"to fit, add: {' '.join(report['overrides'])}"])
