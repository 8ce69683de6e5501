"""`bottega prepare`: the prepared data of a recipe, without loading a framework."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bottega.config.recipe import Recipe
from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.model_spec import resolve_reference
from bottega.core.saver import explain_os_error
from bottega.data.prepare.prepared import PreparedData
from bottega.data.prepare.preview import Preview, iter_public_records
from bottega.data.tables.cache import write_manifest
from bottega.storage.durable import writing_folder
from bottega.tasks.recipes import check_recipe, parse_overrides
from bottega.tasks.registry import TASKS, find_spec, refusal_error
from bottega.terminal import open_console

ProgressCallback = Callable[[str, int, int], None]
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk."""
FORMATS = ("webdataset", "tfrecord", "parquet", "jsonl")
TABLE_METADATA = ("num_rules", "bayes_accuracy", "input_columns", "left_out_columns")
"""Metadata of tables of numbers: the number of synthetic rules, the Bayes accuracy, and column names."""


def prepare(
    recipe: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
    *,
    progress: ProgressCallback = lambda stage, done, total: None,
) -> PreparedData:
    """Prepare the data of a recipe on disk, given by name, file or dict; of several, later ones and `overrides` win."""
    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    return prepare_recipe(_load_data_recipe([*sources, overrides or {}], ()), progress)


def prepare_recipe(recipe: Recipe, progress: ProgressCallback) -> PreparedData:
    """Return the recipe's data as tables, from the cache or prepared now."""
    spec = find_spec(recipe)
    if spec.prepare is None:
        raise refusal_error(recipe, "prepare")
    prepared: PreparedData = resolve_reference(spec.prepare)(recipe, progress=progress)
    return prepared


def open_preview(prepared: PreparedData) -> Preview:
    """Return the task's preview of prepared data, which shows, plots and exports its rows."""
    preview: Preview = resolve_reference(TASKS[prepared.metadata["task"]].preview)(prepared)
    return preview


def read_recipe(words: list[str], *, verb: str = "prepare") -> Recipe:
    """Load a recipe whose data section is complete; keys that only training needs may be missing."""
    sources, overrides = parse_overrides(words)
    if any(override.key == "output_dir" for override in overrides):
        raise UsageError(
            f"output_dir is the folder of runs, which bottega {verb} does not write; give a folder with --out"
        )
    if not sources:
        raise UsageError(f"no recipe given; run bottega {verb} RECIPE, such as bottega {verb} language --data my.txt")
    return _load_data_recipe(sources, overrides)


def _load_data_recipe(sources: list[Any], overrides: Any) -> Recipe:
    recipe = check_recipe(sources, overrides).recipe
    problems = [(key, text) for key, text in recipe.find_missing_keys() if key.startswith("data.")]
    if problems:
        raise UsageError("; ".join(f"{key}: {text}" for key, text in problems))
    return recipe


def prepare_command(words: list[str], *, out: Path | None, to: list[tuple[str, str]]) -> dict[str, Any]:
    """Run `bottega prepare`; return the result that --json prints. `to` lists (format, folder) of each requested export."""
    from bottega.callbacks.progress_bars import progress_bars

    for format_name, _ in to:
        if format_name not in FORMATS:
            raise UsageError(f"--to {format_name}: unknown format; choose from {', '.join(FORMATS)}")
    recipe = read_recipe(words)
    if out is not None:
        _check_output_folder(out)
    start = time.monotonic()
    with progress_bars(open_console()) as progress:
        prepared = prepare_recipe(recipe, progress)
        if out is not None:
            _copy_prepared(prepared, out)
        exported = [path for target in to for path in _export_tables(prepared, target, progress)]
    return {
        **summarise_prepared(prepared),
        "folder": str(out or prepared.folder),
        "exported": [str(path) for path in exported],
        "seconds": round(time.monotonic() - start, 2),
    }


def summarise_prepared(prepared: PreparedData) -> dict[str, Any]:
    """Return the metadata of prepared data as plain values, without reading a row."""
    metadata = prepared.metadata
    return {
        "task": metadata["task"],
        "folder": str(prepared.folder),
        "fingerprint": prepared.fingerprint,
        "tables": sort_train_first(metadata["tables"]),
        "unread_parts": list(prepared.unread_splits),
        "records": metadata["records"],
        "bad": metadata["bad"],
        **{name: metadata[name] for name in TABLE_METADATA if name in metadata},
        "bad_records": metadata["named"],
        "dropped": metadata["dropped"],
    }


