"""Logging to Weights & Biases, with the extra `wandb` and `logging.wandb` in the recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bottega.callbacks.tensorboard import find_media
from bottega.config.credentials import strip_credentials_in_text
from bottega.core.callback import Callback, Progress
from bottega.core.errors import EnvironmentProblem


class WandB(Callback):
    """Logs metrics and samples to one wandb run, continued after a resume by the id in the checkpoint.

    A failed start or a lost connection is reported and does not end the run.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        folder: Path,
        project: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self.project, self.options, self.config, self.warn = folder, project, options, config, warn
        self._id: str | None = None
        self._run: Any = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state.get("id")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id} if self._id else {}

    def start(self, progress: Progress) -> None:
        try:
            import wandb
        except ImportError:
            raise EnvironmentProblem("logging.wandb needs wandb; pip install 'bottega[wandb]'") from None
        command_line = sys.argv
        sys.argv = [strip_credentials_in_text(word) for word in command_line]  # wandb records the command line
        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.options.get("entity"),
                name=self.options.get("name"),
                tags=self.options.get("tags") or None,
                notes=self.options.get("notes"),
                mode="offline" if self.options.get("offline") else None,
                dir=str(self.folder),
                id=self._id,
                resume="allow" if self._id else None,
                config=dict(self.config),
                settings=wandb.Settings(silent=True),
            )
            self._id = self._run.id
        except Exception as error:
            self.warn(f"wandb could not start ({_describe_failure(error)}); training continues without it")
        finally:
            sys.argv = command_line

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._log("train", progress, metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._log("validation", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        if self._run is None:
            return
        import wandb

        makers: dict[str, Callable[[str], Any]] = {
            ".png": wandb.Image,
            ".gif": partial(wandb.Video, format="gif"),
            ".wav": wandb.Audio,
        }
        samples = {}
        for suffix, make in makers.items():
            for path in find_media(folder, suffix):
                # A damaged image or a missing Pillow must not end the run; the file is left out.
                with suppress(Exception):
                    samples[path.name] = make(str(path))
        if samples:
            self._log("samples", progress, samples)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)

    def _log(self, group: str, progress: Progress, metrics: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({f"{group}/{name}": value for name, value in metrics.items()}, step=progress.step)
        except Exception as error:
            self.warn(f"wandb stopped responding ({type(error).__name__}); training continues without it")
            self._run = None


def _describe_failure(error: Exception) -> str:
    """Return the remedy if there is no login; else only the type of the error, because its text may contain an address."""
    if "api key" in str(error).lower() or "log in" in str(error).lower():
        return "not logged in: run `wandb login`, set WANDB_API_KEY, or set logging.wandb.offline=true and sync later"
    return type(error).__name__
