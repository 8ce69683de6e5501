"""Write src/bottega/analysis/doctor/tested_versions.txt from constraints.txt: run it after changing a pin.

An installed package does not have constraints.txt; `bottega doctor` compares installed versions with this file.

    python tools/tested_versions.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from bottega.analysis.doctor.requirements import (
    TESTED_VERSIONS_FILE,
    UNLISTED_EXTRAS,
    format_tested_versions,
    parse_requirement,
)

ROOT = Path(__file__).resolve().parents[1]


def build_text() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras if extra not in UNLISTED_EXTRAS for line in extras[extra]),
    ]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return format_tested_versions(constraints, [parse_requirement(line) for line in lines])


if __name__ == "__main__":
    TESTED_VERSIONS_FILE.write_text(build_text(), encoding="utf-8")
