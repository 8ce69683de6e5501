"""`bottega predict`: which class new texts are of, by a run that classifies text, or rows of numbers by one that routes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from bottega.branches.multitask import MultitaskBranch
from bottega.branches.text_classify import TextClassifyBranch
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import RunDirectory
from bottega.data.prepare.inputs import find_in_utf8
from bottega.data.prepare.rules import Rules
from bottega.data.present import whole, writing
from bottega.data.record import Bad, Record
from bottega.insight.predict_numbers import part_recipe, predict_numbers, reads_numbers
from bottega.insight.predict_numbers import show as show_numbers
from bottega.saved import named_checkpoint, open_run
from bottega.schema.classify import ClassifyRecipe
from bottega.schema.data import Source
from bottega.schema.load import load_saved_recipe
from bottega.schema.multitask import MultitaskRecipe
from bottega.schema.routing import RoutingRecipe
from bottega.tasks.multitask import whole as whole_part
from bottega.terminal import print_notice

THRESHOLD = 0.5
"""Where a text may have several classes: those that are more likely than not."""


def predict(
    run: str | Path,
    texts: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    part: str | None = None,
    checkpoint: str | int = "best",
    device: str = "auto",
) -> list[dict[str, Any]]:
    """`bottega.predict`: for each text {"text", "predicted", "probability"}; with several labels, "predicted" is a list of
    classes and "probability" a dict of all; both are None of a blank text. `data` is a file of texts, or for a run of the task routing a table of numbers, each row of which has
    {"row", "predicted", "probability", "expert"}. `part` is for a run of several tasks, where more than one can answer."""
    run, checkpoint = named_checkpoint(Path(run), checkpoint)
    if reads_numbers(Path(run), part):
        if texts:
            raise UsageError(f"{run} tells labels of rows of numbers, not of texts; give a table with --data FILE")
        given = str(data) if data is not None else None
        return predict_numbers(Path(run), given, part=part, checkpoint=checkpoint, device=device)
    if data is not None:
        texts = texts_in(str(data), Path(run))
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    branch = saved.branch
    if isinstance(branch, MultitaskBranch):
        part = branch.of(part, wanted=lambda one: isinstance(one, TextClassifyBranch), verb="predict")
        branch = branch.parts[part]
    elif part is not None:
        raise UsageError(f"--part {part}: {run} is a run of one task; leave it out")
    if not isinstance(branch, TextClassifyBranch):
        raise UsageError(f"{run} is a run of {saved.recipe.task} and classifies no text")
    if not any(text.strip() for text in texts):
        raise DataError("there is no text to classify; give some, a file with --data, or lines on standard input")
    with saved.engine.sampling() as models:
        own = models if part is None else whole_part(models, part)
        chances = branch.predict(own, texts, device=saved.engine.device)
    cut, limit = branch.num_cut(texts)
    if cut:
        print_notice(f"{cut:,} of {len(texts):,} texts are cut at {limit} tokens, which is what the run reads")
    names = branch.classes.names
    rows: list[dict[str, Any]] = []
    for text, row in zip(texts, chances.tolist(), strict=True):
        if not text.strip():
            rows.append({"text": text, "predicted": None, "probability": None})
        elif branch.recipe.data.multi_label:
            chosen: Any = [name for name, chance in zip(names, row, strict=True) if chance >= THRESHOLD]
            rows.append({"text": text, "predicted": chosen, "probability": dict(zip(names, row, strict=True))})
        else:
            best = max(range(len(row)), key=row.__getitem__)
            rows.append({"text": text, "predicted": names[best], "probability": row[best]})
    return rows


def example(run: Path) -> str | None:
    """A command to try on a run that classifies text; None where none does."""
    recipe = load_saved_recipe(RunDirectory(run).must_exist().recipe)
    if isinstance(recipe, ClassifyRecipe):
        return f'bottega predict {run} "a text of yours"'
    if isinstance(recipe, RoutingRecipe) and recipe.data.train.path is not None:
        return f"bottega predict {run} --data {recipe.data.train.path}"
    if not isinstance(recipe, MultitaskRecipe):
        return None
    able = [name for name in recipe.data.parts if isinstance(part_recipe(run, name), ClassifyRecipe)]
    part = f" --part {able[0]}" if len(able) > 1 else ""
    return f'bottega predict {run}{part} "a text of yours"' if able else None


def texts_in(path: str, run: Path) -> list[str]:
    """The texts of a file: its lines, or the rows of a table, by the fields that the run has learnt from."""
    own = load_saved_recipe(RunDirectory(run).must_exist().recipe).data.train
    said = own.model_dump(include={"field", "columns", "delimiter", "encoding"})
    found = find_in_utf8(Source(path=path, **said))
    if found.kind == "text":
        with found.files[0].open("rb") as file:
            return lines_of(file, where=path)
    texts = []
    rules, usual = Rules("text"), found.source.model_copy(update={"field": None})
    for piece in found.pieces(1 << 20):
        for record in found.read(piece):
            by_number = found.kind == "csv"
            row = record if isinstance(record, Bad) else rules.apply(record, found.source, by_number=by_number)
            if isinstance(row, Bad) and not isinstance(record, Bad) and own.field is not None:
                retried = rules.apply(record, usual, by_number=by_number)
                row = row if isinstance(retried, Bad) else retried
            if isinstance(row, Bad):
                raise DataError(f"{row.where}: {row.reason.partition('; name the right one')[0]}")
            texts.append(row.fields["text"] if isinstance(row, Record) else "")
    return texts


def lines_of(lines: Iterable[str] | Iterable[bytes] | TextIO, *, where: str = "standard input") -> list[str]:
    """One text a line, also where it is blank: answers are to be laid beside what was asked."""
    texts = []
    # As bytes where they are to be had: a bad one can then be named by its line.
    for number, line in enumerate(getattr(lines, "buffer", lines), start=1):
        if isinstance(line, bytes):
            try:
                line = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}, line {number}: not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}; "
                    "convert it, such as with iconv"
                ) from None
        texts.append(line.rstrip("\r\n"))
    return texts


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A line each: the class, how likely it is, and the text; or of rows of numbers, the expert and the row."""
    if rows and "row" in rows[0]:
        return show_numbers(rows)
    return "\n".join(_line(row) for row in rows)


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    with writing(file), whole(file) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    """Always three columns, and always one line."""
    predicted, chances = row["predicted"], row["probability"]
    if predicted is None:
        named, chance = "-", "-"
    elif isinstance(predicted, list):
        named = ", ".join(predicted) or "none"
        chance = ", ".join(f"{chances[name]:.3f}" for name in predicted) or "-"
    else:
        named, chance = predicted, f"{chances:.3f}"
    return "\t".join((_escaped(named), chance, _escaped(row["text"])))


def _escaped(text: str) -> str:
    for sign, shown in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, shown)
    return text
