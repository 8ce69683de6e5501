"""Import configurations of other trainers: read a file, detect its format, translate it, and write a recipe."""

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
    """Translate the file at `path` into a recipe file and return a report of every key. Nothing is overwritten."""
    content = _read_config(path)
    config = strip_credentials_in_values(content)
    _reject_recipe(tasks, path, config, is_explicit=kind is not None)
    kind = kind or detect_format(path, config)
    translation = translate_config(tasks, path, config, kind)
    if config != content:
        translation.notes.append("credentials of addresses are left out; give an address with them on the command line")
    out = out or path.with_name(f"{path.stem}.bottega.yaml")
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out {out}: the name of a recipe file must end in .yaml or .yml")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    text = render_recipe_file(translation, path=path, kind=kind)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{out} exists and is not overwritten; give another file with --out") from None
    return build_report(translation, kind=kind, path=path, out=out)


def translate_config(tasks: TaskRegistry, path: Path, config: Mapping[str, Any], kind: str) -> Translation:
    """Translate a configuration: every key is mapped or has a reason, and the recipe passes validation."""
    translation = Translation(config)
    FORMATS[kind](translation)
    if not any(not row.is_default for row in translation.mapped):
        raise UsageError(f"{path} has no key of {kind}; check --from")
    translation.drop_rejected_keys(tasks)
    return translation


def detect_format(path: Path, config: Mapping[str, Any]) -> str:
    """Return the format of a configuration, a key of `FORMATS`, by its keys."""
    candidates = []
    trainer_block = config.get("trainer")
    if isinstance(trainer_block, Mapping) and any(key in trainer_block for key in lightning.MARKER_KEYS):
        candidates.append("lightning")
    if "base_model" in config and any(key in config for key in axolotl.MARKER_KEYS):
        candidates.append("axolotl")
    if "model_name_or_path" in config and any(key in config for key in llamafactory.MARKER_KEYS):
        candidates.append("llamafactory")
    if not candidates and sum(key in config for key in trainer.MARKER_KEYS) >= 2:
        candidates.append("trainer")
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(f"{path} has keys of {' and of '.join(candidates)}; choose the format with --from")
    raise UsageError(f"{path}: the format cannot be detected from its keys; set it with --from {', '.join(FORMATS)}")


def _reject_recipe(tasks: TaskRegistry, path: Path, config: Mapping[str, Any], *, is_explicit: bool) -> None:
    """Refuse a file that needs no import: a recipe or an Accelerate configuration. `is_explicit`: --from names the format."""
    if "compute_environment" in config or "distributed_type" in config:
        raise UsageError(f"{path}: an Accelerate configuration needs no import; run bottega train RECIPE {path}")
    is_recipe = isinstance(config.get("extends"), str) or isinstance(config.get("training"), dict)
    is_recipe = is_recipe or (isinstance(config.get("task"), str) and config["task"] in tasks)
    if is_recipe or (not is_explicit and set(config) <= set(Recipe.model_fields) and "trainer" not in config):
        raise UsageError(f"{path}: this is already a recipe; print it with bottega plan {path} --check")


def _read_config(path: Path) -> dict[str, Any]:
    value = _read_json(path) if path.suffix.lower() == ".json" else read_yaml(path).value
    if value is None or value in ({}, []):
        raise UsageError(f"{path} is empty")
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a configuration is a mapping of keys, not {format_value(value)}")
    return value


def _read_json(path: Path) -> Any:
    """Read JSON with the limits of our YAML reader: 1 MiB, no duplicate keys, bounded nesting."""
    if not path.is_file():
        raise UsageError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    with path.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB, the limit for a configuration; check the path")
    if not content.strip():
        return None
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_reject_duplicates)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if _compute_depth(value) > MAX_DEPTH:
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key, value in pairs:
        if key in block:
            raise ValueError(f"{key}: given twice; keep one")
        block[key] = value
    return block


def _compute_depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth
