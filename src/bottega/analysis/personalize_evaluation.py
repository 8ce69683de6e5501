"""Ablation of personalisation: the same wishes of the same people, generated with and without each conditioning.

The arms: `none` has the wish only; `keywords` adds keywords that the language model predicts from the history; `soft` adds
the trained soft tokens instead; `both` is the full method. `picked` is `both` as `bottega generate` returns it, the best of
several weightings by CLIP; since CLIP is also a metric, the tests use `both`. `shuffled` is `both` with the history of
another user with other preferences: a gain that remains there does not come from personalisation. All arms start from the
same noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bottega.analysis.personalize_arms import (
    MIN_PEOPLE,
    TARGET_ARM,
    compare_arms,
    list_measures,
    summarise_arms,
    swap_histories,
)
from bottega.analysis.personalize_contact_sheets import PersonRow, plot_arms, write_contact_sheets
from bottega.analysis.personalize_metrics import STICKER_PREFIX, ImageMetrics, People
from bottega.analysis.personalize_table import select_headline_measures
from bottega.analysis.personalize_truth import (
    MIN_STICKER_ACCURACY,
    ClipFieldClassifier,
    TruthFields,
    build_preference_keys,
    find_sticker_classifier,
    find_truth_fields,
    score_fields,
    score_keywords,
)
from bottega.data.output_files import explain_write_errors
from bottega.plots.figure import try_plot
from bottega.storage.durable import replacing_file
from bottega.storage.json_values import replace_non_finite
from bottega.tasks.personalize.arms import ARMS
from bottega.tasks.personalize.contact_sheets import MAX_HISTORY_SHOWN
from bottega.tasks.personalize.data.records import Item, Record, pick_evenly_spaced

PEOPLE_FILE, SHEETS_FOLDER, CHART_FILE = "people.jsonl", "sheets", "arms.png"
MAX_RECORDS = 256
"""Default maximum number of records: each needs eight generated images, and all images of an arm are in memory at once."""
MAX_PEOPLE_SHOWN = 64
"""Maximum number of people on contact sheets: the images of all arms of all people would not fit in memory."""
MAX_CAPTION_RECORDS = 2000
"""Maximum number of records of each table whose captions become zero-shot prompts."""

ProgressCallback = Callable[[str, int, int], None]


class RecordTable(Protocol):
    """Records with their images, such as `PersonalRows`."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Return the record of one user."""

    def image(self, item: Item) -> np.ndarray:
        """Return the image of an item, uint8 (height, width, 3)."""


@dataclass(frozen=True)
class PersonalizedGenerator:
    """The parts of a personalised run that the evaluation uses: records, keyword prediction, generation, and a CLIP."""

    table: RecordTable
    all_tables: Sequence[RecordTable]
    """All tables of the data; their values are the classes of each field."""
    predict_keywords: Callable[[Sequence[Record]], list[tuple[str, ...]]]
    generate_arm: Callable[[str, Sequence[Record], ProgressCallback], np.ndarray]
    """(arm other than `shuffled`, records, progress callback) -> images, uint8 (records, height, width, 3).

    Image i depends on record i, i and the seed only.
    """
    clip_scorer: Any = None
    """A CLIP with its tokenizer; None if the recipe has no model.clip."""
    device: Any = "cpu"
    predict_random_keywords: Callable[[Sequence[Record]], list[tuple[str, ...]]] | None = None
    """Keywords of the same language model with random weights; None if the model is too large."""


