"""What personalisation is worth: the same wishes of the same people, drawn with less and with more known of them.

The arms: `none` knows the wish alone; `keywords` adds what the language model says in words; `soft` adds the trained
tokens instead; `both` is the method. `picked` is `both` as `bottega generate` gives it, the best of several weightings by
CLIP; since CLIP also judges, the tests are of `both`. `shuffled` is `both` with the history of somebody who likes something
else: what is left of the gain then has nothing to do with the person. All arms start from the same noise.
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
    measure_names,
    summarise_arms,
    swap_histories,
)
from bottega.analysis.personalize_contact_sheets import PersonRow, plot_arms, write_contact_sheets
from bottega.analysis.personalize_metrics import STICKER_PREFIX, ImageMetrics, People
from bottega.analysis.personalize_table import headline_measures
from bottega.analysis.personalize_truth import (
    MIN_READER_ACCURACY,
    ClipFieldClassifier,
    TruthFields,
    find_truth_fields,
    open_sticker_reader,
    preference_keys,
    score_fields,
    score_keywords,
)
from bottega.data.output_files import explain_write_errors, replace_non_finite
from bottega.plots.figure import try_plot
from bottega.storage.durable import replacing_file
from bottega.tasks.personalize.arms import ARMS
from bottega.tasks.personalize.contact_sheets import MAX_HISTORY_SHOWN
from bottega.tasks.personalize.data.records import Item, Record, evenly_spaced

PEOPLE_FILE, SHEETS_FOLDER, CHART_FILE = "people.jsonl", "sheets", "arms.png"
MAX_RECORDS = 256
"""Records that are drawn for where nobody says: each takes eight drawings, and the pictures of an arm are held at once."""
MAX_PEOPLE_SHOWN = 64
"""People on sheets; nobody turns more pages, and the pictures of all arms of all people would not fit."""
MAX_CAPTION_RECORDS = 2000
"""Records of each table whose captions are looked through for ways to say a word."""

ProgressCallback = Callable[[str, int, int], None]


class RecordTable(Protocol):
    """Records with their pictures; `PersonalRows` is one."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record: ...

    def image(self, item: Item) -> np.ndarray: ...


@dataclass(frozen=True)
class PersonalizedGenerator:
    """All that is asked of a run: whom there is, what is said of them, and how they are drawn for."""

    table: RecordTable
    all_tables: Sequence[RecordTable]
    """All tables of the data, for the words that there are."""
    predict_keywords: Callable[[Sequence[Record]], list[tuple[str, ...]]]
    generate_arm: Callable[[str, Sequence[Record], ProgressCallback], np.ndarray]
    """An arm other than `shuffled`, and records: uint8 [n, h, w, 3]. Picture i is a function of i and the seed, and of
    nothing of another record."""
    judge: Any = None
    """A CLIP with its words; None where the recipe names none."""
    device: Any = "cpu"
    random_keywords: Callable[[Sequence[Record]], list[tuple[str, ...]]] | None = None
    """Keywords of the same language model with random weights; None where it is too large for a trial."""


def evaluate_personalization(
    generator: PersonalizedGenerator,
    *,
    count: int | None,
    lpips: Path | None,
    out: Path,
    seed: int = 0,
    report_progress: ProgressCallback,
) -> dict[str, Any]:
    """Draws and measures all arms for `count` people, writes all of it to `out`, and gives what stands in metrics.json."""
    notes: list[str] = []
    numbers = _chosen(generator.table, count, notes)
    records = [generator.table.record(number) for number in numbers]
    people = _people(generator, numbers, records)
    fields = find_truth_fields(records, _every(generator)) if any(record.truth for record in records) else None
    tools = _instruments(generator, people, fields, lpips, notes)
    rows = tools.measure_arm(TARGET_ARM, people.target_images)
    pictures: dict[str, np.ndarray] = {}
    for arm, asked, beside in _arms(generator, people, fields, notes, seed=seed):
        drawn = "both" if arm == "shuffled" else arm
        made = generator.generate_arm(
            drawn,
            asked,
            lambda stage, done, total, arm=arm: report_progress(arm, done, total),  # type: ignore[misc]
        )
        rows += tools.measure_arm(arm, made, **beside)
        pictures[arm] = made[:MAX_PEOPLE_SHOWN].copy()  # a part of it would keep the whole
    found = _found(rows, people, fields, notes)
    if fields is not None and generator.random_keywords is not None:
        found["keywords"]["random weights"] = _named(fields, generator.random_keywords(records), records)
    _write(out, rows, people, pictures, found)
    return found


def _chosen(table: RecordTable, count: int | None, notes: list[str]) -> list[int]:
    """Records of different people as long as there are such, and an even choice of them; in the order of the table."""
    available = len(table)
    if count is None and available > MAX_RECORDS:
        notes.append(f"{MAX_RECORDS} of {available:,} records are drawn for, each by all arms; --count takes more")
    count = min(available, MAX_RECORDS if count is None else count)
    if count == available:
        return list(range(available))
    last = list({table.record(number).user: number for number in range(available)}.values())
    if count <= len(last):
        return sorted(last[place] for place in evenly_spaced(len(last), count))
    others = sorted(set(range(available)) - set(last))
    return sorted(last + [others[place] for place in evenly_spaced(len(others), count - len(last))])


def _people(studio: PersonalizedGenerator, numbers: list[int], records: list[Record]) -> People:
    table = studio.table
    return People(
        records=records,
        record_indices=numbers,
        keywords=studio.predict_keywords(records),
        target_images=np.stack([table.image(record.target) for record in records]),
        load_liked_images=lambda place: [
            table.image(item) for item in records[place].history if item.image is not None
        ],
    )


