"""CLIP: the same outputs in transformers, caption deduplication, and which folders load."""

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
from bottega.tasks.align.config import AlignModel, build_clip_shape

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
SHAPE = build_clip_shape(MODEL, image_size=8, vocab_size=20, bos=BOS, eos=EOS, padding=EOS)


def build_row(words: list[int]) -> list[int]:
    """Return the token ids of a caption, padded to 10."""
    return [BOS, *words, EOS, *[EOS] * (8 - len(words))]


@pytest.fixture(scope="module")
def clip() -> Clip:
    return build_clip(SHAPE, 0, negatives=3).eval()


@pytest.fixture(scope="module")
def exported(clip: Clip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    export_clip(clip, folder)
    return folder


def save_hub_model(folder: Path, **vision: Any) -> Path:
    """Save a model as OpenAI's: other means and deviations, images center-cropped."""
    text = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 10, "eos_token_id": EOS, "bos_token_id": BOS}
    vision_config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision_config |= {"image_size": 16, "patch_size": 8, **vision}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision_config, projection_dim=12)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hub_model(tmp_path_factory.mktemp("hub"))


def draw_pixels(side: int, *, width: int | None = None, count: int = 3) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (count, side, width or side, 3), np.uint8)


def scale_pixels(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1)


def test_an_export_gives_the_same_numbers_in_transformers(clip: Clip, exported: Path) -> None:
    theirs = transformers.CLIPModel.from_pretrained(exported).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(exported, backend="pil")
    images_u8, ids = draw_pixels(8), torch.tensor([build_row([1, 2, 3]), build_row([4])])
    with torch.no_grad():
        pixel_values = processor(
            images=[Image.fromarray(image) for image in images_u8], return_tensors="pt"
        ).pixel_values
        output = theirs(input_ids=ids, pixel_values=pixel_values)
        images, texts = clip.encode_images(scale_pixels(images_u8)), clip.encode_texts(ids)
        logits = clip.logits(images, texts)
    torch.testing.assert_close(images, output.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(texts, output.text_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits - clip.offset, output.logits_per_image, atol=1e-4, rtol=0)


def test_exported_text_model_loads_as_a_text_encoder(clip: Clip, exported: Path) -> None:
    from bottega.models.text_encoder import load_text_encoder, read_text_encoder_metadata

    ids, metadata = torch.tensor([build_row([1, 2, 3])]), read_text_encoder_metadata(exported)
    assert (metadata.width, metadata.max_positions, metadata.vocab_size, metadata.is_clip) == (16, 10, 20, True)
    with torch.no_grad():
        ours = clip.network.text_model(input_ids=ids).last_hidden_state
        for loaded in (load_text_encoder(exported), transformers.CLIPTextModel.from_pretrained(exported).eval()):
            torch.testing.assert_close(loaded(input_ids=ids).last_hidden_state, ours, atol=0, rtol=0)


def test_loaded_clip_matches_the_exported_one_including_the_bias(clip: Clip, exported: Path) -> None:
    loaded = load_clip(exported)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    x, ids = scale_pixels(draw_pixels(8)), torch.tensor([[build_row([1]), build_row([2, 3])]] * 3)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x, ids).scores, clip(x, ids).scores, atol=0, rtol=0)
    assert loaded.shape.mean == clip.shape.mean


@pytest.mark.parametrize(("height", "width"), [(16, 16), (40, 40), (24, 40), (33, 20), (8, 8)])
def test_images_are_resized_and_normalised_as_the_folder_specifies(hub: Path, height: int, width: int) -> None:
    ours, theirs = load_clip(hub), transformers.CLIPModel.from_pretrained(hub).eval()
    images = draw_pixels(height, width=width)
    processor = transformers.CLIPImageProcessor.from_pretrained(hub)
    with torch.no_grad():
        pixel_values = processor(
            images=list(images), return_tensors="pt", input_data_format="channels_last"
        ).pixel_values
        expected = theirs.get_image_features(pixel_values=pixel_values).pooler_output
        embeddings = ours.encode_images(scale_pixels(images))
    # transformers rounds pixels to integers after resizing.
    torch.testing.assert_close(embeddings, torch.nn.functional.normalize(expected, dim=-1), atol=0.01, rtol=0)


def test_grey_image_equals_three_equal_channels(clip: Clip) -> None:
    grey = scale_pixels(draw_pixels(8))[..., :1]
    with torch.no_grad():
        torch.testing.assert_close(
            clip.encode_images(grey), clip.encode_images(grey.expand(-1, -1, -1, 3)), atol=0, rtol=0
        )


