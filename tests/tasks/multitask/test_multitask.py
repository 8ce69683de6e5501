"""Several tasks in one run: training, evaluation, use and export of each part, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

import bottega
import small_multitask
import small_texts
from bottega import cli
from bottega.analysis.ledger import list_step_samples
from bottega.core.errors import BottegaError, DataError, UsageError
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches
from bottega.engines.torch.engine import TorchEngine
from bottega.metrics_log import read_metrics
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.multitask.data import MultitaskData
from bottega.tasks.multitask.sampler import select_part
from bottega.tasks.recipes import load_recipe
from small_media import image
from small_run import differing_tensors, read_tensors


def train(folder: Path, **changes: Any) -> Any:
    return bottega.train(["multitask", small_multitask.settings(folder)], changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("parts"), name="both").path


def refusal_message(folder: Path, **changes: Any) -> str:
    with pytest.raises(BottegaError) as caught:
        train(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("weights", ["fixed", "uncertainty", "pcgrad"])
def test_resume_is_bitwise_equal(weights: str, tmp_path: Path) -> None:
    options = {"data.weights": weights, "training.scheduler.name": "constant", "training.ema": 0.9}
    uninterrupted = train(tmp_path / "a", name="x", **options)
    train(tmp_path / "b", name="x", **options, **{"training.max_steps": 4})
    resumed = train(tmp_path / "b", name="x", **options)
    assert differing_tensors(read_tensors(uninterrupted.path), read_tensors(resumed.path)) == []
    rows = [r for r in read_metrics(uninterrupted.path / "metrics.jsonl") if r["kind"] == "train"]
    assert ("gradient_cosine" in rows[0]) == (weights == "pcgrad")
    assert ("text/weight" in rows[0]) == ("penalty" in rows[0]) == (weights == "uncertainty")


def test_splits_of_the_part_that_shares_most_held_out_data_are_compared() -> None:
    def build_part(validation: float, test: float) -> Any:
        comparison = {
            "key": "data",
            "train": {"share": 0.1},
            "validation": {"share": validation},
            "test": {"share": test},
        }
        return SimpleNamespace(data=SimpleNamespace(compare_splits=lambda: comparison))

    data = SimpleNamespace(parts={"a": build_part(0.1, 0.0), "b": build_part(0.0, 0.4)})
    assert MultitaskData.compare_splits(data)["key"] == "data.parts.b.settings.data"  # type: ignore[arg-type]


def test_evaluation_has_the_metrics_of_each_part_and_the_weighted_loss(run: Path) -> None:
    metrics = bottega.load(run).evaluate()
    assert list(metrics)[:3] == ["loss", "text/perplexity", "topics/accuracy"], "the recipe's metrics come first"
    assert metrics["loss"] == pytest.approx(0.5 * metrics["text/loss"] + metrics["topics/loss"])
    assert {"text/bits_per_byte", "topics/macro_f1", "topics/auroc"} <= metrics.keys()
    last = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "eval"][-1]
    assert {key: last[key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


def test_each_part_is_evaluated_as_it_would_be_alone(run: Path) -> None:
    """Each on its own validation samples, 4 and 24 of them."""
    saved = bottega.load(run)
    metrics = saved.evaluate()
    sizes = {name: len(part.data.validation() or ()) for name, part in saved.workload.parts.items()}
    assert len(set(sizes.values())) == 2
    for name, part in saved.workload.parts.items():
        engine = TorchEngine(part.task, saved.recipe.training, rate=lambda step: 0.0, device="cpu")
        engine.model.load_state_dict(saved.model.part(name).state_dict())
        source = part.data.validation()
        assert source is not None
        own_metrics = evaluate(engine, iter_eval_batches(source, 3), score=part.task.score)
        for key, value in part.summarise(own_metrics).items():
            assert metrics[f"{name}/{key}"] == pytest.approx(value, rel=1e-5), key


def test_parts_generate_predict_and_export(run: Path, tmp_path: Path, capsys: Any) -> None:
    saved = bottega.load(run)
    (text,) = saved.generate("alpha", max_tokens=4, part="text")
    assert text.startswith("alpha")
    assert saved.generate("alpha", max_tokens=4) == [text], "only one part generates"
    (row,) = bottega.predict(run, ["mast and rope"])
    assert row["predicted"] in small_texts.WORDS
    assert cli.main(["predict", str(run), "mast", "--part", "topics"]) == 0
    assert cli.main(["generate", str(run), "--part", "topics"]) == 2
    assert "--part text" in capsys.readouterr().err
    folder = saved.export(tmp_path / "out")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "text")
    assert model.config.hidden_size == 16
    exported = load_file(folder / "topics" / "model.safetensors")
    assert exported["embedding.weight"].tobytes() == model.model.embed_tokens.weight.detach().numpy().tobytes()


@pytest.mark.parametrize("name", [None, "topics"])
def test_run_without_a_capable_part_says_only_that(run: Path, name: str | None) -> None:
    parts = bottega.load(run).workload.parts
    with pytest.raises(UsageError, match=r"^no part of this run can generate$"):
        select_part(parts, name, is_able=lambda part: False, verb="generate")


def test_a_step_can_be_replayed(run: Path) -> None:
    report = list_step_samples(run, step=3, replay=True)
    assert report["described"][0].startswith("text: ")
    assert report["replay"]["loss"] > 0


def test_other_data_must_name_its_part(run: Path, tmp_path: Path) -> None:
    more = small_texts.write_texts(tmp_path, "more.jsonl", count=30, seed=9)
    metrics = bottega.load(run).evaluate(f"topics={more}")
    assert {name.partition("/")[0] for name in metrics} == {"loss", "topics"}
    with pytest.raises(UsageError, match="does not name a part of the recipe; write text=PATH or topics=PATH"):
        bottega.load(run).evaluate(more)


def test_a_run_stores_the_recipes_of_its_parts(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("extends: classify/transformer\ndata: {sequence_length: 32}\n")
    options = {"name": "x", "data.parts.topics.recipe": str(own)}
    path = train(tmp_path, **options).path
    own.write_text("extends: classify/transformer\ndata: {sequence_length: 32, label_field: other}\n")
    assert bottega.load(path).evaluate()["topics/accuracy"] >= 0
    with pytest.raises(BottegaError, match=r"data\.parts\.topics: .*label"):
        train(tmp_path, **options, **{"training.max_steps": 9})
    own.write_text("extends: classify/transformer\ndata: {sequence_length: 32}\nmodel: {attention_dropout: 0.3}\n")
    with pytest.raises(
        DataError, match=r"data\.parts\.topics: model\.attention_dropout changed from None to 0\.3 since this run"
    ):
        train(tmp_path, **options, **{"training.max_steps": 9})


def test_text_parts_share_one_tokenizer(tmp_path: Path) -> None:
    run = train(tmp_path, name="x", **{"data.tokenizer.kind": "bpe", "data.tokenizer.vocab_size": 270})
    assert json.loads((run.path / "processor" / "parts.json").read_text())["given_tokenizer"] == ["topics"]
    workload = bottega.load(run.path).workload
    assert workload.parts["text"].tokenizer.fingerprint == workload.parts["topics"].tokenizer.fingerprint
    assert "text, topics" in (run.path / "log.txt").read_text(), "the log lists the parts that share layers"
    state = read_tensors(run.path)
    assert state["model.safetensors/shared.embedding.weight"].shape == (270, 16)


def test_two_image_classifiers_share_their_convolutions(tmp_path: Path) -> None:
    shared = {k: v for k, v in image(tmp_path).items() if k.startswith("data.")}
    part_settings = {"recipe": "classify/image", "settings": shared}
    without_defaults = dict.fromkeys(("data.parts.text", "data.parts.topics"))
    parts = {"data.parts.a": part_settings, "data.parts.b": {**part_settings, "weight": 2.0}}
    sizes = {"model.hidden_size": 8, "model.num_layers": 1, "model.num_heads": None, "data.tokenizer": None}
    run = train(tmp_path, name="pictures", **without_defaults, **parts, **sizes)
    names = {name for name in read_tensors(run.path) if name.startswith("model.")}
    assert "model.safetensors/shared.stem.weight" in names
    assert {name for name in names if "head.weight" in name} == {
        f"model.safetensors/parts.{part}.head.weight" for part in "ab"
    }


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"data.parts.topics": None}, "data.parts: expected at least two tasks, got text"),
    (
        {"data.parts.topics.recipe": "clasify"},
        "data.parts.topics: clasify: no bundled recipe of this name; did you mean",
    ),
    ({"data.parts.topics.settings.model.kind": "cnn"}, "its model shares no layer with another part"),
    (
        {"data.parts.topics.metric": "acuracy"},
        "data.parts.topics.metric: acuracy is not measured; did you mean accuracy?",
    ),
    ({"data.parts.topics.recipe": "multitask"}, "data.parts.topics: a part cannot be of task multitask; it can be"),
    ({"data.parts.topics.recipe": "personalize"}, "data.parts.topics: a part cannot be of task personalize; it can be"),
    ({"data.parts.weight": {"recipe": "classify"}}, "data.parts: 'weight' cannot name a part"),
    ({"data.train.path": "x.txt"}, "data.train: belongs to a part; set data.parts.NAME.settings.data.train"),
    ({"model.hidden_size": 15}, "model: hidden_size: 15 does not give each of 2 heads"),
    ({"techniques": ["ewc"]}, "techniques: ewc does not support several tasks; remove it"),
    ({"data.parts.topics.settings.techniques": ["lora"]}, "data.parts.topics: techniques cannot be combined with"),
    (
        {"data.parts.turns": {"recipe": "classify/continual", "settings": {"techniques": []}}},
        "data.parts.turns: data.mixture: sequence cannot be combined with several tasks; remove it from the part",
    ),
    (
        {"data.parts.topics.settings.model.word_dropout": 0.5},
        "data.parts.topics: model.word_dropout: 0.5 needs text and",
    ),
    ({"data.parts.topics.settings.data.train.path": "gone.jsonl"}, "data.parts.topics: "),
]


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=[next(iter(changes)) for changes, _ in INVALID])
def test_invalid_settings_are_refused_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal_message(tmp_path, **changes)


def test_dynamic_weights_mean_uncertainty() -> None:
    recipe = load_recipe(["multitask", {"data.weights": "dynamic"}]).recipe
    assert isinstance(recipe, MultitaskRecipe)
    assert recipe.data.weights == "uncertainty"
