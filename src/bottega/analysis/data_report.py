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
MAX_LABELS_SHOWN = 12
"""Maximum number of labels shown; of a longer list, only the most and the least frequent are shown."""


def data_command(words: list[str], *, examples: int, out: Path) -> dict[str, Any]:
    """Report on the data of a recipe or path, with `examples` rows; plots are written to `out`."""
    from bottega.callbacks.progress_bars import progress_bars

    column_report = _describe_textless_table(words)
    if column_report is not None:
        return column_report
    recipe = read_recipe(_add_task(words), verb="data")
    with progress_bars(open_console()) as report_progress:
        prepared = prepare_recipe(recipe, report_progress)
        preview = open_preview(prepared)
        report = describe_data(preview)
        report["examples"] = _list_examples(preview, examples)
        report["pictures"] = [str(path) for path in _draw_preview(preview, max(examples, 12), out)] if examples else []
    if _is_path(words) and _has_labelled_lines(words[0]):
        path = shlex.quote(words[0])
        report["hint"] = f"each line has a label and a text; to train a classifier: bottega data classify --data {path}"
    return report


def _add_task(words: list[str]) -> list[str]:
    """Turn `bottega data photos/` into the task that fits the files, with the path as its data."""
    return [_guess_task(words), "--data", *words] if _is_path(words) else words


def _is_path(words: list[str]) -> bool:
    first_word = words[0] if words else ""
    path = Path(first_word).expanduser()
    is_path = path.exists() or path.suffix or first_word.startswith(("/", ".", "~"))
    return bool(
        first_word and is_path and not first_word.startswith("-") and "=" not in first_word
    ) and path.suffix not in (
        ".yaml",
        ".yml",
    )


def _describe_textless_table(words: list[str]) -> dict[str, Any] | None:
    """Return the columns of a table without a text field if only its path is given; else None."""
    if not _is_path(words) or any(word.startswith(("data.", "--data")) for word in words[1:]):
        return None
    listing = find_files(Source(path=words[0]))
    if listing.kind not in TABLE_KINDS or _guess_task(words) != "language":
        return None
    report = describe_columns(listing)
    names = [column["name"] for column in report["columns"]]
    # Without any column nothing could be read, and preparing the data reports why.
    return None if not names or find_field(dict.fromkeys(names), TEXT_FIELDS) is not None else report


def _has_labelled_lines(path: str) -> bool:
    """Return whether every sampled line is a label, a tab and a text (or fastText's); other delimiters occur in any text."""
    listing = find_files(Source(path=path))
    if listing.kind != "text":
        return False
    try:
        return detect_line_layout(listing.paths).delimiter == "\t"
    except DataError:
        return False


def _guess_task(words: list[str]) -> str:
    """Return the task that fits the kind of the files, or the fields of the first record of an archive or table."""
    path, option = words[0], "data.train.encoding="
    encoding = next((word.removeprefix(option) for word in words if word.startswith(option)), None)
    listing = find_utf8_files(Source(path=path, encoding=encoding))
    if listing.kind == "shards":
        return str(json.loads((Path(path).expanduser() / "meta.json").read_bytes()).get("task", "language"))
    for task, spec in TASKS.items():
        if listing.kind in spec.files:
            return task
    records = (record for piece in listing.list_pieces(1 << 20)[:1] for record in listing.read(piece))
    first_record = next((record for record in records if isinstance(record, Record)), None)
    names = set(first_record.fields) if first_record is not None else set()
    suffixes, stems = {f".{name.rpartition('.')[2]}" for name in names}, {name.partition(".")[0] for name in names}
    for task, media_suffixes in (("image", IMAGE_SUFFIXES), ("audio", AUDIO_SUFFIXES), ("video", VIDEO_SUFFIXES)):
        if suffixes & media_suffixes or task in stems:
            return task
    return next((task for task, spec in TASKS.items() if spec.fields and spec.fields <= names), "language")


def describe_data(preview: Preview) -> dict[str, Any]:
    """Return counts, lengths, labels, rules and duplicates of prepared data, as plain values."""
    prepared, column = preview.prepared, preview.column
    meta = prepared.metadata
    tables = {name: prepared.table(name) for name in sort_train_first(prepared.tables)}
    duplicates = _count_duplicates(tables, preview.content_columns(tables))
    report: dict[str, Any] = {**summarise_prepared(prepared), "duplicates": duplicates}
    if preview.unit is not None and column is not None:
        report["lengths"] = {
            "unit": preview.unit,
            **{
                name: _compute_quantiles(table.lengths(column) / preview.entries_per_unit)
                for name, table in tables.items()
                if len(table)
            },
        }
    if meta.get("classes"):
        report["labels"] = {name: _count_values(read_text_column(table, "label")) for name, table in tables.items()}
    if meta.get("num_rules"):
        rules = {name: table.values("rule").tolist() for name, table in tables.items()}
        report["rules"] = {name: _count_values(map(str, numbers)) for name, numbers in rules.items()}
    return report


def _compute_quantiles(lengths: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.percentile(lengths, percentile)), 3) for name, percentile in PERCENTILES.items()}


