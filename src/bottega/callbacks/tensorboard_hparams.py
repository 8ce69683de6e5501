"""What TensorBoard needs to compare runs: hyperparameters for its HPARAMS tab, and the charts of its CUSTOM SCALARS tab."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bottega.callbacks.tensorboard_summaries import make_bytes_summary
from bottega.redaction import redact_values

Hyperparameters = Mapping[str, str | float | bool]

CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Loss": {"loss": ("train/loss", "validation/loss")},
    "Optimisation": {"learning rate": ("train/learning_rate",), "gradient norm": ("train/grad_norm",)},
    "Throughput": {
        "units per second": ("train/units_per_second",),
        "samples per second": ("train/samples_per_second",),
        "seconds per step": ("train/step_seconds",),
        "fraction of time waiting for data": ("train/data_wait",),
    },
    "Resources": {
        "CPU and GPU utilisation in percent": ("train/cpu_percent", "train/gpu_percent"),
        "memory in GiB": ("train/ram_gib", "train/gpu_memory_gib"),
        "free disk space in GiB": ("train/disk_free_gib",),
    },
}
"""Category -> chart -> tags of the scalars in it."""

MODULE_CHARTS = {
    "gradient norm": "modules/.*/gradient_norm",
    "update ratio": "modules/.*/update_ratio",
    "dead fraction": "modules/.*/dead_fraction",
}


def flatten_hyperparameters(values: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Return settings by dotted key as texts, numbers and booleans, the types that TensorBoard can compare.

    A list of blocks, such as the techniques of a recipe, becomes a key for each option; any other list becomes JSON. Keys without
    a value are left out.
    """
    flat: dict[str, str | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            names = [item.get("name") for item in value]
            labels = names if all(names) and len(set(names)) == len(names) else range(len(value))
            value = dict(zip(labels, value, strict=True))
        if isinstance(value, Mapping):
            flat |= flatten_hyperparameters({f"{key}.{name}": item for name, item in value.items()})
        elif value is not None:
            flat[key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flat


def make_session_start(hyperparameters: Hyperparameters, *, group: str) -> Any:
    """Return the hyperparameters of a run as a `Summary`.

    No experiment is declared: TensorBoard would use the declaration of whichever run it reads first, and hide every key that this
    run does not have. Without one it lists the keys and scalars of all runs, those keys first that differ between runs.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    start = SessionStartInfo(group_name=group, start_time_secs=time.time())
    for key, value in redact_values(dict(hyperparameters)).items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    return _make_hparams_summary("_hparams_/session_start_info", HParamsPluginData(session_start_info=start))


def make_session_end(*, is_success: bool) -> Any:
    """Return the end of a run, with its status, as a `Summary`."""
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = STATUS_SUCCESS if is_success else STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _make_hparams_summary("_hparams_/session_end_info", HParamsPluginData(session_end_info=end))


def is_session_end(event: Any) -> bool:
    """Return whether an event is the end of a run."""
    return any(value.tag == "_hparams_/session_end_info" for value in event.summary.value)


def make_layout_summary(metrics: Iterable[str]) -> Any:
    """Return the charts that compare runs as a `Summary`: those of every run, one for each of `metrics`, and those of modules.

    TensorBoard merges the layouts of all runs.
    """
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

    def make_chart(title: str, *patterns: str) -> Any:
        return Chart(title=title, multiline=MultilineChartContent(tag=patterns))

    # A tag of a chart is a regular expression that has to match the beginning of the scalar's tag.
    categories = [
        Category(
            title=title,
            chart=[make_chart(name, *(re.escape(tag) + "$" for tag in tags)) for name, tags in charts.items()],
        )
        for title, charts in CHARTS.items()
    ]
    metric_charts = [
        make_chart(name, rf"(train|validation|best)/{re.escape(name)}$") for name in metrics if name != "loss"
    ]
    if metric_charts:
        categories.insert(1, Category(title="Task metrics", chart=metric_charts))
    module_charts = [make_chart(title, f"{pattern}$") for title, pattern in MODULE_CHARTS.items()]
    categories.append(Category(title="Modules", chart=module_charts, closed=True))
    layout = Layout(category=categories).SerializeToString()
    return make_bytes_summary("custom_scalars__config__", layout, plugin="custom_scalars")


def _make_hparams_summary(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    summary_metadata = metadata.create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)])
