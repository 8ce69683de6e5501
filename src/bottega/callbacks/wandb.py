"""Logging to Weights & Biases, with the extra `wandb` and `logging.wandb` in the recipe."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bottega.callbacks.media_files import find_media
from bottega.callbacks.tracker_guard import describe_failure
from bottega.callbacks.wandb_runs import find_run_id, read_last_step
from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.errors import EnvironmentProblem
from bottega.core.rundir import RunDirectory
from bottega.metrics_log import read_metrics
from bottega.redaction import redact_values

FINISH_SECONDS = 120.0
"""Time to upload what is left at the end of a run; wandb itself would wait for the network without limit."""
GROUPS = {"train": "train", "eval": "validation"}
"""Kind of a line of metrics.jsonl -> the group that it is logged under."""

LAST_LOGGED_STEPS: dict[str, int] = {}
"""Id of each run of this process -> its last step: wandb may write the end of a file after `finish` has returned."""


class WandB(Callback):
    """Logs metrics and samples to one wandb run, which later processes of the same run directory continue.

    wandb accepts steps in increasing order only and cannot take one back: `resume_from` rewinds on the server, but not every server
    supports it, and offline there is none. So each step is logged once, by the first process that gets to it: a resumed run
    repeats the same steps with the same values, and those that are recorded already are left out. Steps before
    the checkpoint that are not recorded, since wandb writes only every 15 seconds, are logged from metrics.jsonl.

    Errors are raised; `TrackerGuard` turns them into warnings.
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
        best_metric: str = "loss",
    ) -> None:
        self.folder, self.project, self.warn = folder, project, warn
        self.options, self.config = redact_values(dict(options)), redact_values(dict(config))
        self.best_metric = best_metric
        self._id: str | None = None
        self._run: Any = None
        self._first_step = self._last_step = 0
        self._start_step = 0
        self._has_warned = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (
            state.get("folder") == self.folder.name
        ):  # else a checkpoint of another run, whose id this one must not continue
            self._id = state.get("id")

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id, "folder": self.folder.name} if self._id else {}

    def start(self, progress: Progress) -> None:
        # The folder of wandb also has the id of a run that was killed before its first checkpoint.
        self._id = find_run_id(self.folder) or self._id
        is_resumed = self._id is not None
        last_step = -1
        if self._id is not None:
            last_step = max(read_last_step(self.folder, self._id), LAST_LOGGED_STEPS.get(self._id, -1))
        self._run = self._init_run()
        self._id = self._run.id
        if is_resumed and not self._run.offline:
            last_step = self._run.starting_step - 1  # what the server has is what counts
        self._first_step, self._last_step, self._start_step = last_step + 1, last_step, progress.step
        for row in read_metrics(RunDirectory(self.folder).metrics) if is_resumed else ():
            if row.get("kind") in GROUPS and isinstance(step := row.get("step"), int) and step > last_step:
                values = {k: v for k, v in row.items() if k not in ("step", "samples") and isinstance(v, int | float)}
                self._log(GROUPS[row["kind"]], values, step)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._log("train", metrics, progress.step)

    def after_inspect(self, progress: Progress, modules: Mapping[str, Mapping[str, float]]) -> None:
        statistics = {f"{name}/{key}": value for name, values in modules.items() for key, value in values.items()}
        self._log("modules", statistics, progress.step)

    def after_histograms(self, progress: Progress, histograms: Mapping[str, Histogram]) -> None:
        if self._run is None:
            return
        import wandb

        for name, histogram in histograms.items():
            if not all(map(math.isfinite, histogram.edges)):
                continue
            group, _, parameter = name.partition("/")
            chart = wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))
            self._log(group, {parameter: chart}, progress.step)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._log("validation", metrics, progress.step)
        self._summarise(progress)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        """Log each file by itself: one that is damaged or was deleted, or a missing Pillow, is reported once and left out."""
        if self._run is None:
            return
        import wandb

        makers: dict[str, Callable[[str], Any]] = {
            ".png": wandb.Image,
            ".gif": partial(wandb.Video, format="gif"),
            ".mp4": partial(wandb.Video, format="mp4"),
            ".wav": wandb.Audio,
            ".txt": _make_text_table,
        }
        for suffix, make in makers.items():
            for path in find_media(folder, suffix):
                try:
                    self._log("samples", {path.name: make(str(path))}, progress.step)
                except Exception as error:
                    if not self._has_warned:
                        self.warn(f"cannot log {path} to wandb: {describe_failure(error)}; it is left out")
                    self._has_warned = True

    def rewind(self, progress: Progress) -> None:
        self._first_step = self._last_step + 1  # wandb cannot take back the steps that are run again

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        with suppress(Exception):  # a lost connection; it must still be closed
            self._summarise(progress, run)
        _call_with_timeout(partial(run.finish, exit_code=0 if error is None else 1), seconds=FINISH_SECONDS + 30)

    def _init_run(self) -> Any:
        import wandb

        settings: dict[str, Any] = {"silent": True}
        if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # not in every version of wandb
            settings["finish_timeout"] = FINISH_SECONDS
        command_line = sys.argv
        sys.argv = redact_values(command_line)  # wandb records the command line
        try:
            return wandb.init(
                project=self.project,
                entity=self.options.get("entity"),
                name=self.options.get("name"),
                tags=self.options.get("tags") or None,
                notes=self.options.get("notes"),
                mode="offline" if self.options.get("offline") else None,
                dir=str(self.folder),
                id=self._id,
                resume="allow" if self._id else None,
                config=self.config,
                settings=wandb.Settings(**settings),
            )
        except Exception as error:
            if "api key" in str(error).lower() or "log in" in str(error).lower():
                raise EnvironmentProblem(
                    "not logged in: run `wandb login`, set WANDB_API_KEY, or set logging.wandb.offline=true and sync later"
                ) from None
            raise
        finally:
            sys.argv = command_line

    def _log(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Log values that are not recorded yet; wandb joins those of one step to a row."""
        if step == self._start_step == self._first_step - 1 and group in ("validation", "samples"):
            step = self._first_step  # the previous process had logged its last step, but was stopped before this
        if self._run is None or step < self._first_step or not values:
            return
        self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)
        self._last_step = LAST_LOGGED_STEPS[self._id or ""] = max(self._last_step, step)

    def _summarise(self, progress: Progress, run: Any = None) -> None:
        """Put the best result into the columns of wandb's table of runs."""
        run = run if run is not None else self._run
        if run is not None and progress.best is not None:
            run.summary.update({f"best/{self.best_metric}": progress.best, "best/step": progress.best_step})


def _make_text_table(path: str) -> Any:
    import wandb

    return wandb.Table(columns=["text"], data=[[Path(path).read_text(encoding="utf-8", errors="replace")]])


def _call_with_timeout(function: Callable[[], Any], *, seconds: float) -> None:
    """Call a function and raise what it raises; raise TimeoutError if it does not return, and leave it behind."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="wandb-finish", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError
