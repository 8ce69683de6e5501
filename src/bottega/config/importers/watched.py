"""Which metric decides: the names that others give to what is measured here, and none that nothing here measures."""

from __future__ import annotations

import re

from bottega.config.importers.mapping import Sheet, text
from bottega.config.metrics import natural_direction

NAMES = {
    "loss": "loss",
    **dict.fromkeys(("perplexity", "ppl"), "perplexity"),
    **dict.fromkeys(("bits_per_byte", "bpb"), "bits_per_byte"),
    **dict.fromkeys(("accuracy", "acc", "accuracy_score"), "accuracy"),
    **dict.fromkeys(("f1", "f1_score", "macro_f1", "f1_macro"), "macro_f1"),
    **dict.fromkeys(("weighted_f1", "f1_weighted"), "weighted_f1"),
    **dict.fromkeys(("auroc", "auc", "roc_auc"), "auroc"),
    **{name: name for name in ("ece", "exact_match", "label_accuracy", "mse", "psnr", "kl")},
}
OF_LANGUAGE = ("loss", "perplexity", "bits_per_byte")


def watched(sheet: Sheet, *, metric: str, mode: str, ours: str) -> str | None:
    """Fill `ours`.metric from their keys; which way it is better needs no key, since all that is taken over is known."""
    found = None
    if sheet.is_open(metric):
        said = text(sheet.get(metric)) if isinstance(sheet.get(metric), str) else ""
        bare = _bare(said)
        named = NAMES.get(bare)
        task = sheet.ours("task")
        allowed = (
            OF_LANGUAGE if task is not None and task.becomes == "language" else tuple(dict.fromkeys(NAMES.values()))
        )
        if named in allowed:
            note = "the mean over classes; weighted_f1 goes by their sizes" if bare in ("f1", "f1_score") else None
            found = sheet.convert(metric, f"{ours}.metric", lambda _: named, note=note)
        else:
            sheet.leave(metric, "not understood", f"measured here are {', '.join(allowed)}; loss decides")
    known = natural_direction(found or "loss")
    if sheet.is_open(mode):
        is_max = str(sheet.get(mode)).lower() in ("max", "true", "yes", "on", "1")
        if is_max == (known == "max"):
            sheet.leave(mode, "meaningless here", "the name of the metric says it")
        else:
            better = "larger" if known == "max" else "smaller"
            sheet.leave(mode, "not understood", f"of {found or 'loss'}, which decides here, {better} is better")
    return found


def _bare(name: str) -> str:
    """eval_loss, val_loss and val/loss are all the loss on held-out data."""
    return re.sub(r"^(eval|valid|validation|val)[_/]", "", name.strip().lower()).replace("-", "_")
