"""Adapter folders: exports load in peft, peft's load here, and a start is read once and checked against its base."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bottega
from bottega.analysis.ledger import list_step_samples
from bottega.core.errors import UsageError
from bottega.models.build import build_models
from bottega.techniques.lora.torch import Lora
from small_fine_tuning import language_task, train, write_bases
from small_run import differing_tensors, read_tensors


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bases(tmp_path_factory.mktemp("bases"))


def test_our_adapter_opens_in_peft(bases: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run = train(bases, tmp_path, "language", name="ours", **{"training.learning_rate": 0.05})
    saved = bottega.load(run.path, device="cpu")
    adapter = saved.export() / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "language" / "final")
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad(), saved.engine.sampling() as models:
        ours = models["model"](tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-5, atol=1e-5)
        plain = transformers.AutoModelForCausalLM.from_pretrained(saved.directory.final).eval()
        torch.testing.assert_close(plain(tokens).logits, ours, rtol=1e-5, atol=1e-5)
        with theirs.disable_adapter():
            assert (theirs(tokens).logits - ours).abs().max() > 1e-3


def test_our_classifier_and_its_head_open_in_peft(bases: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run = train(bases, tmp_path, "classify", name="ours", **{"training.learning_rate": 0.05})
    saved = bottega.load(run.path, device="cpu")
    adapter = saved.export() / "adapter"
    transformers.utils.logging.set_verbosity_error()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(bases / "encoder", num_labels=3)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    ids = torch.tensor([[2, 7, 9, 3]])
    with torch.no_grad(), saved.engine.sampling() as models:
        ours = models["model"](ids, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours, rtol=1e-5, atol=1e-5)


def test_training_starts_from_a_peft_adapter(bases: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "language" / "final")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config).eval()
    noisy_parts = [p for name, p in theirs.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for number, parameter in enumerate(noisy_parts):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (number + 1) / 4)
    theirs.save_pretrained(tmp_path / "theirs")
    options = {"rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj"], "start": str(tmp_path / "theirs")}
    still = {"training.learning_rate": 1e-30, "training.weight_decay": 0.0, "name": "still"}
    run = train(bases, tmp_path, "language", technique={"name": "lora", "options": options}, **still)
    shutil.move(tmp_path / "theirs", tmp_path / "gone")  # a finished run does not need it
    saved, tokens = bottega.load(run.path, device="cpu"), torch.arange(8)[None]
    with torch.no_grad(), saved.engine.sampling() as models:
        torch.testing.assert_close(theirs(tokens).logits, models["model"](tokens), rtol=1e-5, atol=1e-5)
    options["start"] = str(tmp_path / "gone")
    for change, message in (
        ({"rank": 8}, r"lora\.rank is 8, but .* has 4"),
        ({"alpha": None}, r"lora\.alpha is 8, but .* has 6"),
        ({"targets": None}, r"lacks model\.layers.*; its layers are q_proj, v_proj"),
        ({"targets": ["q_proj"]}, "contains .*v_proj.*, which is not trained here"),
        ({"start": str(tmp_path / "nowhere")}, "does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            train(bases, tmp_path, "language", technique={"name": "lora", "options": {**options, **change}}, name="no")


def test_training_starts_from_our_own_adapter(bases: Path, tmp_path: Path) -> None:
    """EMA weights start from it too."""
    first = train(bases, tmp_path, "classify", name="first", **{"training.learning_rate": 0.05})
    adapter = bottega.load(first.path, checkpoint="last", device="cpu").export() / "adapter"
    technique = {"name": "lora", "options": {"start": str(adapter)}}
    still = {"training.learning_rate": 1e-30, "training.weight_decay": 0.0, "name": "still", "training.ema": 0.9}
    second = train(bases, tmp_path, "classify", technique=technique, **still)
    first_weights, second_weights, average = (
        load_file(run.path / "checkpoints" / "last" / name)
        for run, name in ((first, "model.safetensors"), (second, "model.safetensors"), (second, "ema.safetensors"))
    )
    assert differing_tensors(first_weights, second_weights) == []
    for name, tensor in average.items():  # 0.1 of 1 and 0.9 of it is 1 but for rounding
        np.testing.assert_allclose(tensor, first_weights[name], rtol=1e-5, atol=1e-8)


def test_resume_does_not_need_the_starting_adapter(bases: Path, tmp_path: Path) -> None:
    first = train(bases, tmp_path, "language", name="first", **{"training.learning_rate": 0.05})
    adapter = bottega.load(first.path, device="cpu").export() / "adapter"
    shutil.copytree(adapter, tmp_path / "start")
    technique = {"name": "lora", "options": {"start": str(tmp_path / "start")}}
    more = {"technique": technique, "training.ema": 0.9}
    straight = train(bases, tmp_path, "language", name="straight", **more)
    elsewhere = train(bases, tmp_path, "language", name="elsewhere", **{**more, "technique": "lora"})
    train(bases, tmp_path, "language", name="cut", **more, **{"training.max_steps": 4})
    shutil.rmtree(tmp_path / "start")
    train(bases, tmp_path, "language", name="cut", **more)
    assert differing_tensors(read_tensors(straight.path), read_tensors(tmp_path / "cut")) == []
    assert differing_tensors(read_tensors(straight.path), read_tensors(elsewhere.path)) != []  # the start has an effect
    assert list_step_samples(straight.path, step=3, replay=True)["replay"]["loss"] > 0
    with pytest.raises(UsageError, match=r"techniques\.lora\.start: .* does not exist"):
        train(bases, tmp_path, "language", name="new", **more)


def build_language_lora(**options: Any) -> Lora:
    return Lora(inner=language_task()[0], **options)


def export_adapter(lora: Lora, folder: Path, *, seed: int = 0) -> Path:
    lora.export(build_models(lora, seed)["model"], folder, origin="runs/base", export_whole=dict)
    return folder


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_adapter_over_a_base_that_differs_in_one_number_is_refused(tmp_path: Path, name: str) -> None:
    start = export_adapter(build_language_lora(targets=("q_proj",)), tmp_path)
    lora = build_language_lora(targets=("q_proj",), start=str(start))
    model = build_models(lora, 0)["model"]
    assert lora.load_start(model)
    lora = build_language_lora(targets=("q_proj",), start=str(start))
    model = build_models(lora, 0)["model"]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6
    message = rf"techniques\.lora\.start: .* another base model \(runs/base; {re.escape(name)} differs\); set model\.from to it"
    with pytest.raises(UsageError, match=message):
        lora.load_start(model)


def test_more_modules_may_be_trained_over_the_same_base(tmp_path: Path) -> None:
    start = str(export_adapter(build_language_lora(train=("model.layers.1.input_layernorm",)), tmp_path))
    here = ("model.layers.1.input_layernorm", "model.norm")
    lora = build_language_lora(train=here, start=start)
    assert lora.load_start(build_models(lora, 0)["model"])
    lora = build_language_lora(train=here, start=start)
    with pytest.raises(UsageError, match=r"another base"):
        lora.load_start(build_models(lora, 1)["model"])


def test_adapter_of_another_base_is_refused(bases: Path, tmp_path: Path) -> None:
    first = train(bases, tmp_path, "language", name="first")
    folder = bottega.load(first.path, device="cpu").export()
    technique = {"name": "lora", "options": {"start": str(folder / "adapter")}}
    with pytest.raises(
        UsageError, match=r"techniques\.lora\.start: .* over another base"
    ):  # the change would be applied twice
        train(bases, tmp_path, "language", name="twice", technique=technique, **{"model.from": str(first.path)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "pissa_niter_4"),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("qalora_group_size", 32),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("target_parameters", ["experts.weight"]),
        ("trainable_token_indices", [3]),
        ("rank_pattern", {"q_proj": 2}),
        ("loftq_config", {"loftq_bits": 4}),
        ("something_of_next_year", {"deep": {"on": True}}),
    ],
)
def test_unsupported_peft_setting_is_refused_by_name_and_value(tmp_path: Path, key: str, value: Any) -> None:
    start = export_adapter(build_language_lora(), tmp_path)
    config = json.loads((start / "adapter_config.json").read_text())
    (start / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    lora = build_language_lora(start=str(start))
    with pytest.raises(
        UsageError, match=rf"techniques\.lora\.start: .* has {key} {re.escape(json.dumps(value))}, which"
    ):
        lora.load_start(build_models(lora, 0)["model"])


def test_peft_settings_without_effect_are_accepted(tmp_path: Path) -> None:
    start = export_adapter(build_language_lora(), tmp_path)
    config = json.loads((start / "adapter_config.json").read_text())
    defaults = {"use_dora": False, "eva_config": None, "rank_pattern": {}, "next_year": [], "bias": "none"}
    defaults |= {"runtime_config": {"ephemeral_gpu_offload": False}, "megatron_core": "megatron.core"}
    defaults |= {"init_lora_weights": "gaussian", "qalora_group_size": 16, "peft_version": "9.9", "layers_pattern": "h"}
    (start / "adapter_config.json").write_text(json.dumps({**config, **defaults}))
    lora = build_language_lora(start=str(start))
    assert lora.load_start(build_models(lora, 0)["model"])
