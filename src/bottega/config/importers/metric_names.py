"""Translate names of monitored metrics: names of other trainers to the metrics that are computed here."""

from __future__ import annotations

import re

from bottega.config.importers.translation import Translation, parse_text
from bottega.config.metrics import infer_metric_mode

METRIC_NAMES = {
    "loss": "loss",
    **dict.fromkeys(("perplexity", "ppl"), "perplexity"),
    **dict.fromkeys(("bits_per_byte", "bpb"), "bits_per_byte"),
    **dict.fromkeys(("accuracy", "acc", "accuracy_score"), "accuracy"),
    **dict.fromkeys(("f1", "f1_score", "macro_f1", "f1_macro"), "macro_f1"),
    **dict.fromkeys(("weighted_f1", "f1_weighted"), "weighted_f1"),
    **dict.fromkeys(("auroc", "auc", "roc_auc"), "auroc"),
    **{name: name for name in ("ece", "exact_match", "label_accuracy", "mse", "psnr", "kl")},
}
LANGUAGE_METRICS = ("loss", "perplexity", "bits_per_byte")


def map_monitored_metric(translation: Translation, *, metric_key: str, mode_key: str, recipe_block: str) -> str | None:
    """Map the monitored metric to `recipe_block`.metric and return its name; its mode (min or max) follows from the name."""
    recipe_metric = None
    if translation.is_pending(metric_key):
        source_name = parse_text(translation.get(metric_key)) if isinstance(translation.get(metric_key), str) else ""
        base_name = _strip_split_prefix(source_name)
        recipe_name = METRIC_NAMES.get(base_name)
        task = translation.find_mapped("task")
        allowed = (
            LANGUAGE_METRICS
            if task is not None and task.recipe_value == "language"
            else tuple(dict.fromkeys(METRIC_NAMES.values()))
        )
        if recipe_name in allowed:
            note = (
                "the mean over classes; weighted_f1 weights them by size" if base_name in ("f1", "f1_score") else None
            )
            recipe_metric = translation.map_converted(
                metric_key, f"{recipe_block}.metric", lambda _: recipe_name, note=note
            )
        else:
            translation.skip(metric_key, "invalid value", f"available metrics are {', '.join(allowed)}; loss is used")
    mode = infer_metric_mode(recipe_metric or "loss")
    if translation.is_pending(mode_key):
        is_max = str(translation.get(mode_key)).lower() in ("max", "true", "yes", "on", "1")
        if is_max == (mode == "max"):
            translation.skip(mode_key, "not applicable", "the direction follows from the metric")
        else:
            better = "larger" if mode == "max" else "smaller"
            translation.skip(
                mode_key, "invalid value", f"the metric is {recipe_metric or 'loss'}, for which {better} is better"
            )
    return recipe_metric


def _strip_split_prefix(name: str) -> str:
    """Remove the split from a metric's name: eval_loss, val_loss and val/loss are the validation loss."""
    return re.sub(r"^(eval|valid|validation|val)[_/]", "", name.strip().lower()).replace("-", "_")
