"""Classes of new samples by a finished classifier: texts, images, sounds, clips, or rows of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.prepare.inputs import find_in_utf8
from bottega.data.prepare.rules import Rules
from bottega.data.readers import find
from bottega.data.records.record import Bad, Record
from bottega.data.sources.given import GivenData
from bottega.tasks.branch import Branch
from bottega.tasks.classify.media import ClassifyBranch
from bottega.tasks.classify.text import TextClassifyBranch
from bottega.tasks.multitask.branch import MultitaskBranch
from bottega.tasks.multitask.task import whole
from bottega.tasks.routing.branch import RoutingBranch
from bottega.terminal import print_notice

THRESHOLD = 0.5
"""Where a text may have several classes: those that are more likely than not."""
KINDS = {"image": "images", "audio": "audio", "video": "video"}
CLASSIFIERS = (TextClassifyBranch, RoutingBranch, ClassifyBranch)
"""In the order in which a run of several tasks is asked, where no part of it is named."""


def choose_part(branch: Branch, part: str | None) -> tuple[Branch, str | None]:
    """The classifier of a run, and the name of its part where the run is of several tasks."""
    if not isinstance(branch, MultitaskBranch):
        if part is not None:
            raise UsageError(f"--part {part}: this is a run of one task; leave it out")
        return branch, None
    kinds = [kind for kind in CLASSIFIERS if any(isinstance(one, kind) for one in branch.parts.values())]
    wanted = CLASSIFIERS if part is not None or not kinds else kinds[:1]
    name = branch.of(part, wanted=lambda one: isinstance(one, tuple(wanted)), verb="predict")
    return branch.parts[name], name


def predict_classes(
    branch: Branch,
    models: Models,
    device: Any,
    inputs: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    part: str | None = None,
    standard_input: TextIO | None = None,
) -> list[dict[str, Any]]:
    """One dict a sample, with "predicted", "probability" and "probabilities" of all classes.

    `inputs` are texts of a classifier of text, and paths of any other; `data` is a path. A classifier of text without
    either reads the lines of `standard_input`.
    """
    data = str(data) if data is not None else None
    one, part = choose_part(branch, part)
    own = models if part is None else whole(models, part)
    if isinstance(one, TextClassifyBranch):
        return _predict_texts(one, own, device, _texts(one, inputs, data, standard_input))
    if not isinstance(one, RoutingBranch | ClassifyBranch):
        raise UsageError(f"this is a run of {one.recipe.task}, which is not a classifier")  # type: ignore[attr-defined]
    if isinstance(one, RoutingBranch):
        return _predict_numbers(one, own, device, inputs, data)
    paths = [*inputs, *([data] if data is not None else [])]
    medium = one.recipe.data.input
    if not paths:
        raise UsageError(f"this run classifies {medium}; name files or folders of it: bottega predict RUN PATH")
    return _predict_media(one, own, device, paths)


def _predict_media(branch: ClassifyBranch, models: Models, device: Any, paths: list[str]) -> list[dict[str, Any]]:
    for path in filter(_is_missing, paths):
        raise UsageError(f"{path} is not there; this run classifies {branch.recipe.data.input}: name files or folders")
    keys, chances = branch.predict(models, GivenData(_media_source(paths, branch.recipe.data.input)), device=device)
    return [
        {"file": key, **_one_class(branch.classes.names, row)} for key, row in zip(keys, chances.tolist(), strict=True)
    ]


def _media_source(paths: list[str], medium: str) -> Source:
    """Paths as a source. Of folders only the files of the medium are taken, whatever else lies there."""
    source = Source.model_validate({"path": paths})
    if not any(Path(path).expanduser().is_dir() for path in paths):
        return source
    try:
        chosen = Source.model_validate({"path": paths, "kind": KINDS[medium]})
        find(chosen)
    except DataError:
        return source  # archives, tables or arrays
    return chosen


def _is_missing(path: str) -> bool:
    return "://" not in path and not any(sign in path for sign in "*?[{") and not Path(path).expanduser().exists()


def _predict_numbers(
    branch: RoutingBranch, models: Models, device: Any, inputs: Sequence[str], data: str | None
) -> list[dict[str, Any]]:
    numbers = [_numbers(word) for word in inputs]
    if inputs and all(row is not None for row in numbers):
        keys, x = [str(n) for n in range(len(inputs))], _stacked([row for row in numbers if row is not None], inputs)
    else:
        paths = [*inputs, *([data] if data is not None else [])]
        if not paths or any(map(_is_missing, inputs)):
            not_texts = ", not of texts" if inputs else ""
            raise UsageError(
                f"this run tells labels of rows of numbers{not_texts}; give a table with --data FILE, or numbers: 0.5,1,-2"
            )
        keys, x = branch.read(paths[0] if len(paths) == 1 else paths)
    chances, chosen = branch.answered(models, x, device=device)
    return [
        {"row": key, **_one_class(branch.classes.names, row), "expert": experts[0] if len(experts) == 1 else experts}
        for key, row, experts in zip(keys, chances.tolist(), chosen.tolist(), strict=True)
    ]


def _numbers(word: str) -> list[float] | None:
    try:
        return [float(part) for part in word.strip("[]() ").split(",")]
    except ValueError:
        return None


def _stacked(rows: list[list[float]], words: Sequence[str]) -> np.ndarray:
    for row, word in zip(rows, words, strict=True):
        if len(row) != len(rows[0]):
            raise UsageError(f"{word}: has {len(row)} numbers, and {words[0]} has {len(rows[0])}")
    return np.array(rows, np.float32)


def _predict_texts(
    branch: TextClassifyBranch, models: Models, device: Any, texts: Sequence[str]
) -> list[dict[str, Any]]:
    if not any(text.strip() for text in texts):
        raise DataError("there is no text to classify; give some, a file with --data, or lines on standard input")
    chances = branch.predict(models, texts, device=device)
    cut, limit = branch.num_cut(texts)
    if cut:
        print_notice(f"{cut:,} of {len(texts):,} texts are cut at {limit} tokens, which is what the run reads")
    names = branch.classes.names
    rows: list[dict[str, Any]] = []
    for text, row in zip(texts, chances.tolist(), strict=True):
        if not text.strip():
            rows.append({"text": text, "predicted": None, "probability": None, "probabilities": None})
        elif branch.recipe.data.multi_label:
            every = dict(zip(names, row, strict=True))
            chosen = [name for name, chance in every.items() if chance >= THRESHOLD]
            rows.append({"text": text, "predicted": chosen, "probability": every, "probabilities": every})
        else:
            rows.append({"text": text, **_one_class(names, row)})
    return rows


def _one_class(names: Sequence[str], chances: Sequence[float]) -> dict[str, Any]:
    best = max(range(len(chances)), key=chances.__getitem__)
    every = dict(zip(names, chances, strict=True))
    return {"predicted": names[best], "probability": chances[best], "probabilities": every}


def _texts(
    branch: TextClassifyBranch, inputs: Sequence[str], data: str | None, standard_input: TextIO | None
) -> Sequence[str]:
    if data is not None:
        return texts_in(data, branch.recipe.data.train)
    return inputs if inputs or standard_input is None else lines_of(standard_input)


def texts_in(path: str, own: Source) -> list[str]:
    """The texts of a file: its lines, or the rows of a table, by the fields that a run has learnt from."""
    options = own.model_dump(include={"field", "columns", "delimiter", "encoding"})
    listing = find_in_utf8(Source(path=path, **options))
    if listing.kind == "text":
        with listing.files[0].open("rb") as file:
            return lines_of(file, where=path)
    rules, usual = Rules("text"), listing.source.model_copy(update={"field": None})
    by_number = listing.kind == "csv"
    texts = []
    for piece in listing.pieces(1 << 20):
        for record in listing.read(piece):
            row = record if isinstance(record, Bad) else rules.apply(record, listing.source, by_number=by_number)
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
