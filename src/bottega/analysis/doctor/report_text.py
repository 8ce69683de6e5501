"""The report of `bottega doctor` as text: a section for each check, then notes, and problems with their remedies last."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from bottega.analysis.doctor.check_result import NO_BREAK, MachineReport, Problem

MIN_WIDTH, MAX_WIDTH = 60, 100
LABEL_WIDTH = 11
PROBLEM_TITLES = {False: "problems that do not stop training", True: "problems that stop training"}
"""Whether problems stop training -> the title above them; those that do come last, where a terminal shows them."""


def format_report(report: MachineReport, *, width: int | None = None) -> str:
    """Format a report in lines of at most `width` characters (default: those of the terminal, at most 100)."""
    columns = width if width is not None else shutil.get_terminal_size((MAX_WIDTH, 24)).columns
    columns = max(MIN_WIDTH, min(MAX_WIDTH, columns))
    header = report.header
    lines = _wrap(f"bottega {header['bottega']}, Python {header['python']}, {header['platform']}", columns)
    for result in report.results:
        if result.lines:
            lines += ["", result.title]
        for label, text in result.lines:
            lines += _wrap(text, columns, first=f"  {label:<{LABEL_WIDTH}}", rest=" " * (LABEL_WIDTH + 2))
    if report.notes:
        lines += ["", "notes"]
    for note in report.notes:
        lines += _wrap(note, columns, first="  - ", rest="    ")
    for is_stopping, title in PROBLEM_TITLES.items():
        problems = [problem for problem in report.problems if problem.stops_training == is_stopping]
        lines += _format_problems(title, problems, columns)
    if report.not_checked:
        lines += ["", *_wrap(f"not checked: {', '.join(report.not_checked)}", columns)]
    if not report.problems:
        lines += ["", "no problems found"]
    return "\n".join(lines)


def _format_problems(title: str, problems: Sequence[Problem], width: int) -> Iterator[str]:
    if problems:
        yield from ("", title)
    for problem in problems:
        yield from _wrap(problem.message, width, first="  - ", rest="    ")
        yield from _wrap(problem.remedy, width, first="    remedy: ", rest="            ")


def _wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Wrap between words only: a path in the text must stay in one piece to be copied."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]
