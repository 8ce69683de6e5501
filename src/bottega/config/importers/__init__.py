"""Configurations of other trainers become a recipe: read, told apart, translated, checked and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bottega.config.credentials import strip_credentials_in_values
from bottega.config.error_messages import format_value
from bottega.config.importers import axolotl, lightning, llamafactory, trainer
from bottega.config.importers.import_report import build_report, render_recipe_file
from bottega.config.importers.translation import Translation
from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.yaml_io import MAX_BYTES, MAX_DEPTH, read_yaml
from bottega.core.errors import UsageError

__all__ = ["FORMATS", "Translation", "detect_format", "import_file", "translate_config"]

FORMATS: dict[str, Callable[[Translation], None]] = {
    "axolotl": axolotl.translate,
    "llamafactory": llamafactory.translate,
    "trainer": trainer.translate,
    "lightning": lightning.translate,
}


def import_file(tasks: TaskRegistry, path: Path, *, out: Path | None = None, kind: str | None = None) -> dict[str, Any]:
    """Write the recipe that `path` makes, and tell what became of each key. Nothing is overwritten."""
    whole = _read(path)
    said = strip_credentials_in_values(whole)
    _refuse_ours(tasks, path, said, is_told=kind is not None)
    kind = kind or detect_format(path, said)
    translation = translate_config(tasks, path, said, kind)
    if said != whole:
        translation.notes.append("credentials of addresses are left out; give an address with them on the command line")
    out = out or path.with_name(f"{path.stem}.bottega.yaml")
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out: {out}: a recipe file ends in .yaml or .yml")
    if not out.parent.is_dir():
        raise UsageError(f"--out: {out.parent}: no such folder")
    text = render_recipe_file(translation, path=path, kind=kind)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{out}: exists and is not overwritten; name another file with --out") from None
    return build_report(translation, kind=kind, path=path, out=out)


def translate_config(tasks: TaskRegistry, path: Path, said: Mapping[str, Any], kind: str) -> Translation:
    """The translation of one file, on which every key has an answer, and whose recipe our loader takes."""
    translation = Translation(said)
    FORMATS[kind](translation)
    if not any(not row.is_default for row in translation.mapped):
        raise UsageError(f"{path}: no key of it is known as one of {kind}; is --from right?")
    translation.drop_rejected(tasks)
    return translation


def detect_format(path: Path, said: Mapping[str, Any]) -> str:
    """Which trainer's file it is, by its keys."""
    fits = []
    inner = said.get("trainer")
    if isinstance(inner, Mapping) and any(key in inner for key in lightning.MARKER_KEYS):
        fits.append("lightning")
    if "base_model" in said and any(key in said for key in axolotl.MARKER_KEYS):
        fits.append("axolotl")
    if "model_name_or_path" in said and any(key in said for key in llamafactory.MARKER_KEYS):
        fits.append("llamafactory")
    if not fits and sum(key in said for key in trainer.MARKER_KEYS) >= 2:
        fits.append("trainer")
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UsageError(f"{path}: has keys of {' and of '.join(fits)}; say which it is with --from")
    raise UsageError(f"{path}: its keys do not tell whose configuration it is; say so with --from {', '.join(FORMATS)}")


def _refuse_ours(tasks: TaskRegistry, path: Path, said: Mapping[str, Any], *, is_told: bool) -> None:
    if "compute_environment" in said or "distributed_type" in said:
        raise UsageError(f"{path}: a configuration of Accelerate is understood as it is: bottega train RECIPE {path}")
    is_ours = isinstance(said.get("extends"), str) or isinstance(said.get("training"), dict)
    is_ours = is_ours or (isinstance(said.get("task"), str) and said["task"] in tasks)
    if is_ours or (not is_told and set(said) <= set(Recipe.model_fields) and "trainer" not in said):
        raise UsageError(f"{path}: this is a recipe already; bottega plan {path} --check prints it")


def _read(path: Path) -> dict[str, Any]:
    value = _read_json(path) if path.suffix.lower() == ".json" else read_yaml(path).value
    if value is None or value in ({}, []):
        raise UsageError(f"{path}: is empty")
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a configuration is a block of keys, not {format_value(value)}")
    return value


def _read_json(path: Path) -> Any:
    """JSON with the limits that YAML has here: one megabyte, no key twice, no endless nesting."""
    if not path.is_file():
        raise UsageError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    with path.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB, so it is not a configuration")
    if not content.strip():
        return None
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if _depth(value) > MAX_DEPTH:
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key}: given twice")
        found[key] = value
    return found


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return deepest
