"""The verbs about recipes: plan, recipes, schema, init, import."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb, add_no_arguments, reject_extra_words
from bottega.core.errors import UsageError
from bottega.terminal import print_result


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega plan RECIPE... [key=value]... [--check | --memory | --fit SIZE] [--probe [--price 2.5/h]]"
    parser.add_argument(
        "--check",
        action="store_true",
        help="find every problem that train would find, and print the resolved recipe; predict nothing",
    )
    parser.add_argument(
        "--fit",
        metavar="SIZE",
        help="find the micro-batch, precision and gradient checkpointing that fit into the memory of a GPU, such as 24GB",
    )
    parser.add_argument(
        "--probe", action="store_true", help="measure a few training steps: time and memory of the run on this device"
    )
    parser.add_argument("--price", metavar="PRICE", help="with --probe: price of the machine, such as 2.5/h")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure a few steps: memory by micro-batch, and the micro-batch that fits on each GPU",
    )


def _plan(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.fit import parse_memory
    from bottega.analysis.plan import PlanOptions, plan_command
    from bottega.analysis.probe import parse_price

    flags = [f"--{name}" for name in ("check", "memory", "fit", "probe") if getattr(arguments, name)]
    if len(flags) > 1 and flags != ["--fit", "--probe"]:
        raise UsageError(f"bottega plan: {' and '.join(flags)} cannot be combined; run one after the other")
    if arguments.price is not None and not arguments.probe:
        raise UsageError("bottega plan: --price needs --probe, which measures the time of a step")
    options = PlanOptions(
        predict=not arguments.check,
        fit=None if arguments.fit is None else parse_memory(arguments.fit),
        probe=arguments.probe,
        price=None if arguments.price is None else parse_price(arguments.price),
    )
    if arguments.memory:
        from bottega.analysis.memory import format_report, plan_memory

        report = plan_memory(words, quiet=arguments.json)
        if not arguments.json:
            print_result(format_report(report))
        return report
    return plan_command(words, show=not arguments.json, options=options)


def _list_recipes(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.tasks.recipes import list_bundled_recipes

    reject_extra_words(words)
    rows = [{"name": name, "task": task, "about": about} for name, task, about in list_bundled_recipes()]
    if not arguments.json:
        for row in rows:
            print_result(f"{row['name']:<28}{row['about']}")
    return {"recipes": rows}


def _print_schema(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.tasks.recipes import build_json_schema

    reject_extra_words(words)
    schema = build_json_schema()
    if not arguments.json:
        print_result(json.dumps(schema, indent=2), is_data=True)
    return schema


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", default="language", help="task of the recipe (default: language)")


def _print_recipe(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.tasks.recipes import render_recipe_template

    reject_extra_words(words)
    text = render_recipe_template(arguments.task)
    if not arguments.json:
        print_result(text, end="")
    return {"recipe": text}


def _add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="axolotl.yml, llamafactory.yaml, trainer-args.json or lightning.yaml")
    parser.add_argument("--out", metavar="RECIPE", help="file to write (default: NAME.bottega.yaml next to the file)")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=("axolotl", "llamafactory", "trainer", "lightning"),
        help="format of the file, if it cannot be detected from its keys",
    )


def _import(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.config.importers.import_report import format_report
    from bottega.tasks.recipes import import_file

    reject_extra_words(words)
    out = Path(arguments.out) if arguments.out else None
    report = import_file(Path(arguments.file), out=out, kind=arguments.kind)
    if not arguments.json:
        print_result(format_report(report))
    return report


VERBS = {
    "plan": Verb("check a recipe and print what would run, or measure the memory it takes", _add_plan_arguments, _plan),
    "recipes": Verb("list the bundled recipes", add_no_arguments, _list_recipes),
    "schema": Verb("print the JSON schema of recipes, for editors", add_no_arguments, _print_schema),
    "init": Verb("print a commented recipe to start from", _add_init_arguments, _print_recipe),
    "import": Verb("convert the configuration of another trainer to a recipe", _add_import_arguments, _import),
}
