"""Personalised runs: checkpoints, frozen base models, keywords, generation for a user, candidate selection and contact sheets."""

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
from bottega.analysis.memory import build_longest_batch
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError, DataError, UsageError
from bottega.data.image.canvas import Canvas
from bottega.models.build import build_models
from bottega.models.frozen.soft_prompts import SoftPrompts
from bottega.run.saved import SavedRun, open_run
from bottega.tasks.personalize.arms import ARMS, generate_arm
from bottega.tasks.personalize.clip_scorer import MIN_COSINE, Scores, pick_best
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.personalize.contact_sheets import GeneratedRow, UserSummary, write_contact_sheet
from bottega.tasks.personalize.export import ExportConfig
from bottega.tasks.personalize.keywords import KeywordGenerator
from bottega.tasks.personalize.language_tokenizer import hash_prompt_files
from bottega.tasks.personalize.prompts import PromptBuilder
from bottega.tasks.personalize.user_requests import read_history
from bottega.tasks.recipes import load_recipe
from small_run import environment, read_tensors, run_bottega


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return small_personal.train(folder, name="mine", **{"samples.every": 8, "training.learning_rate": 1e-2}).path


@pytest.fixture(scope="module")
def saved(run: Path) -> SavedRun:
    return open_run(run)


# Checkpoints and frozen models


def test_a_checkpoint_holds_the_soft_prompts_and_nothing_else(run: Path, saved: SavedRun) -> None:
    folder = checkpoint.read_link(run / "checkpoints", "last")
    assert folder is not None
    saved_tensors = load_file(folder / "model.safetensors")
    assert set(saved_tensors) == {"image_tokens", "prefix", "mapping.weight", "mapping.bias"}
    assert sum(array.size for array in saved_tensors.values()) == saved.workload.task.shape.num_parameters == 720
    assert "720 parameters" in (run / "log.txt").read_text()
    frozen = checkpoint.verify(folder).fingerprint["frozen"]
    components = ("unet", "vae", "text_encoder", "tokens and schedule")
    names = {
        "language model",
        "language model's tokenizer",
        "CLIP",
        *(f"image generator's {name}" for name in components),
    }
    assert set(frozen) == names, "frozen models are stored as hashes only"


def test_number_of_parameters_matches_the_paper() -> None:
    from bottega.models.frozen.config import SoftPromptShape

    sizes = {"hidden_size": 4096, "num_layers": 32, "num_kv_heads": 32, "head_size": 128, "text_size": 768}
    assert SoftPromptShape(**sizes, num_image_tokens=2, num_prefix_tokens=2).num_parameters == 3_678_976


@pytest.fixture
def bases(tmp_path: Path) -> dict[str, Path]:
    """Copies of the frozen models that a test may damage."""
    return {name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in small_personal.models().items()}


def perturb_last_tensor(file: Path) -> None:
    tensors = {name: np.asarray(array) for name, array in load_file(file).items()}
    last = sorted(tensors)[-1]
    save_file({**tensors, last: tensors[last] + 1}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("file", "component"),
    [
        ("language_model/model.safetensors", "language model"),
        ("diffusion/unet/diffusion_pytorch_model.safetensors", "image generator's unet"),
        ("diffusion/text_encoder/model.safetensors", "image generator's text_encoder"),
    ],
)
def test_a_changed_base_model_is_refused(tmp_path: Path, bases: dict[str, Path], file: str, component: str) -> None:
    models = {f"model.{name}": str(folder) for name, folder in bases.items()}
    first = small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 4})
    perturb_last_tensor(tmp_path / file)
    key = f"model.{file.split('/')[0]}"
    with pytest.raises(CheckpointError, match=f"{key} is not the {component} that this run started with"):
        small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 8})
    with pytest.raises(CheckpointError, match=r"is not the .* that this run was trained with; restore it"):
        open_run(first.path)


