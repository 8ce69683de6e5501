"""Charts of the page: which series are drawn together, under which title, in which section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bottega.run_files.logs import MetricsLog, Series, ThinnedPoints

POINT_BUDGET, MODULE_POINT_BUDGET = 30_000, 12_000
"""Points of all curves and of all modules on a page: together about 1.3 MB of text."""
MAX_POINTS, MIN_POINTS = 2000, 20
"""Most and fewest points of one series; no screen shows more."""

SECTIONS = {
    "optimisation": ("learning_rate", "grad_norm", "grad_norm_spread", "loss_spikes", "skipped_steps"),
    "throughput": ("units_per_second", "samples_per_second", "step_seconds", "data_wait", "matmul_share"),
    "resources": (
        *("gpu_percent", "gpu_memory_gib", "gpu_memory_percent", "gpu_power_watts", "gpu_temperature_celsius"),
        *("cpu_percent", "system_cpu_percent", "ram_gib", "ram_percent", "disk_free_gib"),
        *("disk_read_mib_per_second", "disk_write_mib_per_second"),
        *("network_received_mib_per_second", "network_sent_mib_per_second"),
    ),
}
"""Section -> training metrics that belong to it, in order."""

TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "grad_norm_spread": "Spread of the gradient norm",
    "loss_spikes": "Loss spikes so far",
    "skipped_steps": "Skipped steps so far",
    "samples_per_second": "Samples per second",
    "step_seconds": "Seconds per step",
    "data_wait": "Share of time waiting for data",
    "matmul_share": "Share of the device's matmul rate",
    "gpu_percent": "GPU utilisation, %",
    "gpu_memory_gib": "GPU memory, peak, GiB",
    "gpu_memory_percent": "GPU memory in use, all processes, %",
    "gpu_power_watts": "GPU power, W",
    "gpu_temperature_celsius": "GPU temperature, °C",
    "cpu_percent": "CPU of this process, %",
    "system_cpu_percent": "CPU of the machine, %",
    "ram_gib": "Memory of this process, GiB",
    "ram_percent": "Memory of the machine, %",
    "disk_free_gib": "Free disk space, GiB",
    "disk_read_mib_per_second": "Disk reads, MiB/s",
    "disk_write_mib_per_second": "Disk writes, MiB/s",
    "network_received_mib_per_second": "Network received, MiB/s",
    "network_sent_mib_per_second": "Network sent, MiB/s",
    "gradient_norm": "Gradient norm by module",
    "update_ratio": "Update-to-weight ratio by module",
    "dead_fraction": "Dead units by module, fraction",
    "bits_per_byte": "Bits per byte",
    "macro_f1": "Macro F1",
    "weighted_f1": "Weighted F1",
    "ece": "Calibration error (ECE)",
    "auroc": "AUROC",
}
LOG_SCALE = frozenset({"grad_norm", "gradient_norm", "update_ratio"})
"""Metrics whose values span orders of magnitude."""
UNSMOOTHED = frozenset({"learning_rate", "loss_spikes", "skipped_steps", *SECTIONS["resources"]})
"""Metrics without noise, whose steps should be seen."""


def make_title(metric: str) -> str:
    """Return the title of a metric's chart: a readable form of its name."""
    name, _, variant = metric.rpartition("/")[::-1]
    if variant and name.isdigit():  # such as load/0, of the first expert
        return f"{make_title(variant)} {name}"
    title = TITLES.get(name, name.replace("_", " ").strip().capitalize() or metric)
    return f"{title} ({variant})" if variant else title


