"""LoRA: identity at initialisation, a bitwise unchanged base, and checkpoints that hold only trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import bottega
import small_media
import small_run
import small_texts
from bottega.analysis.inspect import inspect_model
from bottega.analysis.ledger import list_step_samples
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.techniques.injected_layers import hash_frozen
from bottega.techniques.lora.torch import Lora, find_low_rank_layers, merge, merged_weights, unmerge
from small_fine_tuning import (
    LANGUAGE,
    MEDIA,
    NULL_SIZES,
    STEADY,
    TASKS,
    encoder_task,
    image,
    language,
    language_task,
    train,
    untied_task,
    write_bases,
)
from small_run import differing_tensors, read_tensors


def add_noise(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Randomise every weight: the zero initialisation of a diffusion transformer would hide changes in earlier layers."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def compute_loss(task: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rng = Noise(0, 0, torch.arange(len(next(iter(batch.values())))), torch)
    with torch.no_grad():
        return task.loss({"model": model.eval()}, batch, rng).terms["loss"][0]


@pytest.fixture(params=TASKS, ids=lambda make: make.__name__)
def task_and_batch(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    return request.param()


def test_lora_is_the_identity_initially(task_and_batch: tuple[Any, dict[str, torch.Tensor]]) -> None:
    task, batch = task_and_batch
    plain, lora = build_models(task, 3)["model"], build_models(Lora(inner=task, rank=2), 3)["model"]
    assert len(find_low_rank_layers(lora)) >= 2
    assert torch.equal(compute_loss(task, plain, batch), compute_loss(task, lora, batch))
    plain_state = dict(plain.state_dict())
    base_state = {name: tensor for name, tensor in lora.state_dict().items() if "lora_" not in name}
    assert list(base_state) == list(plain_state)
    assert all(torch.equal(base_state[name], plain_state[name]) for name in plain_state)


@pytest.mark.parametrize("targets", [None, "all-linear", (".*",)], ids=str)
def test_every_targeted_layer_affects_the_loss(
    task_and_batch: tuple[Any, dict[str, torch.Tensor]], targets: Any
) -> None:
    """A head read by a fused loss, or a matrix shared with another module, would have no or only partial effect."""
    task, batch = task_and_batch
    if targets == "all-linear" and type(build_models(task, 0)["model"]).__name__ in ("Kim", "ConvNet"):
        with pytest.raises(UsageError, match="has no matrix"):  # except the head
            build_models(Lora(inner=task, targets=targets), 0)
        return
    model = add_noise(build_models(Lora(inner=task, rank=2, targets=targets), 0)["model"])
    layers = find_low_rank_layers(model)
    for layer in layers.values():
        nn.init.zeros_(layer.lora_B)
    before = compute_loss(task, model, batch)
    for name, layer in layers.items():
        with torch.no_grad():  # not constant: a softmax or a norm would cancel it
            layer.lora_B.copy_(torch.linspace(-1, 1, layer.lora_B.numel()).view_as(layer.lora_B).sin())
        assert not torch.equal(compute_loss(task, model, batch), before), name
        nn.init.zeros_(layer.lora_B)


def test_merge_is_equal_up_to_rounding_and_unmerge_bitwise(task_and_batch: tuple[Any, Any]) -> None:
    task, batch = task_and_batch
    model = add_noise(build_models(Lora(inner=task, rank=2), 0)["model"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = compute_loss(task, model, batch)
    merge(model)
    merge(model)  # idempotent
    assert not all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(compute_loss(task, model, batch), before, rtol=1e-5, atol=1e-5)
    unmerge(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(compute_loss(task, model, batch), before)
    plain = build_models(task, 0)["model"]
    with merged_weights(model):
        assert list(model.state_dict()) == list(plain.state_dict())
        assert not find_low_rank_layers(model)
        plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(compute_loss(task, plain, batch), before, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(compute_loss(task, model, batch), before)


def test_initial_weights_depend_on_seed_and_name() -> None:
    task, _ = language_task()
    few = find_low_rank_layers(build_models(Lora(inner=task, targets=("q_proj",)), 1)["model"])
    every_layer = find_low_rank_layers(build_models(Lora(inner=task), 1)["model"])
    other = find_low_rank_layers(build_models(Lora(inner=task), 2)["model"])
    assert len({layer.lora_A.detach().numpy().tobytes() for layer in few.values()}) == len(few)
    for name, layer in few.items():
        assert torch.equal(layer.lora_A, every_layer[name].lora_A)
        assert not torch.equal(layer.lora_A, other[name].lora_A)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_prj",), "did you mean q_proj"),
        (("nothing",), "choose from down_proj, gate_proj"),
        (("lm_head",), "read elsewhere"),
        (("[",), "is not a regular expression"),
        (("layers.7.*",), "matches no layer"),
    ],
)
def test_unknown_targets_are_refused(targets: tuple[str, ...], message: str) -> None:
    task, _ = untied_task()
    with pytest.raises(UsageError, match=message):
        build_models(Lora(inner=task, targets=targets), 0)


def test_targets_match_name_suffixes_or_patterns() -> None:
    task, _ = untied_task()
    chosen = find_low_rank_layers(
        build_models(Lora(inner=task, targets=("q_proj", r".*\.1\.mlp\.up_proj")), 0)["model"]
    )
    assert list(chosen) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert "lm_head" not in find_low_rank_layers(build_models(Lora(inner=task, targets="all-linear"), 0)["model"])


def test_modules_trained_in_full() -> None:
    task, _ = encoder_task()
    lora = Lora(inner=task, train=("head", r"layers\.1\..*layernorm.*"))
    trainable = [name for name, _ in build_models(lora, 0)["model"].named_parameters() if lora.is_trainable(name)]
    full = [name for name in trainable if "lora_" not in name]
    assert full == ["layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight", *HEAD]
    with pytest.raises(UsageError, match="'tail' is not a module"):
        build_models(Lora(inner=task, train=("tail",)), 0)
    with pytest.raises(UsageError, match="trained in full"):
        build_models(Lora(inner=task, train=("head",), targets=("head",)), 0)


HEAD = ["head.weight", "head.bias"]


def test_hash_covers_the_base_only() -> None:
    task, _ = encoder_task()
    lora = Lora(inner=task, train=("head",))
    model = build_models(lora, 0)["model"]
    base_hash, other = lora.hash_base(model), Lora(inner=task, train=("head",), rank=3, targets=("q_proj",))
    assert base_hash == other.hash_base(build_models(other, 0)["model"])
    assert base_hash != lora.hash_base(build_models(lora, 1)["model"])
    with torch.no_grad():
        model.head.weight.add_(1)
        next(iter(find_low_rank_layers(model).values())).lora_B.add_(1)
        assert hash_frozen(model, lora.is_trainable) == base_hash
        model.embedding.weight[0, 0] += 1e-6
    assert hash_frozen(model, lora.is_trainable) != base_hash


# Runs


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("medium", MEDIA)
def test_run_saves_trained_weights_resumes_bitwise_and_loads(bases: Path, tmp_path: Path, medium: str) -> None:
    more = {"training.ema": 0.9, "training.micro_batch_size": 2}
    technique = {"name": "lora", "options": {"rank": 2, "dropout": 0.1}}
    straight = train(bases, tmp_path, medium, technique=technique, name="straight", **more)
    train(bases, tmp_path, medium, technique=technique, name="cut", **more, **{"training.max_steps": 4})
    train(bases, tmp_path, medium, technique=technique, name="cut", **more)
    final = read_tensors(straight.path)
    assert differing_tensors(final, read_tensors(tmp_path / "cut")) == []
    saved = [name for name in final if name.startswith("model.safetensors/")]
    assert all("lora_" in name or "/head." in name for name in saved)
    assert any(np.abs(final[name]).max() > 0 for name in saved if name.endswith("lora_B"))
    # The loaded run gives the metrics of training, and the base is unchanged.
    loaded = bottega.load(straight.path, checkpoint="last", device="cpu")
    assert loaded.evaluate() == pytest.approx(straight.metrics, rel=1e-6)
    base = build_models(loaded.workload.task, 0)["model"].state_dict()
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], base[name]) for name in base if not name.startswith("head."))
    sizes = {name: parameter.numel() for name, parameter in loaded.model.named_parameters()}
    num_trainable = sum(size for name, size in sizes.items() if loaded.engine.task.is_trainable(name))
    assert sum(final[name].size for name in saved) == num_trainable < 0.5 * sum(sizes.values())


def test_commands_work_on_a_lora_run(bases: Path, tmp_path: Path) -> None:
    run = train(bases, tmp_path, "language", name="verbs").path
    saved = bottega.load(run, device="cpu")
    text = saved.generate("alpha", max_tokens=8, temperature=0.0)
    with merged_weights(saved.model):
        assert saved.generate("alpha", max_tokens=8, temperature=0.0) == text
    assert list_step_samples(run, step=3, replay=True)["replay"]["loss"] > 0
    rows = {row["name"]: row for row in inspect_model(str(run), [])["modules"]}
    assert rows["model.embed_tokens"]["trainable"] == 0
    assert rows["model.layers.0.self_attn.q_proj"]["trainable"] == 8 * (16 + 16)
    labels = train(bases, tmp_path, "classify", name="labels").path
    assert bottega.predict(labels, ["salt and onion"])[0]["predicted"] in small_texts.WORDS


def test_exported_model_is_the_merged_model(bases: Path, tmp_path: Path) -> None:
    run = train(bases, tmp_path, "image", name="drawn")
    saved = bottega.load(run.path, device="cpu")
    samples = saved.generate(count=2, **{"class": ["dark"]})
    folder = saved.export()
    continued = bottega.train(
        "image", {**image(bases, tmp_path)[1], "model.from": str(folder), "name": "on", "training.learning_rate": 1e-30}
    )
    exported_samples = bottega.load(continued.path, device="cpu").generate(count=2, **{"class": ["dark"]})
    assert np.abs(samples.astype(int) - exported_samples.astype(int)).max() <= 1
    assert "merged in" in (folder / "README.md").read_text()
    assert json.loads((folder / "adapter" / "bottega.json").read_text())["base"] == saved.base_hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ema: {**ema, "strange": next(iter(ema.values()))}, "strange is not in the model"),
        (lambda ema: dict(list(ema.items())[1:]), "is missing"),
        (lambda ema: {name: array[:1] for name, array in ema.items()}, "the model has"),
    ],
    ids=["strange", "missing", "narrow"],
)
def test_mismatched_ema_weights_are_refused(bases: Path, tmp_path: Path, change: Any, message: str) -> None:
    """Otherwise extra weights would be dropped silently, and missing ones replaced by those without EMA."""
    run = train(bases, tmp_path, "language", name="averaged", **{"training.ema": 0.9, "training.max_steps": 4}).path
    bottega.load(run, device="cpu")
    last = (run / "checkpoints" / "last").resolve()
    manifest = checkpoint.verify(last)
    files = {name: load_file(last / name) for name in manifest.files if name.endswith(".safetensors")}
    files["ema.safetensors"] = change(files["ema.safetensors"])
    checkpoint.write(
        last.parent,
        step=manifest.step,
        files=files,
        progress=checkpoint.read_progress(last),
        fingerprint=manifest.fingerprint,
    )
    with pytest.raises(CheckpointError, match=rf"ema\.safetensors does not fit the model: .*{message}"):
        bottega.load(run, checkpoint="last", device="cpu")


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_checkpoint_size_is_checked_before_the_first_step(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The size excludes the frozen base and includes the state of techniques."""
    requested_sizes: list[int] = []
    monkeypatch.setattr(
        "bottega.run.session.check_disk_space", lambda folder, *, size, **options: requested_sizes.append(size)
    )
    recipe, settings = language(bases, tmp_path)
    paths = (settings.pop("data.train.path"), str(small_run.write_text(tmp_path / "second.txt", seed=2)))
    more = {"training.ema": 0.9, "training.optimizer.name": optimizer, "name": "sized"}
    more |= {
        "data.sources": [{"path": path} for path in paths],
        "data.mixture": "sequence",
        "techniques": ["lora", "ewc"],
    }
    run = bottega.train(recipe, {**settings, **STEADY, **more}).path
    written = list((run / "checkpoints" / "last").glob("*.safetensors"))
    assert len(written) == 4
    assert requested_sizes == [sum(array.nbytes for file in written for array in load_file(file).values())]


