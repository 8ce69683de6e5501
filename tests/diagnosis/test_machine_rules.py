"""Rules about modules and the machine on constructed logs and on records of runs on a GPU.

The folders of tests/diagnosis/gpu are from runs of a language model of a million parameters on one NVIDIA H200, in three seeds,
with fewer fields and digits (tools/record_gpu_runs.py): one had micro-batches of 1, then, as advised, one of 32, and then a
batch of 512; one used 94 % of the memory and then half of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bottega.diagnosis import modules as module_rules
from bottega.tasks.recipes import check_recipe, parse_overrides
from recorded_run import apply_all, find, write_recorded_run

GPU_RUNS = Path(__file__).parent / "gpu"
SEEDS = ("", "-seed-1", "-seed-2")


def write_dead(folder: Path, fraction: float, *, gradient_norm: float = 1.0, **options: Any) -> Path:
    statistics = {
        "layers.0": {"gradient_norm": gradient_norm, "update_ratio": 2e-3, "dead_fraction": fraction},
        "head": {"gradient_norm": gradient_norm, "update_ratio": 2e-3, "dead_fraction": 0.0},
    }
    return write_recorded_run(folder, modules=statistics, **options)


@pytest.mark.parametrize(("fraction", "is_ill"), [(0.39, False), (0.4, True)])
def test_dead_units(tmp_path: Path, fraction: float, is_ill: bool) -> None:
    finding = find(write_dead(tmp_path / "run", fraction), "dead-units")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.evidence == "40 % of the units of layers.0 have no gradient"
        assert finding.steps == (210, 400)
        assert finding.override == "training.learning_rate=0.0001"


def test_units_that_are_dead_at_the_start_only_do_not_count(tmp_path: Path) -> None:
    run = write_dead(tmp_path / "run", 0.0)
    rows = [json.loads(line) for line in (run / "modules.jsonl").read_text().splitlines()]
    for row in rows[: len(rows) // 2]:
        row["modules"]["layers.0"]["dead_fraction"] = 1.0
    (run / "modules.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find(run, "dead-units") is None


def test_loss_of_zero_does_not_make_units_dead(tmp_path: Path) -> None:
    assert find(write_dead(tmp_path / "run", 1.0, gradient_norm=0.0), "dead-units") is None


def test_few_rows_of_modules_are_not_judged(tmp_path: Path) -> None:
    run = write_dead(tmp_path / "run", 1.0)
    lines = (run / "modules.jsonl").read_text().splitlines()
    (run / "modules.jsonl").write_text("\n".join(lines[: module_rules.MIN_MODULE_ROWS - 1]) + "\n")
    assert apply_all(run).not_checked["dead-units"] == "3 rows of modules.jsonl with dead_fraction, at least 4 needed"


@pytest.mark.parametrize(
    ("settings", "recipe", "override"),
    [
        ({"model.spike_threshold": 20.0}, "classify/spiking", "model.spike_threshold=1"),
        ({"model.spike_threshold": None}, "classify/spiking", "model.firing_rate=0.1"),
        ({"model.spike_threshold": 1.0}, "routing", "model.firing_rate=0.1"),
        ({"model.router": "spiking"}, "language/shakespeare-moe", "model.router=linear"),
    ],
)
def test_silent_spiking_units(tmp_path: Path, settings: dict[str, Any], recipe: str, override: str) -> None:
    for name, dead, is_ill in (("few", 0.39, False), ("many", 0.4, True)):
        validation = {"loss": [1.0, 0.5], "dead": [0.9, dead]}
        finding = find(write_recorded_run(tmp_path / name, validation=validation, settings=settings), "dead-units")
        assert (finding is not None) == is_ill
    assert finding is not None
    assert finding.evidence == "40 % of the spiking units fire for no validation sample"
    assert finding.override == override
    base = {"data.train.path": "texts.txt"} if recipe.startswith("language") else {}
    check_recipe([recipe, base], parse_overrides([override])[1])


def test_units_with_a_target_rate_are_not_advised_one(tmp_path: Path) -> None:
    settings = {"model.spike_threshold": 1.0, "model.firing_rate": 0.1}
    run = write_recorded_run(tmp_path / "run", validation={"loss": [1.0], "dead": [0.9]}, settings=settings)
    assert find(run, "dead-units") is None


def find_collapse(
    folder: Path, entropies: Sequence[float], settings: Mapping[str, Any], *, kind: str = "eval", task: str = "routing"
) -> Any:
    validation: dict[str, Sequence[float]] = {"loss": [1.0] * len(entropies)}
    if kind == "eval":
        validation |= {"load_entropy": entropies, "load/0": [0.9] * len(entropies), "load/1": [0.01] * len(entropies)}
    run = write_recorded_run(folder, validation=validation, settings={"task": task, **settings})
    if kind == "train":
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": 400, "kind": "train", "loss": 0.2, "load_entropy": entropies[-1]}) + "\n")
    return find(run, "collapsed-experts")


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_collapsed_experts(tmp_path: Path, kind: str) -> None:
    """Eight experts count as 8^entropy, of which 4.8 are the limit: an entropy of 0.7543."""
    settings = {"model.num_experts": 8}
    assert find_collapse(tmp_path / "even", [0.5, 0.755], settings, kind=kind) is None
    finding = find_collapse(tmp_path / "uneven", [0.9, 0.754], settings, kind=kind)
    assert finding is not None
    assert "the load of 8 experts has an entropy of 0.75, as if 4.8 shared it evenly" in finding.evidence
    assert ("1 of them get less than a tenth of their share" in finding.evidence) == (kind == "eval")


def test_single_expert_cannot_collapse(tmp_path: Path) -> None:
    assert find_collapse(tmp_path / "run", [0.0], {"model.num_experts": 1}) is None


@pytest.mark.parametrize(
    ("task", "settings", "override"),
    [
        ("routing", {"model.balance": "none"}, "model.balance=loss model.load_balancing_weight=0.1"),
        ("routing", {"model.load_balancing_weight": 0.2}, "model.balance=loss model.load_balancing_weight=2"),
        ("language", {"model.kind": "moe"}, "model.balance=loss model.balance_weight=0.1"),
    ],
)
def test_collapsed_experts_suggest_a_balancing_loss(
    tmp_path: Path, task: str, settings: dict[str, Any], override: str
) -> None:
    finding = find_collapse(tmp_path / "run", [0.2], {"model.num_experts": 8, **settings}, task=task)
    assert finding is not None
    assert finding.override == override
    recipe = "language/shakespeare-moe" if task == "language" else task
    check_recipe([recipe, {"data.train.path": "texts.txt"}], parse_overrides(override.split())[1])


def test_collapsed_experts_explain_dead_units(tmp_path: Path) -> None:
    settings = {"task": "routing", "model.num_experts": 8}
    run = write_dead(tmp_path / "run", 0.9, validation={"load_entropy": [0.2]}, settings=settings)
    assert [finding.name for finding in apply_all(run).findings] == ["collapsed-experts"]


def write_waiting(folder: Path, waits: Sequence[float], **settings: Any) -> Path:
    run = write_recorded_run(folder, settings=settings)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"][: len(waits)]
    rows = [{**row, "data_wait": wait} for row, wait in zip(train, waits, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.parametrize(("wait", "is_ill"), [(0.19, False), (0.2, True)])
def test_slow_data(tmp_path: Path, wait: float, is_ill: bool) -> None:
    finding = find(write_waiting(tmp_path / "run", [0.9, wait, wait, wait]), "slow-data")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.evidence == "20 % of the time was spent waiting for data"
        assert finding.steps == (20, 40)


def test_start_of_worker_processes_is_not_slow_data(tmp_path: Path) -> None:
    assert find(write_waiting(tmp_path / "run", [1.0, 0.0, 0.0]), "slow-data") is None


@pytest.mark.parametrize(
    ("settings", "cores", "override"),
    [
        ({"data.workers": 0}, 2, "data.workers=2"),
        ({"data.workers": 0}, 64, "data.workers=10"),
        ({"data.workers": 4}, 64, "data.workers=8"),
        ({"data.workers": 3}, 4, "data.workers=4"),
        ({"data.workers": 4}, 4, "data.workers=8"),
        ({"data.workers": 0, "data.store": "encoded"}, 8, "data.store=decoded"),
    ],
)
def test_slow_data_suggests_workers_or_decoded_images(
    tmp_path: Path, settings: dict[str, Any], cores: int, override: str
) -> None:
    run = write_waiting(tmp_path / "run", [0.9] * 4, **settings)
    (run / "environment.json").write_text(json.dumps({"steps": 400, "device": "cpu", "cores": cores}))
    finding = find(run, "slow-data")
    assert finding is not None
    assert finding.override == override
    check_recipe(*parse_overrides(["classify/image", override]))


def copy_gpu_run(name: str, folder: Path) -> Path:
    return shutil.copytree(GPU_RUNS / name, folder / name)


def set_gpu_percent(run: Path, percent: float) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "gpu_percent": percent} if row["kind"] == "train" else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("micro-batch-of-1", "training.micro_batch_size=auto"),
        ("batch-of-32", "training.batch_size=512"),
        ("batch-of-512", None),
        ("full-memory", None),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_idle_gpu_of_recorded_runs(tmp_path: Path, name: str, seed: str, override: str | None) -> None:
    finding = find(copy_gpu_run(f"{name}{seed}", tmp_path), "idle-gpu")
    assert (finding.override if finding is not None else None) == override
    if finding is not None:
        assert "and 0 % was spent waiting for data" in finding.evidence
        check_recipe(*parse_overrides(["language", override or ""]))


@pytest.mark.parametrize(("percent", "is_ill"), [(29.9, True), (30.0, False)])
def test_idle_gpu(tmp_path: Path, percent: float, is_ill: bool) -> None:
    run = copy_gpu_run("batch-of-32", tmp_path)
    set_gpu_percent(run, percent)
    assert (find(run, "idle-gpu") is not None) == is_ill


@pytest.mark.parametrize(
    ("changes", "data", "override"),
    [
        ({"batch_size: 32": "batch_size: 32", "compile: auto": "compile: false"}, {}, "training.compile=true"),
        (
            {"gradient_accumulation_steps: null": "gradient_accumulation_steps: 4"},
            {},
            "training.batch_size=128 training.gradient_accumulation_steps=1 training.micro_batch_size=auto",
        ),
        ({}, {"splits": {"train": 100}}, "training.batch_size=100"),
    ],
)
def test_idle_gpu_suggests_larger_pieces_of_work(
    tmp_path: Path, changes: dict[str, str], data: dict[str, Any], override: str
) -> None:
    run = copy_gpu_run("batch-of-32", tmp_path)
    text = (run / "recipe.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (run / "recipe.yaml").write_text(text)
    (run / "data.json").write_text(json.dumps(data))
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert finding.override == override


@pytest.mark.parametrize(
    ("flags", "is_advised"), [([0.0], True), ([0.0, 1.0], False), ([1.0, 0.0], True), ([1.0], False)]
)
def test_idle_gpu_that_auto_did_not_compile(tmp_path: Path, flags: list[float], is_advised: bool) -> None:
    """The last steps count: `auto` may compile in the middle of a run, or give it up."""
    run = copy_gpu_run("batch-of-32", tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        if row["kind"] == "train":
            row["compiled"] = flags[min(number // 3, len(flags) - 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert (finding.override == "training.compile=true") == is_advised
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("compile: auto", "compile: true"))
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert finding.override != "training.compile=true", "it was asked for, and the compiler failed"


def test_idle_gpu_whose_compiler_failed_is_not_told_to_compile(tmp_path: Path) -> None:
    run = copy_gpu_run("batch-of-32", tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    failure = {"compiled": 0.0, "compile_failed": 1.0}
    lines = (json.dumps({**row, **failure} if row["kind"] == "train" else row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text("".join(lines))
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert finding.override != "training.compile=true"


def test_gpu_that_waits_for_data_is_slow_data(tmp_path: Path) -> None:
    run = copy_gpu_run("batch-of-32", tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, "data_wait": 0.6}) + "\n" for row in rows))
    names = [finding.name for finding in apply_all(run).findings]
    assert "slow-data" in names
    assert "idle-gpu" not in names


def test_gpu_without_sensors_is_not_judged(tmp_path: Path) -> None:
    run = copy_gpu_run("batch-of-32", tmp_path)
    text = (run / "metrics.jsonl").read_text().replace("gpu_percent", "other")
    (run / "metrics.jsonl").write_text(text)
    assert "install the extra gpu" in apply_all(run).not_checked["idle-gpu"]


@pytest.mark.parametrize(
    ("seed", "peak", "micro_batch_size"), [("", 131.4, 13800), ("-seed-1", 132.1, 27750), ("-seed-2", 132.0, 27750)]
)
def test_memory_pressure_of_recorded_runs(tmp_path: Path, seed: str, peak: float, micro_batch_size: int) -> None:
    finding = find(copy_gpu_run(f"full-memory{seed}", tmp_path), "memory-pressure")
    assert finding is not None
    assert finding.evidence == f"the peak was {peak} GiB of 139.8 GiB of cuda:0 NVIDIA H200"
    assert finding.override == f"training.micro_batch_size={micro_batch_size}"
    assert find(copy_gpu_run(f"half-memory{seed}", tmp_path), "memory-pressure") is None


def write_memory(run: Path, *, peak: int, total: int = 1000, activations: int = 900, optimizer: int = 0) -> None:
    categories = {"activations and workspace": activations, "optimizer": optimizer}
    use = {"device": "cpu", "peak": peak, "total": total, "categories": categories}
    (run / "memory.json").write_text(json.dumps(use))


@pytest.mark.parametrize(("peak", "is_ill"), [(919, False), (920, True)])
def test_memory_pressure(tmp_path: Path, peak: int, is_ill: bool) -> None:
    run = write_recorded_run(tmp_path / "run", settings={"training.batch_size": 1})
    write_memory(run, peak=peak)
    finding = find(run, "memory-pressure")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("settings", "activations", "optimizer", "override"),
    [
        ({"training.batch_size": 7}, 900, 0, "training.micro_batch_size=4"),
        ({"training.micro_batch_size": 2, "training.batch_size": 64}, 900, 0, "training.micro_batch_size=1"),
        ({"training.micro_batch_size": "auto"}, 900, 0, "training.gradient_checkpointing=true"),
        ({"training.batch_size": 64}, 200, 200, "training.optimizer.name=adafactor"),
        ({"training.batch_size": 64}, 200, 100, "training.micro_batch_size=32"),
        (
            {"training.batch_size": 1, "training.gradient_checkpointing": True, "data.sequence_length": 64},
            900,
            0,
            "data.sequence_length=32",
        ),
        ({"training.batch_size": 1, "training.gradient_checkpointing": True}, 900, 0, None),
    ],
)
def test_memory_pressure_suggests_what_takes_most(
    tmp_path: Path, settings: dict[str, Any], activations: int, optimizer: int, override: str | None
) -> None:
    run = write_recorded_run(tmp_path / "run", settings=settings)
    write_memory(run, peak=950, activations=activations, optimizer=optimizer)
    finding = find(run, "memory-pressure")
    assert finding is not None
    assert finding.override == override
    assert ("try" in finding.format_line()) == (override is not None)
    check_recipe(*parse_overrides(["classify", *([override] if override else [])]))


@pytest.mark.parametrize(
    ("settings", "data", "peak", "override"),
    [
        ({}, {}, 40, "training.batch_size=512"),
        ({}, {}, 300, "training.batch_size=96"),
        ({}, {}, 470, None),
        ({"task": "recall", "data.distance": 128}, {}, 40, "training.batch_size=128"),
        ({"task": "recall", "data.distance": 40}, {}, 40, None),
        ({}, {"splits": {"train": 40}}, 40, None),
    ],
)
def test_larger_batch_is_suggested_within_memory_data_and_distance(
    tmp_path: Path, settings: dict[str, Any], data: dict[str, Any], peak: int, override: str | None
) -> None:
    run = write_recorded_run(tmp_path / "run", settings={"training.batch_size": 32, **settings}, data=data)
    (run / "environment.json").write_text(json.dumps({"steps": 400, "device": "cuda:0"}))
    set_gpu_percent(run, 10.0)
    write_memory(run, peak=peak)
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert finding.override == override


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "accumulation", "override"),
    [
        (64, 8, None, "training.batch_size=512"),  # eight samples on each of eight processes: one pass already
        (64, 4, None, "training.micro_batch_size=auto"),
        (8, None, 4, "training.batch_size=32 training.gradient_accumulation_steps=1 training.micro_batch_size=auto"),
    ],
)
def test_idle_gpus_of_several_processes(
    tmp_path: Path, batch_size: int, micro_batch_size: int | None, accumulation: int | None, override: str
) -> None:
    settings = {
        "training.batch_size": batch_size,
        "training.micro_batch_size": micro_batch_size,
        "training.gradient_accumulation_steps": accumulation,
    }
    run = write_recorded_run(tmp_path / "run", settings=settings)
    (run / "environment.json").write_text(json.dumps({"steps": 400, "device": "cuda:0", "world": 8}))
    set_gpu_percent(run, 20.0)
    finding = find(run, "idle-gpu")
    assert finding is not None
    assert finding.override == override


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"training.batch_size": 64}, "training.micro_batch_size=4"),
        ({"training.batch_size": 8, "training.gradient_accumulation_steps": 4}, "training.micro_batch_size=4"),
        (
            {
                "training.batch_size": 8,
                "training.gradient_accumulation_steps": 4,
                "training.micro_batch_size": 16,
            },
            "training.micro_batch_size=8",
        ),
        ({"training.batch_size": 32, "training.micro_batch_size": 700}, "training.micro_batch_size=2"),
    ],
)
def test_memory_pressure_halves_the_samples_of_one_pass(
    tmp_path: Path, settings: dict[str, Any], override: str
) -> None:
    run = write_recorded_run(tmp_path / "run", settings=settings)
    (run / "environment.json").write_text(json.dumps({"steps": 400, "device": "cuda:0", "world": 8}))
    write_memory(run, peak=950)
    finding = find(run, "memory-pressure")
    assert finding is not None
    assert finding.override == override


@pytest.mark.parametrize(("num_samples", "override"), [(10**6, "data.store=decoded"), (1000, "data.workers=2")])
def test_images_that_auto_stores_encoded_are_to_be_decoded(tmp_path: Path, num_samples: int, override: str) -> None:
    """A million images of 64 x 64 pixels take 11 GiB, more than are decoded by default."""
    settings = {"data.store": "auto", "data.image_size": 64, "data.channels": 3}
    run = write_waiting(tmp_path / "run", [0.9] * 4, **settings)
    (run / "data.json").write_text(json.dumps({"splits": {"train": num_samples}}))
    finding = find(run, "slow-data")
    assert finding is not None
    assert finding.override == override


def test_run_that_ran_out_of_memory(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", settings={"training.batch_size": 64})
    (run / "log.txt").write_text("2026-01-01 10:00:00 ERROR out of memory on cuda:0 with a micro-batch of 64\n")
    finding = find(run, "memory-pressure")
    assert finding is not None
    assert finding.evidence == "training ended because it was out of memory"
    assert finding.override == "training.micro_batch_size=32"
    write_memory(run, peak=500)  # before the allocation that failed
    finding = find(run, "memory-pressure")
    assert finding is not None
    assert finding.evidence == "training ended because it was out of memory and the peak was 500 B of 1000 B of cpu"


def test_memory_of_a_running_run_is_not_judged(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run")
    assert apply_all(run).not_checked["memory-pressure"] == "memory.json is written when training ends"
