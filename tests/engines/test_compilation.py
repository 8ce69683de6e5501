"""Compiling in the torch engine: switched between two steps, and given up, within a step, if the compiler fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.errors import OutOfMemory, UsageError
from bottega.engines.torch.compiler_errors import describe_compiler_error
from bottega.engines.torch.engine import TorchEngine
from fake_compiler import FakeCompiler, use_compiler
from small_run import differing_tensors
from toy_task import Toy, copy_state, engine, loader, save_checkpoint, train_steps, training

# torch.compile itself accesses .grad of non-leaf tensors, and warns of graphs without gradients.
pytestmark = pytest.mark.filterwarnings("ignore")


Install = Callable[[FakeCompiler], FakeCompiler]


@pytest.fixture
def install() -> Iterator[Install]:
    """Return a function that makes torch.compile use a backend."""
    with ExitStack() as stack:
        yield lambda compiler: stack.enter_context(use_compiler(compiler))


class WithDropout(Toy):
    dropout: float = 0.3


def train_toy(*, compile: bool, micro: int | None = None, task: Toy | None = None) -> TorchEngine:
    toy_engine = engine(training(compile=compile, ema=0.9, max_grad_norm=0.5), task=task or WithDropout(), micro=micro)
    toy_engine.reports = train_steps(toy_engine, loader(of=toy_engine), 0, 5)  # type: ignore[attr-defined]
    return toy_engine


def assert_equal_runs(a: Any, b: Any) -> None:
    assert a.reports == b.reports
    assert differing_tensors(copy_state(a), copy_state(b)) == []


@pytest.mark.parametrize("micro", [None, 3])
def test_compiler_that_fails_leaves_the_weights_of_an_eager_run(install: Install, micro: int | None) -> None:
    install(FakeCompiler(fails_to_compile=True))
    compiled, eager = train_toy(compile=True, micro=micro), train_toy(compile=False, micro=micro)
    assert_equal_runs(compiled, eager)
    assert not compiled.is_compiled
    assert compiled.compile_error == "RuntimeError: Failed to find C compiler"
    assert eager.compile_error is None


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("failing_call", [1, 2, 5])
def test_compiled_call_that_fails_later_leaves_no_trace(install: Install, micro: int | None, failing_call: int) -> None:
    """With micro-batches of 3, the second call fails in the middle of the first step, whose gradients are half summed."""
    compiler = install(FakeCompiler(failing_call=failing_call))
    compiled, eager = train_toy(compile=True, micro=micro), train_toy(compile=False, micro=micro)
    assert compiler.num_calls == failing_call, "no compiled call after the one that failed"
    assert_equal_runs(compiled, eager)
    assert compiled.compile_error == "RuntimeError: Triton Error [CUDA]: an illegal instruction"


def test_switch_between_two_steps_changes_nothing_with_a_compiler_that_changes_nothing(install: Install) -> None:
    compiler = install(FakeCompiler())
    switched, eager = (engine(training(ema=0.9), task=WithDropout()) for _ in range(2))
    batches = loader(of=eager)
    expected = train_steps(eager, batches, 0, 6)
    reports = train_steps(switched, batches, 0, 2)
    assert compiler.num_calls == 0
    switched.is_compiled = True
    reports += train_steps(switched, batches, 2, 4)
    assert compiler.num_calls == 2
    switched.is_compiled = False
    reports += train_steps(switched, batches, 4, 6)
    assert compiler.num_calls == 2
    assert reports == expected
    assert differing_tensors(copy_state(switched), copy_state(eager)) == []


class Failing(Toy):
    """Raises an error of its own in each loss."""

    error: Any

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        super().loss(models, batch, rng)
        raise self.error


@pytest.mark.parametrize("error", [UsageError("data.train: empty"), ValueError("a bug of the task")])
def test_errors_of_the_task_are_not_taken_for_errors_of_the_compiler(install: Install, error: Exception) -> None:
    install(FakeCompiler())
    toy_engine = engine(training(compile=True), task=Failing(error=error))
    with pytest.raises(type(error), match=str(error)):
        toy_engine.train_step(0, loader(of=toy_engine).batch(0))
    assert toy_engine.compile_error is None


def test_memory_that_runs_out_is_not_taken_for_an_error_of_the_compiler(install: Install) -> None:
    install(FakeCompiler())
    error = torch.OutOfMemoryError("CUDA out of memory")
    toy_engine = engine(training(compile=True, micro_batch_size=4), task=Failing(error=error), micro=4)
    with pytest.raises(OutOfMemory):
        toy_engine.train_step(0, loader(of=toy_engine).batch(0))
    assert toy_engine.is_compiled
    assert toy_engine.compile_error is None


class FailingWhileCompiled(Toy):
    """Raises in the compiled step, and runs out of memory in a whole batch of the eager one."""

    def loss(self, models: Any, batch: Any, rng: Any) -> Any:
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(models, batch, rng)


def test_micro_batch_is_halved_after_the_compiler_has_failed(install: Install) -> None:
    install(FakeCompiler(fails_to_compile=True))
    options: dict[str, Any] = {"micro_batch_size": "auto", "optimizer": {"name": "sgd"}}
    split, unsplit = (
        engine(training(compile=compile, **options), task=task)
        for compile, task in ((True, FailingWhileCompiled()), (False, Toy()))
    )
    for toy_engine in (split, unsplit):
        train_steps(toy_engine, loader(of=toy_engine), 0, 2)
    assert split.micro_batch_size == 4
    assert split.compile_error is not None
    for name, array in copy_state(unsplit).items():
        np.testing.assert_allclose(copy_state(split)[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def test_resume_after_a_switch_is_bit_exact(install: Install, tmp_path: Path) -> None:
    """The mode is the caller's to restore; given the same modes, the weights are equal."""
    install(FakeCompiler())

    def train(toy_engine: TorchEngine, start: int, stop: int) -> None:
        for step in range(start, stop):
            toy_engine.is_compiled = step >= 2
            train_steps(toy_engine, loader(of=toy_engine), step, step + 1)

    straight, first, second = (engine(training(ema=0.9), task=WithDropout()) for _ in range(3))
    train(straight, 0, 5)
    train(first, 0, 3)
    second.load(save_checkpoint(first, tmp_path, 3))
    train(second, 3, 5)
    assert differing_tensors(copy_state(straight), copy_state(second)) == []


def test_the_error_inside_that_of_the_compiler_is_named() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    outer = BackendCompilerFailed(lambda: None, ValueError("the cause:\nhere"), None)  # type: ignore[arg-type]
    assert describe_compiler_error(outer) == "ValueError: the cause: here"
    assert describe_compiler_error(KeyError("x")) == "KeyError: 'x'"
