"""The module tree of a recipe or run: parameters, what is trainable, devices, types and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.engine import Engine
from bottega.core.rundir import RunDirectory, split_checkpoint_path
from bottega.data.loading.loader import Loader


def inspect_model(run_or_recipe: str, words: list[str]) -> dict[str, Any]:
    """Return a row for each module of a run or recipe, with gradient norms of the first training batch; nothing is updated."""
    engine, workload, batch_size, seed = _open_engine(run_or_recipe, words)
    return engine.inspect(Loader(workload.data.training(), batch_size, seed=seed, order=workload.data.order).batch(0))


def _open_engine(run_or_recipe: str, words: list[str]) -> tuple[Engine, Any, int, int]:
    if RunDirectory(split_checkpoint_path(Path(run_or_recipe))[0]).recipe.is_file():
        from bottega.run.saved import open_run

        saved = open_run(Path(run_or_recipe))
        return saved.engine, saved.workload, saved.recipe.training.batch_size, saved.recipe.seed
    from bottega.callbacks.console import Console
    from bottega.run.checks import find_problems, raise_all
    from bottega.run.compose import build_engine, build_training_plan, prepare_workload
    from bottega.tasks.recipes import load_recipe, parse_overrides
    from bottega.tasks.registry import TASKS

    if (
        "/" in run_or_recipe
        and not run_or_recipe.endswith((".yaml", ".yml"))
        and run_or_recipe.partition("/")[0] not in TASKS
    ):
        RunDirectory(Path(run_or_recipe)).must_exist()  # raises an error that suggests a similar run
    sources, overrides = parse_overrides([run_or_recipe, *words])
    recipe = load_recipe(sources, overrides).recipe
    raise_all(find_problems(recipe))
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"compile": False})})
    workload = prepare_workload(recipe, Console(unit="samples"))
    return (
        build_engine(recipe, build_training_plan(recipe, workload).task),
        workload,
        recipe.training.batch_size,
        recipe.seed,
    )


def format_report(report: dict[str, Any]) -> str:
    """Format the module tree as a table for the terminal."""
    head = ("module", "kind", "parameters", "trainable", "device", "type", "gradient")
    rows = [
        (
            "  " * row["name"].count(".") + row["name"].rpartition(".")[2],
            row["kind"],
            f"{row['parameters']:,}",
            f"{row['trainable']:,}",
            ",".join(row["devices"]),
            ",".join(row["dtypes"]),
            "-" if row["gradient_norm"] is None else f"{row['gradient_norm']:.2e}",
        )
        for row in report["modules"]
    ]
    widths = [max(len(cells[column]) for cells in (head, *rows)) for column in range(len(head))]
    right_aligned_columns = {2, 3, 6}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right_aligned_columns else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in (head, *rows)
    ]
    return "\n".join([*(line.rstrip() for line in lines), f"loss of the first batch: {report['loss']:.4f}"])
