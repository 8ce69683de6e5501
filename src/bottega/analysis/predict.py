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

    `inputs` are texts of a classifier of text, paths of files and folders of one of images, sound or video, and paths or
    numbers ("0.5,1,-2") of one of rows. `data` is a path. "probabilities" has all classes. With several labels a text,
    "predicted" is a list and "probability" the dict of all; of a blank text all are None. `part` is for a run of several
    tasks, where more than one can answer.
    """
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    return saved.predict(inputs, data=data, part=part, standard_input=standard_input)


def example_command(run: Path) -> str | None:
    """A command to try on a run that classifies; None where none does."""
    recipe = load_saved_recipe(RunDirectory(run).must_exist().recipe)
    asks = TASKS[recipe.task].asks
    words = asks(recipe, RunDirectory(run).processor) if asks is not None else None
    return f"bottega predict {run} {words}{plugins.quoted_plugin_flags()}" if words is not None else None


def format_predictions(rows: Sequence[dict[str, Any]]) -> str:
    """A line each: the class, how likely it is, and the text or file; of rows of numbers, the expert and the row."""
    return "\n".join(_line(row) for row in rows)


def write_predictions(rows: Sequence[dict[str, Any]], file: Path) -> None:
    with explain_write_errors(file), replacing_file(file) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    """Always three columns, or four of a row of numbers, and always one line; two where nothing has a probability."""
    predicted = row["predicted"]
    shown = next(str(row[name]) for name in ("text", "file", "row") if name in row)
    if "probability" not in row:
        return "\t".join(
            (_escaped(f"{predicted:.6g}" if isinstance(predicted, float) else str(predicted)), _escaped(shown))
        )
    chances = row["probability"]
    if predicted is None:
        named, chance = "-", "-"
    elif isinstance(predicted, list):
        named = ", ".join(predicted) or "none"
        chance = ", ".join(f"{chances[name]:.3f}" for name in predicted) or "-"
    else:
        named, chance = predicted, f"{chances:.3f}"
    experts = row["expert"] if isinstance(row.get("expert"), list) else [row["expert"]] if "expert" in row else []
    asked = [", ".join(f"e{number}" for number in experts)] if experts else []
    return "\t".join((_escaped(named), chance, *asked, _escaped(shown)))


def _escaped(text: str) -> str:
    for sign, shown in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, shown)
    return text
