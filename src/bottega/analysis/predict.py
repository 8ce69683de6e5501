"""`bottega predict`: classify new texts, images, audio, video or rows of numbers with a trained run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bottega.core.rundir import RunDirectory
from bottega.data.output_files import explain_write_errors
from bottega.run.saved import open_run
from bottega.storage.durable import replacing_file
from bottega.tasks import plugins
from bottega.tasks.recipes import load_saved_recipe
from bottega.tasks.registry import TASKS


def predict(
    run: str | Path,
    inputs: str | Sequence[str] = (),
    *,
    data: str | Path | None = None,
    part: str | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
    standard_input: TextIO | None = None,
) -> list[dict[str, Any]]:
    """`bottega.predict`: for each sample {"predicted", "probability", "probabilities"}, with its "text", "file" or "row".

    `inputs` are texts for a text classifier, paths of files and folders for one of images, audio or video, and paths or
    numbers ("0.5,1,-2") for one of rows. `data` is a path. "probabilities" has all classes. For multi-label data,
    "predicted" is a list and "probability" a dict of all classes; for a blank text all are None. `part` selects a task of a
    multitask run in which several tasks can predict.
    """
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    return saved.predict(inputs, data=data, part=part, standard_input=standard_input)


def example_command(run: Path) -> str | None:
    """Return an example command for a run that classifies; None for other runs."""
    recipe = load_saved_recipe(RunDirectory(run).must_exist().recipe)
    example_input = TASKS[recipe.task].example_input
    words = example_input(recipe, RunDirectory(run).processor) if example_input is not None else None
    return f"bottega predict {run} {words}{plugins.quote_plugin_flags()}" if words is not None else None


def format_predictions(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each prediction: class, probability, and text or file; for rows of numbers, expert and row."""
    return "\n".join(_format_prediction(row) for row in rows)


def write_predictions(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write predictions to a file, one JSON object per line."""
    with explain_write_errors(file), replacing_file(file) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _format_prediction(row: dict[str, Any]) -> str:
    """Return one line of three columns, four for a routed row of numbers, or two without a probability."""
    predicted = row["predicted"]
    input_text = next(str(row[name]) for name in ("text", "file", "row") if name in row)
    if "probability" not in row:
        return "\t".join(
            (_escape(f"{predicted:.6g}" if isinstance(predicted, float) else str(predicted)), _escape(input_text))
        )
    probability = row["probability"]
    if predicted is None:
        classes, probability_text = "-", "-"
    elif isinstance(predicted, list):
        classes = ", ".join(predicted) or "none"
        probability_text = ", ".join(f"{probability[name]:.3f}" for name in predicted) or "-"
    else:
        classes, probability_text = predicted, f"{probability:.3f}"
    experts = row["expert"] if isinstance(row.get("expert"), list) else [row["expert"]] if "expert" in row else []
    expert_column = [", ".join(f"e{number}" for number in experts)] if experts else []
    return "\t".join((_escape(classes), probability_text, *expert_column, _escape(input_text)))


def _escape(text: str) -> str:
    for character, escaped in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escaped)
    return text
