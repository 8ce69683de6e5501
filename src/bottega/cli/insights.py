"""The verbs that look closer: doctor, inspect, ledger, verify-resume."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb, no_arguments, no_more


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.doctor import examine, show

    no_more(rest)
    report = examine()
    if not arguments.json:
        print(show(report))
    return report


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega inspect RECIPE-or-RUN [key=value]..."
    parser.add_argument("what", help="a run directory, or a recipe")


def _inspect(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.inspect import inspect, show

    report = inspect(arguments.what, rest)
    if not arguments.json:
        print(show(report))
    return report


def _ledger_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--step", type=int, required=True, help="which step, counted from 1 as in the log")
    parser.add_argument("--replay", action="store_true", help="compute the loss of that batch with the best weights")


def _ledger(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.ledger import ledger, show

    no_more(rest)
    report = ledger(Path(arguments.run), step=arguments.step, replay=arguments.replay)
    if not arguments.json:
        print(show(report))
    return report


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega verify-resume RECIPE... [key=value]... [--kills N]"
    parser.add_argument("--kills", type=int, default=3, help="how often to kill -9 the run (default: 3)")
    parser.add_argument("--steps", type=int, default=30, help="length of the run (default: 30)")


def _verify(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.verify_resume import verify

    return verify(rest, steps=arguments.steps, kills=arguments.kills, show=not arguments.json)


VERBS = {
    "inspect": Verb("the module tree with parameters and gradients", _inspect_arguments, _inspect),
    "ledger": Verb("which samples made a step; replay of that batch", _ledger_arguments, _ledger),
    "verify-resume": Verb("kill a run, resume it, compare bit for bit", _verify_arguments, _verify),
    "doctor": Verb("versions, devices and what is missing", no_arguments, _doctor),
}