def _every(studio: PersonalizedGenerator) -> Iterable[Record]:
    for table in studio.all_tables:
        yield from (table.record(number) for number in range(len(table)))


def _captions(studio: PersonalizedGenerator) -> Iterable[str]:
    for table in studio.all_tables:
        for number in evenly_spaced(len(table), MAX_CAPTION_RECORDS):
            yield from (item.caption for item in table.record(number).items)


def _instruments(
    studio: PersonalizedGenerator, people: People, fields: TruthFields | None, lpips: Path | None, notes: list[str]
) -> ImageMetrics:
    judge, ruler, words = studio.judge, None, None
    if judge is None:
        notes.append("the recipe names no model.clip: what it would judge, and the arm picked, are left out")
    if fields is not None:
        words = ClipFieldClassifier(fields, _captions(studio), judge.encode_texts) if judge is not None else None
        ruler = _trusted(fields, people)
    if lpips is not None:
        from bottega.models.metric_networks.perceptual import load_lpips

        perceptual: Any = load_lpips(lpips, device=studio.device)
    elif judge is not None:
        from bottega.models.metric_networks.perceptual import ClipPerceptual

        perceptual = ClipPerceptual(judge.clip)
        notes.append(
            "perceptual is a distance over the layers of this run's CLIP, not LPIPS; --lpips FILE measures that"
        )
    else:
        perceptual = None
    return ImageMetrics(
        people,
        judge=judge,
        perceptual=perceptual,
        device=studio.device,
        fields=fields,
        clip_classifier=words,
        sticker_reader=ruler,
    )


def _trusted(fields: TruthFields, people: People) -> Any:
    """The ruler of stickers, if it can read the real ones: other data may have the same words."""
    ruler = open_sticker_reader(fields)
    if ruler is None:
        return None
    found = score_fields(fields, ruler(people.target_images), people.records)
    return ruler if min(float(values.mean()) for values in found.values()) >= MIN_READER_ACCURACY else None


def _arms(
    studio: PersonalizedGenerator, people: People, fields: TruthFields | None, notes: list[str], *, seed: int
) -> Iterable[tuple[str, Sequence[Record], dict[str, list[Any]]]]:
    """Arm, what it is asked, and what else its rows say."""
    records = people.records
    for arm in ARMS:
        yield arm, records, {}
    if studio.judge is not None:
        yield "picked", records, {}
    given = swap_histories(preference_keys(records, people.keywords, fields), seed=seed)
    if given is None:
        notes.append("shuffled is left out: more than half of these people like the same; take more with --count")
        return
    others = [records[i] for i in given]
    swapped = [r.model_copy(update={"history": o.history}) for r, o in zip(records, others, strict=True)]
    words = [list(one) for one in studio.predict_keywords(swapped)]
    yield "shuffled", swapped, {"history_of": [other.user for other in others], "keywords": words}


def _found(rows: list[dict[str, Any]], people: People, fields: TruthFields | None, notes: list[str]) -> dict[str, Any]:
    num_people = len({record.user for record in people.records})
    if num_people < MIN_PEOPLE:
        notes.append(f"with {num_people} people no test can find anything; {MIN_PEOPLE} or more are tested")
    found: dict[str, Any] = {"arms": summarise_arms(rows), "tests": compare_arms(rows)}
    if fields is not None:
        measured = measure_names(rows)
        chance = {
            f"{p}{name}_accuracy": value for p in ("", STICKER_PREFIX) for name, value in fields.chance_accuracy.items()
        }
        found["chance"] = {name: value for name, value in chance.items() if name in measured}
        found["keywords"] = {"learnt": _named(fields, people.keywords, people.records)}
    counts = {"people": num_people, "records": len(people)}
    return {**found, "counts": counts, "notes": notes}


def _named(fields: TruthFields, keywords: Sequence[Sequence[str]], records: Sequence[Record]) -> dict[str, float]:
    """The share of people whose keywords name what they like."""
    return {name: float(values.mean()) for name, values in score_keywords(fields, keywords, records).items()}


def _write(
    out: Path, rows: list[dict[str, Any]], people: People, pictures: dict[str, np.ndarray], found: dict[str, Any]
) -> None:
    file = out / PEOPLE_FILE
    with explain_write_errors(file), replacing_file(file) as temporary:
        lines = (json.dumps(replace_non_finite(row), ensure_ascii=False) + "\n" for row in rows)
        temporary.write_text("".join(lines), encoding="utf-8")
    columns = [*pictures, TARGET_ARM]
    drawn = {**pictures, TARGET_ARM: people.target_images}
    shown = [
        PersonRow(
            r.user,
            r.wish_or_caption,
            people.keywords[i],
            people.load_liked_images(i)[-MAX_HISTORY_SHOWN:],
            {arm: drawn[arm][i] for arm in columns},
        )
        for i, r in enumerate(people.records[:MAX_PEOPLE_SHOWN])
    ]
    files = [file, *write_contact_sheets(shown, out / SHEETS_FOLDER)]
    shares = [name for name in headline_measures(measure_names(rows)) if name.endswith("_accuracy")]
    if shares:
        plot = partial(plot_arms, found["arms"], shares, found.get("chance", {}))
        files += [out / CHART_FILE] if try_plot(plot, out / CHART_FILE, warn=found["notes"].append) else []
    found["files"] = [str(path) for path in files]
