"""The verbs report and diagnose: an HTML page over runs, cross-validations and studies; what is wrong with runs."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb, take_positional_words
from bottega.core.errors import UsageError
from bottega.signals import StopRequested
from bottega.terminal import print_notice, print_result


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega report RUN... [STUDY...] [--out report.html | --live]"
    parser.add_argument("paths", nargs="*", metavar="RUN", help="runs, cross-validations and studies")
    parser.add_argument(
        "--out", metavar="FILE", help="file to write (default: report.html in the run, or here for several)"
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the report on 127.0.0.1 and refresh it while training"
    )
    parser.add_argument("--port", type=int, default=0, help="port of --live (default: any free one)")


def _report(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.report import serve_report, write_report

    paths = [*arguments.paths, *take_positional_words(words)]
    if not 0 <= arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}: expected a number from 1 to 65535, or 0 for any free one")
    if arguments.live:
        if arguments.json:
            raise UsageError("--json cannot be combined with --live, which serves a page until it is stopped")
        if arguments.out:
            raise UsageError(f"--out {arguments.out} cannot be combined with --live; keep one of them")
        # Stopping is how a server ends, not a failure.
        with suppress(StopRequested):
            serve_report(paths, port=arguments.port, announce=_announce)
        return {}
    if arguments.port:
        raise UsageError(f"--port {arguments.port}: needs --live")
    result = write_report(paths, Path(arguments.out) if arguments.out is not None else None)
    for note in result["notes"]:
        print_notice(f"note: {note}")
    if not arguments.json:
        print_result(f"{result['report']}  ({result['bytes'] / 1e6:.1f} MB)")
    return result


def _announce(url: str) -> None:
    print_notice(
        "bottega: serving the report; only this machine can open it, and only with this address; Ctrl-C ends it"
    )
    print_result(url)


def _add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega diagnose RUN... | FOLDER"
    parser.add_argument("paths", nargs="*", metavar="RUN", help="runs, and folders of runs")


def _diagnose(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.diagnose import diagnose_all, format_report

    reports, notes = diagnose_all([*arguments.paths, *take_positional_words(words)])
    for note in notes:
        print_notice(f"note: {note}")
    if not arguments.json:
        print_result("\n\n".join(format_report(report) for report in reports))
    return {"runs": reports, "notes": notes}


VERBS = {
    "report": Verb("write an HTML page with curves, samples and tables of runs", _add_report_arguments, _report),
    "diagnose": Verb(
        "say what is wrong with runs, by which evidence, and what to try", _add_diagnose_arguments, _diagnose
    ),
}
