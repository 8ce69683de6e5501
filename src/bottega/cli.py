"""The verbs. Nothing heavy is imported before a verb runs, so `bottega --help` answers at once."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega import __version__
from bottega.core.errors import BottegaError, EnvironmentProblem, OutOfMemory, UsageError

HELP = """\
usage: bottega VERB [...]            one recipe, one command; `bottega VERB --help` says more

{verbs}

  bottega train language                                  works offline, on a CPU
  bottega train language --data my.txt --lr 3e-4          short names people type
  bottega train my.yaml training.max_steps=500            any key of a recipe, dotted

Every verb takes --json (one JSON object on standard output) and --debug (tracebacks)."""


@dataclass(frozen=True)
class Verb:
    """What a verb says of itself, which arguments it has, and what it does. The rest of the line is for the recipe."""

    says: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], Any]


def main(argv: Sequence[str] | None = None) -> int:
    # Threads of torch that wait by spinning take the core from whoever they wait for: with one more busy process on two
    # cores a step takes 2 to 8 times as long. Sleeping costs 9 % on a quiet machine. Must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        table = "\n".join(f"  {name:<15}{verb.says}" for name, verb in VERBS.items())
        print(HELP.format(verbs=table))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"bottega {__version__}")
        return 0
    debug = "--debug" in words
    try:
        return _dispatch(words[0], [w for w in words[1:] if w != "--debug"])
    except Exception as error:
        if debug:
            raise
        return _explain(error)
    except KeyboardInterrupt:
        return 130


def _dispatch(name: str, words: list[str]) -> int:
    verb = VERBS.get(name)
    if verb is None:
        import difflib

        near = difflib.get_close_matches(name, VERBS, 1)
        raise UsageError(f"{name!r} is not a verb; " + (f"did you mean {near[0]}?" if near else "see bottega --help"))
    parser = _Parser(prog=f"bottega {name}", description=verb.says, allow_abbrev=False)
    verb.arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments, rest = parser.parse_known_args(words)
    result = verb.run(arguments, rest)
    if arguments.json and int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(_finite(result if result is not None else {}), default=str))
    return int(result.get("exit_code", 0)) if isinstance(result, dict) else 0


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; null is what a reader can tell from a number."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"{self.prog}: {message}")


def _explain(error: Exception) -> int:
    """One line for people, and the exit code a scheduler can act on."""
    if isinstance(error, BottegaError):
        code, text = error.code, str(error)
    elif isinstance(error, MemoryError):
        code, text = OutOfMemory.code, "out of memory on the host; lower training.batch_size or use a smaller model"
    elif isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    elif isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        code, text = EnvironmentProblem.code, f"{where}{error.strerror}"
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        # torch's, on a GPU and on the host; its name is looked at so that torch need not be imported here.
        code, text = OutOfMemory.code, "out of memory; use a smaller model or lower training.micro_batch_size"
    else:
        said = " ".join(str(error).split())
        code, text = 1, f"a bug in bottega: {type(error).__name__}: {said} (--debug shows where)"
    rank = f"rank {os.environ.get('RANK', '0')}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    sys.stderr.write(f"bottega: {rank}{text}\n")  # one write, so that ranks do not tear each other's lines
    return code


def _no_more(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected {' '.join(rest)}; see --help")


# train


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega train RECIPE... [key=value | --key value]... [options]"
    parser.add_argument("--fresh", action="store_true", help="start over; the old run is kept under another name")
    parser.add_argument("--resume_from", "--resume-from", metavar="PATH", help="start from this checkpoint or run")
    parser.add_argument("--allow-data-change", action="store_true", help="resume although the data has changed")
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def _train(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.run import train_command

    return train_command(
        rest,
        fresh=arguments.fresh,
        resume_from=Path(arguments.resume_from) if arguments.resume_from else None,
        allow_data_change=arguments.allow_data_change,
        quiet=arguments.quiet,
    )


# evaluate, generate, export


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--model_path", "--model-path", metavar="RUN", help="the same, as other trainers call it")
    parser.add_argument("--checkpoint", default="best", help="best, last or a step number (default: best)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")


def _the_run(arguments: argparse.Namespace) -> Path:
    given = [p for p in (arguments.run, arguments.model_path) if p]
    if len(given) != 1:
        raise UsageError("say which run: bottega VERB runs/NAME")
    return Path(given[0])


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _run_argument(parser)
    parser.add_argument("--data", help="other data than the run's own")
    parser.add_argument("--data_config", "--data-config", metavar="FILE", help="a recipe file whose data is meant")
    parser.add_argument("--split", choices=("validation", "test"), default="validation", help="which of the run's own")
    parser.add_argument("--output_dir", "--output-dir", "--out", metavar="DIR", help="write metrics.json there")


def _evaluate(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.saved import open_run

    _no_more(rest)
    saved = open_run(_the_run(arguments), checkpoint=arguments.checkpoint, device=arguments.device)
    metrics = saved.evaluate(arguments.data or _data_of(arguments.data_config), split=arguments.split)
    if arguments.output_dir:
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps(_finite(metrics), indent=1) + "\n")
    if not arguments.json:
        for name, value in metrics.items():
            print(f"{name:<16}{value:.4f}")
    return {"metrics": metrics, "checkpoint": str(saved.checkpoint)}


def _data_of(recipe: str | None) -> str | None:
    """The data a recipe file names: its test part where it has one, else its training part."""
    if recipe is None:
        return None
    from bottega.schema.load import check_recipe

    data = check_recipe([recipe]).recipe.data
    path = (data.test.path if data.test else None) or data.train.path
    if path is None:
        raise UsageError(f"{recipe} names no data: data.test.path or data.train.path")
    return path


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    _run_argument(parser)
    parser.add_argument("--prompt", action="append", help="how the text begins; repeat for a batch")
    parser.add_argument("--count", type=int, default=1, help="samples for each prompt")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, default=200, help="tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top_k", "--top-k", type=int, help="sample among the k likeliest tokens")
    parser.add_argument("--top_p", "--top-p", type=float, help="sample among the likeliest tokens that hold this mass")
    parser.add_argument(
        "--repetition_penalty", "--repetition-penalty", type=float, default=1.0, help="above 1 repeats less"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    parser.add_argument("--out", help="write the text to this file too")


def _generate(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.saved import open_run

    _no_more(rest)
    saved = open_run(_the_run(arguments), checkpoint=arguments.checkpoint, device=arguments.device)
    texts = saved.generate(
        arguments.prompt or [""],
        count=arguments.count,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stream=None if arguments.json else sys.stdout,
    )
    if arguments.out:
        Path(arguments.out).write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return {"texts": texts}


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _run_argument(parser)
    parser.add_argument("--out", "--output_dir", "--output-dir", help="where (default: RUN/final)")


def _export(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.saved import open_run

    _no_more(rest)
    saved = open_run(_the_run(arguments), checkpoint=arguments.checkpoint, device="cpu")
    folder = saved.export(Path(arguments.out) if arguments.out else None)
    if not arguments.json:
        print(f"exported {saved.checkpoint.name} to {folder}")
    return {"folder": str(folder)}


# plan, recipes, schema, init


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega plan RECIPE... [key=value]... --check"
    parser.add_argument("--check", action="store_true", help="validate and print what would run")


def _plan(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.plan import check

    if not arguments.check:
        raise UsageError("bottega plan: say --check; it validates and prints what would run")
    return check(rest, show=not arguments.json)


def _recipes(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.schema.load import bundled_recipes

    _no_more(rest)
    rows = [{"name": name, "task": task, "about": about} for name, task, about in bundled_recipes()]
    if not arguments.json:
        for row in rows:
            print(f"{row['name']:<28}{row['about']}")
    return {"recipes": rows}


def _schema(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.schema.load import json_schema

    _no_more(rest)
    schema = json_schema()
    if not arguments.json:
        print(json.dumps(schema, indent=2))
    return schema


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", default="language", help="which task (default: language)")


def _init(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.schema.load import commented_recipe

    _no_more(rest)
    text = commented_recipe(arguments.task)
    if not arguments.json:
        print(text, end="")
    return {"recipe": text}


# doctor, inspect, ledger, verify-resume


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from bottega.insight.doctor import examine, show

    _no_more(rest)
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

    _no_more(rest)
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


def _nothing(parser: argparse.ArgumentParser) -> None:
    """A verb without arguments of its own."""


VERBS = {
    "train": Verb("train a recipe; the same command resumes it", _train_arguments, _train),
    "evaluate": Verb("measure a run on held-out data", _evaluate_arguments, _evaluate),
    "generate": Verb("sample from a run", _generate_arguments, _generate),
    "export": Verb("write a run for the ecosystem (transformers layout)", _export_arguments, _export),
    "plan": Verb("check a recipe and print what would run", _plan_arguments, _plan),
    "inspect": Verb("the module tree with parameters and gradients", _inspect_arguments, _inspect),
    "ledger": Verb("which samples made a step; replay of that batch", _ledger_arguments, _ledger),
    "verify-resume": Verb("kill a run, resume it, compare bit for bit", _verify_arguments, _verify),
    "doctor": Verb("versions, devices and what is missing", _nothing, _doctor),
    "recipes": Verb("the bundled recipes", _nothing, _recipes),
    "schema": Verb("the JSON schema of a recipe, for editors", _nothing, _schema),
    "init": Verb("a commented recipe to start from", _init_arguments, _init),
}

if __name__ == "__main__":
    sys.exit(main())
