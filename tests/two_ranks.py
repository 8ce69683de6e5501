"""All two-process experiments of the tests in one launch: `torchrun --nproc_per_node 2 two_ranks.py FOLDER TEXT`.

The ranks write files to FOLDER; test_two_ranks.py and the contract compare them with one process.
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
from fake_compiler import FakeCompiler, use_compiler
from small_run import train_arguments
from toy_state import Remembering
from toy_task import Toy, copy_state, engine, loader, source, train_steps, training

RANK = int(os.environ.get("RANK", 0))
BAD = 11
IMAGE = {"training.max_steps": 4, "training.ema": 0.9, "evaluation.every": 2, "samples.every": 4, "samples.count": 2}


def save_tensors(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    save_file({key.replace("/", "|"): array for key, array in tensors.items()}, folder / f"{name}.{RANK}.safetensors")


def splits(folder: Path) -> None:
    """The same three steps, with and without micro-batches."""
    for micro in (None, 1, 3):
        toy_engine = engine(training(optimizer={"name": "sgd"}), micro=micro)
        assert (toy_engine.rank, toy_engine.world_size) == (RANK, 2)
        reports = train_steps(toy_engine, loader(of=toy_engine), 0, 3)
        save_tensors(folder, f"split-{micro}", copy_state(toy_engine))
        if RANK == 0:
            (folder / f"split-{micro}.json").write_text(json.dumps([r["loss"] for r in reports]))


def inspection(folder: Path) -> None:
    """Statistics of the modules in one step, which rank 0 alone computes."""
    toy_engine = engine(training(optimizer={"name": "sgd"}))
    toy_engine.train_step(0, loader(of=toy_engine).batch(0), module_statistics=True)
    modules = toy_engine.fetch_inspection().modules
    (folder / f"inspection.{RANK}.json").write_text(json.dumps(modules))


def tensor(folder: Path) -> None:
    """Tensor ranks process the same samples, so each equals a single process."""
    for name, task in {"tensor": WithDropout(), "tensor-unwrapped": Unwrapped(), "tensor-state": Remembering()}.items():
        toy_engine = engine(
            training(optimizer={"name": "sgd"}), task=task, micro=3, world=World.from_environment({"tensor": 2})
        )
        assert (toy_engine.rank, toy_engine.world_size, toy_engine.data_rank, toy_engine.data_size) == (RANK, 2, 0, 1)
        reports = train_steps(toy_engine, loader(of=toy_engine), 0, 3)
        save_tensors(folder, name, copy_state(toy_engine))
        (folder / f"{name}.{RANK}.json").write_text(json.dumps([r["loss"] for r in reports]))
    assert toy_engine.any_rank(RANK == 1), "a request of one rank reaches all ranks"
    batches = iter_eval_batches(source(samples=37), 8, data_rank=toy_engine.data_rank, data_size=toy_engine.data_size)
    _, arrays = evaluate_with_rows(engine(task=WithRows(), world=World.from_environment({"tensor": 2})), batches)
    save_tensors(folder, "tensor-rows", arrays)


class WithDropout(Toy):
    dropout: float = 0.3


class Unwrapped(Toy):
    needs_unwrapped_model: ClassVar[bool] = True


UNFREEZING = [{"pattern": "(second|head).*"}, {"pattern": ".*", "starts": 2}]


def unfreezing(folder: Path) -> None:
    """Some parameters become trainable at the third step, and their gradients are then reduced too."""
    toy_engine = engine(training(optimizer={"name": "sgd"}, groups=UNFREEZING))
    toy_engine.set_schedule(toy_engine.rate, total=8, steps_per_epoch=5)
    train_steps(toy_engine, loader(of=toy_engine), 0, 4)
    save_tensors(folder, "unfreezing", copy_state(toy_engine))


def remembering(folder: Path) -> None:
    """State that is computed from the samples of both ranks."""
    toy_engine = engine(training(optimizer={"name": "sgd"}), task=Remembering(), micro=3)
    train_steps(toy_engine, loader(of=toy_engine), 0, 3)
    save_tensors(folder, "remembering", copy_state(toy_engine))


class WithRows(Toy):
    """Returns an identifier of each example as a row."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        return super().loss(models, batch, rng)._replace(rows={"first": batch["x"][:, 0]})


def rows(folder: Path) -> None:
    """37 samples in batches of 8; the last batch cannot be split evenly."""
    _, arrays = evaluate_with_rows(
        engine(task=WithRows()), iter_eval_batches(source(samples=37), 8, data_rank=RANK, data_size=2)
    )
    save_tensors(folder, "rows", arrays)


