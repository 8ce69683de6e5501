"""Rules about the data: samples that occur twice, rare classes, and too few validation samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.series import get_metric, require_data
from bottega.run_files.record import RunRecord

HELD_OUT = ("validation", "test")
MIN_LEAK_SHARE = 0.03
"""Share of the held-out samples that are also in the training data from which they count as a leak.

They raise an accuracy by at most this much. Of the data sets of the healthy runs, the largest share is 0.023, short texts from
templates; web crawls have 0.05 to 0.14 (Lee et al., 2022)."""
MIN_DUPLICATE_SHARE = 0.05
"""Share of duplicates in the training data that counts; the largest of a healthy run is 0.017, and C4 has 0.03 (Lee et al., 2022)."""
MIN_IMBALANCE_RATIO = 9
"""A class with so many times fewer samples than the largest one is rare: the limit of high imbalance in the KEEL repository."""
MIN_RECALL_GAP = 0.25
"""Difference between the recall of the rare classes and that of all others that counts."""
MIN_RECALL_DEVIATIONS = 2.0
"""The same, in standard errors: with few rare validation samples, a gap may be chance."""
MAX_ACCURACY_MARGIN = 0.075
"""Half of the 95 % confidence interval of an accuracy from which the validation set is too small.

Two runs must then differ by 0.1 to be told apart. The healthy run with the fewest samples, 200, has 0.052."""
MAX_LOSS_MARGIN = 0.15
"""The same for a loss, as a fraction of it."""
LOSS_SPREAD, TOKEN_LOSS_SPREAD = 0.4, 1.5
"""Standard deviation of the loss of a sample, and of a token, over its mean. Over 100 samples of the healthy runs: image 0.39,
text of 20 tokens 0.30 (so 1.3 for a token), image VAE and tokens 0.24, video 0.21, audio 0.07."""
DEVIATIONS_OF_INTERVAL = 1.96
SAFETY = 1.1
"""Factor on the number of validation samples that is advised, because a split is not exact."""
MAX_VALIDATION_SPLIT = 0.5


def find_leak(record: RunRecord) -> Finding | None:
    """Validation or test samples are also in the training data, so the metrics do not measure generalisation."""
    comparison = _get_comparison(record)
    compared_share = _get_compared_share(comparison["train"])
    shares = {name: min(1.0, comparison[name]["share"] / compared_share) for name in HELD_OUT if name in comparison}
    if not shares or max(shares.values()) < MIN_LEAK_SHARE:
        return None
    worst = max(shares, key=lambda name: shares[name])
    counts, (first, second) = comparison[worst], comparison[worst]["example"]
    return Finding(
        "leak-between-splits",
        f"{_format_count(counts['in_train'], counts['compared'])} {worst} samples are also in the training data, "
        f"such as {first}, which equals {second}{_describe_sampling(comparison['train'])}",
        None,
        _suggest_deduplication(record, comparison["key"]),
    )


def find_duplicates(record: RunRecord) -> Finding | None:
    """Training samples occur several times, which weights them more and is memorised first."""
    comparison = _get_comparison(record)
    train = comparison["train"]
    if train["share"] / _get_compared_share(train) < MIN_DUPLICATE_SHARE:
        return None
    return Finding(
        "duplicates",
        f"{_format_count(train['duplicates'], train['compared'])} training samples repeat an earlier one"
        f"{_describe_sampling(train)}",
        None,
        _suggest_deduplication(record, comparison["key"]),
    )


def _get_compared_share(train: Mapping[str, Any]) -> float:
    """Return the fraction of the training samples that were compared: of a copy, the other half is among them as often."""
    share = train.get("sampled")
    return share if isinstance(share, float) and 0 < share < 1 else 1.0


def _describe_sampling(train: Mapping[str, Any]) -> str:
    share = _get_compared_share(train)
    return (
        "" if share == 1.0 else f"; only {100 * share:.0f} % of the training samples were compared, so there are more"
    )


def _get_comparison(record: RunRecord) -> dict[str, Any]:
    require_data(record)
    comparison = record.data.get("duplicates")
    if comparison == {}:
        raise NotRecorded(f"samples of the task {record.get('task')} are not compared")
    if not isinstance(comparison, dict) or not all(
        isinstance(split, dict) and "share" in split
        for split in (comparison.get("train"), *(comparison[name] for name in HELD_OUT if name in comparison))
    ):
        raise NotRecorded("data.json does not compare the samples; an earlier version wrote it")
    return comparison


def _format_count(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(1, total):.0f} %)"


def _suggest_deduplication(record: RunRecord, key: str) -> str:
    """Return the override that drops equal samples; texts that stay equal in their tokens alone are near duplicates."""
    is_text = record.get("task") == "language" or record.get("data.input") == "text"
    method = "near" if is_text and record.get(f"{key}.deduplicate.method") == "exact" else "exact"
    return f"{key}.deduplicate.method={method}"


def find_class_imbalance(record: RunRecord) -> Finding | None:
    """Rare classes are recognised far less often than the others."""
    require_data(record)
    classes, task = record.data.get("classes"), record.get("task")
    if task != "classify" or record.get("data.multi_label") or not classes or len(classes) < 2:
        return None  # other tasks have no class weights, and several labels of a sample are not counted
    # Rare samples that are memorised stay so: beside class weights, neither the focal loss nor weight decay helped.
    if record.get("loss.class_weights") is not None:
        return None
    per_class = record.evaluation.get("per_class")
    if not isinstance(per_class, dict):
        raise NotRecorded("no evaluation with metrics of each class")
    rare = [name for name, count in classes.items() if count * MIN_IMBALANCE_RATIO <= max(classes.values())]
    rare_recall = _pool_recall(per_class, rare)
    other_recall = _pool_recall(per_class, [name for name in classes if name not in rare])
    if not rare or not rare_recall.num_samples or not other_recall.num_samples:
        return None
    gap = other_recall.mean - rare_recall.mean
    if gap < MIN_RECALL_GAP or gap < MIN_RECALL_DEVIATIONS * math.hypot(rare_recall.error, other_recall.error):
        return None
    step = _read_step(record.evaluation.get("checkpoint"))
    rarest = min(rare, key=lambda name: classes[name])
    count = "the class" if len(rare) == 1 else f"{len(rare)} classes, such as"
    return Finding(
        "class-imbalance",
        f"{count} {rarest}, with {classes[rarest]:,} of {sum(classes.values()):,} training samples, "
        f"{'has' if len(rare) == 1 else 'have'} a recall of {rare_recall.mean:.2f}, and all others {other_recall.mean:.2f}",
        (step, step) if step is not None else None,
        # The accuracy alone would choose a checkpoint that predicts no rare class.
        "loss.class_weights=balanced evaluation.metric=macro_f1",
    )


class _Recall(NamedTuple):
    """Recall of several classes together."""

    mean: float
    num_samples: int

    @property
    def error(self) -> float:
        """The standard error, from (k + 2) / (n + 4), since all or none of a few samples would have none (Agresti and Coull, 1998)."""
        return _estimate_error(self.mean, self.num_samples)


def _pool_recall(per_class: Mapping[str, Mapping[str, float]], names: list[str]) -> _Recall:
    metrics = [per_class[name] for name in names if name in per_class]
    num_samples = sum(int(values["support"]) for values in metrics)
    num_correct = sum(values["recall"] * values["support"] for values in metrics)
    return _Recall(num_correct / max(1, num_samples), num_samples)


def _estimate_error(mean: float, num_samples: int) -> float:
    adjusted = (mean * num_samples + 2) / (num_samples + 4)
    return math.sqrt(adjusted * (1 - adjusted) / (num_samples + 4))


def _read_step(checkpoint: Any) -> int | None:
    digits = str(checkpoint).rpartition("-")[2]
    return int(digits) if digits.isdecimal() else None


def find_small_validation(record: RunRecord) -> Finding | None:
    """The validation metric is too uncertain to compare evaluations or runs."""
    if not _has_plain_samples(record):
        return None
    require_data(record)
    num_samples = record.data.get("splits", {}).get("validation")
    if num_samples is None:
        raise NotRecorded("the run has no validation data")
    max_batches, batch_size = record.get("evaluation.max_batches"), record.get("evaluation.batch_size")
    if max_batches is not None:
        num_samples = min(num_samples, max_batches * (batch_size or record.get("training.batch_size") or 1))
    metric = next((name for name in ("accuracy", "exact_match") if record.log.get("eval", name) is not None), "loss")
    steps, values = get_metric(record, "eval", metric)
    if metric == "loss":
        margin = DEVIATIONS_OF_INTERVAL * _estimate_loss_spread(record) / math.sqrt(max(1, num_samples))
        is_certain, needed = margin <= MAX_LOSS_MARGIN, num_samples * (margin / MAX_LOSS_MARGIN) ** 2
        interval = f"known to about ±{100 * margin:.0f} %, so smaller differences tell nothing"
    else:
        best = float(values.max())
        margin = DEVIATIONS_OF_INTERVAL * _estimate_error(best, num_samples)
        # The accuracy of the next run is unknown within this margin; the most samples are needed where it is closest to 0.5.
        accuracy = min(max(0.5, best - margin), best + margin)
        is_certain = margin <= MAX_ACCURACY_MARGIN
        needed = accuracy * (1 - accuracy) * (DEVIATIONS_OF_INTERVAL / MAX_ACCURACY_MARGIN) ** 2
        interval = f"{best:.2f} ± {margin:.2f} at best (95 %), so smaller differences tell nothing"
    if is_certain:
        return None
    return Finding(
        "validation-too-small",
        f"on {num_samples:,} validation samples the {metric} is {interval}; about {math.ceil(needed):,} are needed",
        (int(steps[0]), int(steps[-1])),
        _suggest_larger_validation(record, num_samples, math.ceil(SAFETY * needed)),
    )


def _estimate_loss_spread(record: RunRecord) -> float:
    """Return the standard deviation of the loss of a sample over its mean; a text of many tokens has a smaller one."""
    row = record.log.last_rows.get("train", {})
    units, samples = row.get("units_per_second"), row.get("samples_per_second")
    if record.data.get("unit") != "tokens" or not units or not samples:
        return LOSS_SPREAD
    return TOKEN_LOSS_SPREAD / math.sqrt(max(1.0, units / samples))


def _has_plain_samples(record: RunRecord) -> bool:
    """Return whether a validation sample is one observation.

    A segment of recall and an episode of maml have several answers, and the parts of multitask have metrics of their own.
    """
    techniques = [t.get("name") if isinstance(t, dict) else t for t in record.get("techniques") or ()]
    return record.get("task") not in ("recall", "multitask") and "maml" not in techniques


def _suggest_larger_validation(record: RunRecord, num_samples: int, needed: int) -> str | None:
    """Return the override for `needed` validation samples, or as many as there are; None if only more data helps."""
    splits = record.data["splits"]
    if num_samples < splits["validation"]:  # evaluation.max_batches
        batch_size = record.get("evaluation.batch_size") or record.get("training.batch_size")
        return f"evaluation.max_batches={math.ceil(needed / batch_size)}"
    if num_samples >= (record.get("data.validation.limit") or math.inf):
        return f"data.validation.limit={needed}"
    if record.get("data.validation.kind") == "synthetic":
        return f"data.validation.num_samples={needed}"
    folds = record.get("data.split.folds")
    total = splits["train"] + splits["validation"]
    if folds is not None:
        if folds <= 2:
            return None
        num_folds = max(2, min(folds - 1, total // needed))
        fold = record.get("data.split.fold") or 0
        return f"data.split.folds={num_folds}" + (" data.split.fold=0" if fold >= num_folds else "")
    source = record.get("data.validation") or {}
    own_source = {key: value for key in ("path", "kind") if (value := source.get(key)) not in (None, "auto")}
    # Held-out data of its own does not grow; a part of the training data takes its place.
    resets = [f"data.validation.{key}={'null' if key == 'path' else 'auto'}" for key in own_source]
    fraction = min(MAX_VALIDATION_SPLIT, math.ceil(100 * needed / (splits["train"] if own_source else total)) / 100)
    if not own_source and fraction <= (record.get("data.validation.split") or 0.0):
        return None
    return " ".join([*resets, f"data.validation.split={fraction:g}"])


RULES = {
    "leak-between-splits": find_leak,
    "duplicates": find_duplicates,
    "class-imbalance": find_class_imbalance,
    "validation-too-small": find_small_validation,
}
