"""The verbs about data: prepare, data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb
from bottega.terminal import print_result


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega prepare RECIPE... [key=value | --key value]... [--out FOLDER] [--to FORMAT FOLDER]"
    parser.add_argument(
        "--out",
        "--output_dir",
        "--output-dir",
        metavar="FOLDER",
        help="also write the prepared shards here, to copy or to train from",
    )
    parser.add_argument(
        "--to",
        nargs=2,
        action="append",
        default=[],
        metavar=("FORMAT", "FOLDER"),
        help="also export as webdataset, tfrecord, parquet or jsonl; may be repeated",
    )


def _prepare(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.run.prepare import format_report, prepare_command

    exports = [(format_name, folder) for format_name, folder in arguments.to]
    result = prepare_command(words, out=Path(arguments.out) if arguments.out else None, to=exports)
    if not arguments.json:
        print_result(format_report(result))
    return result


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega data RECIPE-or-PATH... [key=value | --key value]... [options]"
    parser.add_argument("--examples", type=int, default=3, help="how many examples to show (default: 3)")
    parser.add_argument(
        "--out",
        "--output_dir",
        "--output-dir",
        metavar="FOLDER",
        help="where images and plots are written (default: data-report)",
    )


def _describe_data(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.data_report import data_command, format_report

    report = data_command(words, examples=arguments.examples, out=Path(arguments.out or "data-report"))
    if not arguments.json:
        print_result(format_report(report), is_data=True)
    return report


VERBS = {
    "prepare": Verb("read, clean, split and encode the data once, before training", _add_prepare_arguments, _prepare),
    "data": Verb(
        "describe the data: counts, lengths, labels, duplicates, examples", _add_data_arguments, _describe_data
    ),
}
