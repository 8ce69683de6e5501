"""What a text encoder may depend on, and which folders are opened as one."""

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
from bottega.models.dit.torch import initial_value
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
def test_what_fills_up_a_row_never_changes_the_encoding(
    encoder: TextEncoder, caption: list[int], filler: int, more: int
) -> None:
    length = min(12, len(caption) + more)
    row = torch.tensor([caption + [filler] * (length - len(caption))])
    mask = torch.arange(length)[None] < len(caption)
    with torch.no_grad():
        alone = encoder(torch.tensor([caption]), torch.ones(1, len(caption), dtype=torch.bool))
        filled = encoder(row, mask)
    torch.testing.assert_close(filled[:, : len(caption)], alone, atol=1e-5, rtol=1e-5)
    assert not filled[:, len(caption) :].any()


def test_every_token_is_read_in_the_light_of_the_others_and_of_their_order(encoder: TextEncoder) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        first, last, turned = (encoder(torch.tensor([ids]), mask) for ids in ([1, 2, 3], [1, 2, 4], [2, 1, 3]))
    assert (first[0, 0] - last[0, 0]).abs().max() > 1e-3, "the first does not see the last"
    assert (first[0, 2] - turned[0, 2]).abs().max() > 1e-4, "the order of the others does not matter"


def test_the_encoding_has_unit_variance_from_the_first_step(encoder: TextEncoder) -> None:
    with torch.no_grad():
        found = encoder(torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool))
    torch.testing.assert_close(found.square().mean(-1), torch.ones(1, 12), atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_clip.save(tmp_path_factory.mktemp("clip"))


def test_a_folder_is_read_as_transformers_reads_it_and_stays_frozen(clip: Path) -> None:
    from transformers import CLIPTextModel

    ids = torch.tensor(tiny_clip.tokenizer()(["a red square"], padding="max_length", max_length=12).input_ids)
    found = load_text_encoder(clip)
    with torch.no_grad():
        theirs = CLIPTextModel.from_pretrained(clip).eval()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found(input_ids=ids).last_hidden_state, theirs, atol=0, rtol=0)
    assert not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    facts = read_text_encoder_metadata(clip)
    assert (facts.width, facts.positions, facts.is_clip) == (16, 12, True)


def test_only_the_reading_half_of_other_kinds_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.utils.logging.disable_progress_bar()
    try:
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    finally:
        transformers.utils.logging.enable_progress_bar()
    found, ids = load_text_encoder(tmp_path), torch.tensor([[3, 4, 1]])
    assert type(found).__name__ == "T5EncoderModel"
    assert found(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.shape == (1, 3, 16)
    facts = read_text_encoder_metadata(tmp_path)
    assert (facts.width, facts.vocab_size, facts.is_clip) == (16, 40, False)


def _copy(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_weight_that_is_not_there_is_not_drawn_at_random(clip: Path, tmp_path: Path) -> None:
    folder = _copy(clip, tmp_path)
    state = load_file(folder / "model.safetensors")
    gone = next(name for name in state if "final_layer_norm.weight" in name)
    save_file({name: value for name, value in state.items() if name != gone}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*final_layer_norm"):
        load_text_encoder(folder)


def test_pickles_and_models_that_do_not_read_are_refused(clip: Path, tmp_path: Path) -> None:
    folder = _copy(clip, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_text_encoder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 16}))
    with pytest.raises(UsageError, match="not a text encoder"):
        read_text_encoder_metadata(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_text_encoder_metadata(folder)