def test_clip_may_be_missing_but_not_changed_and_a_base_model_may_be_restored(
    tmp_path: Path, bases: dict[str, Path]
) -> None:
    models = {f"model.{name}": str(folder) for name, folder in bases.items()}
    first = small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 4})
    shutil.move(bases["language_model"], tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"the language model of this run no longer exists: .*; restore it"):
        open_run(first.path)
    (tmp_path / "elsewhere").rename(bases["language_model"])
    metadata: Any = open_run(first.path).workload.metadata  # type: ignore[attr-defined]
    assert metadata.clip is not None
    perturb_last_tensor(bases["clip"] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is not the CLIP that this run was trained with"):
        open_run(first.path)  # another CLIP would select and score differently
    with pytest.raises(CheckpointError, match=r"model\.clip is not the CLIP that this run started with"):
        small_personal.train(tmp_path, name="mine", **models, **{"training.max_steps": 8})
    shutil.rmtree(bases["clip"])
    metadata = open_run(first.path).workload.metadata  # type: ignore[attr-defined]
    assert metadata.clip is None


def test_truncated_clip_weights_are_refused_before_training(tmp_path: Path, bases: dict[str, Path]) -> None:
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
def test_invalid_settings_are_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], error: type[BottegaError], message: str
) -> None:
    with pytest.raises(error, match=message):
        small_personal.train(tmp_path, **changes)


def test_an_unusable_clip_model_is_refused_before_training(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_personal.models()["clip"], tmp_path / "clip"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"model\.clip: .* has no tokenizer\.json"):
        small_personal.train(tmp_path, **{"model.clip": str(folder)})
    with pytest.raises(UsageError, match=r"model\.clip: .* contains a llama; a CLIP or SigLIP"):
        small_personal.train(tmp_path, **{"model.clip": str(small_personal.models()["language_model"])})


# Keywords


@pytest.fixture
def interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A run of four steps and the settings that continue it to eight; the keyword cache is deleted."""
    settings: dict[str, Any] = {"name": "mine", "checkpoint.every": 2}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_personal.train(tmp_path, **{**settings, "training.max_steps": 4})
    shutil.rmtree(tmp_path / "cache" / "bottega" / "keywords")
    return tmp_path / "mine", {**settings, "training.max_steps": 8}


def test_a_resumed_run_reuses_its_keywords(
    interrupted_run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = interrupted_run
    monkeypatch.setattr(
        KeywordGenerator, "_decode", lambda *args: pytest.fail("all keywords come from the run's own file")
    )
    assert small_personal.train(run.parent, **settings).step == 8


def test_keywords_of_the_run_take_precedence_over_the_cache(
    interrupted_run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run on this machine may have cached other answers; a finished run samples with its own keywords too."""
    run, settings = interrupted_run
    other = lambda self, prompts, *args: dict.fromkeys(prompts, ("blue", "moon"))  # noqa: E731
    monkeypatch.setattr(KeywordGenerator, "_decode", other)
    small_personal.train(run.parent, **{**settings, "name": "other"})
    monkeypatch.setattr(
        KeywordGenerator, "_decode", lambda *args: pytest.fail("all keywords come from the run's own file")
    )
    assert small_personal.train(run.parent, **settings).step == 8
    workload: Any = open_run(run).workload
    records = [workload.personal_rows("train").record(number) for number in range(24)]
    assert {keywords.preference for keywords in workload.generate_keywords(records)} != {("blue", "moon")}