class OutOfMemoryOnRank1(Toy):
    """Only the second rank runs out of memory."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        if RANK == 1 and len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(models, batch, rng)


class UnwrappedOutOfMemory(OutOfMemoryOnRank1):
    needs_unwrapped_model: ClassVar[bool] = True


class SurgeryOutOfMemory(OutOfMemoryOnRank1):
    gradient_surgery: ClassVar[bool] = True


OUT_OF_MEMORY = {
    "memory": OutOfMemoryOnRank1,
    "memory-unwrapped": UnwrappedOutOfMemory,
    "memory-surgery": SurgeryOutOfMemory,
}


def memory(folder: Path) -> None:
    """Both ranks use the micro-batch that fits both, and no rank waits for gradients of one that ran out of memory."""
    for name, task in OUT_OF_MEMORY.items():
        toy_engine = engine(training(micro_batch_size="auto", optimizer={"name": "sgd"}), task=task())
        train_steps(toy_engine, loader(of=toy_engine), 0, 3)
        assert toy_engine.micro_batch_size == 2
        save_tensors(folder, name, copy_state(toy_engine))


def compilation(folder: Path) -> None:
    """Both ranks start eagerly and compile the second step; in one run the compiler of rank 1 fails, and neither compiles."""
    for name, fails in {"compiled": False, "compiler-fails": RANK == 1}.items():
        with use_compiler(FakeCompiler(fails_to_compile=fails)) as compiler:
            toy_engine = engine(training(optimizer={"name": "sgd"}), micro=3)
            batches = loader(of=toy_engine)
            train_steps(toy_engine, batches, 0, 1)
            toy_engine.is_compiled = True
            train_steps(toy_engine, batches, 1, 3)
        save_tensors(folder, name, copy_state(toy_engine))
        report = {"is_compiled": toy_engine.is_compiled, "error": toy_engine.compile_error, "calls": compiler.num_calls}
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(report))


def evaluation(folder: Path) -> None:
    """37 samples in batches of 8; the last batch cannot be split evenly."""
    toy_engine = engine(task=Weighted(noise=0.0))
    means = evaluate(
        toy_engine,
        iter_eval_batches(source(samples=37), 8, data_rank=toy_engine.data_rank, data_size=toy_engine.data_size),
    )
    (folder / f"evaluation.{RANK}.json").write_text(json.dumps(means))


class Weighted(Toy):
    """Ignores the padding rows of an evaluation."""

    def counts(self, batch: Any) -> Any:
        return super().counts(without_padding(batch))

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        rows = batch["weight"] > 0 if "weight" in batch else torch.ones(len(batch["x"]), dtype=torch.bool)
        selected = {name: value[rows] for name, value in batch.items() if name != "weight"}
        return super().loss(models, selected, type(rng)(rng.seed, rng.step, rng.positions[rows], rng.xp))


def without_padding(batch: Any) -> Any:
    if "weight" not in batch:
        return batch
    rows = np.asarray(batch["weight"]) > 0
    return {name: value[rows] for name, value in batch.items() if name != "weight"}


class SlowSnapshot(Snapshot):
    """A snapshot that takes long to write."""

    def __init__(self, inner: Snapshot) -> None:
        self.inner = inner

    def files(self) -> Any:
        time.sleep(0.2)
        return self.inner.files()


class InfiniteLossOnRank1(Toy):
    """The loss of one rank is infinite; all gradients are finite."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        out = super().loss(models, batch, rng)
        total, weight = out.terms["mean"]
        return out._replace(terms={**out.terms, "mean": (total + (torch.inf if RANK == 1 else 0.0), weight)})


def disagreement(folder: Path) -> None:
    toy_engine = engine(training(optimizer={"name": "sgd"}, on_nonfinite="skip"), task=InfiniteLossOnRank1())
    train_steps(toy_engine, loader(of=toy_engine), 0, 2)
    save_tensors(folder, "disagreement", copy_state(toy_engine))


def rollback(folder: Path) -> None:
    """A bad sample on one rank: both roll back to the same checkpoint, although rank 0 is still writing it."""
    toy_engine = engine(training(on_nonfinite="rollback", optimizer={"name": "sgd"}))
    batches = loader(source(bad=BAD), of=toy_engine)
    snapshot = toy_engine.snapshot
    toy_engine.snapshot = lambda: SlowSnapshot(snapshot())  # type: ignore[method-assign,assignment]
    saver = Saver(folder / "rollback", keep=2, fingerprint={}, announce=lambda p, path: None, warn=lambda text: None)
    recover = NonfiniteRecovery(
        engine=toy_engine,
        loader=batches,
        saver=saver,
        policy="rollback",
        folder=folder / "nonfinite",
        warn=lambda text: None,
    )
    progress = Progress(total=6)
    rows = [JsonLines(folder / "rollback.jsonl", print)] if RANK == 0 else []
    Trainer(
        engine=toy_engine,
        batches=batches,
        progress=progress,
        cadences=Cadences(log=1, save=1),
        saver=saver,
        recover=recover,
        callbacks=rows,
    ).run()
    save_tensors(folder, "rollback", copy_state(toy_engine))
    (folder / f"rollback.{RANK}.json").write_text(json.dumps(progress.to_json()))


def language(folder: Path, text: Path) -> None:
    """The command: a run, and the same run in two halves, the second with more steps."""
    halves = {"name": "halves", "training.scheduler.name": "constant"}
    for changes in ({"name": "whole"}, {**halves, "training.max_steps": 3}, {**halves, "training.max_steps": 6}):
        code = cli.main(
            train_arguments(folder, text, "--quiet", **{"training.max_steps": 6, "checkpoint.every": 2, **changes})
        )
        assert code == 0, code


def image(folder: Path) -> None:
    """27 training samples and 9 held out, whose second batch has a single sample."""
    assert cli.main(small_media.train_arguments(folder, "--quiet", name="image", **IMAGE)) == 0


if __name__ == "__main__":
    out = Path(sys.argv[1])
    # The engines here are never closed and share one process group.
    destroy_process_group, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    splits(out)
    inspection(out)
    unfreezing(out)
    remembering(out)
    rows(out)
    tensor(out)
    memory(out)
    compilation(out)
    evaluation(out)
    disagreement(out)
    rollback(out)
    gc.collect()  # wrappers of unclosed engines, which would outlive the group
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group = destroy_process_group
    destroy_process_group()
    # Each command joins its own group under the same launcher.
    language(out, Path(sys.argv[2]))
    image(out)
