"""The command line. A verb imports what it needs when it runs, so that `bottega --help` is fast."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from bottega import __version__
from bottega.cli import analysis, data, recipes, report, runs
from bottega.config.launch import check_launch_variables
from bottega.core.errors import UsageError, describe_error
from bottega.redaction import redact_values
from bottega.signals import CommandSignals, StopRequested, StopSignals
from bottega.terminal import OutputClosed, drop_unwritable_output, print_notice, print_result, reserve_standard_files
from bottega.world import World

HELP = """\
usage: bottega VERB [...]            one recipe, one command; see `bottega VERB --help`

{verbs}

  bottega train language                                  works offline, on a CPU
  bottega train language --data my.txt --lr 3e-4          short flags for common keys
  bottega train my.yaml training.max_steps=500            any key of a recipe, dotted

Every verb accepts --json (one JSON object on standard output), --plugin FILE (a task of your own) and --debug (tracebacks)."""


VERBS = {**runs.VERBS, **data.VERBS, **recipes.VERBS, **analysis.VERBS, **report.VERBS}
DATA_VERBS = ("generate", "predict", "data", "schema")
"""Verbs whose result is data, from which nothing is redacted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; errors become one line on standard error."""
    # OpenMP threads of torch that spin while they wait take the core from the thread they wait for: with another busy
    # process on two cores a step takes 2 to 8 times as long. Sleeping at once makes small models 40 % slower on an idle machine;
    # a thousand spins before sleeping cost next to nothing on a busy or an idle machine. Must be set before torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    reserve_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with CommandSignals() if StopSignals.current is None else nullcontext():
            return _run_command(words)
    except OutputClosed:
        return 0
    except StopRequested as stop:
        print_notice(f"bottega: {stop}")
        return stop.code
    except Exception as error:
        if "--debug" in words:
            print_notice(traceback.format_exc())
        return _report_error(error)
    except KeyboardInterrupt:
        return 130
    finally:
        drop_unwritable_output()


def _run_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        table = "\n".join(f"  {name:<15}{verb.summary}" for name, verb in VERBS.items())
        print_result(HELP.format(verbs=table))
        return 0
    if words[0] in ("-V", "--version"):
        print_result(f"bottega {__version__}")
        return 0
    check_launch_variables()
    words = [word for word in words if word != "--debug"]
    if any(word.partition("=")[0] == "--plugin" for word in words):
        from bottega.tasks.plugins import load_plugin_flags

        words = load_plugin_flags(words)
    return _dispatch(words[0], words[1:]) if words else _run_command([])


def _dispatch(name: str, words: list[str]) -> int:
    verb = VERBS.get(name)
    if verb is None:
        from bottega.similar_names import find_similar_names

        similar = find_similar_names(name, VERBS)
        raise UsageError(
            f"{name!r} is not a verb; " + (f"did you mean {similar[0]}?" if similar else "see bottega --help")
        )
    parser = _Parser(prog=f"bottega {name}", description=verb.summary, allow_abbrev=False)
    verb.add_arguments(parser)
    parser.set_defaults(verb=name)
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output")
    # Removed from the words before parsing; added here for --help.
    parser.add_argument(
        "--plugin", metavar="FILE", help="a file with a task of your own (docs/extend.md); may be repeated"
    )
    arguments, remaining_words = parser.parse_known_args(_join_negative_values(parser, words))
    result = verb.run(arguments, remaining_words)
    if arguments.json and World.from_environment().is_main:
        from bottega.storage.json_values import replace_non_finite

        result = result if name in DATA_VERBS else redact_values(result)
        text = json.dumps(replace_non_finite(result if result is not None else {}), default=str)
        print_result(
            text.replace("\x7f", "\\u007f"), is_data=True
        )  # the only control character that JSON does not escape
    return int(result.get("exit_code", 0)) if isinstance(result, dict) else 0


def _join_negative_values(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Turn `--vector -0.5,1` into `--vector=-0.5,1`: argparse takes a word that begins with a dash for an option.

    No option has a single dash, except -h.
    """
    options = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    joined_words: list[str] = []
    for word in words:
        is_value = word.startswith("-") and not word.startswith("--") and word != "-h"
        if is_value and joined_words and joined_words[-1] in options:
            joined_words[-1] += f"={word}"
        else:
            joined_words.append(word)
    return joined_words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        # The printed line already begins with the program name.
        raise UsageError(f"{self.prog.removeprefix('bottega ')}: {message}")


def _report_error(error: Exception) -> int:
    """Print an error as one line, and return its exit code, which a scheduler can act on."""
    code, text = describe_error(error)
    if code == 1 and "bottega.tasks.plugins" in sys.modules:
        from bottega.tasks.plugins import describe_plugin_error

        text = describe_plugin_error(error) or text
    world = World.from_environment()
    rank = f"rank {world.rank}: " if world.size != 1 else ""
    print_notice(f"bottega: {rank}{text}")
    return code
