"""The verbs that train a run and use it: train, evaluate, generate, predict, export."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import Any

from bottega.cli.train_help import add_keys_to_help
from bottega.cli.verb import Verb, reject_extra_words, take_positional_words
from bottega.core.errors import UsageError
from bottega.terminal import ResultStream, open_console, print_notice, print_result
from bottega.world import World


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega train RECIPE... [key=value | --key value]... [options]"
    parser.add_argument("--fresh", action="store_true", help="start over; the old run is renamed")
    parser.add_argument("--resume_from", "--resume-from", metavar="PATH", help="start from this checkpoint or run")
    parser.add_argument(
        "--until", type=int, metavar="STEP", help="pause after this step; the same command without it continues"
    )
    parser.add_argument("--allow-data-change", action="store_true", help="resume even if the data has changed")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    add_keys_to_help(parser)


def _train(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.run.train import train_command

    result = train_command(
        words,
        fresh=arguments.fresh,
        resume_from=Path(arguments.resume_from) if arguments.resume_from else None,
        allow_data_change=arguments.allow_data_change,
        quiet=arguments.quiet,
        until=arguments.until,
    )
    if not arguments.quiet and World.from_environment().is_main:
        _print_predict_example(Path(result["run"]))
    return result


def _print_predict_example(run: Path) -> None:
    """Print an example of `bottega predict` for a run that can classify."""
    from bottega.analysis.predict import example_command

    command = example_command(run)
    if command is not None:
        print_notice(f"{'':<7}{command}")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run directory, or a checkpoint in it: RUN/checkpoints/last"
    )
    parser.add_argument(
        "--model_path", "--model-path", metavar="RUN", help="the same as RUN, by the name that other trainers use"
    )
    parser.add_argument("--checkpoint", default="best", help="best, last or a step number (default: best)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")


def _get_run_path(arguments: argparse.Namespace) -> Path:
    paths = [p for p in (arguments.run, arguments.model_path) if p]
    if len(paths) != 1:
        raise UsageError(f"give one run: bottega {arguments.verb} runs/NAME")
    return Path(paths[0])


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    parser.usage = "bottega evaluate RUN [--data PATH] [data.train.field=NAME]... [options]"
    parser.add_argument(
        "--data", help="evaluate on other data; data.train.field=NAME and similar settings define how to read it"
    )
    parser.add_argument(
        "--data_config", "--data-config", metavar="FILE", help="evaluate on the data of this recipe file"
    )
    parser.add_argument(
        "--split", choices=("validation", "test", "train"), help="which split of the data (default: validation)"
    )
    parser.add_argument(
        "--output_dir",
        "--output-dir",
        "--out",
        metavar="DIR",
        help="folder for metrics.json, the predictions and plots of a classifier, and the images generated for users",
    )
    parser.add_argument(
        "--count",
        type=int,
        help="samples of a generator to score (default: the number held out, at least 1,000 images or videos or 250 audio clips; 0: none), or users to generate for (default: all)",
    )
    parser.add_argument("--inception", metavar="FILE", help="Inception weights (safetensors), to compute FID too")
    parser.add_argument("--lpips", metavar="FILE", help="LPIPS weights (safetensors), for images generated for users")


def _evaluate(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.evaluate import evaluate_run, format_report
    from bottega.tasks.evaluation_data import DataRequest
    from bottega.tasks.recipes import parse_overrides

    if arguments.model_path and arguments.run and "=" in arguments.run:
        words, arguments.run = [arguments.run, *words], None  # with --model_path, the first word is a setting
    if arguments.data and arguments.data_config:
        raise UsageError(f"--data {arguments.data} cannot be combined with --data_config; keep one of them")
    files, settings = parse_overrides(words)
    if not arguments.data:
        reject_extra_words(files)
    data = [arguments.data, *files] if files else arguments.data
    result = evaluate_run(
        _get_run_path(arguments),
        request=DataRequest(data, arguments.data_config, settings, arguments.split),
        checkpoint=arguments.checkpoint,
        device=arguments.device,
        count=arguments.count,
        inception=arguments.inception,
        lpips=arguments.lpips,
        quiet=arguments.json,
        out=Path(arguments.output_dir) if arguments.output_dir else None,
    )
    if not arguments.json:
        print_result(format_report(result))
    return result


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", help="beginning of a text, or description of an image; may be repeated"
    )
    parser.add_argument("--class", action="append", dest="class_", metavar="NAME", help="a class by name or number")
    parser.add_argument("--vector", action="append", metavar="X,Y,...", help="a vector condition")
    parser.add_argument(
        "--count",
        type=int,
        help="samples for each prompt, class or vector; without these, the total number of samples, over all classes in turn (default: 1 text, else 16)",
    )
    parser.add_argument("--seed", type=int, help="random seed; the same seed gives the same samples (default: 0)")
    parser.add_argument("--part", metavar="NAME", help="task of a multitask run, if several can generate")
    parser.add_argument("--out", help="file or folder to write to")
    text = parser.add_argument_group("text")
    text.add_argument("--max_tokens", "--max-tokens", type=int, help="maximum number of new tokens (default: 200)")
    text.add_argument(
        "--repetition_penalty",
        "--repetition-penalty",
        type=float,
        help="repetition penalty; values above 1 reduce repetition",
    )
    tokens = parser.add_argument_group("text, and images and audio as tokens")
    tokens.add_argument(
        "--temperature", type=float, help="sampling temperature; 0 is greedy (default: 0.8 for text, else the recipe's)"
    )
    tokens.add_argument("--top_k", "--top-k", type=int, help="sample from the k most likely tokens")
    tokens.add_argument(
        "--top_p", "--top-p", type=float, help="sample from the most likely tokens with this total probability"
    )
    media = parser.add_argument_group("images, audio, video")
    media.add_argument("--steps", type=int, help="number of sampling steps (default: the recipe's)")
    media.add_argument("--sampler", help="sampler: euler, heun or dpm (default: the recipe's)")
    media.add_argument("--guidance", type=float, help="guidance scale; 1 turns guidance off")
    personal = parser.add_argument_group("personalised images")
    personal.add_argument("--user", action="append", metavar="ID", help="user to generate for; may be repeated")
    personal.add_argument("--wish", action="append", metavar="TEXT", help="what the image should show; may be repeated")
    personal.add_argument("--history", metavar="FILE", help="what a new user has liked: a record file, or captions")
    personal.add_argument("--negative_prompt", "--negative-prompt", help="what the image should not show")


GENERATION_OPTIONS = (
    *("prompt", "class_", "vector", "count", "seed", "max_tokens", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "steps", "sampler", "guidance", "part"),
    *("user", "wish", "history", "negative_prompt"),
)


def _generate(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.callbacks.progress_bars import progress_bars
    from bottega.run.saved import open_run

    reject_extra_words(words)
    request = {
        name.removesuffix("_"): getattr(arguments, name)
        for name in GENERATION_OPTIONS
        if getattr(arguments, name) is not None
    }
    saved_run = open_run(_get_run_path(arguments), checkpoint=arguments.checkpoint, device=arguments.device)
    out = Path(arguments.out) if arguments.out else None
    if out is not None:
        saved_run.workload.sampler.check_output(out)
    # One text is streamed to the terminal, and a progress bar would overwrite it; several are printed when the bar has gone.
    prompts = request.get("prompt")
    num_texts = request.get("count", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    is_streamed = "max_tokens" in saved_run.workload.sampler.requests and num_texts == 1
    text = io.StringIO()
    with progress_bars(open_console(quiet=arguments.json or is_streamed), in_bytes=False) as report_progress:
        samples = saved_run.generate_samples(
            request,
            stream=None if arguments.json else ResultStream() if is_streamed else text,
            progress=report_progress,
        )
    if text.getvalue():
        ResultStream().write(text.getvalue())
    result = saved_run.workload.sampler.present(samples, out, run=saved_run.directory.path, **request)
    if not arguments.json:
        for line in (*result.get("files", ()), *result.get("notes", ())):
            print_result(line)
    return result


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    parser.add_argument("--out", "--output_dir", "--output-dir", help="output folder (default: RUN/final)")


def _export(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.run.export import list_export_notes
    from bottega.run.saved import open_run

    reject_extra_words(words)
    saved_run = open_run(_get_run_path(arguments), checkpoint=arguments.checkpoint, device="cpu", needs_best=True)
    folder = saved_run.export(arguments.out or None)
    notes = list_export_notes(folder)
    if not arguments.json:
        print_result(f"exported {saved_run.checkpoint.name} to {folder}")
        for note in notes:
            print_result(note)
    return {"folder": str(folder), **({"notes": notes} if notes else {})}


def _add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bottega predict RUN [TEXT | FILE | FOLDER | NUMBERS]... [options]"
    _add_run_arguments(parser)
    parser.add_argument(
        "inputs",
        nargs="*",
        help="texts, or files and folders of images, audio, video or rows; without any, a text classifier reads the lines of "
        "standard input",
    )
    parser.add_argument("--data", metavar="PATH", help="a file of lines, a table, an archive or a folder")
    parser.add_argument("--out", metavar="FILE", help="write predictions to this file, one JSON object per line")
    parser.add_argument("--part", metavar="NAME", help="task of a multitask run, if several can predict")


def _predict(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bottega.analysis.predict import format_predictions, predict, write_predictions

    inputs = [*arguments.inputs, *take_positional_words(words)]
    if arguments.model_path and arguments.run:
        inputs, arguments.run = [arguments.run, *inputs], None  # with --model_path, the first word is a text
    if arguments.data and inputs:
        raise UsageError(f"--data {arguments.data} and {inputs[0]} cannot be combined; keep one of them")
    options = {"part": arguments.part, "checkpoint": arguments.checkpoint, "device": arguments.device}
    rows = predict(_get_run_path(arguments), inputs, data=arguments.data, **options, standard_input=sys.stdin)
    for text in inputs:
        if rows and "text" in rows[0] and os.path.isfile(text):
            print_notice(
                f"bottega: {text} is a file, and its name was classified as a text; use --data {text} to classify its content"
            )
    if arguments.out:
        write_predictions(rows, Path(arguments.out))
    if not arguments.json:
        unit = next((name for name in ("text", "file") if rows and name in rows[0]), "row")
        print_result(
            format_predictions(rows)
            if not arguments.out
            else f"wrote the predictions of {len(rows)} {unit}{'s' if len(rows) != 1 else ''} to {arguments.out}",
            is_data=True,
        )
    return {"predictions": rows}


VERBS = {
    "train": Verb("train a recipe; the same command resumes it", _add_train_arguments, _train),
    "evaluate": Verb("evaluate a run on held-out data", _add_evaluate_arguments, _evaluate),
    "generate": Verb("generate samples with a run", _add_generate_arguments, _generate),
    "predict": Verb("classify new texts, images, audio, video or rows with a run", _add_predict_arguments, _predict),
    "export": Verb("export a run in the layout of transformers or diffusers", _add_export_arguments, _export),
}
