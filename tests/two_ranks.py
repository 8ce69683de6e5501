"""What the tests want to see of two processes, in one launch: `torchrun --nproc_per_node 2 two_ranks.py FOLDER TEXT`.

Rank 0 leaves files in FOLDER; test_two_ranks.py and the contract compare them with one process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

import small_media
from bottega import cli
from bottega.callbacks.jsonl import JsonLines
from bottega.core.callback import Progress
from bottega.core.engine import Snapshot
from bottega.core.saver import Saver
from bottega.core.trainer import Cadences, Trainer, evaluate, evaluate_with_rows
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.nonfinite import NonfiniteRecovery
from bottega.world import World
from small_run import words
from toy_state import Remembering
from toy_task import Toy, advance, engine, loader, source, state, training

RANK = int(os.environ.get("RANK", 0))
BAD = 11
IMAGE = {"training.max_steps": 4, "training.ema": 0.9, "evaluation.every": 2, "samples.every": 4, "samples.count": 2}


def keep(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    save_file({key.replace("/", "|"): array for key, array in tensors.items()}, folder / f"{name}.{RANK}.safetensors")


def splits(folder: Path) -> None:
    """The same three steps, with and without micro-batches."""
    for micro in (None, 1, 3):
        one = engine(training(optimizer={"name": "sgd"}), micro=micro)
        assert (one.rank, one.world) == (RANK, 2)
        reports = advance(one, loader(of=one), 0, 3)
        keep(folder, f"split-{micro}", state(one))
        if RANK == 0:
            (folder / f"split-{micro}.json").write_text(json.dumps([r["loss"] for r in reports]))


def tensor(folder: Path) -> None:
    """Both ranks share the work on the same samples, so each is what one process is."""
    for name, task in {"tensor": Dropped(), "tensor-bare": Whole(), "tensor-state": Remembering()}.items():
        one = engine(
            training(optimizer={"name": "sgd"}), task=task, micro=3, world=World.from_environment({"tensor": 2})
        )
        assert (one.rank, one.world, one.data_rank, one.data_size) == (RANK, 2, 0, 1)
        reports = advance(one, loader(of=one), 0, 3)
        keep(folder, name, state(one))
        (folder / f"{name}.{RANK}.json").write_text(json.dumps([r["loss"] for r in reports]))
    assert one.any_rank(RANK == 1), "what one rank asks for, all do, whatever samples they see"
    batches = iter_eval_batches(source(samples=37), 8, data_rank=one.data_rank, data_size=one.data_size)
    _, found = evaluate_with_rows(engine(task=Named(), world=World.from_environment({"tensor": 2})), batches)
    keep(folder, "tensor-rows", found)


class Dropped(Toy):
    dropout: float = 0.3


class Whole(Toy):
    needs_unwrapped_model: ClassVar[bool] = True


THAWING = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 2}]


def thawing(folder: Path) -> None:
    """Some parameters join in at the third step, when their gradients have to be waited for."""
    one = engine(training(optimizer={"name": "sgd"}, groups=THAWING))
    one.set_schedule(one.rate, total=8, steps_per_epoch=5)
    advance(one, loader(of=one), 0, 4)
    keep(folder, "thawing", state(one))


def remembering(folder: Path) -> None:
    """State that follows from what both ranks have seen."""
    one = engine(training(optimizer={"name": "sgd"}), task=Remembering(), micro=3)
    advance(one, loader(of=one), 0, 3)
    keep(folder, "remembering", state(one))


class Named(Toy):
    """Says of each example who it is."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        return super().loss(models, batch, rng)._replace(rows={"first": batch["x"][:, 0]})


def rows(folder: Path) -> None:
    """37 samples in batches of 8, the last of which the ranks cannot share equally."""
    _, found = evaluate_with_rows(
        engine(task=Named()), iter_eval_batches(source(samples=37), 8, data_rank=RANK, data_size=2)
    )
    keep(folder, "rows", found)


