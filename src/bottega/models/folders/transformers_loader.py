"""`from_pretrained` of transformers and diffusers for local folders: no network, no pickle, no code of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError, EnvironmentProblem, first_line
from bottega.models.folders.untrusted import check_loading_info


def load_pretrained(model_class: Any, folder: Path | str, *, description: str, **options: Any) -> Any:
    """Return the model that `model_class` (a class of transformers or diffusers) reads from a local folder.

    `description` names the model in errors, with its article. A weight that is missing or has the wrong shape is a
    CheckpointError, because the libraries would initialise it at random.
    """
    model, info = load_with_info(model_class, folder, description=description, ignore_mismatched_sizes=True, **options)
    check_loading_info(folder, info)
    return model


def load_with_info(
    model_class: Any,
    folder: Path | str,
    *,
    description: str,
    errors: tuple[type[Exception], ...] = (Exception,),
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the model and its loading info (missing and mismatched keys), without checking the latter.

    Exceptions in `errors` become a CheckpointError; the libraries raise any class if a file is wrong.
    """
    library = model_class.__module__.partition(".")[0]
    if library == "transformers":
        options["trust_remote_code"] = False  # diffusers has no such option: it never runs code of a folder
    try:
        with quiet_logging(library):
            return model_class.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
    except ImportError as error:
        raise EnvironmentProblem(f"{folder} cannot be loaded: {first_line(error)}") from error
    except errors as error:
        raise CheckpointError(f"{folder} cannot be loaded as {description}: {first_line(error)}") from error


@contextmanager
def quiet_logging(library: str = "transformers") -> Iterator[None]:
    """Silence warnings and progress bars of transformers, and of diffusers if `library` names it."""
    import transformers

    loggers: list[Any] = [transformers.utils.logging]
    if library == "diffusers":
        import diffusers

        loggers.append(diffusers.utils.logging)
    previous = [(logging, logging.get_verbosity(), logging.is_progress_bar_enabled()) for logging in loggers]
    for logging in loggers:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging, level, has_progress_bar in previous:
            logging.set_verbosity(level)
            if has_progress_bar:
                logging.enable_progress_bar()


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore torch's global generator afterwards: transformers draws initial values from it, which are then overwritten."""
    import torch

    with torch.random.fork_rng(devices=[]):
        yield
