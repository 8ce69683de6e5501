"""Text encoders: what the encoding depends on, and which folders load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny_clip
from bottega.core.errors import CheckpointError, UsageError
from bottega.models.dit.initial import initial_value
from bottega.models.generator.config import ConditionShape
from bottega.models.initial import fill_parameters
from bottega.models.text_encoder import TextEncoder, load_text_encoder, read_text_encoder_metadata

SHAPE = ConditionShape(kind="text", hidden_size=8, vocab_size=50, text_size=16, text_layers=2, max_tokens=12)


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    encoder = TextEncoder(SHAPE)
    fill_parameters(encoder, lambda name, shape: initial_value(name, shape, 0))
    return encoder.eval()


@given(st.lists(st.integers(0, 49), min_size=1, max_size=11), st.integers(0, 49), st.integers(1, 11))
def test_padding_never_changes_the_encoding(
    encoder: TextEncoder, caption: list[int], filler: int, num_padding: int
) -> None:
    length = min(12, len(caption) + num_padding)
    row = torch.tensor([caption + [filler] * (length - len(caption))])
    mask = torch.arange(length)[None] < len(caption)
    with torch.no_grad():
        alone = encoder(torch.tensor([caption]), torch.ones(1, len(caption), dtype=torch.bool))
        filled = encoder(row, mask)
    torch.testing.assert_close(filled[:, : len(caption)], alone, atol=1e-5, rtol=1e-5)
    assert not filled[:, len(caption) :].any()


def test_encoding_depends_on_all_tokens_and_their_order(encoder: TextEncoder) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        first, last, reordered = (encoder(torch.tensor([ids]), mask) for ids in ([1, 2, 3], [1, 2, 4], [2, 1, 3]))
    assert (first[0, 0] - last[0, 0]).abs().max() > 1e-3, "the first token attends to the last"
    assert (first[0, 2] - reordered[0, 2]).abs().max() > 1e-4, "the order of tokens matters"


def test_the_encoding_has_unit_variance_from_the_first_step(encoder: TextEncoder) -> None:
    with torch.no_grad():
        encoding = encoder(torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool))
    torch.testing.assert_close(encoding.square().mean(-1), torch.ones(1, 12), atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_clip.save_clip(tmp_path_factory.mktemp("clip"))


def test_loaded_folder_matches_transformers_and_is_frozen(clip: Path) -> None:
    from transformers import CLIPTextModel

    ids = torch.tensor(tiny_clip.tokenizer()(["a red square"], padding="max_length", max_length=12).input_ids)
    encoder = load_text_encoder(clip)
    with torch.no_grad():
        theirs = CLIPTextModel.from_pretrained(clip).eval()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(encoder(input_ids=ids).last_hidden_state, theirs, atol=0, rtol=0)
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    metadata = read_text_encoder_metadata(clip)
    assert (metadata.width, metadata.max_positions, metadata.is_clip) == (16, 12, True)


def test_only_the_encoder_of_an_encoder_decoder_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.utils.logging.disable_progress_bar()
    try:
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    finally:
        transformers.utils.logging.enable_progress_bar()
    encoder, ids = load_text_encoder(tmp_path), torch.tensor([[3, 4, 1]])
    assert type(encoder).__name__ == "T5EncoderModel"
    assert encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.shape == (1, 3, 16)
    metadata = read_text_encoder_metadata(tmp_path)
    assert (metadata.width, metadata.vocab_size, metadata.is_clip) == (16, 40, False)


def _copy_folder(folder: Path, target: Path) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_missing_weight_is_refused(clip: Path, tmp_path: Path) -> None:
    folder = _copy_folder(clip, tmp_path)
    state = load_file(folder / "model.safetensors")
    removed = next(name for name in state if "final_layer_norm.weight" in name)
    save_file({name: value for name, value in state.items() if name != removed}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*final_layer_norm"):
        load_text_encoder(folder)


def test_pickles_and_non_text_models_are_refused(clip: Path, tmp_path: Path) -> None:
    folder = _copy_folder(clip, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_text_encoder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 16}))
    with pytest.raises(UsageError, match="not a text encoder"):
        read_text_encoder_metadata(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_text_encoder_metadata(folder)
