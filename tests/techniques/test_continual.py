"""Continual learning: metrics per source, the forgetting matrix, EWC and replay, and resumed runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bottega
import small_media
import small_run
import small_texts
from bottega.analysis.compare import compare
from bottega.analysis.verify_resume import find_difference
from bottega.core.callback import Progress
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import Noise
from bottega.core.trainer import BestMetric, evaluate
from bottega.core.types import Batch, Loss, Models
from bottega.data.loading.loader import iter_eval_batches
from bottega.data.sources.source import ArraySource, Source
from bottega.data.sources.take import Take
from bottega.engines.torch.fisher import FISHER_STEP, fisher_diagonal
from bottega.engines.torch.sums import sum_terms
from bottega.tasks.evaluation_data import DataRequest
from bottega.techniques.continual.forgetting import ForgettingMatrix, compute_transfer_metrics
from bottega.techniques.continual.per_source_metrics import PerSourceMetrics
from bottega.techniques.ewc.task import Ewc, consolidate
from toy_task import Toy, engine, source

EWC_AND_REPLAY = [
    {"name": "ewc", "options": {"samples": 6}},
    {"name": "replay", "options": {"share": 0.25, "memory": 5}},
]


# Metrics per source


class PaddedToy(Toy):
    """Ignores padding rows, and returns a row that identifies each example."""

    def counts(self, batch: Batch) -> Any:
        mask = (
            np.asarray(batch["mask"]) * (np.asarray(batch["weight"]) > 0)[:, None]
            if "weight" in batch
            else batch["mask"]
        )
        return {"error": float(np.sum(mask)), "mean": float((np.sum(mask, axis=1) > 0).sum())}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        weight = (batch["weight"] > 0).float() if "weight" in batch else torch.ones(len(batch["x"]))
        mask = batch["mask"].float()
        x = batch["x"] + self.noise * rng.normal("x", tuple(batch["x"].shape[1:]))
        wrong = (models["model"](x) - batch["y"]) ** 2 * mask * weight[:, None]
        return Loss(
            terms={"error": (wrong.sum(), 1.0), "mean": ((wrong.sum(1) / mask.sum(1)).sum(), 0.25)},
            metrics={"absolute": (wrong.detach().sqrt().sum(), (mask * weight[:, None]).sum())},
            rows={"first": batch["x"][:, 0, 0]},
        )


def build_source(count: int = 37) -> ArraySource:
    source_index = np.arange(count) % 3 - (np.arange(count) == 5) * 10  # the sixth belongs to no source
    return ArraySource({**source(samples=count).arrays, "source": source_index})


def test_metrics_of_each_source_equal_evaluating_it_alone() -> None:
    samples = build_source()
    plain = engine(task=PaddedToy(noise=0.0))
    both = engine(task=PerSourceMetrics(inner=PaddedToy(noise=0.0), names=("a", "b", "c")))
    metrics = evaluate(both, iter_eval_batches(samples, 8))
    everything = ArraySource({k: v for k, v in samples.arrays.items() if k != "source"})
    for name, value in evaluate(plain, iter_eval_batches(everything, 8)).items():
        assert metrics[name] == pytest.approx(value, rel=1e-6)
    for number, name in enumerate("abc"):
        is_from_source = samples.arrays["source"] == number
        alone = ArraySource({k: v[is_from_source] for k, v in everything.arrays.items()})
        for metric, value in evaluate(plain, iter_eval_batches(alone, 5)).items():
            assert metrics[f"{name}/{metric}"] == pytest.approx(value, rel=1e-6)


def test_sums_of_two_ranks_add_up_and_rows_stay_in_order() -> None:
    samples, subject = build_source(), engine(task=PerSourceMetrics(inner=PaddedToy(), names=("a", "b", "c")))
    single = [subject.eval_step(batch) for batch in iter_eval_batches(samples, 8)]
    ranks = [
        [subject.eval_step(batch) for batch in iter_eval_batches(samples, 8, data_rank=r, data_size=2)]
        for r in range(2)
    ]
    for step, (sums, rows) in enumerate(single):
        results = [rank[step] for rank in ranks]
        for name, (total, count) in sums.items():
            assert float(sum(result.sums[name][0] for result in results)) == pytest.approx(
                float(total), rel=1e-5, abs=1e-7
            )
            assert float(sum(result.sums[name][1] for result in results)) == float(count)
        joined = torch.cat([result.rows["first"] for result in results])
        assert torch.equal(joined, rows["first"])
        assert [list(result.sums) for result in results] == [
            list(sums)
        ] * 2  # ranks are reduced in the order of the names


def test_source_index_does_not_affect_training() -> None:
    batch = next(iter_eval_batches(build_source(), 8))
    inner, outer = engine(task=PaddedToy()), engine(task=PerSourceMetrics(inner=PaddedToy(), names=("a", "b", "c")))
    plain = {name: value for name, value in batch.items() if name not in ("source", "index")}
    for subject, inputs in ((inner, plain), (outer, {**plain, "source": batch["source"]})):
        subject.train_step(0, inputs)
    for a, b in zip(inner.model.parameters(), outer.model.parameters(), strict=True):
        assert torch.equal(a, b)


# The matrix


def test_transfer_metrics_of_a_worked_example() -> None:
    matrix = np.array([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.5, 0.85, 0.7]])
    metrics = compute_transfer_metrics(matrix, maximise=True)
    assert metrics["average"] == pytest.approx((0.5 + 0.85 + 0.7) / 3)
    assert metrics["backward_transfer"] == pytest.approx(((0.5 - 0.9) + (0.85 - 0.8)) / 2)
    assert metrics["forgetting"] == pytest.approx(((0.9 - 0.5) + (0.8 - 0.85)) / 2)
    # A rising loss is negative transfer too.
    assert compute_transfer_metrics(1 - matrix, maximise=False)["backward_transfer"] == pytest.approx(
        metrics["backward_transfer"]
    )
    assert compute_transfer_metrics(1 - matrix, maximise=False)["forgetting"] == pytest.approx(metrics["forgetting"])


def test_matrix_is_recorded_at_source_ends_and_survives_a_resume() -> None:
    progress = Progress(total=9)
    matrix = ForgettingMatrix(("a", "b"), BestMetric("accuracy", maximise=True))
    matrix.first_steps = (0, 4)
    matrix.start(progress)
    for step, a, b in ((2, 0.1, 0.1), (4, 0.8, 0.2)):
        progress.step = step
        measured = {"accuracy": 0.5, "a/accuracy": a, "b/accuracy": b}
        assert matrix.summarise(measured) == measured
    resumed = ForgettingMatrix(("a", "b"), BestMetric("accuracy", maximise=True))
    resumed.first_steps = (0, 4)
    resumed.load_state_dict(json.loads(json.dumps(matrix.state_dict())))
    resumed.start(progress)
    progress.step = 9
    metrics = resumed.summarise({"accuracy": 0.5, "a/accuracy": 0.5, "b/accuracy": 0.9})
    assert resumed.matrix == [[0.8, 0.2], [0.5, 0.9]]
    assert metrics["backward_transfer"] == pytest.approx(-0.3)
    resumed.load_state_dict({})
    assert resumed.matrix == [[None, None], [None, None]]


# Elastic weight consolidation


def test_fisher_is_the_mean_of_squared_per_example_gradients() -> None:
    subject, samples = engine(task=Toy(dropout=0.5)), source(samples=7)
    names = [name for name, _ in subject.model.named_parameters()]
    subject.model.first.weight.requires_grad_(False)  # as if it were unfrozen later
    single = [(i, samples.rows(np.array([i]), np.array([0]))) for i in range(7)]
    fisher = fisher_diagonal(subject, single, count=7, names=names)
    assert not subject.model.first.weight.requires_grad

    model, expected = subject.model.eval().requires_grad_(True), dict.fromkeys(names, 0.0)
    for number, batch in single:
        model.zero_grad()
        rng = Noise(subject.seed, FISHER_STEP, torch.tensor([number]), torch)
        out = subject.task.loss({"model": model}, {k: torch.from_numpy(v) for k, v in batch.items()}, rng)
        sum_terms(out.terms, subject.task.counts(batch)).backward()
        for name, p in model.named_parameters():
            expected[name] = expected[name] + p.grad**2 / 7
    for name in names:
        torch.testing.assert_close(fisher[name], expected[name], rtol=1e-5, atol=1e-12)
    assert all(float(f.sum()) > 0 for f in fisher.values())
    # The sums of two ranks with every other example each add up to the same.
    halves = [fisher_diagonal(subject, single[rank::2], count=7, names=names) for rank in range(2)]
    for name in names:
        torch.testing.assert_close(halves[0][name] + halves[1][name], fisher[name], rtol=1e-5, atol=1e-12)


def test_fisher_of_an_fp16_run_is_computed_in_fp32() -> None:
    """Below 6e-8 fp16 underflows, and no loss scale is used here."""
    samples, fisher = source(samples=5), {}
    single = [(i, samples.rows(np.array([i]), np.array([0]))) for i in range(5)]
    for precision in (torch.float32, torch.float16, torch.bfloat16):
        subject = engine(task=TinyLossToy())
        subject.dtype = precision
        fisher[precision] = fisher_diagonal(
            subject, single, count=5, names=[n for n, _ in subject.model.named_parameters()]
        )
    for name, expected in fisher[torch.float32].items():
        assert float(expected.sum()) > 0
        assert torch.equal(fisher[torch.float16][name], expected)
    assert any(
        not torch.equal(fisher[torch.bfloat16][name], expected) for name, expected in fisher[torch.float32].items()
    )


class TinyLossToy(Toy):
    """A tiny loss, as for one of many thousand tokens."""

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        terms = super().loss(models, batch, rng).terms
        return Loss(terms={name: (1e-7 * total, weight) for name, (total, weight) in terms.items()})


def test_penalty_gradient_is_proportional_to_importance() -> None:
    task = Ewc(inner=Toy(), strength=3.0)
    subject = engine(task=task)
    named = dict(subject.model.named_parameters())
    assert set(subject.task_state()) == {f"{kind}/{name}" for kind in ("fisher", "anchor") for name in named}
    penalty = task.penalty(named, subject.task_state())
    assert penalty.item() == 0.0
    importance = {name: torch.rand_like(p) for name, p in named.items()}
    subject.write_task_state(consolidate(subject.task_state(), named, importance, decay=0.5))
    anchors = {name: p.detach().clone() for name, p in named.items()}
    with torch.no_grad():
        for p in named.values():
            p.add_(0.1)
    gradients = torch.autograd.grad(task.penalty(named, subject.task_state()), list(named.values()))
    for (name, p), gradient in zip(named.items(), gradients, strict=True):
        torch.testing.assert_close(gradient, 3.0 * importance[name] * (p - anchors[name]))
    subject.write_task_state(consolidate(subject.task_state(), named, importance, decay=0.5))
    for name, p in named.items():
        torch.testing.assert_close(subject.task_state()[f"fisher/{name}"], 1.5 * importance[name])
        assert torch.equal(subject.task_state()[f"anchor/{name}"], p)


# Runs


def language(folder: Path) -> dict[str, Any]:
    paths = [small_run.write_text(folder / f"{i}.txt", seed=i, words=words) for i, words in enumerate((600, 400))]
    changes = {"data.sources": [{"path": str(path)} for path in paths], "data.validation.split": 0.2}
    values = {**small_run.settings(folder, paths[0]), **changes, "data.train.path": None}
    return {key: value for key, value in values.items() if key != "data.train.path"}


def split_by_class(values: dict[str, Any], first: list[str], second: list[str]) -> dict[str, Any]:
    path = values["data.train.path"]
    sources = [{"path": path, "labels": first, "name": "early"}, {"path": path, "labels": second, "name": "late"}]
    remaining = {key: value for key, value in values.items() if not key.startswith("data.train")}
    return {**remaining, "data.train": {}, "data.sources": sources}


def classify(folder: Path) -> dict[str, Any]:
    values = small_texts.settings(folder, "cnn", **{"model.word_dropout": 0.2, "data.split": None})
    return split_by_class(values, ["cook", "sail"], ["sing"])


def image(folder: Path) -> dict[str, Any]:
    return split_by_class(small_media.image(folder), ["dark", "grey"], ["bright"])


CASES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "language": ("language/shakespeare", language),
    "classify": ("classify", classify),
    "image": ("image", image),
}


def train(case: str, folder: Path, **changes: Any) -> Any:
    recipe, settings = CASES[case]
    return bottega.train(recipe, {**settings(folder), "name": "run", "data.mixture": "sequence", **changes})


@pytest.mark.parametrize("case", CASES)
def test_resume_around_source_boundaries_is_bitwise_equal(case: str, tmp_path: Path) -> None:
    changes = {"techniques": EWC_AND_REPLAY, "checkpoint.every": 1, "checkpoint.keep": 20, "evaluation.every": 7}
    run = train(case, tmp_path, **changes)
    matrix = json.loads((run.path / "forgetting.json").read_text())
    assert (run.path / "forgetting.png").stat().st_size > 1000
    names = matrix["sources"]
    assert names == (["source-0", "source-1"] if case == "language" else ["early", "late"])
    assert {f"{name}/loss" for name in names} <= set(run.metrics)
    assert run.metrics["backward_transfer"] == pytest.approx(matrix["backward_transfer"])
    evaluated = small_run.read_logged_steps(run.path, "eval")
    (boundary,) = set(evaluated) - {7, 8}  # the first step of the second source
    assert 0 < boundary < 8
    uninterrupted = tmp_path / "whole"
    shutil.move(run.path, uninterrupted)
    for last in (boundary, boundary + 1):
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(uninterrupted, run.path, symlinks=True)
        (run.path / "forgetting.json").unlink()
        for folder in (run.path / "checkpoints").glob("step-*"):
            if int(folder.name.removeprefix("step-")) > last:
                shutil.rmtree(folder)
        train(case, tmp_path, **changes)
        assert find_difference(uninterrupted, run.path) is None, last
        assert json.loads((run.path / "forgetting.json").read_text()) == matrix


def test_ewc_has_no_effect_before_the_first_source_boundary(tmp_path: Path) -> None:
    """Bitwise equal to the plain run up to the second source, and different after it."""
    states = {}
    for name, techniques in (("plain", []), ("ewc", EWC_AND_REPLAY[:1])):
        changes = {"checkpoint.every": 1, "checkpoint.keep": 20, "techniques": techniques}
        run = train("classify", tmp_path, **changes, name=name)
        boundary = (set(small_run.read_logged_steps(run.path, "eval")) - {4, 8}).pop()
        for step in (boundary, boundary + 2):  # at the boundary itself the weights are the anchors
            folder = run.path / "checkpoints" / f"step-{step:08d}"
            tensors = {f: load_file(folder / f"{f}.safetensors") for f in ("model", "optimizer")}
            states[name, step] = {f"{f}/{n}": a for f in tensors for n, a in tensors[f].items()}
    assert small_run.differing_tensors(states["plain", boundary], states["ewc", boundary]) == []
    assert small_run.differing_tensors(states["plain", boundary + 2], states["ewc", boundary + 2])
    rows = [json.loads(line) for line in (tmp_path / "ewc" / "metrics.jsonl").read_text().splitlines()]
    penalties = {row["step"]: row["penalty"] for row in rows if row["kind"] == "train"}
    assert {penalties[step] for step in range(1, boundary + 2)} == {0.0}
    assert min(penalties[step] for step in range(boundary + 2, 9)) > 0


def test_limited_validation_still_covers_every_source(tmp_path: Path) -> None:
    run = train("classify", tmp_path, **{"data.validation.limit": 6, "evaluation.max_batches": 1})
    assert np.isfinite([run.metrics[f"{name}/accuracy"] for name in ("early", "late")]).all()
    saved = bottega.load(run.path)
    held_out: Source = saved.workload.data.validation()
    assert isinstance(held_out, Take)
    assert len(held_out) == 6
    result = bottega.evaluate(run.path)
    assert result["metrics"]["accuracy"] >= 0


def test_evaluation_rows_name_the_right_examples(tmp_path: Path) -> None:
    from bottega.analysis.classifier_predictions import ClassifierPredictions

    saved = bottega.load(train("classify", tmp_path).path)
    _, rows, held_out = saved.evaluate_data(saved.select_data(DataRequest()))
    lines = ClassifierPredictions(rows, held_out, tuple(saved.workload.classes.names)).to_rows()
    table = saved.workload.data.prepared.table("validation")
    labels = {table.row("key", i): table.row("label", i) for i in range(len(table))}
    assert {line["key"]: line["label"] for line in lines} == labels


def test_one_epoch_visits_each_source_once(tmp_path: Path) -> None:
    run = train(
        "classify", tmp_path, **{"training.max_steps": None, "training.num_epochs": 1, "training.batch_size": 7}
    )
    saved = bottega.load(run.path)
    sizes = [saved.workload.data.prepared.tables[f"train.{i}"]["rows"] for i in range(2)]
    assert run.step == sum(-(-size // 7) for size in sizes)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"data.mixture": None, "techniques": ["ewc"]},
            UsageError,
            "ewc needs sources .* set data.mixture: sequence",
        ),
        ({"data.mixture": None, "techniques": ["replay"]}, UsageError, "replay needs sources"),
        ({"data.sources": [{"kind": "embedded"}]}, UsageError, "a sequence needs two or more data.sources"),
        ({"data.replay.path": "x"}, UsageError, "cannot be combined with mixture: sequence"),
        (
            {"training.max_steps": 1},
            UsageError,
            r"data.sources\[.\] has .* samples, which is less than one step of a run of 1 steps",
        ),
        (
            {"data.validation.split": 1e-9, "data.split": {"by": "hash"}},
            DataError,
            "which is split by itself in a sequence: splitting .* by hash leaves no row for validation",
        ),
    ],
)
def test_invalid_sequence_is_refused(
    changes: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        train("classify", tmp_path, **changes)


def test_duplicate_source_names_are_refused(tmp_path: Path) -> None:
    values = classify(tmp_path)
    twice = [{**source, "name": "same"} for source in values["data.sources"]]
    with pytest.raises(UsageError, match="2 are named same"):
        train("classify", tmp_path, **{"data.sources": twice})


def test_missing_validation_disables_the_forgetting_matrix_with_a_message(tmp_path: Path) -> None:
    run = train("classify", tmp_path, **{"data.validation": None})
    assert "forgetting is not measured" in (run.path / "log.txt").read_text()
    assert not (run.path / "forgetting.json").exists()


def test_changing_the_schedule_on_resume_is_refused(tmp_path: Path) -> None:
    train("classify", tmp_path)
    for changes in ({"training.max_steps": 12}, {"training.batch_size": 4}):
        with pytest.raises(UsageError, match="was started with another recipe"):
            train("classify", tmp_path, **changes)


# Claims


def train_digits(folder: Path, name: str, seed: int, techniques: list[Any]) -> None:
    source = {"kind": "embedded"}
    sources = [{**source, "labels": list(range(5))}, {**source, "labels": list(range(5, 10))}]
    values = {
        "output_dir": str(folder),
        "name": f"{name}-s{seed}",
        "seed": seed,
        "techniques": techniques,
        "model.hidden_size": 8,
        "data.train": {},
        "data.sources": sources,
        "data.mixture": "sequence",
        "training.max_steps": 60,
        "training.batch_size": 32,
        "training.scheduler": {"name": "constant", "warmup_steps": 5},
        "evaluation.every": 60,
        "logging.tensorboard": False,
        "logging.report": False,
        "logging.resources": False,
    }
    bottega.train("classify/image", values)


@pytest.mark.slow
def test_ewc_and_replay_forget_less_than_plain_training_at_equal_steps(tmp_path: Path) -> None:
    """Digits 0 to 4, then 5 to 9, with one head for all ten: five seeds each."""
    for seed in range(5):
        train_digits(tmp_path, "plain", seed, [])
        train_digits(tmp_path, "ewc", seed, [{"name": "ewc", "options": {"samples": 128}}])
        train_digits(tmp_path, "replay", seed, ["replay"])
    groups = [str(tmp_path / f"{name}-s*") for name in ("plain", "ewc", "replay")]
    for metric in ("backward_transfer", "average"):
        report = compare(groups, metric=metric)
        for pair in report["pairs"][:2]:
            assert pair["difference"] > 0, pair["verdict"]
            assert pair["p_adjusted"] < 0.05, pair["verdict"]
