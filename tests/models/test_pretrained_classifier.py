"""Encoders of transformers as classifiers: from a folder with or without a head, back to one, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.text_classifier.config import PretrainedShape
from bottega.models.text_classifier.pretrained import (
    PretrainedClassifier,
    build_pretrained,
    export_pretrained,
    read_pretrained_shape,
)

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
DISTIL = {"vocab_size": 50, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 40}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
# Kind -> (configuration class, saved class, configuration, our names of the parameters that its folder lacks)
KINDS: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "bert": ("BertConfig", "BertModel", SMALL, {"head.weight", "head.bias"}),
    "bert masked lm": (
        "BertConfig",
        "BertForMaskedLM",
        SMALL,
        {"head.weight", "head.bias", "backbone.pooler.dense.weight", "backbone.pooler.dense.bias"},
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        DISTIL,
        {"head.weight", "head.bias", "pooling.pre_classifier.weight", "pooling.pre_classifier.bias"},
    ),
    "roberta": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        {**SMALL, "pad_token_id": 1},
        {"head.weight", "head.bias", "pooling.classifier.dense.weight", "pooling.classifier.dense.bias"},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**SMALL, **SPECIAL_TOKENS},
        {"head.weight", "head.bias"},
    ),
}
NAMES = ("bad", "fair", "good")


def save_model(folder: Path, network: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    try:
        network.save_pretrained(folder)
    finally:
        transformers.utils.logging.enable_progress_bar()
    return folder


def save_encoder(folder: Path, kind: str) -> Path:
    config, model, values, _ = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return save_model(folder, getattr(transformers, model)(getattr(transformers, config)(**values)))


def draw_texts(kind: str, *, padding_id: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    padding = KINDS[kind][2].get("pad_token_id", 0) if padding_id is None else padding_id
    return ids.masked_fill(~mask, padding), mask


def build_classifier(folder: Path, seed: int = 0) -> PretrainedClassifier:
    return build_pretrained(read_pretrained_shape(folder, NAMES), seed, folder=folder)


@pytest.mark.parametrize("kind", KINDS)
def test_folder_without_a_head_gets_a_new_head_and_keeps_the_rest(kind: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, kind)
    first, repeated, other = (dict(build_classifier(folder, seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert {name for name in first if name.endswith("weight") and not torch.equal(first[name], other[name])} == {
        name for name in KINDS[kind][3] if name.endswith("weight")
    }
    assert all(name.startswith(("backbone.", "pooling.", "head.")) for name in first)
    assert first["head.weight"].std().item() == pytest.approx(0.02, rel=0.5)
    assert (first["head.bias"] == 0).all()
    stored = load_file(folder / "model.safetensors")
    embedding = next(
        tensor for name, tensor in stored.items() if name.endswith("ings.weight") and tensor.shape[0] == 50
    )
    assert torch.equal(next(iter(first.values())), embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_in_transformers_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = build_classifier(save_encoder(tmp_path / "encoder", kind)).eval()
    export_pretrained(model.state_dict(), model.shape, tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids, mask = draw_texts(kind)
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, mask), theirs(input_ids=ids, attention_mask=mask.long()).logits, rtol=0, atol=0
        )
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert theirs.config.label2id == {"bad": 0, "fair": 1, "good": 2}
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_tokens_have_no_effect(kind: str, tmp_path: Path) -> None:
    model = build_classifier(save_encoder(tmp_path, kind)).eval()
    ids, mask = draw_texts(kind)
    with torch.no_grad():
        together = model(ids, mask)
        assert torch.equal(model(*draw_texts(kind, padding_id=7)), together)
        for row, length in enumerate((9, 4, 1)):
            alone = model(ids[row : row + 1, :length], mask[row : row + 1, :length])
            torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
        features = model.features(ids, mask)
        assert features.shape == (3, 16)
        torch.testing.assert_close(model.head(features), together)


def test_decoder_classifies_at_the_last_token(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
    model = build_classifier(save_model(tmp_path, transformers.GPT2Model(config))).eval()
    assert model.shape.max_positions == 40
    ids, mask = draw_texts("bert")
    together = model(*draw_texts("bert", padding_id=7))
    for row, length in enumerate((9, 4, 1)):
        alone = model(ids[row : row + 1, :length], mask[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def test_exported_folder_loads_with_its_head(tmp_path: Path) -> None:
    model = build_classifier(save_encoder(tmp_path / "encoder", "roberta"), 5)
    export_pretrained(model.state_dict(), model.shape, tmp_path / "out")
    reloaded = build_classifier(tmp_path / "out", 9).state_dict()
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in model.state_dict().items())
    # For other classes only the last layer is new.
    two_classes = build_pretrained(
        read_pretrained_shape(tmp_path / "out", ("no", "yes")), 9, folder=tmp_path / "out"
    ).state_dict()
    assert two_classes["head.weight"].shape == (2, 16)
    assert all(torch.equal(two_classes[name], reloaded[name]) for name in reloaded if not name.startswith("head."))


def test_model_is_rebuilt_from_its_configuration(tmp_path: Path) -> None:
    model = build_classifier(save_encoder(tmp_path, "modernbert")).eval()
    shape = PretrainedShape.model_validate_json(model.shape.model_dump_json())
    assert (shape.num_labels, shape.vocab_size, shape.max_positions) == (3, 50, 40)
    before = torch.get_rng_state()
    rebuilt, repeated = (build_pretrained(shape, 0, folder=None).eval() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not used"
    assert all(torch.equal(a, b) for a, b in zip(rebuilt.parameters(), repeated.parameters(), strict=True))
    assert (rebuilt.backbone.final_norm.weight == 1).all()
    rebuilt.load_state_dict(model.state_dict())
    ids, mask = draw_texts("modernbert")
    with torch.no_grad():
        assert torch.equal(rebuilt(ids, mask), model(ids, mask))


def test_max_positions_is_the_length_of_the_longest_text(tmp_path: Path) -> None:
    """RoBERTa reserves its first two positions."""
    for kind, max_length in (("bert", 40), ("roberta", 38)):
        model = build_classifier(save_encoder(tmp_path / kind, kind)).eval()
        assert model.shape.max_positions == max_length
        model(torch.full((1, max_length), 7), torch.ones(1, max_length, dtype=torch.bool))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, max_length + 1), 7), torch.ones(1, max_length + 1, dtype=torch.bool))


def test_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    folder, gradients = save_encoder(tmp_path, "bert"), []
    for checkpoint_blocks in (False, True):
        model = build_classifier(folder)
        model.checkpoint_blocks = checkpoint_blocks
        assert model.checkpoint_blocks is checkpoint_blocks
        torch.manual_seed(0)
        model(*draw_texts("bert")).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_eval_mode_and_deepcopy_apply_to_every_module(tmp_path: Path) -> None:
    import copy

    model = build_classifier(save_encoder(tmp_path, "distilbert"))
    ids, mask = draw_texts("distilbert")
    assert not torch.equal(model(ids, mask), model(ids, mask)), "training has dropout"
    model.eval()
    logits = model(ids, mask)
    assert torch.equal(model(ids, mask), logits)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.zero_()
    assert torch.equal(copied(ids, mask), logits)
    assert not torch.equal(model(ids, mask), logits)


def test_missing_weight_is_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    state = load_file(folder / "model.safetensors")
    removed = next(name for name in state if "layer.1.output.dense.weight" in name)
    save_file({n: t for n, t in state.items() if n != removed}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks backbone\.encoder\.layer\.1\.output\.dense\.weight"):
        build_classifier(folder)


def test_pickles_and_non_text_models_are_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        build_classifier(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 16}))
    with pytest.raises(UsageError, match="cannot classify texts"):
        build_classifier(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(UsageError, match="cannot read the configuration of the encoder"):
        build_classifier(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        build_classifier(folder)
