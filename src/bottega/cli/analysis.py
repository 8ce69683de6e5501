"""The verbs that analyse runs: runs, lr-find, inspect, ledger, crossval, tune, compare, verify-resume, doctor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bottega.cli.verb import Verb, reject_extra_words, take_positional_words
from bottega.core.errors import UsageError
from bottega.terminal import print_result


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="the device that training must be able to use: cpu, cuda, cuda:N or mps (default: auto)",
    )
    parser.add_argument("--dir", default="runs", metavar="DIR", help="the folder of runs (default: runs)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out what takes seconds: imports other than torch, matrix products, processes, disk speed",
    )


def _run_doctor(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.doctor.examine import examine_machine, show_steps
    from bottega.analysis.doctor.report_text import format_report

    reject_extra_words(words)
    with show_steps(is_shown=not arguments.json) as on_step:
        report = examine_machine(
            device=arguments.device, folder=Path(arguments.dir), is_quick=arguments.quick, on_step=on_step
        )
    if not arguments.json:
        print_result(format_report(report))
    return report.to_plain_dict()


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega inspect RECIPE-or-RUN [key=value]..."
    parser.add_argument("run_or_recipe", metavar="RECIPE-or-RUN", help="a run directory, or a recipe")


def _inspect(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.inspect import format_report, inspect_model

    report = inspect_model(arguments.run_or_recipe, words)
    if not arguments.json:
        print_result(format_report(report))
    return report


def _add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=int, required=True, help="number of the step, from 1 as in the log")
    parser.add_argument("--replay", action="store_true", help="compute the loss of that batch with the best weights")


def _show_ledger(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.ledger import format_report, list_step_samples

    reject_extra_words(words)
    report = list_step_samples(Path(arguments.run), step=arguments.step, replay=arguments.replay)
    if not arguments.json:
        print_result(format_report(report))
    return report


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega verify-resume RECIPE... [key=value]... [--kills N]"
    parser.add_argument("--kills", type=int, default=3, help="how often to kill the run with SIGKILL (default: 3)")
    parser.add_argument("--steps", type=int, default=30, help="length of the run (default: 30)")


def _verify_resume(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.verify_resume import verify_resume

    return verify_resume(words, steps=arguments.steps, kills=arguments.kills, verbose=not arguments.json)


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega compare A B [C]... [options]"
    parser.add_argument(
        "groups",
        nargs="*",
        help='a run, runs of several seeds ("runs/a-s*" or a,b,c), a folder of folds, or RUN:ARM for one arm of an evaluation over people',
    )
    parser.add_argument(
        "--metric", help="metric to compare (default: the metric that selects the runs' best checkpoints)"
    )
    parser.add_argument(
        "--split", choices=("validation", "test"), help="compare the results of bottega evaluate in RUN/results"
    )
    parser.add_argument("--alpha", type=float, default=0.05, help="significance level (default: 0.05)")
    parser.add_argument("--out", metavar="FILE.png", help="also write a plot")


def _compare(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.compare import compare, format_report, plot_comparison
    from bottega.plots.figure import PlotsUnavailable

    positional_words = take_positional_words(words)
    out = Path(arguments.out) if arguments.out else None
    if out is not None and out.suffix.lower() != ".png":
        raise UsageError(f"--out {out}: plots are PNG files; use a name that ends with .png")
    report = compare(
        [*arguments.groups, *positional_words], metric=arguments.metric, split=arguments.split, alpha=arguments.alpha
    )
    if out is not None:
        try:
            plot_comparison(report, out)
            report["picture"] = str(out)
        except PlotsUnavailable as error:
            report["notes"].append(f"no {out.name}: {error}")
    if not arguments.json:
        print_result(format_report(report))
    return report


def _add_crossval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega crossval RECIPE... [key=value | --key value]... [options]"
    parser.add_argument("--folds", type=int, help="number of folds, each held out once (default: the recipe's, else 5)")
    parser.add_argument(
        "--by",
        choices=("fraction", "hash", "file", "stratified", "group"),
        help="how rows are assigned to folds (default: the recipe's; else stratified if rows have a class; else fraction)",
    )
    parser.add_argument(
        "--stratified", action="store_const", dest="by", const="stratified", help="the same as --by stratified"
    )
    parser.add_argument("--field", help="with --by group or hash: rows with the same value of this field stay together")
    parser.add_argument(
        "--repeats", type=int, default=1, help="number of repetitions, each with different folds (default: 1)"
    )
    parser.add_argument(
        "--jobs", default="auto", help="folds trained in parallel (default: auto, as many as fit on the machine)"
    )
    parser.add_argument("--checkpoint", default="best", help="checkpoint to evaluate, best or last (default: best)")
    parser.add_argument("--out", metavar="DIR", help="output folder (default: output_dir/NAME-crossval)")
    parser.add_argument("--fresh", action="store_true", help="start over; the old folds are renamed")
    parser.add_argument("--quiet", action="store_true", help="print errors and the result only")


def _cross_validate(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.crossval import crossval_command
    from bottega.analysis.crossval_table import format_report

    report = crossval_command(
        words,
        folds=arguments.folds,
        by=arguments.by,
        field=arguments.field,
        repeats=arguments.repeats,
        jobs=arguments.jobs,
        checkpoint=arguments.checkpoint,
        out=arguments.out,
        fresh=arguments.fresh,
        quiet=arguments.quiet,
    )
    if not arguments.json:
        print_result(format_report(report))
    return report


def _add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega tune RECIPE... --space KEY=VALUES... [key=value | --key value]... [options]"
    parser.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="a key to search: log(a,b), uniform(a,b), int(a,b), int_log(a,b) or [a,b,c]; add ' if KEY=VALUE' to make it "
        "conditional; may be repeated (default: tune.space of the recipe)",
    )
    parser.add_argument("--trials", type=int, help="number of trials of the study (default: 20; a grid: all points)")
    parser.add_argument(
        "--jobs", type=_parse_number, help="trials at a time (default: auto, as many as fit on the machine)"
    )
    parser.add_argument(
        "--timeout", metavar="TIME", help='time limit, such as 30min or "2 h"; the same command continues'
    )
    parser.add_argument(
        "--metric", help="metric to optimise (default: evaluation.metric); accuracy,-parameters asks for a trade-off"
    )
    parser.add_argument("--method", help="tpe, random, grid, gp, cmaes or pbt (default: tpe)")
    parser.add_argument("--pruner", help="end bad trials early: none, median, hyperband or asha (default: none)")
    parser.add_argument("--study", metavar="NAME", help="name of the study (default: the recipe's name and a hash)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="database for several machines, such as postgresql://user@host/db (default: a file)",
    )
    parser.add_argument(
        "--confirm",
        type=int,
        default=0,
        metavar="N",
        help="train the best again with N seeds, and compare (default: 0)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="pbt: train the winner again from its recorded keys, and compare the weights",
    )
    parser.add_argument("--then-train", action="store_true", help="train the best recipe at the end")
    parser.add_argument("--out", metavar="DIR", help="folder of the study (default: studies/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over; the old study is renamed")
    parser.add_argument("--quiet", action="store_true", help="print errors and the result only")


def _parse_number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _tune(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.tuning.command import tune_command
    from bottega.tuning.report import format_report
    from bottega.tuning.space import parse_space_words

    names = ("trials", "jobs", "timeout", "metric", "method", "pruner")
    report = tune_command(
        rest,
        flags={name: getattr(arguments, name) for name in names},
        space=parse_space_words(arguments.space) or None,
        study=arguments.study,
        storage=arguments.storage,
        confirm=arguments.confirm,
        verify=arguments.verify,
        out=Path(arguments.out) if arguments.out else None,
        fresh=arguments.fresh,
        quiet=arguments.quiet,
    )
    if not arguments.json:
        print_result(format_report(report))
    if arguments.then_train and "recipe" in report["files"] and report["finished"]:
        from bottega.run.train import train_command

        options: dict[str, Any] = {"fresh": False, "resume_from": None, "allow_data_change": False}
        report["trained"] = train_command(
            [report["files"]["recipe"]], **options, quiet=arguments.quiet or arguments.json
        )
    return report


def _add_lr_find_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega lr-find RECIPE-or-RUN [key=value]... [options]"
    parser.add_argument("run_or_recipe", metavar="RECIPE-or-RUN", help="a recipe, or a run directory to start from")
    parser.add_argument(
        "--steps", type=int, default=100, help="steps from the lowest rate to the highest (default: 100)"
    )
    parser.add_argument("--min", type=float, default=1e-7, help="lowest learning rate (default: 1e-7)")
    parser.add_argument("--max", type=float, default=10.0, help="highest learning rate (default: 10)")
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="folder for lr-find.png and lr-find.json (default: .)"
    )


def _find_learning_rate(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.lr_find import format_report, lr_find_command

    report = lr_find_command(
        arguments.run_or_recipe,
        words,
        low=arguments.min,
        high=arguments.max,
        steps=arguments.steps,
        out=Path(arguments.out),
        quiet=arguments.json,
    )
    if not arguments.json and "json" in report:  # other ranks write nothing
        print_result(format_report(report))
    return report


def _add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help="a folder of runs, or a run (default: runs)")


def _list_runs(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.runs import format_runs, list_runs

    reject_extra_words(words)
    folder = Path(arguments.folder)
    rows = list_runs(folder)
    if not arguments.json:
        print_result(format_runs(folder, rows))
    return {"folder": str(folder), "runs": rows}


VERBS = {
    "runs": Verb("list runs with task, step, best metric and state", _add_runs_arguments, _list_runs),
    "lr-find": Verb("find a learning rate with a range test", _add_lr_find_arguments, _find_learning_rate),
    "inspect": Verb("show the module tree with parameters and gradients", _add_inspect_arguments, _inspect),
    "ledger": Verb("list the samples of a step, or replay its batch", _add_ledger_arguments, _show_ledger),
    "crossval": Verb("cross-validate a recipe: mean and interval over folds", _add_crossval_arguments, _cross_validate),
    "tune": Verb("search better values of recipe keys", _add_tune_arguments, _tune),
    "compare": Verb("test whether groups of runs differ", _add_compare_arguments, _compare),
    "verify-resume": Verb("kill and resume a run, and compare bit for bit", _add_verify_arguments, _verify_resume),
    "doctor": Verb("check whether this machine can train, and say what to do", _add_doctor_arguments, _run_doctor),
}