def _count_values(names: Iterable[str]) -> dict[str, int]:
    counts = Counter(names)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _count_duplicates(tables: dict[str, Table], columns: list[str]) -> dict[str, int]:
    """Count rows of equal content: repeated within each table, and shared by two tables."""
    counts: dict[str, int] = {}
    hashes = {name: _hash_rows(table, columns) for name, table in tables.items()}
    for name, table_hashes in hashes.items():
        counts[name] = len(table_hashes) - len(np.unique(table_hashes))
    names = list(hashes)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            counts[f"{a} and {b}"] = int(np.isin(hashes[b], hashes[a]).sum())
    return counts


def _hash_rows(table: Table, columns: list[str]) -> np.ndarray:
    def digest(number: int) -> int:
        content = hashlib.blake2b(digest_size=8)
        for column in columns:
            value = table.row(column, number)
            value = value.encode() if isinstance(value, str) else value
            content.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes())
        return int.from_bytes(content.digest(), "little")

    return np.fromiter((digest(number) for number in range(len(table))), np.uint64, len(table))


def _list_examples(preview: Preview, count: int) -> list[dict[str, str]]:
    """Describe the first rows of the training data."""
    table = preview.prepared.table(preview.prepared.training_tables[0])
    return [_describe_example(preview, row) for row in read_rows(table, list(range(min(count, len(table)))))]


def _describe_example(preview: Preview, row: dict[str, Any]) -> dict[str, str]:
    fields = {name: str(row[name]) for name in ("label", "caption") if row.get(name)}
    if "num_rules" in preview.prepared.metadata:
        fields["rule"] = str(row["rule"])
    return {"key": str(row["key"]), "shows": preview.describe(row), **fields}


def _draw_preview(preview: Preview, count: int, out: Path) -> list[Path]:
    """Write a contact sheet of images or frames, or spectrograms; nothing for other media."""
    return preview.draw(preview.prepared.table(preview.prepared.training_tables[0]), count, out)


def format_report(report: dict[str, Any]) -> str:
    """Format a report for the terminal."""
    if "columns" in report:
        return format_columns(report)
    lines = [f"task        {report['task']}", *format_rules(report)]
    for table, counts in report["tables"].items():
        lines.append(f"{table:<12}" + ", ".join(format_counts(counts)))
    if report["unread_parts"]:
        lines.append(f"{'not read':<12}the splits {', '.join(report['unread_parts'])} of the same folder")
    lengths = dict(report.get("lengths", {}))
    if lengths:
        unit = lengths.pop("unit")
        lines += ["", f"lengths in {unit:<13}" + "".join(f"{name:>12}" for name in PERCENTILES)]
        for table, values in lengths.items():
            lines.append(f"  {table:<22}" + "".join(f"{value:>12,.6g}" for value in values.values()))
    for table, counts_by_name in report.get("labels", {}).items():
        lines += ["", f"classes in {table}: {len(counts_by_name)}", *_format_bars(counts_by_name)]
    for table, counts_by_name in report.get("rules", {}).items():
        lines += ["", f"rules in {table}: {len(counts_by_name)}", *_format_bars(counts_by_name)]
    lines += ["", *_format_duplicates(report["duplicates"])]
    if report["bad"]:
        lines.append(f"bad records: {report['bad']:,} of {report['records']:,}, left out")
        lines += [f"  {bad}" for bad in report["bad_records"][:5]]
    else:
        lines.append("bad records: none")
    for reason, count in sorted(report["dropped"].items()):
        lines.append(f"{format_counts({'records': count})[0]} left out: {reason}")
    for example in report["examples"]:
        names = [name for name in ("label", "rule", "caption") if name in example]
        fields = "".join(f", {name} {_escape(example[name])}" for name in names)
        lines += ["", f"-- {_escape(example['key'])}{fields}", _escape(_truncate(example["shows"]), keep="\n\t")]
    lines += [f"\nsee {path}" for path in report["pictures"]]
    lines += [f"\n{report['hint']}"] if "hint" in report else []
    return "\n".join(lines)


def _format_bars(counts_by_name: dict[str, int]) -> list[str]:
    rows = list(counts_by_name.items())
    num_hidden = max(0, len(rows) - MAX_LABELS_SHOWN)
    if num_hidden:
        rows = [*rows[: MAX_LABELS_SHOWN - 2], *rows[-2:]]
    max_count = max(counts_by_name.values(), default=1)
    lines = [
        f"  {_escape(name[:24]):<24}{count:>10,}  {'█' * max(1, round(30 * count / max_count))}" for name, count in rows
    ]
    if num_hidden:
        lines.insert(MAX_LABELS_SHOWN - 2, f"  ... {num_hidden:,} more ...")
    return lines


def _format_duplicates(duplicates: dict[str, int]) -> list[str]:
    lines = [f"  {count:,} in {name}" for name, count in duplicates.items() if count]
    return ["repeated rows:", *lines] if lines else ["repeated rows: none"]


def _escape(text: str, *, keep: str = "") -> str:
    """Escape control characters, so that data cannot move the cursor or set colours of the terminal."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def _truncate(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " ..."