class Cramped(Toy):
    """Only the second rank has little memory."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        if RANK == 1 and len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(models, batch, rng)


class Bare(Cramped):
    needs_unwrapped_model: ClassVar[bool] = True


class Apart(Cramped):
    gradient_surgery: ClassVar[bool] = True


CRAMPED = {"memory": Cramped, "memory-bare": Bare, "memory-apart": Apart}


def memory(folder: Path) -> None:
    """What fits one rank alone is not tried by the other, and nobody waits for the gradients of one that had no room."""
    for name, task in CRAMPED.items():
        one = engine(training(micro_batch_size="auto", optimizer={"name": "sgd"}), task=task())
        advance(one, loader(of=one), 0, 3)
        assert one.micro_batch_size == 2
        keep(folder, name, state(one))


def evaluation(folder: Path) -> None:
    """37 samples in batches of 8: the last batch cannot be shared equally."""
    one = engine(task=Weighted(noise=0.0))
    means = evaluate(one, iter_eval_batches(source(samples=37), 8, data_rank=one.data_rank, data_size=one.data_size))
    (folder / f"evaluation.{RANK}.json").write_text(json.dumps(means))


class Weighted(Toy):
    """Padding rows of an evaluation count nowhere."""

    def counts(self, batch: Any) -> Any:
        return super().counts(without_padding(batch))

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        rows = batch["weight"] > 0 if "weight" in batch else torch.ones(len(batch["x"]), dtype=torch.bool)
        kept = {name: value[rows] for name, value in batch.items() if name != "weight"}
        return super().loss(models, kept, type(rng)(rng.seed, rng.step, rng.positions[rows], rng.xp))


def without_padding(batch: Any) -> Any:
    if "weight" not in batch:
        return batch
    rows = np.asarray(batch["weight"]) > 0
    return {name: value[rows] for name, value in batch.items() if name != "weight"}


class Slow(Snapshot):
    """A disk on which a checkpoint takes a while."""

    def __init__(self, inner: Snapshot) -> None:
        self.inner = inner

    def files(self) -> Any:
        time.sleep(0.2)
        return self.inner.files()


class Shouting(Toy):
    """One rank's loss is infinite, and everybody's gradients are in order."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        out = super().loss(models, batch, rng)
        total, weight = out.terms["mean"]
        return out._replace(terms={**out.terms, "mean": (total + (torch.inf if RANK == 1 else 0.0), weight)})


def disagreement(folder: Path) -> None:
    one = engine(training(optimizer={"name": "sgd"}, on_nonfinite="skip"), task=Shouting())
    advance(one, loader(of=one), 0, 2)
    keep(folder, "disagreement", state(one))


def rollback(folder: Path) -> None:
    """A bad sample on one rank: both go back to the same checkpoint, although rank 0 was still writing it."""
    one = engine(training(on_nonfinite="rollback", optimizer={"name": "sgd"}))
    batches = loader(source(bad=BAD), of=one)
    quick = one.snapshot
    one.snapshot = lambda: Slow(quick())  # type: ignore[method-assign,assignment]
    saver = Saver(folder / "rollback", keep=2, fingerprint={}, announce=lambda p, path: None, warn=lambda text: None)
    recover = NonfiniteRecovery(
        engine=one, loader=batches, saver=saver, policy="rollback", folder=folder / "evidence", warn=lambda text: None
    )
    progress = Progress(total=6)
    rows = [JsonLines(folder / "rollback.jsonl", print)] if RANK == 0 else []
    Trainer(
        engine=one,
        batches=batches,
        progress=progress,
        cadences=Cadences(log=1, save=1),
        saver=saver,
        recover=recover,
        callbacks=rows,
    ).run()
    keep(folder, "rollback", state(one))
    (folder / f"rollback.{RANK}.json").write_text(json.dumps(progress.to_json()))


def language(folder: Path, text: Path) -> None:
    """The command itself: a run, and the same one in two halves, of which the second has more steps to do."""
    halves = {"name": "halves", "training.scheduler.name": "constant"}
    for changes in ({"name": "whole"}, {**halves, "training.max_steps": 3}, {**halves, "training.max_steps": 6}):
        code = cli.main(words(folder, text, "--quiet", **{"training.max_steps": 6, "checkpoint.every": 2, **changes}))
        assert code == 0, code


def image(folder: Path) -> None:
    """27 samples to learn from and 9 held out, of which the second batch is a single one."""
    assert cli.main(small_media.words(folder, "--quiet", name="image", **IMAGE)) == 0


if __name__ == "__main__":
    out = Path(sys.argv[1])
    # Engines that are built here and never closed share one group.
    leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    splits(out)
    thawing(out)
    remembering(out)
    rows(out)
    tensor(out)
    memory(out)
    evaluation(out)
    disagreement(out)
    rollback(out)
    gc.collect()  # wrappers of engines that were never closed, which would outlive the group
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group = leave
    leave()
    # Each command joins a group of its own, under the same launcher.
    language(out, Path(sys.argv[2]))
    image(out)