def test_resume_refuses_different_keywords_for_the_same_data(
    interrupted_run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = interrupted_run
    (run / "processor" / "keywords.jsonl").unlink()
    monkeypatch.setattr(KeywordGenerator, "_decode", lambda self, prompts, *args: dict.fromkeys(prompts, ("blue",)))
    with pytest.raises(DataError, match="the keywords that a model derives from the data differ"):
        small_personal.train(run.parent, **settings)


def test_only_prompts_without_a_stored_answer_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def decode(self: KeywordGenerator, prompts: dict[str, Any], *args: Any) -> dict[str, tuple[str, ...]]:
        counts.append(len(prompts))
        return dict.fromkeys(prompts, ("new",))

    monkeypatch.setattr(KeywordGenerator, "_decode", decode)
    generator = KeywordGenerator(PromptBuilder(small_personal.models()["language_model"], Keywords()), cache=tmp_path)
    arguments: tuple[Any, ...] = (lambda: None, "cpu", lambda stage, done, total: None)
    generator.generate_targets(["a star"], *arguments)
    generator.resumed_answers = dict.fromkeys(generator.answers, ("old",))
    assert generator.generate_targets(["a star", "a moon"], *arguments) == [("old",), ("new",)]
    assert counts == [1, 1]


def test_cache_is_separate_for_each_precision_and_device_type(tmp_path: Path) -> None:
    folder = small_personal.models()["language_model"]
    prompts = PromptBuilder(folder, Keywords())
    caches = [
        KeywordGenerator(prompts, precision=precision, cache=tmp_path)._cache for precision in ("fp32", "bf16", "fp32")
    ]
    files = [cache.get_path("cpu") for cache in caches]
    assert files[0] == files[2] != files[1]
    assert caches[0].get_path("cuda:0") == caches[0].get_path("cuda:1") != files[0]


def test_the_chat_template_is_part_of_the_tokenizer_hash(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_personal.models()["language_model"], tmp_path / "llama"))
    before = hash_prompt_files(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert hash_prompt_files(folder) != before


def test_an_export_holds_the_soft_prompts_and_their_config_only(run: Path, saved: SavedRun, tmp_path: Path) -> None:
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
        assert f"`{frozen.named}`" in card, f"the model card names the {name}"
    assert card.count("needs") == 1
    for base in small_personal.models().values():
        assert str(base) not in (folder / "config.json").read_text(), "local paths are not published"


@pytest.mark.slow
def test_two_ranks_train_the_same_soft_prompts_as_one(tmp_path: Path) -> None:
    """All trainable parameters are used inside one call of the wrapped model, so DDP reduces their gradients."""
    changes: dict[str, Any] = {"training.max_steps": 4, "model.keyword_dropout": 0.5, "name": "mine"}
    single = small_personal.train(tmp_path, **changes).path
    other = tmp_path / "together"
    shutil.copytree(tmp_path / "people", other / "people")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    command = [*launch, *small_personal.train_arguments(other, "--quiet", **changes)]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    a, b = read_tensors(single), read_tensors(other / "mine")
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-5, atol=2e-6, err_msg=name)


# Generation for users


def test_the_same_seed_in_a_new_process_gives_the_same_pixels(run: Path, saved: SavedRun, tmp_path: Path) -> None:
    expected = np.asarray(saved.generate(user="v3", wish="a star", count=2, seed=7))
    command = ["generate", str(run), "--user", "v3", "--wish", "a star", "--count", "2", "--seed", "7", "--json"]
    process = run_bottega([*command, "--out", str(tmp_path / "drawn")])
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    for number, image in enumerate(result["pictures"]):
        assert np.array_equal(np.asarray(Image.open(image["file"])), expected[number])
        assert (image["user"], image["wish"]) == ("v3", "a star")
        assert set(image) == {"file", "user", "wish", "keywords", "weighting", "scores"}
    assert (tmp_path / "drawn" / "sheet.png").is_file()
    assert not np.array_equal(expected, np.asarray(saved.generate(user="v3", wish="a star", count=2, seed=8)))


def test_generation_uses_the_trained_tokens(saved: SavedRun) -> None:
    trained = np.asarray(saved.generate(user="v3", count=1))
    before = {name: tensor.clone() for name, tensor in saved.model.state_dict().items()}
    try:
        saved.model.load_state_dict(build_models(saved.task, saved.recipe.seed)["model"].state_dict())
        assert not np.array_equal(trained, np.asarray(saved.generate(user="v3", count=1))), (
            "untrained tokens give another image"
        )
    finally:
        saved.model.load_state_dict(before)
    assert np.array_equal(trained, np.asarray(saved.generate(user="v3", count=1)))


