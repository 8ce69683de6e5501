"""The recipes that come with the program, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from bottega.core.errors import UsageError

FOLDER = Path(__file__).parent.parent / "recipes"


def names() -> list[str]:
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find(name: str, *, beside: Path | None = None) -> tuple[Path, str]:
    """The file of a recipe, and the name its runs begin with.

    Only a name that ends in .yaml or .yml is a file of the user's, so that a folder called `language` in the working
    directory cannot stand in for the bundled recipe. A path in `extends` is relative to the file that says it.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        return (path if beside is None else beside / path), path.stem
    if name in names():
        return FOLDER / f"{name}.yaml", name
    if Path(name).is_file():
        raise UsageError(f"{name}: a recipe file ends in .yaml or .yml")
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "bundled recipes: " + ", ".join(names())
    raise UsageError(f"{name}: no bundled recipe of this name; {hint}")


def header(path: Path) -> str:
    """The first comment line of a recipe file: what it is."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""
