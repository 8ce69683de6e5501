"""`bottega prepare`: from a recipe to prepared data, for every task whose data can be read, without a framework loaded."""

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
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that go away where there is more room."""
FORMATS = ("webdataset", "tfrecord", "parquet", "jsonl")
KNOWN = ("num_rules", "bayes_accuracy", "input_columns", "left_out_columns")
"""Of rows of numbers: how many rules there are, how often the best possible answer is right, and the names of columns."""


def prepare(
    recipe: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
    *,
    progress: ProgressCallback = lambda stage, done, total: None,
) -> PreparedData:
    """`bottega.prepare`: the data of a recipe by name, file or dict, ready on disk; later ones and overrides win."""
    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    return prepare_recipe(_complete([*sources, overrides or {}], ()), progress)


def prepare_recipe(recipe: Recipe, progress: ProgressCallback) -> PreparedData:
    """The recipe's data as tables, from the cache or made now."""
    spec = find_spec(recipe)
    if spec.prepare is None:
        raise refusal_error(recipe, "prepare")
    prepared: PreparedData = resolve_reference(spec.prepare)(recipe, progress=progress)
    return prepared


def open_preview(prepared: PreparedData) -> Preview:
    """What shows, draws and exports the rows of prepared data, by the task that it was prepared for."""
    preview: Preview = resolve_reference(TASKS[prepared.metadata["task"]].preview)(prepared)
    return preview


def read_recipe(words: list[str], *, verb: str = "prepare") -> Recipe:
    """A recipe whose data is complete; what only a training needs may be missing."""
    sources, overrides = parse_overrides(words)
    if any(override.key == "output_dir" for override in overrides):
        raise UsageError(f"output_dir: is the folder of runs, and bottega {verb} makes none; name a folder with --out")
    if not sources:
        raise UsageError(f"say which recipe: bottega {verb} RECIPE, such as bottega {verb} language --data my.txt")
    return _complete(sources, overrides)


def _complete(sources: list[Any], overrides: Any) -> Recipe:
    recipe = check_recipe(sources, overrides).recipe
    problems = [(key, text) for key, text in recipe.find_missing_keys() if key.startswith("data.")]
    if problems:
        raise UsageError("; ".join(f"{key}: {text}" for key, text in problems))
    return recipe


def prepare_command(words: list[str], *, out: Path | None, to: list[tuple[str, str]]) -> dict[str, Any]:
    """What `--json` prints."""
    from bottega.callbacks.progress_bars import progress_bars

    for kind, _ in to:
        if kind not in FORMATS:
            raise UsageError(f"--to {kind}: there is {', '.join(FORMATS)}")
    recipe = read_recipe(words)
    if out is not None:
        _check_out(out)
    begun = time.monotonic()
    with progress_bars(open_console()) as say:
        prepared = prepare_recipe(recipe, say)
        if out is not None:
            _copy(prepared, out)
        exported = [path for one in to for path in _export(prepared, one, say)]
    return {
        **summarise_prepared(prepared),
        "folder": str(out or prepared.folder),
        "exported": [str(path) for path in exported],
        "seconds": round(time.monotonic() - begun, 2),
    }


def summarise_prepared(prepared: PreparedData) -> dict[str, Any]:
    """What is known without looking at a row, as plain values."""
    meta = prepared.metadata
    return {
        "task": meta["task"],
        "folder": str(prepared.folder),
        "fingerprint": prepared.fingerprint,
        "tables": sort_train_first(meta["tables"]),
        "unread_parts": list(prepared.unread_splits),
        "records": meta["records"],
        "bad": meta["bad"],
        **{name: meta[name] for name in KNOWN if name in meta},
        "bad_records": meta["named"],
        "dropped": meta["dropped"],
    }


def sort_train_first(tables: dict[str, Any]) -> dict[str, Any]:
    """As people expect them; prepared first is what is held out."""
    return dict(sorted(tables.items(), key=lambda pair: (not pair[0].startswith("train"), pair[0] == "replay")))


def format_counts(counts: dict[str, int]) -> list[str]:
    """1 row, 2 rows."""
    return [f"{count:,} {name.removesuffix('s') if count == 1 else name}" for name, count in counts.items()]


def format_report(result: dict[str, Any]) -> str:
    lines = []
    for table, counts in result["tables"].items():
        lines.append(f"{table:<12}{', '.join(format_counts(counts))}")
    if result["unread_parts"]:
        lines.append(f"{'not read':<12}the parts {', '.join(result['unread_parts'])} of the same folder")
    if result["bad"]:
        lines.append(f"{'left out':<12}{result['bad']:,} bad of {result['records']:,} records")
        lines += [f"            {bad}" for bad in result["bad_records"][:5]]
    for reason, count in sorted(result["dropped"].items()):
        lines.append(f"{'left out':<12}{count:,} {reason}")
    lines += [f"{'left out':<12}column {name!r}, which holds no numbers" for name in result.get("left_out_columns", ())]
    lines += format_rules(result)
    lines.append(f"{'shards':<12}{result['folder']}")
    if result["exported"]:
        more = len(result["exported"]) - 1
        lines.append(f"{'exported':<12}{result['exported'][0]}" + (f" and {more} more" if more else ""))
    lines.append(f"{'time':<12}{result['seconds']:.1f} s")
    return "\n".join(lines)


def format_rules(result: Mapping[str, Any]) -> list[str]:
    """What is known of the rule behind the rows, in words."""
    lines = [f"{'rules':<12}{result['num_rules']}"] if "num_rules" in result else []
    if "bayes_accuracy" in result:
        shares = sort_train_first(result["bayes_accuracy"])
        said = ", ".join(f"{value:.4f} in {table}" for table, value in shares.items())
        lines.append(f"{'best':<12}{said}: how often the best possible answer is right (Bayes)")
    return lines


def _check_out(out: Path) -> None:
    """Before the work, and again after it."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder to write to")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out}: exists already and is not empty; choose another folder")


def _copy(prepared: PreparedData, out: Path) -> None:
    """The whole folder or nothing, with a manifest that knows the copy's times."""
    _check_out(out)
    try:
        with writing_folder(out, replace=False) as temporary:
            _copy_files(prepared.folder, temporary)
            write_manifest(temporary)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise EnvironmentProblem(f"--out {out}: {error.strerror or error}; choose another folder") from None
        size = sum(path.stat().st_size for path in prepared.folder.rglob("*") if path.is_file())
        raise EnvironmentProblem(
            f"--out: {explain_os_error(error, out, size)}; make room there, or choose another folder"
        ) from None


def _copy_files(folder: Path, target: Path) -> None:
    """As shutil.copytree, which goes on after a full disk and then raises a list of what it met."""
    for path in sorted(folder.rglob("*")):
        other = target / path.relative_to(folder)
        if path.is_dir():
            other.mkdir()
        else:
            shutil.copy2(path, other)


def _export(prepared: PreparedData, to: tuple[str, str], say: ProgressCallback) -> list[Path]:
    from bottega.data.formats.write import write_records

    kind: Any = to[0]
    folder = Path(to[1])
    paths: list[Path] = []
    preview = open_preview(prepared)
    total, before = sum(counts["rows"] for counts in prepared.tables.values()), 0
    for table, counts in prepared.tables.items():
        records = iter_public_records(preview, table, partial(_count, say, before, total))
        paths += write_records(records, folder, to=kind, split=table.replace(".", "-"))
        before += counts["rows"]
    return paths


def _count(say: ProgressCallback, before: int, total: int, done: int) -> None:
    say("export", before + done, total)
