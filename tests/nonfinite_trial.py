"""A toy run over data with one bad sample, whose loss is not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.saver import Saver
from bottega.core.task import Task
from bottega.core.trainer import Cadences, Trainer
from bottega.engines.nonfinite import NonfiniteRecovery
from toy_task import Toy, engine, loader, source, training

BAD = 11


def bad_step() -> int:
    """Return the step, counted from 0, whose batch contains the bad sample."""
    batches = loader(source(bad=BAD), of=engine())
    return next(step for step in range(5) if BAD in batches.indices(step)[0])


class Trial:
    """A run over data with one bad sample."""

    def __init__(
        self,
        folder: Path,
        policy: str,
        *,
        log: int = 1,
        save: int = 2,
        total: int = 10,
        build: Callable[..., Any] = engine,
        task: Task | None = None,
        **changes: Any,
    ) -> None:
        self.folder = folder
        self.engine = build(training(on_nonfinite=policy, **changes), task=task or Toy(dropout=0.2), micro=4)
        self.loader = loader(source(bad=BAD), of=self.engine)
        self.warned: list[str] = []
        self.saver = Saver(
            folder / "checkpoints", keep=3, fingerprint={}, announce=lambda p, path: None, warn=self.warned.append
        )
        self.recovery = NonfiniteRecovery(
            engine=self.engine,
            loader=self.loader,
            saver=self.saver,
            policy=policy,
            folder=folder / "nonfinite",
            warn=self.warned.append,
        )
        self.progress = Progress(total=total)
        self.cadences = Cadences(log=log, save=save)

    def run(self, *callbacks: Callback, **options: Any) -> Progress:
        return Trainer(
            engine=self.engine,
            batches=self.loader,
            progress=self.progress,
            cadences=self.cadences,
            saver=self.saver,
            callbacks=callbacks,
            recover=self.recovery,
            **options,
        ).run()
