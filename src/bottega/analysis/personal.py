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
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bottega.analysis.personal_arms import FEW, REAL, compared_arms, measures_of, strangers, summary
from bottega.analysis.personal_rows import DRAWN, Instruments, People
from bottega.analysis.personal_sheets import Shown, write_chart, write_sheets
from bottega.analysis.personal_table import headline
from bottega.analysis.personal_truth import (
    TRUSTED,
    Fields,
    JudgeWords,
    fields_of,
    keywords_right,
    right,
    ruler_of,
    tastes_of,
)
from bottega.data.present import finite, writing
from bottega.storage.durable import replacing_file
from bottega.tasks.personalize.arms import ARMS
from bottega.tasks.personalize.data.records import Item, Record, evenly
from bottega.tasks.personalize.sheets import SHOWN

PEOPLE, SHEETS, CHART = "people.jsonl", "sheets", "arms.png"
MOST_DRAWN = 256
"""Records that are drawn for where nobody says: each takes eight drawings, and the pictures of an arm are held at once."""
MOST_SHOWN = 64
"""People on sheets; nobody turns more pages, and the pictures of all arms of all people would not fit."""
ENOUGH_CAPTIONS = 2000
"""Records of each table whose captions are looked through for ways to say a word."""

Say = Callable[[str, int, int], None]


