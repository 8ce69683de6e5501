"""Image and audio tokenizers and the generators over their codes: training, sampling, export, resume and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_media
from bottega import cli
from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.models.autoencoder.codes_folder import load_codes
from bottega.tasks import registry
from bottega.tasks.autoencode.tokens_workload import TokensWorkload
from bottega.tasks.generation.export_codes import open_exported_code_generator
from bottega.tasks.recipes import load_recipe
from small_run import differing_tensors, read_tensors

GENERATOR_KEYS = ("model.num_layers", "model.num_heads", "model.patch_size", "samples.steps")
TOKENIZER: dict[str, Any] = {
    "model.levels": [4, 4],
    "model.hidden_size": 8,
    "model.downsample": 2,
    "model.layers_per_block": 1,
}


def tokenizer_settings(folder: Path, medium: str = "image", **changes: Any) -> dict[str, Any]:
    common = {k: v for k, v in getattr(small_media, medium)(folder).items() if k not in GENERATOR_KEYS}
    return {**common, "task": "image_tokens", "data.input": medium, **TOKENIZER, **changes}


def train_tokenizer(folder: Path, medium: str = "image", **changes: Any) -> Path:
    return Path(bottega.train({}, tokenizer_settings(folder, medium, **changes)).path)


def train_generator(folder: Path, **changes: Any) -> Path:
    return Path(
        small_media.train(folder, **{"model.backbone": "tokens", "needs": judge_settings("image"), **changes}).path
    )


def judge_settings(medium: str) -> dict[str, Any]:
    return {"judge": {"recipe": f"classify/{medium}", "settings": {"training.max_steps": 2, "training.batch_size": 8}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Path:
    options = {"training.max_steps": 80, "training.learning_rate": 1e-2, "evaluation.every": 40}
    run = train_tokenizer(folder, name="codes", **options, **{"samples.every": 80, "samples.count": 3})
    bottega.load(run).export()
    return run


@pytest.fixture(scope="module")
def run(folder: Path, tokenizer: Path) -> Path:
    options = {"training.max_steps": 80, "training.learning_rate": 1e-2, "evaluation.every": 40, "samples.every": 80}
    return train_generator(
        folder, name="over-codes", **{"model.tokenizer": str(tokenizer), "samples.count": 4}, **options
    )


# The tokenizer


def test_a_tokenizer_learns_to_reconstruct_images(tokenizer: Path) -> None:
    saved = bottega.load(tokenizer)
    metrics = saved.evaluate()
    # Each image has one brightness and noise of standard deviation 10; predicting the global mean gives at most 15 dB.
    assert metrics["psnr"] > 20
    assert metrics["psnr"] == pytest.approx(10 * np.log10(4 / metrics["mse"]))
    names = {path.name for path in (tokenizer / "samples" / "step-00000080").iterdir()}
    assert {f"{n:02d}.png" for n in range(6)} | {"sheet.png"} == names, "three originals, each with its reconstruction"


def test_code_usage_is_computed_over_the_validation_data(tokenizer: Path) -> None:
    saved = bottega.load(tokenizer)
    workload = saved.workload
    assert isinstance(workload, TokensWorkload)
    source = workload.data.validation()
    assert source is not None
    with saved.engine.sampling() as models:
        usage = workload.measure_code_usage(models, source, device="cpu")
        index = np.arange(len(source))
        codes = models["model"].encode(torch.from_numpy(source.rows(index, 0 * index)["image"]))
    assert codes.shape == (9, 4, 4)
    assert usage["codes_used"] == len(codes.unique()) / 16
    assert 1 <= usage["code_perplexity"] <= 16
    metrics = bottega.evaluate(tokenizer)["metrics"]
    assert {name: metrics[name] for name in usage} == usage
    assert metrics["psnr"] == pytest.approx(saved.evaluate()["psnr"])


def test_an_exported_tokenizer_can_be_loaded_and_fine_tuned(tokenizer: Path) -> None:
    model, saved = load_codes(tokenizer / "final"), bottega.load(tokenizer)
    x = torch.rand(2, 8, 8, 1) * 2 - 1
    with saved.engine.sampling() as models, torch.no_grad():
        assert torch.equal(model.encode(x), models["model"].encode(x))
        assert torch.equal(model(x)[0], models["model"](x)[0])
    assert model.num_codes == 16
    again = bottega.train({}, tokenizer_settings(tokenizer.parent, name="started", **{"model.from": str(tokenizer)}))
    assert again.metrics["loss"] < 1.2 * saved.evaluate()["loss"], "training continued from the exported weights"


@pytest.mark.parametrize("quantiser", ["fsq", "vq"])
def test_audio_tokenizers_train_and_export(tmp_path: Path, quantiser: str) -> None:
    options = {"model.quantiser": quantiser, "model.codebook_size": 12, "model.code_size": 4}
    path = train_tokenizer(
        tmp_path, "audio", **options, **{"training.max_steps": 2, "samples.every": 2, "samples.count": 1}
    )
    saved = bottega.load(path)
    assert np.isfinite(saved.evaluate()["psnr"])
    assert (path / "samples" / "step-00000002" / "00.wav").is_file()
    assert (saved.export() / "mel.json").is_file()
    assert load_codes(path / "final").num_codes == (16 if quantiser == "fsq" else 12)
    with pytest.raises(UsageError, match="does not generate"):
        saved.generate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.downsample": 16}, "height 8 (must be a multiple of 16"),
        ({"model.dropout": 0.1}, "model.dropout"),
        ({"model.levels": [1, 4]}, "levels is [1, 4]"),
        ({"data.input": "video"}, "data.input"),
        ({"data.buckets": 2}, "data.buckets"),
        ({"model.from": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_invalid_tokenizer_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        bottega.train({}, tokenizer_settings(tmp_path, **changes))
    assert message in str(caught.value)


def test_a_base_model_of_another_shape_is_refused_by_name(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hidden_size|widths"):
        train_tokenizer(tmp_path, **{"model.from": str(tokenizer), "model.hidden_size": 16})


# The generator


def test_a_generator_over_codes_samples_the_requested_class(run: Path) -> None:
    saved = bottega.load(run)
    images = saved.generate(**{"class": [0, 1, 2]}, count=8, seed=1)
    assert images.dtype == np.uint8
    assert images.shape == (24, 8, 8, 1)
    level = images.reshape(3, -1).mean(1)
    names = saved.workload.metadata.classes
    order = [small_media.NAMES.index(name) for name in names]
    assert np.abs(level - (30 + 100 * np.array(order))).max() < 40, dict(zip(names, level, strict=True))
    metrics = saved.evaluate()
    assert metrics["bits_per_code"] == pytest.approx(metrics["loss"] / np.log(2), rel=1e-6)
    assert metrics["loss"] < np.log(16)
    assert len(list((run / "samples" / "step-00000080").glob("0*.png"))) == 4


def test_generate_options_of_a_generator_over_codes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in ("generate", run, "--count", 2, *arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    file = tmp_path / "made.png"
    images = []
    for arguments in ([], ["--temperature", 0], ["--temperature", 0, "--seed", 9], ["--top_k", 1], ["--guidance", 3]):
        code, out, err = generate("--class", "grey", "--out", file, *arguments)
        assert code == 0, err
        images.append(file.read_bytes())
    plain, greedy, seeded, single, guided = images
    assert greedy == seeded == single, "greedy sampling does not depend on the seed"
    assert plain != greedy
    assert plain != guided
    for arguments, message in (
        (["--steps", 3], "--steps: this run does not support it"),
        (["--sampler", "heun"], "--sampler"),
        (["--temperature", -1], "--temperature -1"),
        (["--top_p", 2], "--top_p 2"),
        (["--top_k", 0], "--top_k 0"),
    ):
        code, out, err = generate(*arguments)
        assert (code, out) == (2, "")
        assert message in err


def test_diffusion_generators_refuse_temperature(tmp_path: Path) -> None:
    path = small_media.train(tmp_path, **{"training.max_steps": 1}).path
    with pytest.raises(UsageError, match=r"^temperature: this run does not support it"):
        bottega.load(path).generate(temperature=0.5)


def test_evaluation_compares_with_real_data_through_the_tokenizer(run: Path) -> None:
    result = bottega.evaluate(run, count=12)
    assert set(result["through_codec"]) == set(result["real"])
    assert "conditional_accuracy" in result["real"]
    assert result["through_codec"]["nearest_ratio"] != result["real"]["nearest_ratio"], "the tokenizer is lossy"
    assert result["counts"]["generated"] == 12


def test_an_exported_generator_is_self_contained(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    folder = saved.export(tmp_path / "out")
    saved.export(folder)  # overwrites the first export
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    task, models = open_exported_code_generator(elsewhere)
    rows = {"label": torch.tensor([0, 1, 2])}
    rng = Noise(0, 0, torch.arange(3), torch)
    with saved.engine.sampling() as run_models:
        expected = saved.workload.task.draw(run_models, rows, rng)
    assert torch.equal(task.draw(models, rows, rng), expected)
    assert json.loads((elsewhere / "config.json").read_text())["samples"]["temperature"] == 1.0
    again = train_generator(
        run.parent, name="goes-on", **{"model.tokenizer": str(run.parent / "codes"), "model.from": str(folder)}
    )
    assert bottega.load(again).evaluate()["loss"] < 1.2 * saved.evaluate()["loss"]


def test_the_language_model_opens_in_transformers(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = bottega.load(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved.export(tmp_path) / "transformer").eval()
    tokens = torch.tensor([[16, 3, 7, 15, 0]])
    with saved.engine.sampling() as models:
        torch.testing.assert_close(theirs(tokens).logits, models["model"](tokens), rtol=1e-4, atol=1e-4)


def test_resume_is_bitwise_equal(tokenizer: Path, tmp_path: Path) -> None:
    options = {"model.tokenizer": str(tokenizer), "training.scheduler.name": "constant", "name": "resumed"}
    options |= {"training.ema": 0.9, "model.dropout": 0.1}
    straight = train_generator(tmp_path / "a", **options)
    train_generator(tmp_path / "b", **options, **{"training.max_steps": 4})
    resumed = train_generator(tmp_path / "b", **options)
    assert differing_tensors(read_tensors(straight), read_tensors(resumed)) == []


def test_a_tokenizer_dependency_is_trained_first(tmp_path: Path) -> None:
    settings = {**TOKENIZER, "training.max_steps": 2, "samples.every": None, "training.batch_size": 8}
    options = {"model.tokenizer": "needs.tokens", "training.max_steps": 2, "name": "first"}
    dependency = {"recipe": "image_tokens/digits", "settings": settings}
    path = train_generator(tmp_path, **options, needs={"tokens": dependency})
    images = bottega.load(path).generate(count=1)
    parts = tmp_path / "parts"
    assert [p.is_dir() for p in parts.glob("*/final")] == [True]
    moved = Path(shutil.move(tmp_path, tmp_path.with_name("moved"))) / "first"
    np.testing.assert_array_equal(bottega.load(moved).generate(count=1), images)


def test_a_changed_tokenizer_is_refused(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = Path(shutil.copytree(tokenizer / "final", tmp_path / "codes"))
    options = {"model.tokenizer": str(codes), "training.max_steps": 2, "name": "faithful"}
    path = train_generator(tmp_path, **options)
    other = train_tokenizer(tmp_path, name="other", seed=1, **{"training.max_steps": 1})
    shutil.rmtree(codes)
    assert cli.main(["generate", str(path), "--count", "1"]) == 4
    assert "tokenizer of this run no longer exists" in capsys.readouterr().err
    bottega.load(other).export(codes)
    assert cli.main(["generate", str(path), "--count", "1"]) == 4
    assert "is not the tokenizer that this run was trained with" in capsys.readouterr().err
    command = small_media.train_arguments(tmp_path, **{"model.backbone": "tokens", **options, "training.max_steps": 4})
    assert cli.main(command) == 4
    message = capsys.readouterr().err
    assert "is not the tokenizer that this run started with" in message
    assert "--fresh" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.tokenizer": None}, "model.tokenizer: missing"),
        ({"model.tokenizer": "needs.other"}, "needs.other"),
        ({"model.tokenizer": "nowhere"}, "has no tokenizer"),
        ({"model.condition": "text"}, "model.condition: text is not supported with backbone tokens"),
        ({"model.vae": "somewhere"}, "model.vae"),
        ({"model.num_heads": 3}, "model.hidden_size: 32"),
        ({"data.normalise": "unit"}, "normalise symmetric, not unit"),
        ({"data.channels": 3}, "set data.channels to 1"),
        ({"samples.guidance": 2.0, "model.condition_dropout": 0.0}, "samples.guidance"),
    ],
)
def test_invalid_settings_of_a_generator_over_codes_are_refused(
    tokenizer: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        train_generator(tmp_path, **{"model.tokenizer": str(tokenizer), **changes})
    assert message in str(caught.value)


def test_audio_over_codes_uses_the_mel_scale_of_the_tokenizer(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path, "audio", name="sounds", **{"training.max_steps": 2})
    file = bottega.load(path).export() / "mel.json"
    mel = json.loads(file.read_text())
    mel["scale"]["mean"] += 0.5  # as if it had been trained on louder audio
    file.write_text(json.dumps(mel))
    settings = {**small_media.audio(tmp_path), "model.backbone": "tokens", "model.tokenizer": str(path)}
    settings |= {"model.axes": 2, "needs": judge_settings("audio")}
    result = bottega.train("audio", {**settings, "training.max_steps": 2, "name": "over"})
    saved = bottega.load(result.path)
    assert saved.workload.mel.scale.model_dump() == mel["scale"]
    waveforms = saved.generate(count=3)
    assert waveforms.shape == (3, 800)
    assert np.isfinite(waveforms).all()
    assert bottega.evaluate(result.path, count=6)["counts"]["generated"] == 6
    with pytest.raises(UsageError, match=r"data\.hop_size: 32"):
        registry.open_workload(
            load_recipe(["audio", {**settings, "data.hop_size": 32}]).recipe, progress=lambda *_: None
        )
