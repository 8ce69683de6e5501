"""Recall: synthetic data that only memory can answer, models with working and lasting memory, and their runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bottega
import small_recall
from bottega import cli
from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches
from bottega.data.recall import IGNORE_INDEX, QUERY_TOKEN, Facts, Lasting, Streams, Tokens
from bottega.models.build import build_models
from bottega.models.decoder.torch import Transformer
from bottega.models.memory import torch as memories
from bottega.models.multitask import find_shared_layers
from bottega.run.compose import build_engine, build_loader, set_learning_rate_schedule
from bottega.tasks import registry
from bottega.tasks.recall.task import RecallFacts, RecallStreams
from bottega.tasks.recipes import load_recipe
from small_run import environment, read_tensors

TOKENS = Tokens(num_keys=10, num_values=5, num_fillers=3)
STREAMS = Streams(TOKENS, 12, 3, 4, 3, seed=1, first=0, count=40)
FACTS = Facts(Tokens(44, 6, 3), 4, 12, 8, 2, 2, 3, seed=1, count=50)


def read_rows(source: Any, count: int | None = None) -> dict[str, np.ndarray]:
    """Return the rows of a source in order; a `count` beyond its length continues into the next epochs."""
    indices = np.arange(count or len(source))
    return source.rows(indices % len(source), indices // len(source))


def stated_pairs(tokens: np.ndarray, vocabulary: Tokens) -> list[tuple[int, int]]:
    """Return the (key, value) pairs that a segment states, parsed from its tokens."""
    first = 1 + vocabulary.num_keys
    result = []
    for current, following in zip(tokens.tolist(), tokens.tolist()[1:], strict=False):
        if 1 <= current < first <= following < first + vocabulary.num_values:
            result.append((current - 1, following - first))
    return result


# The data


def test_answers_of_a_stream_follow_from_its_first_segment() -> None:
    rows = read_rows(STREAMS)
    assert rows["tokens"].shape == rows["answers"].shape == (40, 4, 12)
    assert (rows["answers"][:, 0] == IGNORE_INDEX).all(), "the first segment has no query"
    for tokens, answers in zip(rows["tokens"], rows["answers"], strict=True):
        values = dict(stated_pairs(tokens[0], TOKENS))
        assert len(values) == 4
        for segment in range(1, 4):
            assert stated_pairs(tokens[segment], TOKENS) == [], "facts are stated once"
            positions = np.flatnonzero(answers[segment] != IGNORE_INDEX)
            assert len(positions) == 3
            for position in positions:
                assert tokens[segment, position - 1] == QUERY_TOKEN
                assert answers[segment, position] == values[int(tokens[segment, position]) - 1]


def test_a_stream_is_a_function_of_its_index() -> None:
    in_order = read_rows(STREAMS)["tokens"]
    backwards = STREAMS.rows(np.arange(40)[::-1], np.full(40, 3))["tokens"]
    np.testing.assert_array_equal(in_order, backwards[::-1])
    held_out = Streams(TOKENS, 12, 3, 4, 3, seed=1, first=40, count=40)
    assert not (read_rows(held_out)["tokens"][:, None] == in_order).all(axis=(2, 3)).any()
    assert held_out.fingerprint != STREAMS.fingerprint


def test_values_are_uniformly_distributed() -> None:
    answers = read_rows(Streams(TOKENS, 12, 3, 4, 3, seed=0, first=0, count=3000))["answers"]
    fractions = np.bincount(answers[answers != IGNORE_INDEX], minlength=5) / (answers != IGNORE_INDEX).sum()
    assert fractions == pytest.approx([0.2] * 5, abs=0.02)


def test_answers_follow_from_the_last_statement_of_a_key() -> None:
    rows = read_rows(FACTS, 200)
    memory: dict[int, int] = {}
    correct = changed = queried = 0
    for number in range(200):
        for position in np.flatnonzero(rows["answers"][number] != IGNORE_INDEX):
            key = int(rows["tokens"][number, position]) - 1
            assert key < FACTS.num_changing, "lasting keys are not queried here"
            queried += number >= 2 * FACTS.distance
            correct += number >= 2 * FACTS.distance and memory.get(key) == rows["answers"][number, position]
        stated = stated_pairs(rows["tokens"][number], FACTS.tokens)
        assert len(stated) >= 3
        facts_of_segment = rows["stated"][number] - [1, 1 + FACTS.tokens.num_keys]
        assert {tuple(pair) for pair in facts_of_segment.tolist()} <= set(stated)
        for key, value in facts_of_segment.tolist():
            changed += memory.get(key, value) != value
            memory[key] = value
    assert correct == queried > 300
    assert changed > 50, "values must change for the test to mean anything"


def test_queries_of_unstated_keys_are_ignored() -> None:
    rows = read_rows(FACTS, 60)
    stated_keys: set[int] = set()
    answered = []
    for number in range(60):
        positions = np.flatnonzero(rows["tokens"][number] == QUERY_TOKEN) + 1
        for position in positions:
            is_stated = int(rows["tokens"][number, position]) in stated_keys
            assert (rows["answers"][number, position] != IGNORE_INDEX) == is_stated
            answered.append((number, is_stated))
        stated_keys |= set(rows["stated"][number, :, 0].tolist())
    assert not any(is_stated for number, is_stated in answered if number < FACTS.distance)
    assert all(is_stated for number, is_stated in answered if number >= 2 * FACTS.distance)
    task = RecallFacts.model_construct()
    first = {name: array[: FACTS.distance] for name, array in rows.items()}
    assert task.counts(first) == {"loss": 0.0}


def test_queries_come_one_to_two_distances_after_the_statement() -> None:
    rows = read_rows(FACTS, 300)
    last: dict[int, int] = {}
    gaps = []
    for number in range(300):
        gaps += [number - last[key] for key in rows["queried"][number].tolist() if key in last]
        last |= dict.fromkeys(rows["stated"][number, :, 0].tolist(), number)
    assert set(gaps) == set(range(FACTS.distance, 2 * FACTS.distance))


def test_lasting_facts_are_constant_and_queried_in_evaluation_only() -> None:
    rows, first = read_rows(FACTS, 200), FACTS.num_changing + 1
    stated = {tuple(pair) for pair in rows["stated"].reshape(-1, 2).tolist() if pair[0] >= first}
    assert len(stated) == 4, "one value for each lasting key"
    lasting = read_rows(Lasting(FACTS, 2))
    for tokens, answers in zip(lasting["tokens"], lasting["answers"], strict=True):
        for position in np.flatnonzero(answers != IGNORE_INDEX):
            assert (tokens[position], answers[position] + 1 + FACTS.tokens.num_keys) in stated
    assert not stated_pairs(lasting["tokens"].reshape(-1), FACTS.tokens)


# The models


def streams_task(folder: Path, **changes: Any) -> RecallStreams:
    recipe = load_recipe(["recall", small_recall.settings(folder, **changes)]).recipe
    task = registry.open_workload(recipe, progress=None).task
    assert isinstance(task, RecallStreams)
    return task


def test_a_stream_in_segments_equals_one_forward(tmp_path: Path) -> None:
    """Memory is an argument and a result, and the only state that passes between segments."""
    model = build_models(streams_task(tmp_path), 0)["model"].eval()
    tokens = torch.randint(0, 15, (3, 5, 4))
    expected, end = model(tokens)
    memory, parts = None, []
    for segment in range(5):
        scores, memory = model(tokens[:, segment : segment + 1], memory, clock=segment)
        parts.append(scores)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert (end.time == 4).all(), "time is counted in segments"
    for a, b in zip(memory, end, strict=True):
        torch.testing.assert_close(a, b)


def test_without_memory_segments_are_independent(tmp_path: Path) -> None:
    model = build_models(streams_task(tmp_path), 0)["model"].eval()
    tokens = torch.randint(0, 15, (2, 3, 4))
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 15
    assert torch.equal(model(tokens, with_memory=False)[0][:, 1:], model(other, with_memory=False)[0][:, 1:])
    assert not torch.equal(model(tokens)[0][:, 1:], model(other)[0][:, 1:])
    bare = build_models(streams_task(tmp_path, **{"model.memory": None}), 0)["model"].eval()
    assert torch.equal(bare(tokens)[0][:, 1:], bare(other)[0][:, 1:])
    assert [name for name, _ in bare.named_parameters() if "memory" in name] == []


@pytest.mark.parametrize("kind", ["transformer", "ssm", "hybrid"])
def test_a_segment_may_be_one_token_and_a_stream_one_segment(tmp_path: Path, kind: str) -> None:
    model = build_models(streams_task(tmp_path, **{"model.kind": kind}), 0)["model"].eval()
    scores, memory = model(torch.zeros(2, 1, 1, dtype=torch.long))
    assert scores.shape == (2, 1, 1, 4)
    assert memory.valid.sum(-1).tolist() == [1, 1]


def test_every_weight_of_a_memory_has_a_gradient(tmp_path: Path) -> None:
    task = streams_task(tmp_path)
    model = build_models(task, 0)["model"]
    rows = read_rows(Streams(Tokens(6, 4, 4), 4, 2, 1, 2, seed=0, first=0, count=8))
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    total, _ = task.loss({"model": model}, batch, None).terms["loss"]  # type: ignore[arg-type]
    total.backward()
    memory = {name: p.grad for name, p in model.named_parameters() if name.startswith("memory")}
    assert len(memory) == 7
    assert all(grad is not None and grad.abs().sum() > 0 for grad in memory.values())


@pytest.mark.parametrize("kind", ["transformer", "ssm", "hybrid"])
def test_the_trunk_is_shared_with_a_language_model(tmp_path: Path, kind: str) -> None:
    """A multi-task run can then share it."""
    task = streams_task(tmp_path, **{"model.kind": kind, "model.num_layers": 3})
    language = Transformer(task.shape.model_copy(update={"vocab_size": 99}))
    plan = find_shared_layers({"recall": build_models(task, 0)["model"], "language": language})
    assert {name.partition(".")[0] for name in plan} == {"layers"}
    # The last layer of a language model with tied embeddings is not shared.
    assert {name.split(".")[1] for name in plan} >= {"0", "1"}


def facts_task(folder: Path, **changes: Any) -> RecallFacts:
    recipe = load_recipe(["recall/lasting", small_recall.lasting(folder, **changes)]).recipe
    task = registry.open_workload(recipe, progress=None).task
    assert isinstance(task, RecallFacts)
    return task


def test_the_update_stores_what_was_stated_in_order(tmp_path: Path) -> None:
    task = facts_task(tmp_path)
    model = build_models(task, 0)["model"]
    buffers = dict(model.named_buffers())
    stated = torch.tensor([[[1, 11]], [[2, 12]], [[1, 13]]])
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    new = task.update(buffers, {"stated": stated, "queried": torch.tensor([[1], [2], [3]])}, Noise(0, 4, ()))
    assert all(torch.equal(before[name], buffers[name]) for name in before), "update must not modify its arguments"
    assert {f"memory.{name}" for name in memories.flatten_memory(model.memory.state())} == set(new)
    memory = memories.unflatten_memory({name.removeprefix("memory."): tensor for name, tensor in new.items()})
    matches = memories.search(memory, model.codes[torch.tensor([1, 2, 3])], 1, same=0.95)
    assert torch.equal(matches.values[:2, 0], model.codes[torch.tensor([13, 12])]), "the last statement of a key counts"
    assert matches.scores[2, 0] < 0.95
    assert memory.episodic.written[memory.episodic.valid].tolist() == [4, 4]


def test_a_forward_does_not_change_the_memory(tmp_path: Path) -> None:
    model = build_models(facts_task(tmp_path), 0)["model"]
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model(torch.randint(0, 15, (2, 8)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_buffers())


def test_codes_depend_on_the_seed_and_are_not_in_checkpoints(tmp_path: Path) -> None:
    task = facts_task(tmp_path)
    a, b, c = (build_models(task, seed)["model"] for seed in (0, 0, 1))
    assert torch.equal(a.codes, b.codes)
    assert not torch.equal(a.codes, c.codes)
    assert "codes" not in a.state_dict()


# Refusals


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("recall", ["data.distance=0"], r"data\.distance: expected a number above 0, got 0"),
        (
            "recall",
            ["data.segment_length=1"],
            "segment_length: 1 tokens cannot hold 4 facts of two tokens; raise it to 8",
        ),
        (
            "recall",
            ["data.num_pairs=17"],
            "segment_length: 32 tokens cannot hold 17 facts of two tokens; raise it to 34",
        ),
        ("recall", ["data.num_keys=3"], "num_pairs: 4 facts need 4 distinct keys, but num_keys is 3; raise num_keys"),
        ("recall", ["data.num_questions=17"], "cannot hold the queries as well; raise it to 34"),
        ("recall", ["data.train.path=mine.txt"], "the data of recall is generated"),
        ("recall", ["data.num_values=1"], "data.num_values"),
        ("recall", ["model.memory.working_slots=2"], "2 slots cannot hold the 4 facts of a stream; raise it to 4"),
        ("recall", ["model.memory.working_slots=0"], "model.memory.working_slots"),
        ("recall", ["model.memory.working_decay=1.5"], "model.memory.working_decay"),
        ("recall", ["model.hidden_size=30"], "30 does not give each of 4 heads an even number of channels"),
        ("recall", ["model.attention_every=2"], "attention_every applies to kind hybrid only"),
        (
            "recall/lasting",
            ["data.distance=8"],
            "a query 8 segments after its fact is in the same batch of 16.*raise it to 16",
        ),
        (
            "recall/lasting",
            ["training.gradient_accumulation_steps=10"],
            "a query 128 segments after its fact is in the same batch of 160.*raise it to 160",
        ),
        (
            "recall/lasting",
            ["training.gradient_accumulation_steps=5", "distributed.processes=2"],
            "a query 128 segments after its fact is in the same batch of 160.*raise it to 160",
        ),
        ("recall/lasting", ["data.num_keys=100"], "with 100 keys, a fact is restated before its last query"),
        (
            "recall/lasting",
            ["model.memory.episodic_slots=100"],
            "100 episodic and 64 semantic slots cannot hold 288 facts",
        ),
        ("recall/lasting", ["data.segment_length=5"], "cannot hold the queries as well; raise it to 6"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    recipe: str, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:

    assert cli.main(["plan", "--check", recipe, *settings]) == 2
    stderr = capsys.readouterr().err.strip()
    assert re.search(message, stderr), stderr
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) <= 2


def test_distance_is_checked_against_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """batch_size is global; with gradient accumulation it is per process, and WORLD_SIZE gives their number."""
    plain, own = ({"training.batch_size": 4}, {"training.batch_size": 2, "training.gradient_accumulation_steps": 2})
    for world, changes, is_refused in ((1, own, False), (2, plain, False), (2, own, True)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        if is_refused:
            with pytest.raises(
                UsageError, match=r"data\.distance: a query 4 segments after its fact is in the same batch of 8"
            ):
                facts_task(tmp_path, **changes)
        else:
            facts_task(tmp_path, **changes)


@pytest.fixture(scope="module")
def lasting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lasting")
    return bottega.train("recall/lasting", small_recall.lasting(folder, **{"samples.every": 8})).path


def test_checkpoints_hold_the_memory_that_evaluation_uses(
    lasting_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = bottega.load(lasting_run, checkpoint="last")
    assert len(memories.flatten_memory(saved.model.memory.state())) == 14
    assert saved.model.memory.state().semantic.valid.sum() == 4
    rows = [json.loads(line) for line in (lasting_run / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["kind"] == "eval"][-1]
    capsys.readouterr()
    assert cli.main(["evaluate", str(lasting_run), "--checkpoint", "last", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == pytest.approx({name: logged[name] for name in metrics}, rel=1e-6)
    assert set(metrics) == {"loss", "retrieval_accuracy", "retrieval_accuracy_without_memory"}
    assert "predicted v" in (lasting_run / "samples" / "step-00000008" / "00.txt").read_text()


def test_an_export_includes_memory_and_codes(lasting_run: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(lasting_run), "--out", str(tmp_path / "out")]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    saved = bottega.load(lasting_run)
    assert set(tensors) == {*saved.model.state_dict(), "codes"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "bottega-recall"
    assert config["memory"]["episodic_slots"] == 16


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (["generate"], "a recall model does not generate"),
        (["predict", "--data", "x.txt"], "is not a classifier"),
        (["evaluate", "--data", "x.txt"], "--data x.txt: the data of recall is generated"),
    ],
)
def test_unsupported_commands_are_refused(
    lasting_run: Path, verb: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("a line\n")
    assert cli.main([verb[0], str(lasting_run), *verb[1:]]) == 2
    assert message in capsys.readouterr().err


def test_prepare_is_refused_for_generated_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", "recall"]) == 2
    assert "is generated during training" in capsys.readouterr().err


# Quality


def train_recipe(recipe: str, steps: int, folder: Path, **changes: Any) -> dict[str, float]:
    """Train the recipe for `steps` steps and return the metrics on the held-out data."""
    settings = {"output_dir": str(folder), "training.max_steps": steps, "device": "cpu", **changes}
    loaded = load_recipe([recipe, settings]).recipe
    workload = registry.open_workload(loaded, progress=None)
    engine = build_engine(loaded, workload.task)
    loader = build_loader(loaded, workload.data.training(), engine, workload.data.order)
    set_learning_rate_schedule(loaded, engine, total=steps, steps_per_epoch=100)
    stream = loader(0)
    for step in range(steps):
        engine.train_step(step, next(stream))
    source = workload.data.validation()
    assert source is not None
    return evaluate(engine, iter_eval_batches(source, 250))


SHORT = {"data.distance": 4, "data.segment_length": 16, "data.num_pairs": 3, "data.num_samples": 8000}


@pytest.mark.slow
def test_recall_is_accurate_with_memory_only(tmp_path: Path) -> None:
    """Half the distance of the recipe, for half the cost; chance is 1 in 16."""
    metrics = train_recipe("recall", 120, tmp_path, **SHORT)
    assert metrics["retrieval_accuracy"] >= 0.95
    assert all(metrics[f"distance_{d}/retrieval_accuracy"] >= 0.95 for d in range(1, 5))
    assert metrics["retrieval_accuracy_without_memory"] < 0.12
    without_memory = train_recipe("recall", 80, tmp_path, **SHORT, **{"model.memory": None})
    assert without_memory["retrieval_accuracy"] < 0.12


@pytest.mark.slow
def test_lasting_memory_recalls_facts_of_earlier_sequences(tmp_path: Path) -> None:
    metrics = train_recipe("recall/lasting", 300, tmp_path)
    assert metrics["retrieval_accuracy"] >= 0.95
    assert metrics["retrieval_accuracy_without_memory"] < 0.3, "32 queries; chance is 1 in 16"


@pytest.mark.slow
def test_two_ranks_store_the_same_memory_as_one(tmp_path: Path) -> None:

    single = bottega.train("recall/lasting", small_recall.lasting(tmp_path, name="one")).path
    keys = {**small_recall.lasting(tmp_path), "name": "two"}
    assignments = [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in keys.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "bottega", "train", "recall/lasting", *assignments]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    a, b = read_tensors(single), read_tensors(tmp_path / "two")
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=2e-6, err_msg=name)