def test_different_base_is_refused(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "language", tmp_path / "base")
    changes = {"model.from": str(tmp_path / "base"), "name": "held"}
    run = train(bases, tmp_path, "language", **changes, **{"training.max_steps": 4}).path
    small_run.train(tmp_path, tmp_path / "other.txt", name="odd", seed=1, **{"model.num_layers": 2})
    other = bottega.load(tmp_path / "odd", device="cpu").export(tmp_path / "odd-export")
    shutil.copy(other / "model.safetensors", tmp_path / "base" / "final" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.from.* is not the base model that this run was trained with"):
        bottega.load(run)
    with pytest.raises(CheckpointError, match=r"model\.from is not the base that this run started with"):
        train(bases, tmp_path, "language", **changes)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"the base model of this run, model\.from"):
        bottega.load(run)


def test_run_moved_with_its_base_loads(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "language", tmp_path / "before" / "base")
    run = train(bases, tmp_path / "before", "language", name="moved", **{"model.from": str(tmp_path / "before/base")})
    assert run.path.parent == tmp_path / "before"
    shutil.move(tmp_path / "before", tmp_path / "after")
    assert bottega.load(tmp_path / "after" / "moved").model is not None


def test_two_adapters_of_the_same_layers_are_refused(bases: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep one"):
        train(bases, tmp_path, "image", name="both", techniques=["lora", "adapter"])
    shared = {k: v for k, v in small_media.image(tmp_path).items() if not k.startswith(("model.", "samples."))}
    with pytest.raises(UsageError, match=r"(is not for|does not support) image_vae"):
        bottega.train("image_vae/digits", {**shared, "techniques": ["lora"]})


def test_random_base_is_reported_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**small_media.image(tmp_path), **STEADY, "name": "random", "training.learning_rate": 0.01}
    run = bottega.train("image", {**settings, "techniques": ["lora"]}, quiet=False)
    assert "the frozen base model has random weights of seed 0" in capsys.readouterr().err
    weights = read_tensors(run.path)
    assert {name for name in weights if name.endswith(("attn.to_q.lora_B", "down.lora_B")) and np.any(weights[name])}
    bottega.load(run.path)


