"""Weights & Biases, where the extra is installed and the recipe asks for it."""

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
    """The same run goes on after a resume, because its id travels in the progress. A lost connection stops nothing."""

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

    def load_state_dict(self, note: dict[str, Any]) -> None:
        self._id = note.get("id")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id} if self._id else {}

    def start(self, progress: Progress) -> None:
        try:
            import wandb
        except ImportError:
            raise EnvironmentProblem("logging.wandb needs the wandb package: pip install 'bottega[wandb]'") from None
        typed = sys.argv
        sys.argv = [strip_credentials_in_text(word) for word in typed]  # which wandb writes down
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
            self.warn(f"wandb could not start ({_reason(error)}); training goes on without it")
        finally:
            sys.argv = typed

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
        shown = {}
        for suffix, make in makers.items():
            for path in find_media(folder, suffix):
                # A damaged picture, or no Pillow to look into it, is no reason to lose the curves.
                with suppress(Exception):
                    shown[path.name] = make(str(path))
        if shown:
            self._log("samples", progress, shown)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)

    def _log(self, group: str, progress: Progress, metrics: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({f"{group}/{name}": value for name, value in metrics.items()}, step=progress.step)
        except Exception as error:
            self.warn(f"wandb stopped answering ({type(error).__name__}); training goes on without it")
            self._run = None


def _reason(error: Exception) -> str:
    """What to do where nobody is logged in; else the kind of the error alone, whose text may hold an address."""
    if "api key" in str(error).lower() or "log in" in str(error).lower():
        return "no login: run `wandb login`, set WANDB_API_KEY, or set logging.wandb.offline=true and sync later"
    return type(error).__name__