def test_images_are_ordered_by_user_then_wish(saved: SavedRun) -> None:
    images = saved.generate(user=["v3", "t1"], wish=["a star", "a moon"], count=2)
    assert [(choice.user, choice.wish) for choice in images.choices[::2]] == [
        ("v3", "a star"),
        ("v3", "a moon"),
        ("t1", "a star"),
        ("t1", "a moon"),
    ]
    assert np.asarray(images).shape == images.shape == (8, small_personal.SIDE, small_personal.SIDE, 3)
    assert images.dtype == np.uint8
    assert repr(images) == "8 images of 32 x 32 for 2 users"
    assert np.array_equal(images[1:3], images.images[1:3])
    assert np.array_equal(np.stack(list(images)), images.images)
    assert saved.generate(user="v2", count=1).choices[0].wish == "a moon", "the user's own wish by default"
    assert [choice.user for choice in saved.generate().choices] == ["v0", "v1", "v2", "v3"], (
        "the first held-out users by default"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "17"}, "user 17 is not one of the 32 users of this run; choose one, such as v0, v1"),
        ({"user": "v1", "count": 0}, "count 0: expected 1 or more"),
        ({"user": "v1", "steps": 0}, "steps 0: expected 1 or more"),
        ({"user": "v1", "sampler": "fast"}, "sampler fast: expected euler, heun or dpm"),
        ({"user": "v1", "guidance": -1.0}, "guidance -1: expected 0 or more"),
        ({"user": "v1", "prompt": "a star"}, "prompt: this run does not support it; it takes user, wish, history"),
        ({"history": "nowhere.txt"}, "history nowhere.txt does not exist"),
    ],
)
def test_invalid_requests_are_refused_by_name(saved: SavedRun, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        saved.generate(**options)


def test_a_new_user_is_described_by_a_history_file(saved: SavedRun, tmp_path: Path) -> None:
    lines, records = tmp_path / "liked.txt", tmp_path / "liked.jsonl"
    lines.write_text("a red star\n\na red moon\n")
    liked = [{"id": "a", "caption": "a red star"}, {"id": "b", "caption": "a red moon"}]
    records.write_text(json.dumps({"user": "new", "history": liked, "wish": "a moon"}) + "\n")
    by_lines = saved.generate(history=lines, wish="a moon", count=2)
    by_records = saved.generate(history=records, count=2)
    assert np.array_equal(np.asarray(by_lines), np.asarray(by_records))
    assert by_lines.choices[0].user == "liked"
    assert by_records.choices[0].user == "new"
    lines.write_text("a blue star\na blue moon\n")
    assert not np.array_equal(np.asarray(by_lines), np.asarray(saved.generate(history=lines, wish="a moon", count=2)))
    with pytest.raises(UsageError, match="has no wish; describe the image"):
        saved.generate(history=lines)
    with pytest.raises(UsageError, match="describes a new user"):
        saved.generate(history=lines, user="v1")
    records.write_text(json.dumps({"history": [{"id": "a"}], "wish": "a moon"}))
    with pytest.raises(DataError, match="the history needs at least one item, each with a caption"):
        saved.generate(history=records)
    records.write_text("[1")
    with pytest.raises(DataError, match="not valid JSON"):
        saved.generate(history=records)


def test_a_negative_prompt_changes_the_image(saved: SavedRun) -> None:
    plain, guided = (
        np.asarray(saved.generate(user="v1", count=1, negative_prompt=text)) for text in ("", "red square")
    )
    assert not np.array_equal(plain, guided)


# Selection among candidates


def test_pick_best_weighs_preference_and_wish() -> None:
    candidates = [[Scores(0.2, 0.9), Scores(0.5, 0.5)], [Scores(0.6, 0.3), Scores(0.5, 0.5)]]
    assert pick_best(candidates, 1.0) == [1, 0], "preference only; the first wins a tie"
    assert pick_best(candidates, 0.0) == [0, 0]
    assert Scores(0.5, 0.25).compute_total(2 / 3) == pytest.approx(2 / 3 * np.log(0.5) + 1 / 3 * np.log(0.25))
    assert Scores(-0.1, 0.5).compute_total(1.0) == pytest.approx(np.log(MIN_COSINE)), (
        "cosines are clamped to MIN_COSINE"
    )
    assert Scores(None, 0.5).compute_total(1.0) == pytest.approx(np.log(0.5)), (
        "only the wish counts where there is no preference"
    )


def test_sample_best_takes_the_candidate_with_the_highest_score(saved: SavedRun) -> None:
    workload: Any = saved.workload
    records = [workload.personal_rows("validation").record(number) for number in range(4)]
    with saved.engine.sampling() as models:
        keywords = workload.generate_keywords(records, models)
        options: dict[str, Any] = {"device": "cpu", "seed": 0, "progress": lambda stage, done, total: None}
        images, chosen, scores = workload.image_sampler.sample_best(models, records, keywords, **options)
        weightings = saved.recipe.samples.weightings
        candidates = [
            workload.image_sampler.sample_images(models, records, keywords, weights=weights, **options)
            for weights in weightings
        ]
    for number, (weights, score) in enumerate(zip(chosen, scores, strict=True)):
        assert np.array_equal(images[number], candidates[weightings.index(weights)][number])
        texts = {"likes": [keywords[number].texts[0]], "wishes": [records[number].wish_or_caption]}
        scored = workload.image_sampler.load_clip_scorer("cpu").score_candidates(
            [candidate[number : number + 1] for candidate in candidates], **texts
        )
        totals = [candidate_score.compute_total(2 / 3) for (candidate_score,) in scored]
        assert score.compute_total(2 / 3) == pytest.approx(max(totals), abs=1e-5)


def test_without_clip_the_first_weighting_is_used_with_a_note(tmp_path: Path) -> None:
    run = small_personal.train(tmp_path, **{"model.clip": None, "training.max_steps": 4}).path
    images = open_run(run).generate(user="v1", count=2)
    assert {choice.weighting for choice in images.choices} == {open_run(run).recipe.samples.weightings[0]}
    result = images.write(tmp_path / "drawn")
    assert result["pictures"][0]["scores"] is None
    assert "model.clip is not set" in result["notes"][0]


# Ablation arms


def test_arms_differ_only_in_their_conditions(saved: SavedRun) -> None:
    workload: Any = saved.workload
    records = [workload.personal_rows("validation").record(number) for number in range(4)]
    others = [record.model_copy(update={"history": records[(n + 1) % 4].history}) for n, record in enumerate(records)]
    with saved.engine.sampling() as models:
        options: dict[str, Any] = {"device": "cpu", "seed": 0}
        images = {arm: generate_arm(workload, models, records, arm=arm, **options)[0] for arm in ARMS}
        images_with_other_histories = {
            arm: generate_arm(workload, models, others, arm=arm, **options)[0] for arm in ("none", "soft")
        }
    assert len({array.tobytes() for array in images.values()}) == len(ARMS)
    assert np.array_equal(images["none"], images_with_other_histories["none"]), (
        "the arm 'none' does not use the history"
    )
    assert not np.array_equal(images["soft"], images_with_other_histories["soft"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wish": ""}, "wish '' is blank"),
        ({"wish": ["a star", "  "]}, "is blank"),
        ({"wish": "x" * 2000}, "2,000 characters"),
        ({"count": 10**9, "user": "v1"}, "1,000,000,000 images are more than"),
    ],
)
def test_invalid_wishes_are_refused(saved: SavedRun, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        saved.generate(**options)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("anna.txt", "\n  \n", "the file is empty"),
        ("anna.txt", '{"user": "a"}', "rename it to .json or .jsonl"),
        ("anna.json", '{"history": ["a star"]}', "history.0 must be an item such as"),
        ("anna.json", '{"user": "a"}', "history is missing"),
        ("anna.json", '{"wish": " ", "history": [{"caption": "a star"}]}', "the wish is blank"),
    ],
)
def test_invalid_history_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        read_history(tmp_path / name, wishes=["a star"])


