"""Recall: the data can be answered from what it states alone, memory is the only way there, and it lasts."""

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
from bottega.models.several import shared_layers
from bottega.run.compose import build_engine, build_loader, set_learning_rate_schedule
from bottega.tasks import registry
from bottega.tasks.recall.task import RecallFacts, RecallStreams
from bottega.tasks.recipes import load_recipe
from small_run import environment, tensors

TOKENS = Tokens(num_keys=10, num_values=5, num_fillers=3)
STREAMS = Streams(TOKENS, 12, 3, 4, 3, seed=1, first=0, count=40)
FACTS = Facts(Tokens(44, 6, 3), 4, 12, 8, 2, 2, 3, seed=1, count=50)


def every(source: Any, count: int | None = None) -> dict[str, np.ndarray]:
    """The rows of a source one after the other, beyond the end of an epoch where asked for."""
    numbers = np.arange(count or len(source))
    return source.rows(numbers % len(source), numbers // len(source))


def pairs(tokens: np.ndarray, known: Tokens) -> list[tuple[int, int]]:
    """(key, value) of what a segment states, read off its tokens."""
    first = 1 + known.num_keys
    found = []
    for here, after in zip(tokens.tolist(), tokens.tolist()[1:], strict=False):
        if 1 <= here < first <= after < first + known.num_values:
            found.append((here - 1, after - first))
    return found


# The data


def test_a_stream_is_answered_by_who_remembers_its_first_segment() -> None:
    rows = every(STREAMS)
    assert rows["tokens"].shape == rows["answers"].shape == (40, 4, 12)
    assert (rows["answers"][:, 0] == IGNORE_INDEX).all(), "nothing is asked while it is in sight"
    for tokens, answers in zip(rows["tokens"], rows["answers"], strict=True):
        facts = dict(pairs(tokens[0], TOKENS))
        assert len(facts) == 4
        for segment in range(1, 4):
            assert pairs(tokens[segment], TOKENS) == [], "and nothing is said again"
            asked = np.flatnonzero(answers[segment] != IGNORE_INDEX)
            assert len(asked) == 3
            for place in asked:
                assert tokens[segment, place - 1] == QUERY_TOKEN
                assert answers[segment, place] == facts[int(tokens[segment, place]) - 1]


def test_a_stream_is_a_function_of_its_number() -> None:
    whole = every(STREAMS)["tokens"]
    backwards = STREAMS.rows(np.arange(40)[::-1], np.full(40, 3))["tokens"]
    np.testing.assert_array_equal(whole, backwards[::-1])
    held_out = Streams(TOKENS, 12, 3, 4, 3, seed=1, first=40, count=40)
    assert not (every(held_out)["tokens"][:, None] == whole).all(axis=(2, 3)).any()
    assert held_out.fingerprint != STREAMS.fingerprint


def test_every_value_is_as_likely_as_the_others() -> None:
    answers = every(Streams(TOKENS, 12, 3, 4, 3, seed=0, first=0, count=3000))["answers"]
    shares = np.bincount(answers[answers != IGNORE_INDEX], minlength=5) / (answers != IGNORE_INDEX).sum()
    assert shares == pytest.approx([0.2] * 5, abs=0.02)


def test_facts_are_answered_by_who_remembers_the_last_statement() -> None:
    rows = every(FACTS, 200)
    known: dict[int, int] = {}
    right = changed = asked_ever = 0
    for number in range(200):
        for place in np.flatnonzero(rows["answers"][number] != IGNORE_INDEX):
            key = int(rows["tokens"][number, place]) - 1
            assert key < FACTS.num_changing, "what lasts is never asked for here"
            asked_ever += number >= 2 * FACTS.distance
            right += number >= 2 * FACTS.distance and known.get(key) == rows["answers"][number, place]
        stated = pairs(rows["tokens"][number], FACTS.tokens)
        assert len(stated) >= 3
        carried = rows["stated"][number] - [1, 1 + FACTS.tokens.num_keys]
        assert {tuple(pair) for pair in carried.tolist()} <= set(stated)
        for key, value in carried.tolist():
            changed += known.get(key, value) != value
            known[key] = value
    assert right == asked_ever > 300
    assert changed > 50, "and values do change"


def test_what_was_never_stated_has_no_answer() -> None:
    rows = every(FACTS, 60)
    known: set[int] = set()
    answered = []
    for number in range(60):
        asked = np.flatnonzero(rows["tokens"][number] == QUERY_TOKEN) + 1
        for place in asked:
            is_known = int(rows["tokens"][number, place]) in known
            assert (rows["answers"][number, place] != IGNORE_INDEX) == is_known
            answered.append((number, is_known))
        known |= set(rows["stated"][number, :, 0].tolist())
    assert not any(is_known for number, is_known in answered if number < FACTS.distance)
    assert all(is_known for number, is_known in answered if number >= 2 * FACTS.distance)
    task = RecallFacts.model_construct()
    first = {name: array[: FACTS.distance] for name, array in rows.items()}
    assert task.counts(first) == {"loss": 0.0}


def test_a_statement_is_asked_for_long_before_the_key_is_stated_anew() -> None:
    rows = every(FACTS, 300)
    last: dict[int, int] = {}
    gaps = []
    for number in range(300):
        gaps += [number - last[key] for key in rows["asked"][number].tolist() if key in last]
        last |= dict.fromkeys(rows["stated"][number, :, 0].tolist(), number)
    assert set(gaps) == set(range(FACTS.distance, 2 * FACTS.distance))


def test_what_lasts_is_stated_alike_in_every_epoch_and_asked_for_elsewhere() -> None:
    rows, first = every(FACTS, 200), FACTS.num_changing + 1
    said = {tuple(pair) for pair in rows["stated"].reshape(-1, 2).tolist() if pair[0] >= first}
    assert len(said) == 4, "one value each"
    asked = every(Lasting(FACTS, 2))
    for tokens, answers in zip(asked["tokens"], asked["answers"], strict=True):
        for place in np.flatnonzero(answers != IGNORE_INDEX):
            assert (tokens[place], answers[place] + 1 + FACTS.tokens.num_keys) in said
    assert not pairs(asked["tokens"].reshape(-1), FACTS.tokens)


# The models


def streams_task(folder: Path, **changes: Any) -> RecallStreams:
    recipe = load_recipe(["recall", small_recall.settings(folder, **changes)]).recipe
    task = registry.open_workload(recipe, progress=None).task
    assert isinstance(task, RecallStreams)
    return task


def test_a_stream_in_parts_is_the_stream_as_a_whole(tmp_path: Path) -> None:
    """Memory is an argument and a result, and all that passes."""
    model = build_models(streams_task(tmp_path), 0)["model"].eval()
    tokens = torch.randint(0, 15, (3, 5, 4))
    whole, end = model(tokens)
    memory, parts = None, []
    for segment in range(5):
        scores, memory = model(tokens[:, segment : segment + 1], memory, clock=segment)
        parts.append(scores)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert (end.time == 4).all(), "and a tick is a segment"
    for a, b in zip(memory, end, strict=True):
        torch.testing.assert_close(a, b)


def test_without_memory_a_segment_knows_of_no_other(tmp_path: Path) -> None:
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
    rows = every(Streams(Tokens(6, 4, 4), 4, 2, 1, 2, seed=0, first=0, count=8))
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    total, _ = task.loss({"model": model}, batch, None).terms["loss"]  # type: ignore[arg-type]
    total.backward()
    memory = {name: p.grad for name, p in model.named_parameters() if name.startswith("memory")}
    assert len(memory) == 7
    assert all(grad is not None and grad.abs().sum() > 0 for grad in memory.values())


@pytest.mark.parametrize("kind", ["transformer", "ssm", "hybrid"])
def test_its_trunk_is_that_of_a_language_model(tmp_path: Path, kind: str) -> None:
    """So that a run of several tasks can share it."""
    task = streams_task(tmp_path, **{"model.kind": kind, "model.num_layers": 3})
    language = Transformer(task.shape.model_copy(update={"vocab_size": 99}))
    plan = shared_layers({"recall": build_models(task, 0)["model"], "language": language})
    assert {name.partition(".")[0] for name in plan} == {"layers"}
    # The last layer of a language model with one table for reading and telling is its own.
    assert {name.split(".")[1] for name in plan} >= {"0", "1"}


def facts_task(folder: Path, **changes: Any) -> RecallFacts:
    recipe = load_recipe(["recall/lasting", small_recall.lasting(folder, **changes)]).recipe
    task = registry.open_workload(recipe, progress=None).task
    assert isinstance(task, RecallFacts)
    return task


def test_the_update_stores_what_was_stated_in_order(tmp_path: Path) -> None:
    task = facts_task(tmp_path)
    model = build_models(task, 0)["model"]
    now = dict(model.named_buffers())
    stated = torch.tensor([[[1, 11]], [[2, 12]], [[1, 13]]])
    before = {name: tensor.clone() for name, tensor in now.items()}
    new = task.update(now, {"stated": stated, "asked": torch.tensor([[1], [2], [3]])}, Noise(0, 4, ()))
    assert all(torch.equal(before[name], now[name]) for name in before), "pure"
    assert {f"memory.{name}" for name in memories.flatten_memory(model.memory.state())} == set(new)
    memory = memories.unflatten_memory({name.removeprefix("memory."): tensor for name, tensor in new.items()})
    found = memories.search(memory, model.codes[torch.tensor([1, 2, 3])], 1, same=0.95)
    assert torch.equal(found.values[:2, 0], model.codes[torch.tensor([13, 12])]), "the last one counts"
    assert found.scores[2, 0] < 0.95
    assert memory.episodic.written[memory.episodic.valid].tolist() == [4, 4]


def test_a_forward_changes_no_memory(tmp_path: Path) -> None:
    model = build_models(facts_task(tmp_path), 0)["model"]
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model(torch.randint(0, 15, (2, 8)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_buffers())


def test_codes_are_a_function_of_the_seed_and_in_no_checkpoint(tmp_path: Path) -> None:
    task = facts_task(tmp_path)
    a, b, c = (build_models(task, seed)["model"] for seed in (0, 0, 1))
    assert torch.equal(a.codes, b.codes)
    assert not torch.equal(a.codes, c.codes)
    assert "codes" not in a.state_dict()


# What a person can type


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
def test_what_cannot_be_is_said_in_one_line(
    recipe: str, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:

    assert cli.main(["plan", "--check", recipe, *settings]) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(message, said), said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2


def test_every_process_may_bring_a_batch_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are, a recipe need not say; batch_size alone is of all of them together."""
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


def test_a_run_keeps_its_memory_and_is_evaluated_with_it(lasting_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = bottega.load(lasting_run, checkpoint="last")
    assert len(memories.flatten_memory(saved.model.memory.state())) == 14
    assert saved.model.memory.state().semantic.valid.sum() == 4
    rows = [json.loads(line) for line in (lasting_run / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["kind"] == "eval"][-1]
    capsys.readouterr()
    assert cli.main(["evaluate", str(lasting_run), "--checkpoint", "last", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["metrics"]
    assert said == pytest.approx({name: measured[name] for name in said}, rel=1e-6)
    assert set(said) == {"loss", "retrieval_accuracy", "retrieval_accuracy_without_memory"}
    assert "predicted v" in (lasting_run / "samples" / "step-00000008" / "00.txt").read_text()


def test_an_export_has_everything_that_answers(lasting_run: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(lasting_run), "--out", str(tmp_path / "out")]) == 0
    held = load_file(tmp_path / "out" / "model.safetensors")
    saved = bottega.load(lasting_run)
    assert set(held) == {*saved.model.state_dict(), "codes"}
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
def test_verbs_that_make_no_sense_say_so(
    lasting_run: Path, verb: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("a line\n")
    assert cli.main([verb[0], str(lasting_run), *verb[1:]]) == 2
    assert message in capsys.readouterr().err


def test_there_is_nothing_to_prepare(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", "recall"]) == 2
    assert "is generated during training" in capsys.readouterr().err


# What it is for


def trained(recipe: str, steps: int, folder: Path, **changes: Any) -> dict[str, float]:
    """As the recipe has it, for fewer steps; the measures of what is held out."""
    settings = {"output_dir": str(folder), "training.max_steps": steps, "device": "cpu", **changes}
    one = load_recipe([recipe, settings]).recipe
    workload = registry.open_workload(one, progress=None)
    engine = build_engine(one, workload.task)
    loader = build_loader(one, workload.data.training(), engine, workload.data.order)
    set_learning_rate_schedule(one, engine, total=steps, steps_per_epoch=100)
    stream = loader(0)
    for step in range(steps):
        engine.train_step(step, next(stream))
    source = workload.data.validation()
    assert source is not None
    return evaluate(engine, iter_eval_batches(source, 250))


SHORT = {"data.distance": 4, "data.segment_length": 16, "data.num_pairs": 3, "data.num_samples": 8000}


@pytest.mark.slow
def test_memory_answers_and_nothing_else_does(tmp_path: Path) -> None:
    """Half as far as the recipe goes, and so half as dear; a guess is right once in 16."""
    found = trained("recall", 120, tmp_path, **SHORT)
    assert found["retrieval_accuracy"] >= 0.95
    assert all(found[f"distance_{d}/retrieval_accuracy"] >= 0.95 for d in range(1, 5))
    assert found["retrieval_accuracy_without_memory"] < 0.12
    bare = trained("recall", 80, tmp_path, **SHORT, **{"model.memory": None})
    assert bare["retrieval_accuracy"] < 0.12


@pytest.mark.slow
def test_facts_outlive_the_sequence_that_stated_them(tmp_path: Path) -> None:
    found = trained("recall/lasting", 300, tmp_path)
    assert found["retrieval_accuracy"] >= 0.95
    assert found["retrieval_accuracy_without_memory"] < 0.3, "32 questions, and a guess is right once in 16"


@pytest.mark.slow
def test_two_ranks_remember_what_one_does(tmp_path: Path) -> None:

    alone = bottega.train("recall/lasting", small_recall.lasting(tmp_path, name="one")).path
    keys = {**small_recall.lasting(tmp_path), "name": "two"}
    words = [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in keys.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "bottega", "train", "recall/lasting", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    a, b = tensors(alone), tensors(tmp_path / "two")
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=2e-6, err_msg=name)
