"""`bottega predict`: which class new texts are of, by a run that classifies text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from bottega.branches.multitask import MultitaskBranch
from bottega.branches.text_classify import TextClassifyBranch
from bottega.core.errors import DataError, UsageError
from bottega.data.fields import text_of
from bottega.data.present import whole, writing
from bottega.data.readers import find
from bottega.data.record import Bad
from bottega.saved import open_run
from bottega.schema.data import Source
from bottega.tasks.multitask import whole as whole_part

THRESHOLD = 0.5
"""Where a text may have several classes: those that are more likely than not."""


def predict(
    run: str | Path,
    texts: Sequence[str],
    *,
    part: str | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
) -> list[dict[str, Any]]:
    """`bottega.predict`: for each text {"text", "predicted", "probability"}; with several labels, "predicted" is a list of
    classes and "probability" a dict of all. `part` is for a run of several tasks, where more than one classifies text."""
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    branch = saved.branch
    if isinstance(branch, MultitaskBranch):
        part = branch.of(part, wanted=lambda one: isinstance(one, TextClassifyBranch), verb="predict")
        branch = branch.parts[part]
    elif part is not None:
        raise UsageError(f"--part {part}: {run} is a run of one task; leave it out")
    if not isinstance(branch, TextClassifyBranch):
        raise UsageError(f"{run} is a run of {saved.recipe.task} and classifies no text")
    if not texts:
        raise DataError("there is no text to classify; give some, a file with --data, or lines on standard input")
    with saved.engine.sampling() as models:
        own = models if part is None else whole_part(models, part)
        chances = branch.predict(own, texts, device=saved.engine.device)
    names = branch.classes.names
    rows: list[dict[str, Any]] = []
    for text, row in zip(texts, chances.tolist(), strict=True):
        if branch.recipe.data.multi_label:
            chosen: Any = [name for name, chance in zip(names, row, strict=True) if chance >= THRESHOLD]
            rows.append({"text": text, "predicted": chosen, "probability": dict(zip(names, row, strict=True))})
        else:
            best = max(range(len(row)), key=row.__getitem__)
            rows.append({"text": text, "predicted": names[best], "probability": row[best]})
    return rows


def texts_in(path: str, run: Path) -> list[str]:
    """The texts of a file: its lines, or the rows of a table, by the field that the run has learnt from."""
    saved_field = _field_of(run)
    found = find(Source(path=path))
    if found.kind == "text":
        return lines_of(Path(path).expanduser().read_text(encoding="utf-8").splitlines())
    texts = []
    for piece in found.pieces(1 << 20):
        for record in found.read(piece):
            if isinstance(record, Bad):
                raise DataError(f"{record.where}: {record.reason}")
            name = saved_field if saved_field in record.fields else "text"
            if name not in record.fields:
                raise DataError(f"{record.where}: has no field {name!r}; it has {', '.join(sorted(record.fields))}")
            texts.append(text_of(record.fields[name], name))
    return texts


def lines_of(lines: Iterable[str] | TextIO) -> list[str]:
    """One text a line; empty ones are none."""
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A line each: the class, how likely it is, and the text."""
    return "\n".join(_line(row) for row in rows)


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    with writing(file), whole(file) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    predicted = row["predicted"]
    if isinstance(predicted, list):
        shown = ", ".join(f"{name} {row['probability'][name]:.3f}" for name in predicted) or "none"
        return f"{shown}\t{row['text']}"
    return f"{predicted}\t{row['probability']:.3f}\t{row['text']}"


def _field_of(run: Path) -> str:
    from bottega.core.rundir import RunDirectory
    from bottega.schema.load import load_recipe

    return load_recipe([RunDirectory(run).must_exist().recipe]).recipe.data.train.field or "text"
