"""Which metric decides: the names that others give to what is measured here, and none that nothing here measures."""

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


def map_monitored_metric(translation: Translation, *, metric: str, mode: str, ours: str) -> str | None:
    """Fill `ours`.metric from their keys; which way it is better needs no key, since all that is taken over is known."""
    found = None
    if translation.is_pending(metric):
        said = parse_text(translation.get(metric)) if isinstance(translation.get(metric), str) else ""
        bare = _bare(said)
        named = METRIC_NAMES.get(bare)
        task = translation.find_mapped("task")
        allowed = (
            LANGUAGE_METRICS
            if task is not None and task.recipe_value == "language"
            else tuple(dict.fromkeys(METRIC_NAMES.values()))
        )
        if named in allowed:
            note = "the mean over classes; weighted_f1 goes by their sizes" if bare in ("f1", "f1_score") else None
            found = translation.map_converted(metric, f"{ours}.metric", lambda _: named, note=note)
        else:
            translation.skip(metric, "not understood", f"measured here are {', '.join(allowed)}; loss decides")
    known = infer_metric_mode(found or "loss")
    if translation.is_pending(mode):
        is_max = str(translation.get(mode)).lower() in ("max", "true", "yes", "on", "1")
        if is_max == (known == "max"):
            translation.skip(mode, "meaningless here", "the name of the metric says it")
        else:
            better = "larger" if known == "max" else "smaller"
            translation.skip(mode, "not understood", f"of {found or 'loss'}, which decides here, {better} is better")
    return found


def _bare(name: str) -> str:
    """eval_loss, val_loss and val/loss are all the loss on held-out data."""
    return re.sub(r"^(eval|valid|validation|val)[_/]", "", name.strip().lower()).replace("-", "_")
