"""CLIP as others open it: the same numbers in transformers, whatever folder it came from, and no folder that could run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.clip.torch import Clip, build_clip, export_clip, load_clip, read_clip_shape
from bottega.tasks.align.config import AlignModel, clip_shape

transformers = pytest.importorskip("transformers")

MODEL = AlignModel(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    patch_size=4,
    text_hidden_size=16,
    text_num_layers=2,
    max_tokens=10,
    projection_size=12,
)
BOS, EOS = 18, 19
SHAPE = clip_shape(MODEL, image_size=8, tokens=20, bos=BOS, eos=EOS, padding=EOS)


def row(words: list[int]) -> list[int]:
    return [BOS, *words, EOS, *[EOS] * (8 - len(words))]


@pytest.fixture(scope="module")
def clip() -> Clip:
    return build_clip(SHAPE, 0, negatives=3).eval()


@pytest.fixture(scope="module")
def exported(clip: Clip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    export_clip(clip, folder)
    return folder


def hub_like(folder: Path, **vision: Any) -> Path:
    """As OpenAI's: other means and deviations, pictures cut to the middle."""
    text = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 10, "eos_token_id": EOS, "bos_token_id": BOS}
    seen = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 16, "patch_size": 8, **vision}
    config = transformers.CLIPConfig(text_config=text, vision_config=seen, projection_dim=12)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_like(tmp_path_factory.mktemp("hub"))


def pixels(side: int, *, width: int | None = None, count: int = 3) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (count, side, width or side, 3), np.uint8)


def values(seen: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(seen.astype(np.float32) / 127.5 - 1)


def test_an_export_gives_the_same_numbers_in_transformers(clip: Clip, exported: Path) -> None:
    theirs = transformers.CLIPModel.from_pretrained(exported).eval()
    shown = transformers.AutoImageProcessor.from_pretrained(exported, backend="pil")
    seen, ids = pixels(8), torch.tensor([row([1, 2, 3]), row([4])])
    with torch.no_grad():
        pixel_values = shown(images=[Image.fromarray(one) for one in seen], return_tensors="pt").pixel_values
        found = theirs(input_ids=ids, pixel_values=pixel_values)
        images, texts = clip.images(values(seen)), clip.texts(ids)
        logits = clip.logits(images, texts)
    torch.testing.assert_close(images, found.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(texts, found.text_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits - clip.offset, found.logits_per_image, atol=1e-4, rtol=0)


def test_its_reading_half_is_a_text_encoder_for_generators(clip: Clip, exported: Path) -> None:
    from bottega.models.text_encoder import load_text_encoder, read_text_encoder_metadata

    ids, facts = torch.tensor([row([1, 2, 3])]), read_text_encoder_metadata(exported)
    assert (facts.width, facts.positions, facts.vocab_size, facts.is_clip) == (16, 10, 20, True)
    with torch.no_grad():
        ours = clip.network.text_model(input_ids=ids).last_hidden_state
        for loaded in (load_text_encoder(exported), transformers.CLIPTextModel.from_pretrained(exported).eval()):
            torch.testing.assert_close(loaded(input_ids=ids).last_hidden_state, ours, atol=0, rtol=0)


def test_a_loaded_one_is_the_exported_one_bias_included(clip: Clip, exported: Path) -> None:
    again = load_clip(exported)
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    x, ids = values(pixels(8)), torch.tensor([[row([1]), row([2, 3])]] * 3)
    with torch.no_grad():
        torch.testing.assert_close(again(x, ids).scores, clip(x, ids).scores, atol=0, rtol=0)
    assert again.shape.mean == clip.shape.mean


@pytest.mark.parametrize(("height", "width"), [(16, 16), (40, 40), (24, 40), (33, 20), (8, 8)])
def test_pictures_are_sized_and_scaled_as_the_folder_says(hub: Path, height: int, width: int) -> None:
    ours, theirs = load_clip(hub), transformers.CLIPModel.from_pretrained(hub).eval()
    seen = pixels(height, width=width)
    shown = transformers.CLIPImageProcessor.from_pretrained(hub)
    with torch.no_grad():
        told = shown(images=list(seen), return_tensors="pt", input_data_format="channels_last").pixel_values
        wanted = theirs.get_image_features(pixel_values=told).pooler_output
        found = ours.images(values(seen))
    # They round to whole pixels after sizing.
    torch.testing.assert_close(found, torch.nn.functional.normalize(wanted, dim=-1), atol=0.01, rtol=0)


def test_a_grey_picture_is_one_of_equal_colours(clip: Clip) -> None:
    grey = values(pixels(8))[..., :1]
    with torch.no_grad():
        torch.testing.assert_close(clip.images(grey), clip.images(grey.expand(-1, -1, -1, 3)), atol=0, rtol=0)


@given(st.lists(st.integers(0, 17), max_size=7), st.integers(0, 19))
def test_what_comes_after_the_end_of_a_caption_changes_nothing(clip: Clip, words: list[int], filler: int) -> None:
    ids = torch.tensor([row(words)])
    other = ids.clone()
    other[0, len(words) + 2 :] = filler
    with torch.no_grad():
        torch.testing.assert_close(clip.texts(ids), clip.texts(other), atol=0, rtol=0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_equal_captions_are_encoded_once_and_nobody_can_tell(clip: Clip, numbers: list[list[int]]) -> None:
    captions = torch.tensor([row([1, 2]), row([3]), row([4, 5, 6]), row([])])
    number = torch.tensor(numbers)
    x, ids = values(pixels(8, count=len(numbers))), captions[number]
    with torch.no_grad():
        each, once = clip(x, ids), clip(x, ids, 1000 - 7 * number)
    torch.testing.assert_close(once.scores, each.scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(once.texts, each.texts, atol=1e-6, rtol=0)


def test_gradients_of_captions_that_are_encoded_once_add_up(clip: Clip) -> None:
    x, number = values(pixels(8)), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]])
    ids = torch.tensor([row([1, 2]), row([3])])[number]
    found = []
    for numbers in (None, number):
        clip.zero_grad()
        clip(x, ids, numbers).scores.square().sum().backward()
        found.append({n: p.grad.clone() for n, p in clip.named_parameters() if p.grad is not None})
    assert found[0].keys() == {name for name, _ in clip.named_parameters()}, "all of it learns"
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, atol=2e-3, rtol=1e-4, msg=name)


