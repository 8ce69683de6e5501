"""`bottega data`: what is in a recipe's data, before anything is learned from it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.table_columns import TABLES, describe_columns, show_columns
from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.prepare.inputs import find_in_utf8
from bottega.data.prepare.prepared import Prepared
from bottega.data.readers import find
from bottega.data.readers.folders import AUDIO_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES
from bottega.data.readers.lines import recognise
from bottega.data.records.fields import TEXTS, usual
from bottega.data.records.record import Record
from bottega.data.sources.samples import picture
from bottega.data.tables.classes import texts_of
from bottega.data.tables.shards import Table
from bottega.run.prepare import counted, prepare_recipe, read_recipe, rules_shown, summary, train_first
from bottega.terminal import open_console

# What a sample is and how long it is, by task: the column, and its unit.
CONTENT = {
    "language": ("tokens", "tokens"),
    "classify": ("input_ids", "tokens"),
    "image": ("image", None),
    "image_vae": ("image", None),
    "image_tokens": ("image", None),
    "audio": ("audio", "seconds"),
    "video": ("video", "frames"),
    "routing": ("x", None),
    "personalize": ("history", "liked items"),
}
PERCENTILES = {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}
# A label list longer than this shows its largest and smallest only.
LABELS_SHOWN = 12
# Of each person's history, so that the target beside it can still be seen.
LIKED_SHOWN = 6
TASK_OF_KIND = {"images": "image", "audio": "audio", "video": "video", "idx": "image"}


def data_command(words: list[str], *, examples: int, out: Path) -> dict[str, Any]:
    from bottega.callbacks.bars import bars

    columns = _columns_where_no_text(words)
    if columns is not None:
        return columns
    recipe = read_recipe(_with_task(words), verb="data")
    with bars(open_console()) as say:
        prepared = prepare_recipe(recipe, say)
        report = describe(prepared)
        report["examples"] = _examples(prepared, examples)
        report["pictures"] = [str(path) for path in _pictures(prepared, max(examples, 12), out)] if examples else []
    if _is_path(words) and _has_labelled_lines(words[0]):
        path = shlex.quote(words[0])
        report["hint"] = f"each line has a label and a text; to learn the labels: bottega data classify --data {path}"
    return report


def _with_task(words: list[str]) -> list[str]:
    """`bottega data photos/` is about a path, not a recipe: its kind says which task would learn from it."""
    return [_task_of(words), "--data", *words] if _is_path(words) else words


def _is_path(words: list[str]) -> bool:
    first = words[0] if words else ""
    path = Path(first).expanduser()
    is_path = path.exists() or path.suffix or first.startswith(("/", ".", "~"))
    return bool(first and is_path and not first.startswith("-") and "=" not in first) and path.suffix not in (
        ".yaml",
        ".yml",
    )


def _columns_where_no_text(words: list[str]) -> dict[str, Any] | None:
    """The columns of a table that is named alone and has no field of texts; None of anything else."""
    if not _is_path(words) or any(word.startswith(("data.", "--data")) for word in words[1:]):
        return None
    listing = find(Source(path=words[0]))
    if listing.kind not in TABLES or _task_of(words) != "language":
        return None
    report = describe_columns(listing)
    names = [column["name"] for column in report["columns"]]
    # Without a column nothing could be read, and preparing the data says why.
    return None if not names or usual(dict.fromkeys(names), TEXTS) is not None else report


def _has_labelled_lines(path: str) -> bool:
    """Whether every line looked at is a label, a tab and a text (or has fastText's mark): other signs occur in any text."""
    listing = find(Source(path=path))
    if listing.kind != "text":
        return False
    try:
        return recognise(listing.files).divider == "\t"
    except DataError:
        return False


def _task_of(words: list[str]) -> str:
    """By the kind of the files; of archives and tables, by what the first record holds."""
    path, option = words[0], "data.train.encoding="
    encoding = next((word.removeprefix(option) for word in words if word.startswith(option)), None)
    listing = find_in_utf8(Source(path=path, encoding=encoding))
    if listing.kind == "shards":
        return str(json.loads((Path(path).expanduser() / "meta.json").read_bytes()).get("task", "language"))
    if listing.kind in TASK_OF_KIND:
        return TASK_OF_KIND[listing.kind]
    if listing.kind in ("text", "embedded"):
        return "language"
    records = (record for piece in listing.pieces(1 << 20)[:1] for record in listing.read(piece))
    first = next((record for record in records if isinstance(record, Record)), None)
    names = set(first.fields) if first is not None else set()
    suffixes, stems = {f".{name.rpartition('.')[2]}" for name in names}, {name.partition(".")[0] for name in names}
    if {"history", "target"} <= names:
        return "personalize"
    for task, known in (("image", IMAGE_SUFFIXES), ("audio", AUDIO_SUFFIXES), ("video", VIDEO_SUFFIXES)):
        if suffixes & known or task in stems:
            return task
    return "classify" if {"text", "label"} <= names else "language"


def describe(prepared: Prepared) -> dict[str, Any]:
    """Everything but the examples, as plain values."""
    meta, task = prepared.meta, prepared.meta["task"]
    column, unit = CONTENT[task]
    tables = {name: prepared.table(name) for name in train_first(prepared.tables)}
    # Two texts may have the same ids: words that a tokenizer does not know are all one.
    whole = (name for name in ("text", "record") if all(name in table.columns for table in tables.values()))
    repeated = next(whole, column)
    report: dict[str, Any] = {**summary(prepared), "duplicates": _duplicates(tables, repeated)}
    if unit is not None:
        scale = meta["sample_rate"] if unit == "seconds" else 1
        report["lengths"] = {
            "unit": unit,
            **{name: _quantiles(table.lengths(column) / scale) for name, table in tables.items() if len(table)},
        }
    if meta.get("classes"):
        report["labels"] = {name: _balance(texts_of(table, "label")) for name, table in tables.items()}
    if meta.get("num_rules"):
        rules = {name: table.values("rule").tolist() for name, table in tables.items()}
        report["rules"] = {name: _balance(map(str, numbers)) for name, numbers in rules.items()}
    return report


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.percentile(lengths, place)), 3) for name, place in PERCENTILES.items()}


