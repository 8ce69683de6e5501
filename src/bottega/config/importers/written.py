"""What a person gets of an import: the recipe's text with what was left out at its top, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.config.importers.mapping import IDLE, Sheet, Unmapped, hidden
from bottega.config.yamlfile import write_yaml

WIDEST = 36

TITLES = {
    "axolotl": "Axolotl",
    "llamafactory": "LLaMA-Factory",
    "trainer": "the Trainer of transformers",
    "lightning": "Lightning",
}


def file_text(sheet: Sheet, *, path: Path, kind: str) -> str:
    """The recipe under a header that says where it is from, what was left out and what to know."""
    lines = [f"{path.name}, a configuration of {TITLES[kind]}, taken over by bottega import."]
    lost = [left for left in sheet.unmapped if left.why != "meaningless here"]
    idle = [left.theirs for left in sheet.unmapped if left.why == "meaningless here"]
    if lost:
        lines += ["", "Left out:", *(f"  {left.theirs}: {brief(left.value)} ({_why(left)})" for left in lost)]
    if idle:
        lines += ["", f"Left out as meaningless here, empty or switched off: {', '.join(idle)}"]
    said = [f"{row.key}: {row.note}" for row in sheet.mapped if row.note]
    if said or sheet.notes:
        lines += ["", "To know:", *(f"  {line}" for line in [*said, *sheet.notes])]
    header = "".join(f"# {_plain(line)}".rstrip() + "\n" for line in lines)
    return f"{header}\n{write_yaml(sheet.recipe())}"


def report(sheet: Sheet, *, kind: str, path: Path, out: Path) -> dict[str, Any]:
    return {
        "from": kind,
        "file": str(path),
        "recipe": str(out),
        "mapped": [
            {
                "their_key": row.theirs,
                "their_value": hidden(row.theirs, row.value),
                "our_key": row.key,
                "our_value": row.becomes,
                "note": row.note,
                "default": row.is_default,
            }
            for row in sheet.mapped
        ],
        "unmapped": [
            {"their_key": left.theirs, "their_value": left.value, "why": left.why, "reason": left.reason}
            for left in sheet.unmapped
        ],
        "notes": list(sheet.notes),
    }


def show(found: dict[str, Any]) -> str:
    """The report as a table for the terminal."""
    rows = [("theirs", "value", "ours", "value", "")]
    for row in found["mapped"]:
        value = brief(row["their_value"]) + (" (default)" if row["default"] else "")
        rows.append((row["their_key"], value, row["our_key"], brief(row["our_value"]), row["note"] or ""))
    lines = [
        f"{found['file']}, a configuration of {TITLES[found['from']]}, is now {found['recipe']}",
        "",
        *_table(rows),
    ]
    lost = [left for left in found["unmapped"] if left["reason"] not in IDLE]
    if lost:
        lines += ["", "left out:"]
        lines += _table(
            [(left["their_key"], brief(left["their_value"]), f"{left['why']}: {left['reason']}") for left in lost]
        )
    idle = [left["their_key"] for left in found["unmapped"] if left["reason"] in IDLE]
    if idle:
        lines += ["", f"empty or switched off there, so nothing is lost: {', '.join(idle)}"]
    if found["notes"]:
        lines += ["", *found["notes"]]
    return "\n".join(_plain(line) for line in lines)


def brief(value: Any) -> str:
    """A value on one line, cut short."""
    text = " ".join(write_yaml(value, flow=True).split())
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _why(left: Unmapped) -> str:
    return f"{left.why}: {left.reason}"


def _table(rows: list[Any]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _plain(line: str) -> str:
    """One line without control characters: a key may hold any, and must not end a comment or reach a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in line)