def sort_train_first(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with the training tables first and replay last; they are prepared in another order."""
    return dict(sorted(tables.items(), key=lambda item: (not item[0].startswith("train"), item[0] == "replay")))


def format_counts(counts: dict[str, int]) -> list[str]:
    """Return counts with their units, as in "1 row", "2 rows"."""
    return [f"{count:,} {name.removesuffix('s') if count == 1 else name}" for name, count in counts.items()]


def format_report(result: dict[str, Any]) -> str:
    """Return the result of `bottega prepare` as lines for the console."""
    lines = []
    for table, counts in result["tables"].items():
        lines.append(f"{table:<12}{', '.join(format_counts(counts))}")
    if result["unread_parts"]:
        lines.append(f"{'not read':<12}the splits {', '.join(result['unread_parts'])} of the same folder")
    if result["bad"]:
        lines.append(f"{'left out':<12}{result['bad']:,} bad of {result['records']:,} records")
        lines += [f"            {bad}" for bad in result["bad_records"][:5]]
    for reason, count in sorted(result["dropped"].items()):
        lines.append(f"{'left out':<12}{format_counts({'records': count})[0]}: {reason}")
    lines += [f"{'left out':<12}column {name!r}, which is not numeric" for name in result.get("left_out_columns", ())]
    lines += format_rules(result)
    lines.append(f"{'shards':<12}{result['folder']}")
    if result["exported"]:
        num_more = len(result["exported"]) - 1
        lines.append(f"{'exported':<12}{result['exported'][0]}" + (f" and {num_more} more" if num_more else ""))
    lines.append(f"{'time':<12}{result['seconds']:.1f} s")
    return "\n".join(lines)


def format_rules(result: Mapping[str, Any]) -> list[str]:
    """Return lines on the synthetic rules behind the rows, if there are any."""
    lines = [f"{'rules':<12}{result['num_rules']}"] if "num_rules" in result else []
    if "bayes_accuracy" in result:
        accuracies = sort_train_first(result["bayes_accuracy"])
        text = ", ".join(f"{value:.4f} in {table}" for table, value in accuracies.items())
        lines.append(f"{'best':<12}{text}: accuracy of the best possible classifier (Bayes)")
    return lines


def _check_output_folder(out: Path) -> None:
    """Raise if the output folder cannot be used; checked before and after the work."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} exists and is not empty; choose another folder")


def _copy_prepared(prepared: PreparedData, out: Path) -> None:
    """Copy the prepared folder atomically, with a manifest of the copy's file times."""
    _check_output_folder(out)
    try:
        with writing_folder(out, replace=False) as temporary:
            _copy_files(prepared.folder, temporary)
            write_manifest(temporary)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise EnvironmentProblem(f"--out {out}: {error.strerror or error}; choose another folder") from None
        size = sum(path.stat().st_size for path in prepared.folder.rglob("*") if path.is_file())
        raise EnvironmentProblem(
            f"--out: {explain_os_error(error, out, size)}; make room there, or choose another folder"
        ) from None


def _copy_files(folder: Path, target: Path) -> None:
    """Copy all files. Not `shutil.copytree`, which continues after a full disk and raises a list of errors."""
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir()
        else:
            shutil.copy2(path, copy)


def _export_tables(prepared: PreparedData, to: tuple[str, str], progress: ProgressCallback) -> list[Path]:
    from bottega.data.formats.write import write_records

    format_name: Any = to[0]
    folder = Path(to[1])
    paths: list[Path] = []
    preview = open_preview(prepared)
    total, num_rows_before = sum(counts["rows"] for counts in prepared.tables.values()), 0
    for table, counts in prepared.tables.items():
        records = iter_public_records(preview, table, partial(_report_rows, progress, num_rows_before, total))
        paths += write_records(records, folder, to=format_name, split=table.replace(".", "-"))
        num_rows_before += counts["rows"]
    return paths


def _report_rows(progress: ProgressCallback, num_rows_before: int, total: int, done: int) -> None:
    progress("export", num_rows_before + done, total)
