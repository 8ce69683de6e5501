"""The recipes that come with the program, by name."""

from __future__ import annotations

from pathlib import Path

from bottega.core.errors import UsageError
from bottega.similar_names import find_similar_names

RECIPE_FOLDER = Path(__file__).parent.parent / "recipes"


def list_recipe_names() -> list[str]:
    return sorted(path.relative_to(RECIPE_FOLDER).with_suffix("").as_posix() for path in RECIPE_FOLDER.rglob("*.yaml"))


def find_recipe(name: str, *, beside: Path | None = None) -> tuple[Path, str]:
    """The file of a recipe, and the name its runs begin with.

    Only a name that ends in .yaml or .yml is a file of the user's, so that a folder called `language` in the working
    directory cannot stand in for the bundled recipe. A path in `extends` is relative to the file that says it.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        return (path if beside is None else beside / path), path.stem
    if name in list_recipe_names():
        return RECIPE_FOLDER / f"{name}.yaml", name
    if Path(name).is_file():
        raise UsageError(f"{name}: a recipe file ends in .yaml or .yml")
    near = _near_recipes(name)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else "`bottega recipes` lists them; a file of yours ends in .yaml"
    )
    raise UsageError(f"{name}: no bundled recipe of this name; {hint}")


def _near_recipes(name: str) -> list[str]:
    """Up to three recipes of a similar name, or whose part after the slash is similar."""
    near = find_similar_names(name, list_recipe_names(), count=3)
    if not near:
        last = {recipe.rpartition("/")[2]: recipe for recipe in list_recipe_names()}
        near = [last[word] for word in find_similar_names(name.rpartition("/")[2], last, count=3)]
    return near


def read_header(path: Path) -> str:
    """The first comment line of a recipe file: what it is."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""
