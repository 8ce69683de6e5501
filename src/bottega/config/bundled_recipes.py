"""Find bundled recipes and recipe files by name."""

from __future__ import annotations

from pathlib import Path

from bottega.core.errors import UsageError
from bottega.similar_names import find_similar_names

RECIPE_FOLDER = Path(__file__).parent.parent / "recipes"


def list_recipe_names() -> list[str]:
    """Return the sorted names of the bundled recipes, such as `language/shakespeare`."""
    return sorted(path.relative_to(RECIPE_FOLDER).with_suffix("").as_posix() for path in RECIPE_FOLDER.rglob("*.yaml"))


def find_recipe(name: str, *, base_folder: Path | None = None) -> tuple[Path, str]:
    """Return the file of a recipe, and the prefix of its runs' names.

    Only a name that ends in .yaml or .yml is a path, so that a folder called `language` in the working directory does not
    shadow the bundled recipe. A path in `extends` is relative to `base_folder`, the folder of the file that extends it.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        return (path if base_folder is None else base_folder / path), path.stem
    if name in list_recipe_names():
        return RECIPE_FOLDER / f"{name}.yaml", name
    if Path(name).is_file():
        raise UsageError(f"{name}: the name of a recipe file must end in .yaml or .yml")
    similar = _find_similar_recipes(name)
    hint = (
        f"did you mean {' or '.join(similar)}?"
        if similar
        else "list them with `bottega recipes`; the name of your own file must end in .yaml"
    )
    raise UsageError(f"{name}: no bundled recipe of this name; {hint}")


MIN_PREFIX_LENGTH = 3


def _find_similar_recipes(name: str) -> list[str]:
    """Return up to three recipes of a similar name, that begin with it, or with a similar part after the slash."""
    similar = find_similar_names(name, list_recipe_names(), count=3)
    if not similar and len(name) >= MIN_PREFIX_LENGTH:
        similar = sorted((recipe for recipe in list_recipe_names() if recipe.startswith(name)), key=len)[:3]
    if not similar:
        recipe_by_last_part = {recipe.rpartition("/")[2]: recipe for recipe in list_recipe_names()}
        similar = [
            recipe_by_last_part[word]
            for word in find_similar_names(name.rpartition("/")[2], recipe_by_last_part, count=3)
        ]
    return similar


def read_header(path: Path) -> str:
    """Return the first comment line of a recipe file, which says what it trains."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""