class Table(Protocol):
    """Records with their pictures; `PersonalRows` is one."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record: ...

    def picture(self, item: Item) -> np.ndarray: ...


@dataclass(frozen=True)
class Studio:
    """All that is asked of a run: whom there is, what is said of them, and how they are drawn for."""

    table: Table
    every: Sequence[Table]
    """All tables of the data, for the words that there are."""
    keywords: Callable[[Sequence[Record]], list[tuple[str, ...]]]
    draw: Callable[[str, Sequence[Record], Say], np.ndarray]
    """An arm other than `shuffled`, and records: uint8 [n, h, w, 3]. Picture i is a function of i and the seed, and of
    nothing of another record."""
    judge: Any = None
    """A CLIP with its words; None where the recipe names none."""
    device: Any = "cpu"
    at_random: Callable[[Sequence[Record]], list[tuple[str, ...]]] | None = None
    """Keywords of the same language model with random weights; None where it is too large for a trial."""


def evaluate_people(
    studio: Studio, *, count: int | None, lpips: Path | None, out: Path, seed: int = 0, say: Say
) -> dict[str, Any]:
    """Draws and measures all arms for `count` people, writes all of it to `out`, and gives what stands in metrics.json."""
    notes: list[str] = []
    numbers = _chosen(studio.table, count, notes)
    records = [studio.table.record(number) for number in numbers]
    people = _people(studio, numbers, records)
    fields = fields_of(records, _every(studio)) if any(record.truth for record in records) else None
    tools = _instruments(studio, people, fields, lpips, notes)
    rows = tools.rows(REAL, people.targets)
    pictures: dict[str, np.ndarray] = {}
    for arm, asked, beside in _arms(studio, people, fields, notes, seed=seed):
        drawn = "both" if arm == "shuffled" else arm
        made = studio.draw(drawn, asked, lambda stage, done, total, arm=arm: say(arm, done, total))  # type: ignore[misc]
        rows += tools.rows(arm, made, **beside)
        pictures[arm] = made[:MOST_SHOWN].copy()  # a part of it would keep the whole
    found = _found(rows, people, fields, notes)
    if fields is not None and studio.at_random is not None:
        found["keywords"]["random weights"] = _named(fields, studio.at_random(records), records)
    _write(out, rows, people, pictures, found)
    return found


def _chosen(table: Table, count: int | None, notes: list[str]) -> list[int]:
    """Records of different people as long as there are such, and an even choice of them; in the order of the table."""
    available = len(table)
    if count is None and available > MOST_DRAWN:
        notes.append(f"{MOST_DRAWN} of {available:,} records are drawn for, each by all arms; --count takes more")
    count = min(available, MOST_DRAWN if count is None else count)
    if count == available:
        return list(range(available))
    last = list({table.record(number).user: number for number in range(available)}.values())
    if count <= len(last):
        return sorted(last[place] for place in evenly(len(last), count))
    others = sorted(set(range(available)) - set(last))
    return sorted(last + [others[place] for place in evenly(len(others), count - len(last))])


def _people(studio: Studio, numbers: list[int], records: list[Record]) -> People:
    table = studio.table
    return People(
        records=records,
        numbers=numbers,
        keywords=studio.keywords(records),
        targets=np.stack([table.picture(record.target) for record in records]),
        liked=lambda place: [table.picture(item) for item in records[place].history if item.image is not None],
    )


def _every(studio: Studio) -> Iterable[Record]:
    for table in studio.every:
        yield from (table.record(number) for number in range(len(table)))


def _captions(studio: Studio) -> Iterable[str]:
    for table in studio.every:
        for number in evenly(len(table), ENOUGH_CAPTIONS):
            yield from (item.caption for item in table.record(number).items)


def _instruments(
    studio: Studio, people: People, fields: Fields | None, lpips: Path | None, notes: list[str]
) -> Instruments:
    judge, ruler, words = studio.judge, None, None
    if judge is None:
        notes.append("the recipe names no model.clip: what it would judge, and the arm picked, are left out")
    if fields is not None:
        words = JudgeWords(fields, _captions(studio), judge.texts) if judge is not None else None
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
    return Instruments(
        people,
        judge=judge,
        perceptual=perceptual,
        device=studio.device,
        fields=fields,
        words=words,
        ruler=ruler,
    )


def _trusted(fields: Fields, people: People) -> Any:
    """The ruler of stickers, if it can read the real ones: other data may have the same words."""
    ruler = ruler_of(fields)
    if ruler is None:
        return None
    found = right(fields, ruler(people.targets), people.records)
    return ruler if min(float(values.mean()) for values in found.values()) >= TRUSTED else None


def _arms(
    studio: Studio, people: People, fields: Fields | None, notes: list[str], *, seed: int
) -> Iterable[tuple[str, Sequence[Record], dict[str, list[Any]]]]:
    """Arm, what it is asked, and what else its rows say."""
    records = people.records
    for arm in ARMS:
        yield arm, records, {}
    if studio.judge is not None:
        yield "picked", records, {}
    given = strangers(tastes_of(records, people.keywords, fields), seed=seed)
    if given is None:
        notes.append("shuffled is left out: more than half of these people like the same; take more with --count")
        return
    others = [records[i] for i in given]
    swapped = [r.model_copy(update={"history": o.history}) for r, o in zip(records, others, strict=True)]
    words = [list(one) for one in studio.keywords(swapped)]
    yield "shuffled", swapped, {"history_of": [other.user for other in others], "keywords": words}


def _found(rows: list[dict[str, Any]], people: People, fields: Fields | None, notes: list[str]) -> dict[str, Any]:
    num_people = len({record.user for record in people.records})
    if num_people < FEW:
        notes.append(f"with {num_people} people no test can find anything; {FEW} or more are tested")
    found: dict[str, Any] = {"arms": summary(rows), "tests": compared_arms(rows)}
    if fields is not None:
        measured = measures_of(rows)
        chance = {f"{p}{name}_accuracy": value for p in ("", DRAWN) for name, value in fields.chance.items()}
        found["chance"] = {name: value for name, value in chance.items() if name in measured}
        found["keywords"] = {"learnt": _named(fields, people.keywords, people.records)}
    counts = {"people": num_people, "records": len(people)}
    return {**found, "counts": counts, "notes": notes}


def _named(fields: Fields, keywords: Sequence[Sequence[str]], records: Sequence[Record]) -> dict[str, float]:
    """The share of people whose keywords name what they like."""
    return {name: float(values.mean()) for name, values in keywords_right(fields, keywords, records).items()}


def _write(
    out: Path, rows: list[dict[str, Any]], people: People, pictures: dict[str, np.ndarray], found: dict[str, Any]
) -> None:
    file = out / PEOPLE
    with writing(file), replacing_file(file) as temporary:
        lines = (json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
        temporary.write_text("".join(lines), encoding="utf-8")
    columns = [*pictures, REAL]
    drawn = {**pictures, REAL: people.targets}
    shown = [
        Shown(r.user, r.asked, people.keywords[i], people.liked(i)[-SHOWN:], {arm: drawn[arm][i] for arm in columns})
        for i, r in enumerate(people.records[:MOST_SHOWN])
    ]
    files = [file, *write_sheets(shown, out / SHEETS)]
    shares = [name for name in headline(measures_of(rows)) if name.endswith("_accuracy")]
    if shares:
        with writing(out / CHART):
            write_chart(found["arms"], shares, found.get("chance", {}), out / CHART)
        files.append(out / CHART)
    found["files"] = [str(path) for path in files]