def test_two_threads_give_the_same_gradient_every_time() -> None:
    """With as many captions as a recipe has: smaller sums are left to one thread."""
    wide = MODEL.model_copy(update={"projection_size": 64, "text_num_layers": 1, "num_layers": 1})
    model = build_clip(clip_shape(wide, image_size=8, tokens=20, bos=BOS, eos=EOS, padding=EOS), 0, negatives=15)
    rng = np.random.default_rng(0)
    numbers = torch.from_numpy(rng.integers(0, 120, (64, 16)))
    rows = torch.tensor([row([int(n) % 18, int(n) // 18 + 1]) for n in range(120)])
    pixels = torch.from_numpy(rng.uniform(-1, 1, (64, 8, 8, 3)).astype(np.float32))
    before, found = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        for _ in range(12):
            model.zero_grad()
            model(pixels, rows[numbers], numbers).scores.square().sum().backward()
            gradients = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            found.add(b"".join(gradients))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_training_begins_by_expecting_one_of_all_pairs() -> None:
    clip = build_clip(SHAPE, 0, negatives=7)
    assert clip.offset.item() == pytest.approx(-np.log(7))
    assert clip.scale.item() == pytest.approx(10)


def test_a_siglip_folder_is_read_too(tmp_path: Path) -> None:
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**shared, "vocab_size": 20, "max_position_embeddings": 10, "projection_size": 16}
    config = transformers.SiglipConfig(text_config=text, vision_config={**shared, "image_size": 16, "patch_size": 8})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.SiglipModel(config).eval()
    network.save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    clip, ids, seen = load_clip(tmp_path), torch.tensor([row([1, 2]), row([3])]), pixels(16)
    assert (clip.shape.mean, clip.shape.keeps_aspect) == ((0.5, 0.5, 0.5), False)
    with torch.no_grad():
        found = network(input_ids=ids, pixel_values=values(seen).movedim(-1, 1)).logits_per_image
        torch.testing.assert_close(clip.logits(clip.images(values(seen)), clip.texts(ids)), found, atol=1e-4, rtol=0)


def test_starting_from_a_folder_without_a_bias_begins_undecided(hub: Path) -> None:
    clip = build_clip(read_clip_shape(hub), 0, negatives=3, folder=hub)
    assert clip.training
    assert clip.offset.item() == pytest.approx(-np.log(3) - 0.25 * clip.scale.item(), rel=1e-4)


def changed(folder: Path, target: Path, **config: Any) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    known = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**known, **config}))
    return target


def test_code_of_the_folders_own_is_refused(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has auto_map, custom code"):
        load_clip(changed(hub, tmp_path, auto_map={"AutoModel": "modeling_evil.Evil"}))


def test_only_safetensors_are_opened(hub: Path, tmp_path: Path) -> None:
    folder = changed(hub, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_clip(folder)


def test_a_weight_that_is_missing_is_an_error(hub: Path, tmp_path: Path) -> None:
    folder = changed(hub, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("visual_projection.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks visual_projection\.weight"):
        load_clip(folder)


def test_what_is_no_clip_is_named(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains a bert"):
        read_clip_shape(changed(hub, tmp_path, model_type="bert"))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_clip_shape(tmp_path / "nowhere")
    folder = changed(hub, tmp_path)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    with pytest.raises(CheckpointError, match="must be three numbers"):
        read_clip_shape(folder)
