"""Personalised runs: what they keep, whom they draw for, and between which frozen models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import small_personal
from bottega.analysis.memory import longest_batch
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError, DataError, UsageError
from bottega.data.image.canvas import Canvas
from bottega.models.build import build_models
from bottega.models.frozen.soft_prompts import SoftPrompts
from bottega.run.saved import SavedRun, open_run
from bottega.tasks.personalize.arms import ARMS, generate_arm
from bottega.tasks.personalize.clip_judge import MIN_COSINE, Scores, pick_best
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.personalize.contact_sheets import GeneratedRow, UserSummary, write_contact_sheet
from bottega.tasks.personalize.export import ExportConfig
from bottega.tasks.personalize.keywords import KeywordGenerator
from bottega.tasks.personalize.language_tokenizer import hash_prompt_files
from bottega.tasks.personalize.prompts import PromptBuilder
from bottega.tasks.personalize.user_requests import read_history
from bottega.tasks.recipes import load_recipe
from small_run import bottega, environment, tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return small_personal.train(folder, name="mine", **{"samples.every": 8, "training.learning_rate": 1e-2}).path


@pytest.fixture(scope="module")
def saved(run: Path) -> SavedRun:
    return open_run(run)


def asked(saved: SavedRun, **what: Any) -> Any:
    return saved.generate(**what)


# What a run keeps


def test_a_checkpoint_holds_the_soft_prompts_and_nothing_else(run: Path, saved: SavedRun) -> None:
    folder = checkpoint.read_link(run / "checkpoints", "last")
    assert folder is not None
    kept = load_file(folder / "model.safetensors")
    assert set(kept) == {"image_tokens", "prefix", "mapping.weight", "mapping.bias"}
    assert sum(array.size for array in kept.values()) == saved.workload.task.shape.num_parameters == 720
    assert "720 parameters" in (run / "log.txt").read_text(), "and the count is said"
    frozen = checkpoint.verify(folder).fingerprint["frozen"]
    parts = ("unet", "vae", "text_encoder", "tokens and schedule")
    names = {"language model", "language model's tokenizer", "CLIP", *(f"image generator's {part}" for part in parts)}
    assert set(frozen) == names, "and of the rest hashes alone"


def test_the_count_of_the_paper() -> None:
    from bottega.models.frozen.config import SoftPromptShape

    sizes = {"hidden_size": 4096, "num_layers": 32, "num_kv_heads": 32, "head_size": 128, "text_size": 768}
    assert SoftPromptShape(**sizes, num_image_tokens=2, num_prefix_tokens=2).num_parameters == 3_678_976


@pytest.fixture
def bases(tmp_path: Path) -> dict[str, Path]:
    """Copies of the frozen models that a test may damage."""
    return {name: Path(shutil.copytree(place, tmp_path / name)) for name, place in small_personal.models().items()}


def shaken(file: Path) -> None:
    tensors = {name: np.asarray(array) for name, array in load_file(file).items()}
    last = sorted(tensors)[-1]
    save_file({**tensors, last: tensors[last] + 1}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("language_model/model.safetensors", "language model"),
        ("diffusion/unet/diffusion_pytorch_model.safetensors", "image generator's unet"),
        ("diffusion/text_encoder/model.safetensors", "image generator's text_encoder"),
    ],
)
def test_another_base_is_refused(tmp_path: Path, bases: dict[str, Path], file: str, named: str) -> None:
    models = {f"model.{name}": str(place) for name, place in bases.items()}
    first = small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 4})
    shaken(tmp_path / file)
    key = f"model.{file.split('/')[0]}"
    with pytest.raises(CheckpointError, match=f"{key}: is not the {named} that this run started with"):
        small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 8})
    with pytest.raises(CheckpointError, match=r"is not the .* that this run was trained with; restore it"):
        open_run(first.path)


def test_a_judge_may_be_gone_but_not_another_and_a_base_may_move(tmp_path: Path, bases: dict[str, Path]) -> None:
    models = {f"model.{name}": str(place) for name, place in bases.items()}
    first = small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 4})
    shutil.move(bases["language_model"], tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"the language model of this run no longer exists: .*; restore it"):
        open_run(first.path)
    (tmp_path / "elsewhere").rename(bases["language_model"])
    facts: Any = open_run(first.path).workload.metadata  # type: ignore[attr-defined]
    assert facts.clip is not None
    shaken(bases["clip"] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is not the CLIP that this run was trained with"):
        open_run(first.path)  # which would pick and measure otherwise without a word
    with pytest.raises(CheckpointError, match=r"model\.clip: is not the CLIP that this run started with"):
        small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 8})
    shutil.rmtree(bases["clip"])
    facts = open_run(first.path).workload.metadata  # type: ignore[attr-defined]
    assert facts.clip is None


def test_weights_of_a_judge_that_were_cut_are_told_at_once(tmp_path: Path, bases: dict[str, Path]) -> None:
    file = bases["clip"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.clip: .*model\.safetensors is damaged"):
        small_personal.train(tmp_path, **{"model.clip": str(bases["clip"])})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model.diffusion": "/nowhere/at/all"}, UsageError, "model.diffusion: /nowhere/at/all is not a local folder"),
        (
            {"model.language_model": "/nowhere/at/all"},
            UsageError,
            "model.language_model: /nowhere/at/all is not a local folder",
        ),
        ({"data.image_size": 30}, UsageError, "data.image_size: 30 is not a multiple"),
        ({"data.sequence_length": 12}, UsageError, "data.sequence_length: 12 tokens cannot hold"),
        ({"model.weights.soft": 0.0}, UsageError, "model.weights.*nothing would be trained"),
        ({"samples.weightings": [{"soft": 0, "keywords": 0, "target": 0}]}, UsageError, "all weights are 0"),
        ({"samples.steps": 5000}, UsageError, "samples.steps 5000"),
        ({"model.start_words": [""]}, UsageError, "model.start_words: '' has no token"),
        ({"model.num_image_tokens": 100_000}, UsageError, "num_image_tokens .* lower these"),
        ({"data.min_score": 4}, UsageError, "data.min_score: applies to data.collection=flickr only"),
        ({"data.pictures": "nowhere"}, UsageError, "data.pictures: nowhere is not a folder"),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, changes: dict[str, Any], error: type[BottegaError], message: str
) -> None:
    with pytest.raises(error, match=message):
        small_personal.train(tmp_path, **changes)


def test_a_judge_that_cannot_judge_is_told_at_once(tmp_path: Path) -> None:
    """And not when the first sheet is drawn."""
    judge = Path(shutil.copytree(small_personal.models()["clip"], tmp_path / "clip"))
    (judge / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"model\.clip: .* has no tokenizer\.json"):
        small_personal.train(tmp_path, **{"model.clip": str(judge)})
    with pytest.raises(UsageError, match=r"model\.clip: .* contains a llama; a CLIP or SigLIP"):
        small_personal.train(tmp_path, **{"model.clip": str(small_personal.models()["language_model"])})


# Keywords, which training goes by


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A run of four steps, and what to say to go on to eight; nothing is known outside of it any more."""
    how: dict[str, Any] = {"name": "mine", "checkpoint.every": 2}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_personal.train(tmp_path, **{**how, "training.max_steps": 4})
    shutil.rmtree(tmp_path / "cache" / "bottega" / "keywords")
    return tmp_path / "mine", {**how, "training.max_steps": 8}