def test_history_items_need_no_ids(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"history": [{"caption": "a red star"}, {"caption": "a blue star"}]}')
    (user,) = read_history(tmp_path / "a.json", wishes=["a moon"])
    assert [item.caption for item in user.record.history] == ["a red star", "a blue star"]


# Contact sheets


def test_training_writes_a_sheet_of_held_out_users(run: Path) -> None:
    sheet = np.asarray(Image.open(run / "samples" / "step-00000008" / "sheet.png"))
    assert sheet.ndim == 3
    assert min(sheet.shape[:2]) > 300


def test_samples_are_written_as_files_or_as_a_sheet(saved: SavedRun, tmp_path: Path) -> None:
    images = saved.generate(user=["v1", "v2"], count=2)
    result = images.write(tmp_path / "drawn")
    assert [Path(file).name for file in result["files"]] == ["00.png", "01.png", "02.png", "03.png", "sheet.png"]
    single = saved.generate(user="v1", count=1)
    single.write(tmp_path / "drawn")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["00.png", "sheet.png"]
    single.write(tmp_path / "one.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "one.png")), np.asarray(single)[0]), (
        "a single image is written unchanged"
    )
    images.write(tmp_path / "several.png")
    assert np.asarray(Image.open(tmp_path / "several.png")).shape[0] > 400, "several images are written as a sheet"
    with pytest.raises(UsageError, match=r"cannot write \.txt"):
        saved.workload.sampler.check_output(tmp_path / "a.txt")