@given(st.lists(st.integers(0, 17), max_size=7), st.integers(0, 19))
def test_tokens_after_the_end_of_a_caption_have_no_effect(clip: Clip, words: list[int], filler: int) -> None:
    ids = torch.tensor([build_row(words)])
    other = ids.clone()
    other[0, len(words) + 2 :] = filler
    with torch.no_grad():
        torch.testing.assert_close(clip.encode_texts(ids), clip.encode_texts(other), atol=0, rtol=0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_deduplicated_captions_give_the_same_scores(clip: Clip, rows: list[list[int]]) -> None:
    captions = torch.tensor([build_row([1, 2]), build_row([3]), build_row([4, 5, 6]), build_row([])])
    caption_numbers = torch.tensor(rows)
    x, ids = scale_pixels(draw_pixels(8, count=len(rows))), captions[caption_numbers]
    with torch.no_grad():
        plain, deduplicated = clip(x, ids), clip(x, ids, 1000 - 7 * caption_numbers)
    torch.testing.assert_close(deduplicated.scores, plain.scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(deduplicated.texts, plain.texts, atol=1e-6, rtol=0)


def test_gradients_of_deduplicated_captions_add_up(clip: Clip) -> None:
    x, numbers = scale_pixels(draw_pixels(8)), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]])
    ids = torch.tensor([build_row([1, 2]), build_row([3])])[numbers]
    gradients = []
    for caption_numbers in (None, numbers):
        clip.zero_grad()
        clip(x, ids, caption_numbers).scores.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in clip.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == {name for name, _ in clip.named_parameters()}, "every parameter gets a gradient"
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=2e-3, rtol=1e-4, msg=name)


def test_gradient_is_deterministic_with_two_threads() -> None:
    """With as many captions as in a recipe: smaller sums use one thread."""
    wide = MODEL.model_copy(update={"projection_size": 64, "text_num_layers": 1, "num_layers": 1})
    model = build_clip(
        build_clip_shape(wide, image_size=8, vocab_size=20, bos=BOS, eos=EOS, padding=EOS), 0, negatives=15
    )
    rng = np.random.default_rng(0)
    caption_numbers = torch.from_numpy(rng.integers(0, 120, (64, 16)))
    captions = torch.tensor([build_row([n % 18, n // 18 + 1]) for n in range(120)])
    pixels = torch.from_numpy(rng.uniform(-1, 1, (64, 8, 8, 3)).astype(np.float32))
    num_threads, distinct_gradients = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        for _ in range(12):
            model.zero_grad()
            model(pixels, captions[caption_numbers], caption_numbers).scores.square().sum().backward()
            gradients = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            distinct_gradients.add(b"".join(gradients))
    finally:
        torch.set_num_threads(num_threads)
    assert len(distinct_gradients) == 1


def test_initial_offset_matches_one_positive_pair() -> None:
    clip = build_clip(SHAPE, 0, negatives=7)
    assert clip.offset.item() == pytest.approx(-np.log(7))
    assert clip.scale.item() == pytest.approx(10)


def test_siglip_folder_loads(tmp_path: Path) -> None:
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**shared, "vocab_size": 20, "max_position_embeddings": 10, "projection_size": 16}
    config = transformers.SiglipConfig(text_config=text, vision_config={**shared, "image_size": 16, "patch_size": 8})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.SiglipModel(config).eval()
    network.save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    clip, ids, images = load_clip(tmp_path), torch.tensor([build_row([1, 2]), build_row([3])]), draw_pixels(16)
    assert (clip.shape.mean, clip.shape.keeps_aspect) == ((0.5, 0.5, 0.5), False)
    with torch.no_grad():
        logits = network(input_ids=ids, pixel_values=scale_pixels(images).movedim(-1, 1)).logits_per_image
        torch.testing.assert_close(
            clip.logits(clip.encode_images(scale_pixels(images)), clip.encode_texts(ids)), logits, atol=1e-4, rtol=0
        )


def test_folder_without_a_bias_starts_at_a_neutral_offset(hub: Path) -> None:
    clip = build_clip(read_clip_shape(hub), 0, negatives=3, folder=hub)
    assert clip.training
    assert clip.offset.item() == pytest.approx(-np.log(3) - 0.25 * clip.scale.item(), rel=1e-4)


def copy_with_config(folder: Path, target: Path, **config: Any) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    original = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**original, **config}))
    return target


def test_custom_code_is_refused(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has auto_map, custom code"):
        load_clip(copy_with_config(hub, tmp_path, auto_map={"AutoModel": "modeling_evil.Evil"}))


def test_pickled_weights_are_refused(hub: Path, tmp_path: Path) -> None:
    folder = copy_with_config(hub, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_clip(folder)


def test_missing_weight_is_refused(hub: Path, tmp_path: Path) -> None:
    folder = copy_with_config(hub, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("visual_projection.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks visual_projection\.weight"):
        load_clip(folder)


def test_folder_that_is_not_a_clip_is_refused(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains a bert"):
        read_clip_shape(copy_with_config(hub, tmp_path, model_type="bert"))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_clip_shape(tmp_path / "nowhere")
    folder = copy_with_config(hub, tmp_path)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    with pytest.raises(CheckpointError, match="must be three numbers"):
        read_clip_shape(folder)
