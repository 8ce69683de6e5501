"""The verbs that look closer: doctor, inspect, ledger, verify-resume, compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb, no_arguments, no_more
from bottega.core.errors import UsageError


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


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega compare A B [C]... [options]"
    parser.add_argument(
        "groups", nargs="*", help='a run, runs of several seeds ("runs/a-s*" or a,b,c), a folder of folds'
    )
    parser.add_argument("--metric", help="what is compared (default: the metric the runs kept their best by)")
    parser.add_argument("--split", choices=("validation", "test"), help="what bottega evaluate wrote to RUN/results")
    parser.add_argument("--alpha", type=float, default=0.05, help="how small p must be to tell (default: 0.05)")
    parser.add_argument("--out", metavar="FILE.png", help="draw a picture as well")


def _compare(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.compare import compare, draw, show

    no_more([word for word in rest if word.startswith("-")])
    out = Path(arguments.out) if arguments.out else None
    if out is not None and out.suffix.lower() != ".png":
        raise UsageError(f"--out {out}: a picture is a .png")
    groups = [*arguments.groups, *rest]  # argparse leaves those over that follow an option
    report = compare(groups, metric=arguments.metric, split=arguments.split, alpha=arguments.alpha)
    if out is not None:
        draw(report, out)
        report["picture"] = str(out)
    if not arguments.json:
        print(show(report))
    return report


VERBS = {
    "inspect": Verb("the module tree with parameters and gradients", _inspect_arguments, _inspect),
    "ledger": Verb("which samples made a step; replay of that batch", _ledger_arguments, _ledger),
    "compare": Verb("whether groups of runs differ, by a test that fits", _compare_arguments, _compare),
    "verify-resume": Verb("kill a run, resume it, compare bit for bit", _verify_arguments, _verify),
    "doctor": Verb("versions, devices and what is missing", no_arguments, _doctor),
}
