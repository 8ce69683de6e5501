"""`bottega data`: counts, lengths, labels, duplicates and examples of a recipe's data."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.table_columns import TABLE_KINDS, describe_columns, format_columns
from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import find_files
from bottega.data.formats.folders import AUDIO_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES
from bottega.data.formats.lines import detect_line_layout
from bottega.data.prepare.inputs import find_utf8_files
from bottega.data.prepare.preview import Preview, read_rows
from bottega.data.records.fields import TEXT_FIELDS, find_field
from bottega.data.records.record import Record
from bottega.data.tables.classes import read_text_column
from bottega.data.tables.shards import Table
from bottega.run.prepare import (
    format_counts,
    format_rules,
    open_preview,
    prepare_recipe,
    read_recipe,
    sort_train_first,
    summarise_prepared,
)
from bottega.tasks.registry import TASKS
from bottega.terminal import open_console

PERCENTILES = {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}
# A label list longer than this shows its largest and smallest only.
LABELS_SHOWN = 12


def data_command(words: list[str], *, examples: int, out: Path) -> dict[str, Any]:
    from bottega.callbacks.progress_bars import progress_bars

    columns = _columns_where_no_text(words)
    if columns is not None:
        return columns
    recipe = read_recipe(_with_task(words), verb="data")
    with progress_bars(open_console()) as say:
        prepared = prepare_recipe(recipe, say)
        preview = open_preview(prepared)
        report = describe_data(preview)
        report["examples"] = _examples(preview, examples)
        report["pictures"] = [str(path) for path in _pictures(preview, max(examples, 12), out)] if examples else []
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
    listing = find_files(Source(path=words[0]))
    if listing.kind not in TABLE_KINDS or _task_of(words) != "language":
        return None
    report = describe_columns(listing)
    names = [column["name"] for column in report["columns"]]
    # Without a column nothing could be read, and preparing the data says why.
    return None if not names or find_field(dict.fromkeys(names), TEXT_FIELDS) is not None else report


def _has_labelled_lines(path: str) -> bool:
    """Whether every line looked at is a label, a tab and a text (or has fastText's mark): other signs occur in any text."""
    listing = find_files(Source(path=path))
    if listing.kind != "text":
        return False
    try:
        return detect_line_layout(listing.paths).delimiter == "\t"
    except DataError:
        return False


def _task_of(words: list[str]) -> str:
    """By the kind of the files; of archives and tables, by what the first record holds."""
    path, option = words[0], "data.train.encoding="
    encoding = next((word.removeprefix(option) for word in words if word.startswith(option)), None)
    listing = find_utf8_files(Source(path=path, encoding=encoding))
    if listing.kind == "shards":
        return str(json.loads((Path(path).expanduser() / "meta.json").read_bytes()).get("task", "language"))
    for task, spec in TASKS.items():
        if listing.kind in spec.files:
            return task
    records = (record for piece in listing.list_pieces(1 << 20)[:1] for record in listing.read(piece))
    first = next((record for record in records if isinstance(record, Record)), None)
    names = set(first.fields) if first is not None else set()
    suffixes, stems = {f".{name.rpartition('.')[2]}" for name in names}, {name.partition(".")[0] for name in names}
    for task, known in (("image", IMAGE_SUFFIXES), ("audio", AUDIO_SUFFIXES), ("video", VIDEO_SUFFIXES)):
        if suffixes & known or task in stems:
            return task
    return next((task for task, spec in TASKS.items() if spec.fields and spec.fields <= names), "language")


def describe_data(preview: Preview) -> dict[str, Any]:
    """Everything but the examples, as plain values."""
    prepared, column = preview.prepared, preview.column
    meta = prepared.metadata
    tables = {name: prepared.table(name) for name in sort_train_first(prepared.tables)}
    duplicates = _duplicates(tables, preview.content_columns(tables))
    report: dict[str, Any] = {**summarise_prepared(prepared), "duplicates": duplicates}
    if preview.unit is not None and column is not None:
        report["lengths"] = {
            "unit": preview.unit,
            **{
                name: _quantiles(table.lengths(column) / preview.per_unit)
                for name, table in tables.items()
                if len(table)
            },
        }
    if meta.get("classes"):
        report["labels"] = {name: _balance(read_text_column(table, "label")) for name, table in tables.items()}
    if meta.get("num_rules"):
        rules = {name: table.values("rule").tolist() for name, table in tables.items()}
        report["rules"] = {name: _balance(map(str, numbers)) for name, numbers in rules.items()}
    return report


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.percentile(lengths, place)), 3) for name, place in PERCENTILES.items()}


def _balance(names: Iterable[str]) -> dict[str, int]:
    counts = Counter(names)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _duplicates(tables: dict[str, Table], columns: list[str]) -> dict[str, int]:
    """Rows of the same content: repeated within a table, and common to two tables."""
    found: dict[str, int] = {}
    hashes = {name: _hashes(table, columns) for name, table in tables.items()}
    for name, own in hashes.items():
        found[name] = len(own) - len(np.unique(own))
    names = list(hashes)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            found[f"{a} and {b}"] = int(np.isin(hashes[b], hashes[a]).sum())
    return found


def _hashes(table: Table, columns: list[str]) -> np.ndarray:
    def digest(number: int) -> int:
        content = hashlib.blake2b(digest_size=8)
        for column in columns:
            value = table.row(column, number)
            value = value.encode() if isinstance(value, str) else value
            content.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes())
        return int.from_bytes(content.digest(), "little")

    return np.fromiter((digest(number) for number in range(len(table))), np.uint64, len(table))


def _examples(preview: Preview, count: int) -> list[dict[str, str]]:
    """The first few rows of train in words."""
    table = preview.prepared.table(preview.prepared.training_tables[0])
    return [_example(preview, row) for row in read_rows(table, list(range(min(count, len(table)))))]


def _example(preview: Preview, row: dict[str, Any]) -> dict[str, str]:
    said = {name: str(row[name]) for name in ("label", "caption") if row.get(name)}
    if "num_rules" in preview.prepared.metadata:
        said["rule"] = str(row["rule"])
    return {"key": str(row["key"]), "shows": preview.describe(row), **said}


def _pictures(preview: Preview, count: int, out: Path) -> list[Path]:
    """A sheet of images or frames, or spectrograms; none where the medium is nothing to look at."""
    return preview.draw(preview.prepared.table(preview.prepared.training_tables[0]), count, out)


def format_report(report: dict[str, Any]) -> str:
    """The report for people."""
    if "columns" in report:
        return format_columns(report)
    lines = [f"task        {report['task']}", *format_rules(report)]
    for table, counts in report["tables"].items():
        lines.append(f"{table:<12}" + ", ".join(format_counts(counts)))
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