def _balance(names: Iterable[str]) -> dict[str, int]:
    counts = Counter(names)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _duplicates(tables: dict[str, Table], column: str) -> dict[str, int]:
    """Rows of the same content: repeated within a table, and common to two tables."""
    found: dict[str, int] = {}
    hashes = {name: _hashes(table, column) for name, table in tables.items()}
    for name, own in hashes.items():
        found[name] = len(own) - len(np.unique(own))
    names = list(hashes)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            found[f"{a} and {b}"] = int(np.isin(hashes[b], hashes[a]).sum())
    return found


def _hashes(table: Table, column: str) -> np.ndarray:
    def digest(number: int) -> int:
        value = table.row(column, number)
        value = value.encode() if isinstance(value, str) else value
        raw = value if isinstance(value, bytes) else np.ascontiguousarray(value).view(np.uint8).data
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")

    return np.fromiter((digest(number) for number in range(len(table))), np.uint64, len(table))


def _examples(prepared: Prepared, count: int) -> list[dict[str, str]]:
    """The first few rows of train in words."""
    table = prepared.table(prepared.training_tables[0])
    return [_example(prepared, table, number) for number in range(min(count, len(table)))]


def _example(prepared: Prepared, table: Table, number: int) -> dict[str, str]:
    row = {name: table.row(name, number) for name in table.columns}
    said = {name: str(row[name]) for name in ("label", "caption") if row.get(name)}
    if "num_rules" in prepared.meta:
        said["rule"] = str(row["rule"])
    task = prepared.meta["task"]
    if task == "language":
        text = prepared.tokenizer.decode(row["tokens"][:400])
    elif task == "classify":
        text = str(row["text"])
    elif task == "personalize":
        text = _liked(row["record"])
    else:
        content = row[CONTENT[task][0]]
        text = f"{len(content):,} bytes" if isinstance(content, bytes) else _form(task, content, prepared)
    return {"key": str(row["key"]), "shows": text, **said}


def _liked(record: str) -> str:
    from bottega.data.personal import Record

    person = Record.model_validate_json(record)
    liked = "; ".join(item.caption for item in person.history)
    return f"user {person.user} liked: {liked}\nwish: {person.asked}"


def _form(task: str, content: np.ndarray, prepared: Prepared) -> str:
    if task == "audio":
        return f"{len(content) / prepared.meta['sample_rate']:.2f} s at {prepared.meta['sample_rate']:,} Hz"
    if task == "routing":
        return f"{len(content)} numbers: {np.array2string(np.asarray(content), threshold=8, precision=4)}"
    return " x ".join(map(str, content.shape))


def _pictures(prepared: Prepared, count: int, out: Path) -> list[Path]:
    """A sheet of images or frames, or spectrograms; none where the medium is nothing to look at."""
    task = prepared.meta["task"]
    table = prepared.table(prepared.training_tables[0])
    shown = min(count, len(table)) if task.startswith("image") else min(4, len(table))
    numbers = np.unique(np.linspace(0, len(table) - 1, shown).astype(int)).tolist()
    if task in ("image", "image_vae", "image_tokens"):
        from bottega.data.image.sheet import sheet

        images = [picture(prepared, {name: table.row(name, n) for name in table.columns}) for n in numbers]
        return [_drawn(sheet, images, out / "images.png", captions=[_caption(table, n) for n in numbers])]
    if task == "video":
        from bottega.data.image.sheet import sheet

        videos = [table.row("video", n) for n in numbers]
        frames = [video[i] for video in videos for i in np.linspace(0, len(video) - 1, 6).astype(int)]
        captions = [_caption(table, n) for n in numbers for _ in range(6)]
        return [_drawn(sheet, frames, out / "frames.png", captions=captions, columns=6)]
    if task == "personalize":
        return [_drawn(_people_sheet, prepared, out / "people.png", numbers=numbers)]
    if task == "audio":
        from bottega.data.audio.picture import spectrogram_sheet

        rate = int(prepared.meta["sample_rate"])
        sounds = [(_caption(table, n), np.asarray(table.row("audio", n)), rate) for n in numbers]
        return [_drawn(spectrogram_sheet, sounds, out / "spectrograms.png")]
    return []


