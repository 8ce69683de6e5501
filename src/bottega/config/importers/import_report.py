"""Output of an import: the recipe file with a header of what was left out, the JSON report, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.config.importers.translation import HARMLESS_REASONS, Translation, UnmappedKey, redact_secret
from bottega.config.yaml_io import dump_yaml

MAX_VALUE_WIDTH = 36

FORMAT_TITLES = {
    "axolotl": "Axolotl",
    "llamafactory": "LLaMA-Factory",
    "trainer": "the Trainer of transformers",
    "lightning": "Lightning",
}


def render_recipe_file(translation: Translation, *, path: Path, kind: str) -> str:
    """Return the recipe as YAML, with a header comment of its origin, the keys left out, and notes."""
    lines = [f"{path.name}, a configuration of {FORMAT_TITLES[kind]}, imported by bottega import."]
    lost_keys = [skipped for skipped in translation.unmapped if skipped.category != "not applicable"]
    inapplicable_keys = [skipped.source_key for skipped in translation.unmapped if skipped.category == "not applicable"]
    if lost_keys:
        lines += [
            "",
            "Left out:",
            *(
                f"  {skipped.source_key}: {format_brief(skipped.source_value)} ({_format_reason(skipped)})"
                for skipped in lost_keys
            ),
        ]
    if inapplicable_keys:
        lines += ["", f"Left out because not applicable, empty or turned off: {', '.join(inapplicable_keys)}"]
    notes = [f"{row.recipe_key}: {row.note}" for row in translation.mapped if row.note]
    if notes or translation.notes:
        lines += ["", "Notes:", *(f"  {line}" for line in [*notes, *translation.notes])]
    header = "".join(f"# {_remove_control_characters(line)}".rstrip() + "\n" for line in lines)
    return f"{header}\n{dump_yaml(translation.to_recipe())}"


def build_report(translation: Translation, *, kind: str, path: Path, out: Path) -> dict[str, Any]:
    """Return the report of an import as printed by `--json`: every key, mapped or with its reason."""
    return {
        "from": kind,
        "file": str(path),
        "recipe": str(out),
        "mapped": [
            {
                "their_key": row.source_key,
                "their_value": redact_secret(row.source_key, row.source_value),
                "our_key": row.recipe_key,
                "our_value": row.recipe_value,
                "note": row.note,
                "default": row.is_default,
            }
            for row in translation.mapped
        ],
        "unmapped": [
            {
                "their_key": skipped.source_key,
                "their_value": skipped.source_value,
                "why": skipped.category,
                "reason": skipped.reason,
            }
            for skipped in translation.unmapped
        ],
        "notes": list(translation.notes),
    }


def format_report(report: dict[str, Any]) -> str:
    """Format a report of `build_report` as tables for the terminal."""
    rows = [("theirs", "value", "ours", "value", "")]
    for row in report["mapped"]:
        value = format_brief(row["their_value"]) + (" (default)" if row["default"] else "")
        rows.append((row["their_key"], value, row["our_key"], format_brief(row["our_value"]), row["note"] or ""))
    lines = [
        f"{report['file']}, a configuration of {FORMAT_TITLES[report['from']]}, is now {report['recipe']}",
        "",
        *_format_table(rows),
    ]
    lost_keys = [skipped for skipped in report["unmapped"] if skipped["reason"] not in HARMLESS_REASONS]
    if lost_keys:
        lines += ["", "left out:"]
        lines += _format_table(
            [
                (skipped["their_key"], format_brief(skipped["their_value"]), f"{skipped['why']}: {skipped['reason']}")
                for skipped in lost_keys
            ]
        )
    harmless_keys = [skipped["their_key"] for skipped in report["unmapped"] if skipped["reason"] in HARMLESS_REASONS]
    if harmless_keys:
        lines += ["", f"empty or turned off in the file, so nothing is lost: {', '.join(harmless_keys)}"]
    if report["notes"]:
        lines += ["", *report["notes"]]
    return "\n".join(_remove_control_characters(line) for line in lines)


def format_brief(value: Any) -> str:
    """Format a value on one line, truncated to `MAX_VALUE_WIDTH` characters."""
    text = " ".join(dump_yaml(value, flow=True).split())
    return text if len(text) <= MAX_VALUE_WIDTH else text[: MAX_VALUE_WIDTH - 3] + "..."


def _format_reason(skipped: UnmappedKey) -> str:
    return f"{skipped.category}: {skipped.reason}"


def _format_table(rows: list[Any]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _remove_control_characters(line: str) -> str:
    """Replace control characters: a key may contain them, and they must not end a comment or reach a terminal."""
    return "".join(character if character.isprintable() else " " for character in line)