def build_rows(count: int, *, wish: str = "a star", user: str = "somebody", num_images: int = 1) -> list[GeneratedRow]:
    image = np.zeros((8, 8, 3), np.uint8)
    summary = UserSummary(user=user, history=[image] * 2, num_earlier=0, likes="red", wish=wish)
    return [GeneratedRow(summary, [image] * num_images, ["1 / 1 / 1"] * num_images)] * count


@pytest.mark.parametrize(("count", "num_images"), [(1, 4), (60, 4), (400, 4), (2, 300)])
def test_the_sheet_size_is_bounded_for_many_users(tmp_path: Path, count: int, num_images: int) -> None:
    write_contact_sheet(build_rows(count, num_images=num_images), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        width, height = image.size
    assert height <= 4000
    assert width <= 9000


def test_long_wishes_fit_the_sheet_and_omitted_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    draw_text = Canvas.draw_text

    def record_text(self: Any, x: float, y: float, text: str, **options: Any) -> None:
        texts.append(text)
        assert options.get("anchor") != "lm" or (x + self.measure_text(text, options["size"])) * 2 <= self.image.width
        draw_text(self, x, y, text, **options)

    monkeypatch.setattr(Canvas, "draw_text", record_text)
    write_contact_sheet(build_rows(1, wish="a star that shines " * 20), tmp_path / "sheet.png")
    assert any(text.startswith("for user somebody") for text in texts)
    write_contact_sheet(build_rows(400, num_images=4), tmp_path / "sheet.png")
    shown = sum(text == "a star" for text in texts)
    assert f"{400 - shown} more are not shown" in texts[-1]


def test_the_recipe_declares_its_dependencies() -> None:
    recipe = load_recipe(["personalize"]).recipe
    assert set(recipe.needs) == {"clip", "diffusion", "language_model"}
    assert all(need.own_data for need in recipe.needs.values())


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "contains no record"),
        ([{"history": [{"id": "a", "caption": "red"}], "target": "a star"}], "target must be an object"),
        ([{"history": [{"id": "a", "caption": "red", "image": "../out.png"}], "wish": "a star"}], "is outside"),
        ([{"history": [{"id": "a", "caption": "red", "image": "gone.png"}], "wish": "a star"}], "does not exist"),
        ([{"history": [{"id": "a", "caption": "red", "image": "bad.png"}], "wish": "a star"}], "cannot be read"),
    ],
)
def test_invalid_history_records_are_refused_before_sampling(records: Any, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "out.png")
    (folder / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    (folder / "liked.json").write_text(json.dumps(records))
    with pytest.raises(DataError, match=reason):
        read_history(folder / "liked.json", wishes=None)


def test_memory_is_measured_with_the_longest_histories(saved: SavedRun) -> None:
    rows = saved.workload.data.table("train", is_training=True)  # type: ignore[attr-defined]
    lengths = rows.rows(np.arange(len(rows)), np.zeros(len(rows), np.int64))["prompt_mask"].sum(1)
    longest = build_longest_batch(rows, 2)["prompt_mask"].sum(1)
    assert len(set(lengths)) > 1, "the histories must differ in length"
    assert longest.min() >= np.sort(lengths)[-4], (longest, lengths)