def _people_sheet(prepared: Prepared, path: Path, *, numbers: list[int]) -> None:
    """Each row a person: the last things they liked, then what they took. Where no picture is known, the words stand."""
    from bottega.data.image.sheet import sheet
    from bottega.data.personal import PersonalRows

    rows = PersonalRows(prepared, prepared.training_tables[0])
    records = [rows.record(number) for number in numbers]
    columns = min(LIKED_SHOWN, max(len(record.history) for record in records)) + 1
    size = prepared.meta["image_size"]
    white = np.full((size, size, 3), 255, np.uint8)
    images, captions = [], []
    for record in records:
        items = record.items[-columns:]
        missing = columns - len(items)
        images += [white] * missing + [white if item.image is None else rows.picture(item) for item in items]
        captions += [""] * missing + [item.caption for item in items[:-1]] + [f"took: {items[-1].caption}"]
    sheet(images, path, captions=captions, columns=columns)


def _drawn(draw: Any, what: Any, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(what, path, **options)
    return path


def _caption(table: Table, number: int) -> str:
    named = [table.row(name, number) for name in ("label", "caption", "key") if name in table.columns]
    return next((text for text in named if text), "")


def show(report: dict[str, Any]) -> str:
    """The report for people."""
    if "columns" in report:
        return show_columns(report)
    lines = [f"task        {report['task']}", *rules_shown(report)]
    for table, counts in report["tables"].items():
        lines.append(f"{table:<12}" + ", ".join(counted(counts)))
    if report["unread_parts"]:
        lines.append(f"{'not read':<12}the parts {', '.join(report['unread_parts'])} of the same folder")
    lengths = dict(report.get("lengths", {}))
    if lengths:
        unit = lengths.pop("unit")
        lines += ["", f"lengths in {unit:<13}" + "".join(f"{name:>12}" for name in PERCENTILES)]
        for table, values in lengths.items():
            lines.append(f"  {table:<22}" + "".join(f"{value:>12,.6g}" for value in values.values()))
    for table, balance in report.get("labels", {}).items():
        lines += ["", f"classes in {table}: {len(balance)}", *_bars(balance)]
    for table, balance in report.get("rules", {}).items():
        lines += ["", f"rules in {table}: {len(balance)}", *_bars(balance)]
    lines += ["", *_duplicates_shown(report["duplicates"])]
    if report["bad"]:
        lines.append(f"bad records: {report['bad']:,} of {report['records']:,}, left out")
        lines += [f"  {bad}" for bad in report["bad_records"][:5]]
    else:
        lines.append("bad records: none")
    for reason, count in sorted(report["dropped"].items()):
        lines.append(f"left out: {count:,} {reason}")
    for example in report["examples"]:
        told = [name for name in ("label", "rule", "caption") if name in example]
        said = "".join(f", {name} {_visible(example[name])}" for name in told)
        lines += ["", f"-- {_visible(example['key'])}{said}", _visible(_short(example["shows"]), keep="\n\t")]
    lines += [f"\nsee {path}" for path in report["pictures"]]
    lines += [f"\n{report['hint']}"] if "hint" in report else []
    return "\n".join(lines)


def _bars(balance: dict[str, int]) -> list[str]:
    rows = list(balance.items())
    hidden = max(0, len(rows) - LABELS_SHOWN)
    if hidden:
        rows = [*rows[: LABELS_SHOWN - 2], *rows[-2:]]
    most = max(balance.values(), default=1)
    lines = [
        f"  {_visible(name[:24]):<24}{count:>10,}  {'█' * max(1, round(30 * count / most))}" for name, count in rows
    ]
    if hidden:
        lines.insert(LABELS_SHOWN - 2, f"  ... {hidden:,} more ...")
    return lines


def _duplicates_shown(duplicates: dict[str, int]) -> list[str]:
    found = [f"  {count:,} in {name}" for name, count in duplicates.items() if count]
    return ["repeated rows:", *found] if found else ["repeated rows: none"]


def _visible(text: str, *, keep: str = "") -> str:
    """What comes from the data must not move the cursor or set the colours of a terminal."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " ..."
