"""Every bundled recipe resolves, documents its command, and trains in a small form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import bottega
from bottega.config import bundled_recipes
from bottega.config.load import to_yaml
from bottega.core.model_spec import resolve_reference
from bottega.tasks.recipes import check_recipe, load_recipe, parse_overrides
from bottega.tasks.registry import TASKS
from small_recipes import get_task, settings, write_data

NAMES = bundled_recipes.list_recipe_names()
GENERATED = ("image", "audio", "video")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "my.txt"
    path.write_text("".join(f"Line {n} of the book, written by apprentice {n % 7}.\n" for n in range(100)))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_data(tmp_path_factory.mktemp("data"))


def read_header(name: str) -> str:
    """Return the comment lines at the start of a recipe file."""
    lines = (bundled_recipes.RECIPE_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.lstrip("#").strip() for line in lines[:end])


def test_main_recipes_are_bundled() -> None:
    assert {"language", "language/verse", "language/stanza", "language/epic", *GENERATED} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_resolves_and_round_trips(name: str, tmp_path: Path) -> None:
    recipe = check_recipe([name]).recipe
    assert recipe.task in TASKS
    file = tmp_path / "again.yaml"
    file.write_text(to_yaml(recipe), encoding="utf-8")
    again = check_recipe([file]).recipe
    assert again == recipe
    assert again.run_name() == recipe.run_name()


@pytest.mark.parametrize("name", NAMES)
def test_header_documents_command_and_model(name: str, text: Path) -> None:
    header = read_header(name)
    assert header.splitlines()[0].endswith("."), "the first line is a sentence: `bottega recipes` prints it"
    assert "Trains:" in header
    command = re.search(r"^bottega train (.*)$", header, re.MULTILINE)
    assert command, "no line `bottega train ...`"
    sources, overrides = parse_overrides(shlex.split(command[1]))
    assert sources == [name]
    # The data path of the example is a placeholder for the user's own file.
    existing = [(key, str(text) if key == "data" else value, origin) for key, value, origin in overrides]
    load_recipe(sources, existing)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "/" in n else ()) for n in NAMES])
def test_small_form_trains_three_steps(name: str, data: dict[str, Path], tmp_path: Path) -> None:
    run = bottega.train(name, settings(name, data, tmp_path))
    rows = [row for row in run.history() if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["loss"] < 20 for row in rows)
    assert rows[-1]["loss"] > 0
    assert (run.path / "checkpoints" / "last" / "model.safetensors").is_file()
    if get_task(name) in GENERATED:
        assert len(list((run.path / "samples" / "step-00000003").iterdir())) >= 2, "samples are written"


@pytest.mark.parametrize("task", TASKS)
def test_functions_named_by_a_task_exist(task: str) -> None:
    spec = TASKS[task]
    functions = [spec.open, spec.reopen, spec.preview, *([spec.prepare] if spec.prepare is not None else [])]
    assert all(callable(resolve_reference(function)) for function in functions)
    assert {schema.model_fields["task"].default for schema in spec.schemas.values()} == {task}