def test_a_run_goes_on_with_the_keywords_it_began_with(
    half: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, how = half
    monkeypatch.setattr(KeywordGenerator, "_decode", lambda *asked: pytest.fail("all answers are the run's own"))
    assert small_personal.train(run.parent, **how).step == 8


def test_what_the_run_began_with_counts_more_than_the_cache(
    half: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run on this machine may have been told otherwise; and a finished run draws by its own keywords too."""
    run, how = half
    other = lambda self, wanted, *asked: dict.fromkeys(wanted, ("blue", "moon"))  # noqa: E731
    monkeypatch.setattr(KeywordGenerator, "_decode", other)
    small_personal.train(run.parent, **{**how, "name": "other"})
    monkeypatch.setattr(KeywordGenerator, "_decode", lambda *asked: pytest.fail("all answers are the run's own"))
    assert small_personal.train(run.parent, **how).step == 8
    workload: Any = open_run(run).workload
    records = [workload.personal_rows("train").record(number) for number in range(24)]
    assert {said.preference for said in workload.keywords(records)} != {("blue", "moon")}


def test_other_keywords_of_the_same_data_are_refused(
    half: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, how = half
    (run / "processor" / "keywords.jsonl").unlink()
    monkeypatch.setattr(KeywordGenerator, "_decode", lambda self, wanted, *asked: dict.fromkeys(wanted, ("blue",)))
    with pytest.raises(DataError, match="the keywords that a model derives from the data differ"):
        small_personal.train(run.parent, **how)


def test_only_what_is_not_remembered_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def decode(self: KeywordGenerator, wanted: dict[str, Any], *more: Any) -> dict[str, tuple[str, ...]]:
        numbers.append(len(wanted))
        return dict.fromkeys(wanted, ("new",))

    monkeypatch.setattr(KeywordGenerator, "_decode", decode)
    by = KeywordGenerator(PromptBuilder(small_personal.models()["language_model"], Keywords()), cache=tmp_path)
    how: tuple[Any, ...] = (lambda: None, "cpu", lambda stage, done, total: None)
    by.targets(["a star"], *how)
    by.resumed = dict.fromkeys(by.answers, ("old",))
    assert by.targets(["a star", "a moon"], *how) == [("old",), ("new",)]
    assert numbers == [1, 1]


def test_answers_are_those_of_one_precision_and_kind_of_device(tmp_path: Path) -> None:
    folder = small_personal.models()["language_model"]
    prompts = PromptBuilder(folder, Keywords())
    caches = [
        KeywordGenerator(prompts, precision=precision, cache=tmp_path)._cache for precision in ("fp32", "bf16", "fp32")
    ]
    files = [cache.path("cpu") for cache in caches]
    assert files[0] == files[2] != files[1]
    assert caches[0].path("cuda:0") == caches[0].path("cuda:1") != files[0]


def test_how_a_conversation_is_written_is_a_part_of_the_language_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_personal.models()["language_model"], tmp_path / "llama"))
    before = hash_prompt_files(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert hash_prompt_files(folder) != before


def test_an_export_is_small_and_opens_again(run: Path, saved: SavedRun, tmp_path: Path) -> None:
    folder = saved.export(tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    config = ExportConfig.model_validate_json((folder / "config.json").read_bytes())
    published = load_file(folder / "model.safetensors")
    assert set(published) == set(SoftPrompts(config.shape).state_dict())
    for name, tensor in saved.model.state_dict().items():
        assert np.array_equal(published[name], tensor.numpy()), name
    recipe: Any = saved.recipe
    assert config.frozen["language_model"].contents == saved.workload.metadata.language_model.contents  # type: ignore[attr-defined]
    assert config.keywords == recipe.model.keywords
    assert config.samples == recipe.samples
    card = (folder / "README.md").read_text()
    for name, frozen in config.frozen.items():
        assert f"`{frozen.named}`" in card, f"who has the folder alone must know the {name}"
    assert card.count("needs") == 1
    for place in small_personal.models().values():
        assert str(place) not in (folder / "config.json").read_text(), "where things lie is nobody else's business"


@pytest.mark.slow
def test_two_ranks_train_the_soft_prompts_of_one(tmp_path: Path) -> None:
    """All that learns is used inside one call of the wrapped model, so its gradients are joined."""
    changes: dict[str, Any] = {"training.max_steps": 4, "model.keyword_dropout": 0.5, "name": "mine"}
    alone = small_personal.train(tmp_path, **changes).path
    other = tmp_path / "together"
    shutil.copytree(tmp_path / "people", other / "people")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    whole = [*launch, *small_personal.words(other, "--quiet", **changes)]
    done = subprocess.run(whole, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    a, b = tensors(alone), tensors(other / "mine")
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-5, atol=2e-6, err_msg=name)


# For whom


def test_the_same_seed_in_a_new_process_gives_the_same_pixels(run: Path, saved: SavedRun, tmp_path: Path) -> None:
    here = np.asarray(asked(saved, user="v3", wish="a star", count=2, seed=7))
    words = ["generate", str(run), "--user", "v3", "--wish", "a star", "--count", "2", "--seed", "7", "--json"]
    there = bottega([*words, "--out", str(tmp_path / "drawn")])
    assert there.returncode == 0, there.stderr
    told = json.loads(there.stdout)
    for number, one in enumerate(told["pictures"]):
        assert np.array_equal(np.asarray(Image.open(one["file"])), here[number])
        assert (one["user"], one["wish"]) == ("v3", "a star")
        assert set(one) == {"file", "user", "wish", "keywords", "weighting", "scores"}
    assert (tmp_path / "drawn" / "sheet.png").is_file()
    assert not np.array_equal(here, np.asarray(asked(saved, user="v3", wish="a star", count=2, seed=8)))


def test_trained_tokens_are_what_is_drawn_with(saved: SavedRun) -> None:
    trained = np.asarray(asked(saved, user="v3", count=1))
    before = {name: tensor.clone() for name, tensor in saved.model.state_dict().items()}
    try:
        saved.model.load_state_dict(build_models(saved.task, saved.recipe.seed)["model"].state_dict())
        assert not np.array_equal(trained, np.asarray(asked(saved, user="v3", count=1))), "untrained ones draw another"
    finally:
        saved.model.load_state_dict(before)
    assert np.array_equal(trained, np.asarray(asked(saved, user="v3", count=1)))


def test_users_and_wishes_are_drawn_in_turn(saved: SavedRun) -> None:
    made = asked(saved, user=["v3", "t1"], wish=["a star", "a moon"], count=2)
    assert [(one.user, one.wish) for one in made.choices[::2]] == [
        ("v3", "a star"),
        ("v3", "a moon"),
        ("t1", "a star"),
        ("t1", "a moon"),
    ]
    assert np.asarray(made).shape == made.shape == (8, small_personal.SIDE, small_personal.SIDE, 3)
    assert made.dtype == np.uint8
    assert repr(made) == "8 images of 32 x 32 for 2 users"
    assert np.array_equal(made[1:3], made.pictures[1:3])
    assert np.array_equal(np.stack(list(made)), made.pictures)
    assert asked(saved, user="v2", count=1).choices[0].wish == "a moon", "their own where none is said"
    assert [one.user for one in asked(saved).choices] == ["v0", "v1", "v2", "v3"], "and the first who are held out"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"user": "17"}, "user 17: not one of the 32 users of this run, such as v0, v1"),
        ({"user": "v1", "count": 0}, "count 0: expected 1 or more"),
        ({"user": "v1", "steps": 0}, "steps 0: expected 1 or more"),
        ({"user": "v1", "sampler": "fast"}, "sampler fast: expected euler, heun or dpm"),
        ({"user": "v1", "guidance": -1.0}, "guidance -1: expected 0 or more"),
        ({"user": "v1", "prompt": "a star"}, "prompt: this run does not support it; it takes user, wish, history"),
        ({"history": "nowhere.txt"}, "history nowhere.txt does not exist"),
    ],
)
def test_what_cannot_be_asked_is_one_line(saved: SavedRun, what: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(saved, **what)


def test_somebody_new_is_known_by_what_they_liked(saved: SavedRun, tmp_path: Path) -> None:
    lines, records = tmp_path / "liked.txt", tmp_path / "liked.jsonl"
    lines.write_text("a red star\n\na red moon\n")
    liked = [{"id": "a", "caption": "a red star"}, {"id": "b", "caption": "a red moon"}]
    records.write_text(json.dumps({"user": "new", "history": liked, "wish": "a moon"}) + "\n")
    by_lines = asked(saved, history=lines, wish="a moon", count=2)
    by_records = asked(saved, history=records, count=2)
    assert np.array_equal(np.asarray(by_lines), np.asarray(by_records))
    assert by_lines.choices[0].user == "liked"
    assert by_records.choices[0].user == "new"
    lines.write_text("a blue star\na blue moon\n")
    assert not np.array_equal(np.asarray(by_lines), np.asarray(asked(saved, history=lines, wish="a moon", count=2)))
    with pytest.raises(UsageError, match="has no wish; describe the image"):
        asked(saved, history=lines)
    with pytest.raises(UsageError, match="describes a new user"):
        asked(saved, history=lines, user="v1")
    records.write_text(json.dumps({"history": [{"id": "a"}], "wish": "a moon"}))
    with pytest.raises(DataError, match="the history needs at least one item, each with a caption"):
        asked(saved, history=records)
    records.write_text("[1")
    with pytest.raises(DataError, match="not valid JSON"):
        asked(saved, history=records)


def test_a_negative_prompt_is_led_away_from(saved: SavedRun) -> None:
    plain, away = (np.asarray(asked(saved, user="v1", count=1, negative_prompt=text)) for text in ("", "red square"))
    assert not np.array_equal(plain, away)


# Which of several


def test_the_best_candidate_has_the_best_of_both() -> None:
    candidates = [[Scores(0.2, 0.9), Scores(0.5, 0.5)], [Scores(0.6, 0.3), Scores(0.5, 0.5)]]
    assert pick_best(candidates, 1.0) == [1, 0], "preference alone, and of equal ones the first"
    assert pick_best(candidates, 0.0) == [0, 0]
    assert Scores(0.5, 0.25).total(2 / 3) == pytest.approx(2 / 3 * np.log(0.5) + 1 / 3 * np.log(0.25))
    assert Scores(-0.1, 0.5).total(1.0) == pytest.approx(np.log(MIN_COSINE)), "no cosine is below that"
    assert Scores(None, 0.5).total(1.0) == pytest.approx(np.log(0.5)), "the wish decides where no taste is known"


def test_candidates_are_judged_and_the_best_is_taken(saved: SavedRun) -> None:
    workload: Any = saved.workload
    records = [workload.personal_rows("validation").record(number) for number in range(4)]
    with saved.engine.sampling() as models:
        said = workload.keywords(records, models)
        how: dict[str, Any] = {"device": "cpu", "seed": 0, "progress": lambda stage, done, total: None}
        pictures, chosen, scores = workload.image_sampler.sample_best(models, records, said, **how)
        weightings = saved.recipe.samples.weightings
        every = [workload.image_sampler.sample_images(models, records, said, weights=one, **how) for one in weightings]
    for number, (weights, score) in enumerate(zip(chosen, scores, strict=True)):
        assert np.array_equal(pictures[number], every[weightings.index(weights)][number])
        asked_of = {"likes": [said[number].texts[0]], "wishes": [records[number].wish_or_caption]}
        seen = workload.image_sampler.load_judge("cpu").score_candidates(
            [one[number : number + 1] for one in every], **asked_of
        )
        totals = [one.total(2 / 3) for (one,) in seen]
        assert score.total(2 / 3) == pytest.approx(max(totals), abs=1e-5)


def test_without_a_judge_the_first_weighting_is_drawn_and_that_is_said(tmp_path: Path) -> None:
    run = small_personal.train(tmp_path, **{"model.clip": None, "training.max_steps": 4}).path
    made = open_run(run).generate(user="v1", count=2)
    assert {one.weighting for one in made.choices} == {open_run(run).recipe.samples.weightings[0]}
    told = made.write(tmp_path / "drawn")
    assert told["pictures"][0]["scores"] is None
    assert "model.clip is not set" in told["notes"][0]


# With more or less of what is known


def test_arms_differ_in_what_they_know_and_in_nothing_else(saved: SavedRun) -> None:
    workload: Any = saved.workload
    records = [workload.personal_rows("validation").record(number) for number in range(4)]
    others = [record.model_copy(update={"history": records[(n + 1) % 4].history}) for n, record in enumerate(records)]
    with saved.engine.sampling() as models:
        how: dict[str, Any] = {"device": "cpu", "seed": 0}
        drawn = {arm: generate_arm(workload, models, records, arm=arm, **how)[0] for arm in ARMS}
        of_others = {arm: generate_arm(workload, models, others, arm=arm, **how)[0] for arm in ("none", "soft")}
    assert len({array.tobytes() for array in drawn.values()}) == len(ARMS)
    assert np.array_equal(drawn["none"], of_others["none"]), "which knows no history"
    assert not np.array_equal(drawn["soft"], of_others["soft"])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"wish": ""}, "wish '': is blank"),
        ({"wish": ["a star", "  "]}, "is blank"),
        ({"wish": "x" * 2000}, "2,000 characters"),
        ({"count": 10**9, "user": "v1"}, "1,000,000,000 images are more than"),
    ],
)
def test_wishes_that_cannot_be_drawn(saved: SavedRun, what: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(saved, **what)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("anna.txt", "\n  \n", "the file is empty"),
        ("anna.txt", '{"user": "a"}', "name it .json or .jsonl"),
        ("anna.json", '{"history": ["a star"]}', "history.0 must be an item such as"),
        ("anna.json", '{"user": "a"}', "history is missing"),
        ("anna.json", '{"wish": " ", "history": [{"caption": "a star"}]}', "the wish is blank"),
    ],
)
def test_histories_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        read_history(tmp_path / name, wishes=["a star"])


def test_items_of_somebody_new_need_no_names(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"history": [{"caption": "a red star"}, {"caption": "a blue star"}]}')
    (person,) = read_history(tmp_path / "a.json", wishes=["a moon"])
    assert [item.caption for item in person.record.history] == ["a red star", "a blue star"]


# What people see


def test_a_sheet_of_held_out_people_is_drawn_while_training(run: Path) -> None:
    sheet = np.asarray(Image.open(run / "samples" / "step-00000008" / "sheet.png"))
    assert sheet.ndim == 3
    assert min(sheet.shape[:2]) > 300


def test_samples_are_written_as_files_or_as_a_sheet(saved: SavedRun, tmp_path: Path) -> None:
    made = asked(saved, user=["v1", "v2"], count=2)
    told = made.write(tmp_path / "drawn")
    assert [Path(file).name for file in told["files"]] == ["00.png", "01.png", "02.png", "03.png", "sheet.png"]
    fewer = asked(saved, user="v1", count=1)
    fewer.write(tmp_path / "drawn")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["00.png", "sheet.png"]
    fewer.write(tmp_path / "one.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "one.png")), np.asarray(fewer)[0]), "one is itself"
    made.write(tmp_path / "several.png")
    assert np.asarray(Image.open(tmp_path / "several.png")).shape[0] > 400, "several are a sheet"
    with pytest.raises(UsageError, match=r"cannot write \.txt"):
        saved.workload.sampler.check_output(tmp_path / "a.txt")


def answers(count: int, *, wish: str = "a star", user: str = "somebody", pictures: int = 1) -> list[GeneratedRow]:
    picture = np.zeros((8, 8, 3), np.uint8)
    known = UserSummary(user=user, history=[picture] * 2, earlier=0, likes="red", wish=wish)
    return [GeneratedRow(known, [picture] * pictures, ["1 / 1 / 1"] * pictures)] * count


@pytest.mark.parametrize(("count", "pictures"), [(1, 4), (60, 4), (400, 4), (2, 300)])
def test_a_sheet_of_many_people_is_a_page(tmp_path: Path, count: int, pictures: int) -> None:
    write_contact_sheet(answers(count, pictures=pictures), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as opened:
        width, height = opened.size
    assert height <= 4000
    assert width <= 9000


def test_long_wishes_stay_on_the_sheet_and_take_nobody_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    plain = Canvas.draw_text

    def noted(self: Any, x: float, y: float, words: str, **how: Any) -> None:
        said.append(words)
        assert how.get("anchor") != "lm" or (x + self.measure_text(words, how["size"])) * 2 <= self.image.width
        plain(self, x, y, words, **how)

    monkeypatch.setattr(Canvas, "draw_text", noted)
    write_contact_sheet(answers(1, wish="a star that shines " * 20), tmp_path / "sheet.png")
    assert any(words.startswith("for user somebody") for words in said)
    write_contact_sheet(answers(400, pictures=4), tmp_path / "sheet.png")
    shown = sum(words == "a star" for words in said)
    assert f"{400 - shown} more are not shown" in said[-1]


def test_the_recipe_is_offline_and_needs_its_parts() -> None:
    recipe = load_recipe(["personalize"]).recipe
    assert set(recipe.needs) == {"clip", "diffusion", "language_model"}
    assert all(need.own_data for need in recipe.needs.values())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([], "contains no record"),
        ([{"history": [{"id": "a", "caption": "red"}], "target": "a star"}], "target must be an object"),
        ([{"history": [{"id": "a", "caption": "red", "image": "../out.png"}], "wish": "a star"}], "is outside"),
        ([{"history": [{"id": "a", "caption": "red", "image": "gone.png"}], "wish": "a star"}], "does not exist"),
        ([{"history": [{"id": "a", "caption": "red", "image": "bad.png"}], "wish": "a star"}], "cannot be read"),
    ],
)
def test_a_history_that_is_wrong_is_told_before_anything_is_drawn(said: Any, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "out.png")
    (folder / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    (folder / "liked.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=reason):
        read_history(folder / "liked.json", wishes=None)


def test_memory_is_measured_with_the_longest_histories(saved: SavedRun) -> None:
    rows = saved.workload.data.table("train", is_training=True)  # type: ignore[attr-defined]
    every = rows.rows(np.arange(len(rows)), np.zeros(len(rows), np.int64))["prompt_mask"].sum(1)
    some = longest_batch(rows, 2)["prompt_mask"].sum(1)
    assert len(set(every)) > 1, "histories of one length show nothing"
    assert some.min() >= np.sort(every)[-4], (some, every)