def build_charts(
    logs: Sequence[MetricsLog], *, best_metrics: Iterable[str], units: Iterable[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of all runs by section; a metric that several runs have is one chart.

    The first metrics of the validation section are `best_metrics`, which selected the checkpoints; `units` are what
    `units_per_second` counts.
    """
    train = _list_metrics(logs, "train")
    evaluated = _list_metrics(logs, "eval")
    placed = {name for names in SECTIONS.values() for name in names}
    terms = [name for name in train if name not in placed and name != "loss"]
    first = [name for name in dict.fromkeys(best_metrics) if name in evaluated and name != "loss"]
    validation = [*first, *(name for name in evaluated if name not in first and name != "loss")]
    sections: dict[str, list[tuple[str, tuple[str, ...]]]] = {
        "loss": [("loss", ("train", "eval"))] if "loss" in train or "loss" in evaluated else [],
        "validation": [(name, ("train", "eval") if name in train else ("eval",)) for name in validation],
        "optimisation": [
            (name, ("train",))
            for name in (*SECTIONS["optimisation"], *(name for name in terms if name not in validation))
            if name in train
        ],
        "throughput": [(name, ("train",)) for name in SECTIONS["throughput"] if name in train],
        "resources": [(name, ("train",)) for name in SECTIONS["resources"] if _has_values(logs, name)],
    }
    other_units = sorted(set(units) - {"samples"})
    # A unit that is a sample under another name, such as images, needs one chart only.
    repeated = "samples_per_second" if other_units else "units_per_second"
    if all(map(_counts_samples, logs)):
        sections["throughput"] = [chart for chart in sections["throughput"] if chart[0] != repeated]
    unit_title = f"{' or '.join(other_units).capitalize()} per second"
    num_series = sum(
        (kind, metric) in log.series
        for charts in sections.values()
        for metric, kinds in charts
        for kind in kinds
        for log in logs
    )
    limit = choose_point_limit(num_series)
    return {
        section: [
            build_chart(
                metric,
                [
                    (index, "validation" if kind == "eval" else "training", series)
                    for index, log in enumerate(logs)
                    for kind in kinds
                    if (series := log.get(kind, metric)) is not None
                ],
                limit=limit,
                title=unit_title if metric == "units_per_second" else make_title(metric),
            )
            for metric, kinds in charts
        ]
        for section, charts in sections.items()
    }


def build_module_charts(statistics: dict[str, dict[str, Series]], *, run: int, num_runs: int) -> list[dict[str, Any]]:
    """Return a chart for each statistic of the modules of run `run` of `num_runs`, with a series for each module."""
    num_series = sum(map(len, statistics.values()))
    limit = choose_point_limit(num_series * num_runs, budget=MODULE_POINT_BUDGET)
    return [
        build_chart(
            name,
            [(run, module, series) for module, series in modules.items()],
            limit=limit,
            title=make_title(name),
        )
        for name, modules in statistics.items()
    ]


def choose_point_limit(num_series: int, *, budget: int = POINT_BUDGET) -> int:
    """Return how many points each of `num_series` series may have."""
    return max(MIN_POINTS, min(MAX_POINTS, budget // max(1, num_series)))


def build_chart(metric: str, series: Sequence[tuple[int, str, Series]], *, limit: int, title: str) -> dict[str, Any]:
    """Return one line chart: its title, whether its scale is logarithmic, and for each series its run, label and points."""
    return {
        "metric": metric,
        "title": title,
        "log": metric in LOG_SCALE,
        "smooth": metric not in UNSMOOTHED,
        "series": [
            {"run": run, "label": label, "points": _list_columns(points.thin(limit))} for run, label, points in series
        ],
    }


def _counts_samples(log: MetricsLog) -> bool:
    """Return whether the units of the throughput are samples."""
    units, samples = log.get("train", "units_per_second"), log.get("train", "samples_per_second")
    return units is None or samples is None or np.allclose(units.values, samples.values)


def _list_columns(points: ThinnedPoints) -> list[list[float]]:
    """Return steps, samples and values, and the means of intervals unless each point stands for itself."""
    columns = [points.steps, points.samples, points.values]
    if not np.array_equal(points.means, points.values):
        columns.append(points.means)
    return [_round_column(column) for column in columns]


def _has_values(logs: Sequence[MetricsLog], metric: str) -> bool:
    """Return whether a training metric is anything but zero in some run: a network that is not used needs no chart."""
    return any(any(series.values) for log in logs if (series := log.get("train", metric)) is not None)


def _list_metrics(logs: Sequence[MetricsLog], kind: str) -> list[str]:
    """Return the metrics of one kind of row, in the order in which they first appear."""
    return list(dict.fromkeys(name for log in logs for row_kind, name in log.series if row_kind == kind))


def _round_column(column: Iterable[float]) -> list[float]:
    """Round to six significant digits, whole numbers without a decimal point, which halves the size of the page."""
    rounded = (float(f"{value:.6g}") if abs(value) < 1e6 or value % 1 else value for value in map(float, column))
    return [int(value) if value.is_integer() and abs(value) < 2**53 else value for value in rounded]