def evaluate_personalization(
    generator: PersonalizedGenerator,
    *,
    count: int | None,
    lpips: Path | None,
    out: Path,
    seed: int = 0,
    report_progress: ProgressCallback,
) -> dict[str, Any]:
    """Generate and measure all arms for `count` records, write the results to `out`, and return the contents of metrics.json."""
    notes: list[str] = []
    indices = _choose_records(generator.table, count, notes)
    records = [generator.table.record(index) for index in indices]
    people = _collect_people(generator, indices, records)
    fields = (
        find_truth_fields(records, _iterate_records(generator)) if any(record.truth for record in records) else None
    )
    metrics = _build_metrics(generator, people, fields, lpips, notes)
    rows = metrics.measure_arm(TARGET_ARM, people.target_images)
    images: dict[str, np.ndarray] = {}
    for arm, arm_records, extra in _iterate_arms(generator, people, fields, notes, seed=seed):
        generated_arm = "both" if arm == "shuffled" else arm
        arm_images = generator.generate_arm(
            generated_arm,
            arm_records,
            lambda stage, done, total, arm=arm: report_progress(arm, done, total),  # type: ignore[misc]
        )
        rows += metrics.measure_arm(arm, arm_images, **extra)
        images[arm] = arm_images[:MAX_PEOPLE_SHOWN].copy()  # a copy, since a view would keep the whole array alive
    results = _summarise_results(rows, people, fields, notes)
    if fields is not None and generator.predict_random_keywords is not None:
        results["keywords"]["random weights"] = _compute_keyword_accuracy(
            fields, generator.predict_random_keywords(records), records
        )
    _write_results(out, rows, people, images, results)
    return results


def _choose_records(table: RecordTable, count: int | None, notes: list[str]) -> list[int]:
    """Return evenly spaced record indices in ascending order; a user has a second record only if every user has one."""
    num_available = len(table)
    if count is None and num_available > MAX_RECORDS:
        notes.append(
            f"{MAX_RECORDS} of {num_available:,} records are evaluated, each in all arms; raise the limit with --count"
        )
    count = min(num_available, MAX_RECORDS if count is None else count)
    if count == num_available:
        return list(range(num_available))
    last_indices = list({table.record(index).user: index for index in range(num_available)}.values())
    if count <= len(last_indices):
        return sorted(last_indices[i] for i in pick_evenly_spaced(len(last_indices), count))
    other_indices = sorted(set(range(num_available)) - set(last_indices))
    return sorted(
        last_indices + [other_indices[i] for i in pick_evenly_spaced(len(other_indices), count - len(last_indices))]
    )


def _collect_people(generator: PersonalizedGenerator, indices: list[int], records: list[Record]) -> People:
    table = generator.table
    return People(
        records=records,
        record_indices=indices,
        keywords=generator.predict_keywords(records),
        target_images=np.stack([table.image(record.target) for record in records]),
        load_liked_images=lambda i: [table.image(item) for item in records[i].history if item.image is not None],
    )


def _iterate_records(generator: PersonalizedGenerator) -> Iterable[Record]:
    for table in generator.all_tables:
        yield from (table.record(index) for index in range(len(table)))


def _iterate_captions(generator: PersonalizedGenerator) -> Iterable[str]:
    for table in generator.all_tables:
        for index in pick_evenly_spaced(len(table), MAX_CAPTION_RECORDS):
            yield from (item.caption for item in table.record(index).items)


def _build_metrics(
    generator: PersonalizedGenerator, people: People, fields: TruthFields | None, lpips: Path | None, notes: list[str]
) -> ImageMetrics:
    clip_scorer, sticker_classifier, clip_classifier = generator.clip_scorer, None, None
    if clip_scorer is None:
        notes.append("the recipe has no model.clip: CLIP scores and the arm picked are left out")
    if fields is not None:
        clip_classifier = (
            ClipFieldClassifier(fields, _iterate_captions(generator), clip_scorer.encode_texts)
            if clip_scorer is not None
            else None
        )
        sticker_classifier = _find_reliable_sticker_classifier(fields, people)
    if lpips is not None:
        from bottega.models.metric_networks.perceptual import load_lpips

        perceptual: Any = load_lpips(lpips, device=generator.device)
    elif clip_scorer is not None:
        from bottega.models.metric_networks.perceptual import ClipPerceptual

        perceptual = ClipPerceptual(clip_scorer.clip)
        notes.append(
            "perceptual is a distance over the layers of this run's CLIP, not LPIPS; measure LPIPS with --lpips FILE"
        )
    else:
        perceptual = None
    return ImageMetrics(
        people,
        clip_scorer=clip_scorer,
        perceptual=perceptual,
        device=generator.device,
        fields=fields,
        clip_classifier=clip_classifier,
        sticker_classifier=sticker_classifier,
    )