NEW = ("table", "lamp", "zeal", "glad", "path", "debt")


@pytest.mark.slow
def test_lora_recovers_half_of_the_gain_of_full_fine_tuning(tmp_path: Path) -> None:
    """From a base trained on six words to a text of six others with the same letters; five seeds, equal steps."""
    from bottega.analysis.compare import compare

    text = small_run.write_text(tmp_path / "text.txt", words=4000)
    new = dict(zip(("alpha", "beta", "gamma", "delta", "zeta", "theta"), NEW, strict=True))
    other = tmp_path / "other.txt"
    other.write_text("".join(" ".join(new[w] for w in line.split()) + "\n" for line in text.read_text().splitlines()))
    sizes = {"model.hidden_size": 32, "model.intermediate_size": 64, "model.num_layers": 2, "model.head_size": 16}
    steps = {"training.batch_size": 16, "evaluation.every": 150, "checkpoint.every": 150}
    rate = {"training.max_steps": 300, "training.learning_rate": 3e-3}
    base = small_run.train(tmp_path, text, name="base", **sizes, **steps, **rate)
    bottega.load(base.path, device="cpu").export()
    common = {**LANGUAGE, **NULL_SIZES, **steps, "data.train.path": str(other), "output_dir": str(tmp_path)}
    common |= {"model.from": str(base.path), "training.max_steps": 150}
    kinds: dict[str, dict[str, Any]] = {
        "still": {"training.learning_rate": 1e-12},
        "full": {"training.learning_rate": 3e-3},
        "lora": {"training.learning_rate": 1e-2, "techniques": ["lora"]},
    }
    for seed in range(5):
        for kind, changes in kinds.items():
            bottega.train("language/shakespeare", {**common, **changes, "seed": seed, "name": f"{kind}-s{seed}"})
    report = compare([str(tmp_path / f"{kind}-s*") for kind in kinds], metric="loss")
    untrained, full, lora = (group["mean"] for group in report["groups"])
    comparison = next(pair for pair in report["pairs"] if (pair["first"], pair["second"]) == ("A", "C"))
    assert comparison["better"] == "C", comparison["verdict"]
    assert comparison["p"] < 0.01
    assert untrained - lora > 0.5 * (untrained - full), (untrained, full, lora)