def _find_reliable_sticker_classifier(fields: TruthFields, people: People) -> Any:
    """Return the sticker classifier if it is accurate on the real targets, else None: other data may have the same values."""
    classifier = find_sticker_classifier(fields)
    if classifier is None:
        return None
    scores = score_fields(fields, classifier(people.target_images), people.records)
    return classifier if min(float(values.mean()) for values in scores.values()) >= MIN_STICKER_ACCURACY else None


def _iterate_arms(
    generator: PersonalizedGenerator, people: People, fields: TruthFields | None, notes: list[str], *, seed: int
) -> Iterable[tuple[str, Sequence[Record], dict[str, list[Any]]]]:
    """Yield each arm with its records and the extra columns of its rows."""
    records = people.records
    for arm in ARMS:
        yield arm, records, {}
    if generator.clip_scorer is not None:
        yield "picked", records, {}
    swapped_indices = swap_histories(build_preference_keys(records, people.keywords, fields), seed=seed)
    if swapped_indices is None:
        notes.append(
            "shuffled is left out: more than half of these users have the same preferences; evaluate more with --count"
        )
        return
    other_records = [records[i] for i in swapped_indices]
    swapped_records = [r.model_copy(update={"history": o.history}) for r, o in zip(records, other_records, strict=True)]
    arm_keywords = [list(predicted) for predicted in generator.predict_keywords(swapped_records)]
    yield "shuffled", swapped_records, {"history_of": [other.user for other in other_records], "keywords": arm_keywords}


def _summarise_results(
    rows: list[dict[str, Any]], people: People, fields: TruthFields | None, notes: list[str]
) -> dict[str, Any]:
    num_people = len({record.user for record in people.records})
    if num_people < MIN_PEOPLE:
        notes.append(f"{num_people} users are too few for tests; evaluate at least {MIN_PEOPLE} with --count")
    results: dict[str, Any] = {"arms": summarise_arms(rows), "tests": compare_arms(rows)}
    if fields is not None:
        measures = list_measures(rows)
        chance = {
            f"{prefix}{name}_accuracy": value
            for prefix in ("", STICKER_PREFIX)
            for name, value in fields.chance_accuracy.items()
        }
        results["chance"] = {name: value for name, value in chance.items() if name in measures}
        results["keywords"] = {"learnt": _compute_keyword_accuracy(fields, people.keywords, people.records)}
    counts = {"people": num_people, "records": len(people)}
    return {**results, "counts": counts, "notes": notes}


def _compute_keyword_accuracy(
    fields: TruthFields, keywords: Sequence[Sequence[str]], records: Sequence[Record]
) -> dict[str, float]:
    """Return column -> fraction of records whose keywords name the preferred value."""
    return {name: float(values.mean()) for name, values in score_keywords(fields, keywords, records).items()}


def _write_results(
    out: Path, rows: list[dict[str, Any]], people: People, images: dict[str, np.ndarray], results: dict[str, Any]
) -> None:
    file = out / PEOPLE_FILE
    with explain_write_errors(file), replacing_file(file) as temporary:
        lines = (json.dumps(replace_non_finite(row), ensure_ascii=False) + "\n" for row in rows)
        temporary.write_text("".join(lines), encoding="utf-8")
    columns = [*images, TARGET_ARM]
    images_by_arm = {**images, TARGET_ARM: people.target_images}
    rows_shown = [
        PersonRow(
            record.user,
            record.wish_or_caption,
            people.keywords[i],
            people.load_liked_images(i)[-MAX_HISTORY_SHOWN:],
            {arm: images_by_arm[arm][i] for arm in columns},
        )
        for i, record in enumerate(people.records[:MAX_PEOPLE_SHOWN])
    ]
    files = [file, *write_contact_sheets(rows_shown, out / SHEETS_FOLDER)]
    accuracies = [name for name in select_headline_measures(list_measures(rows)) if name.endswith("_accuracy")]
    if accuracies:
        plot = partial(plot_arms, results["arms"], accuracies, results.get("chance", {}))
        files += [out / CHART_FILE] if try_plot(plot, out / CHART_FILE, warn=results["notes"].append) else []
    results["files"] = [str(path) for path in files]
