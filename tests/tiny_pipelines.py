"""Tiny random models as their libraries save them: a LLaMA, a CLIP, and pipelines of diffusers.

Nothing is downloaded; the seed determines the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_clip import tokenizer as clip_tokenizer

LENGTH = 16
"""Context length of the text encoders, in tokens."""
T5_LENGTH = 24
WORDS = ("star", "moon", "red", "blue", "striped", "plain", "a", "an", "of", "person", "likes", "keywords")


def write_llama(folder: Path, *, seed: int = 0, words: tuple[str, ...] = WORDS, **sizes: Any) -> Path:
    """Write a LlamaForCausalLM with 4 query and 2 key heads, and a tokenizer that prepends <s> like LLaMA-2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = llama_tokenizer(words)
    config = LlamaConfig(
        vocab_size=len(tokens),
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **sizes,
        },
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=None,
    )
    with _without_progress_bars():
        tokens.save_pretrained(folder)
        _initialise(LlamaForCausalLM(config), seed).save_pretrained(folder)
    return folder


def llama_tokenizer(words: tuple[str, ...] = WORDS) -> Any:
    """Return a tokenizer with all bytes, and a token for each of the words with its leading space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ("<unk>", "<s>", "</s>")
    names, merges = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())], []
    for word in words:
        parts = ["Ġ", *word]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
            names.append(parts[0])
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def write_clip(folder: Path, *, seed: int = 0, image_size: int = 32, **sizes: Any) -> Path:
    """Write a CLIPModel for small images, with its tokenizer and image processor configuration."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = clip_tokenizer()
    tokenizer.model_max_length = LENGTH
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    text = {**tower, "max_position_embeddings": LENGTH, **_vocabulary_config(tokenizer)}
    vision = {**tower, "image_size": image_size, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    with _without_progress_bars():
        tokenizer.save_pretrained(folder)
        _initialise(CLIPModel(config), seed).save_pretrained(folder)
    processor_config = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": image_size},
        "crop_size": {"height": image_size, "width": image_size},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), True),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_config))
    return folder


def write_stable_diffusion(folder: Path, *, seed: int = 0, version_2: bool = False, **scheduler: Any) -> Path:
    """Write a StableDiffusionPipeline like version 1.5, or with `version_2` like 2.0: v-prediction, heads of one size.

    `scheduler` changes its configuration. Images are 32 x 32, latents 4 x 4.
    """
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    more: dict[str, Any] = {"attention_head_dim": (2, 4), "use_linear_projection": True} if version_2 else {}
    unet = UNet2DConditionModel(**_unet(cross_attention_dim=16, **{"attention_head_dim": 2, **more}))
    tokenizer, encoder = _text_encoder(CLIPTextModel, 16, "gelu" if version_2 else "quick_gelu")
    pipe = StableDiffusionPipeline(
        vae=_initialise(_vae(), seed),
        text_encoder=_initialise(encoder, seed + 1),
        tokenizer=tokenizer,
        unet=_initialise(unet, seed + 2),
        scheduler=DDIMScheduler(**_betas("v_prediction" if version_2 else "epsilon", scheduler)),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _save_pipeline(pipe, folder)


def write_stable_diffusion_xl(folder: Path, *, seed: int = 0, **scheduler: Any) -> Path:
    """Write a StableDiffusionXLPipeline: two text encoders of different widths, and image sizes as conditions."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    first_tokenizer, first_encoder = _text_encoder(CLIPTextModel, 16, "quick_gelu")
    second_tokenizer, second_encoder = _text_encoder(CLIPTextModelWithProjection, 24, "gelu", projection_dim=20)
    second_tokenizer.pad_token = "!"  # the padding of SDXL's second tokenizer
    unet = UNet2DConditionModel(
        **_unet(
            cross_attention_dim=16 + 24,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=20 + 6 * 8,
        )
    )
    scheduler_config = {**_betas("epsilon", scheduler), "timestep_spacing": "leading", "interpolation_type": "linear"}
    pipe = StableDiffusionXLPipeline(
        vae=_initialise(_vae(scaling_factor=0.13025), seed),
        text_encoder=_initialise(first_encoder, seed + 1),
        text_encoder_2=_initialise(second_encoder, seed + 2),
        tokenizer=first_tokenizer,
        tokenizer_2=second_tokenizer,
        unet=_initialise(unet, seed + 3),
        scheduler=EulerDiscreteScheduler(
            **{k: v for k, v in scheduler_config.items() if k not in ("clip_sample", "set_alpha_to_one")}
        ),
        add_watermarker=False,
    )
    return _save_pipeline(pipe, folder)


def write_stable_diffusion_3(folder: Path, *, seed: int = 0, with_t5: bool = True, **scheduler: Any) -> Path:
    """Write a StableDiffusion3Pipeline: a transformer that predicts velocity, two CLIP encoders and a T5."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

    first_tokenizer, first_encoder = _text_encoder(CLIPTextModelWithProjection, 16, "quick_gelu", projection_dim=12)
    second_tokenizer, second_encoder = _text_encoder(CLIPTextModelWithProjection, 24, "gelu", projection_dim=20)
    second_tokenizer.pad_token = "!"
    t5_tokens = t5_tokenizer()
    t5 = T5EncoderModel(
        T5Config(vocab_size=len(t5_tokens), d_model=48, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    )
    transformer = SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=48,
        pooled_projection_dim=12 + 20,
        out_channels=4,
        pos_embed_max_size=8,
    )
    vae = _vae(scaling_factor=1.5, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False)
    pipe = StableDiffusion3Pipeline(
        vae=_initialise(vae, seed),
        text_encoder=_initialise(first_encoder, seed + 1),
        text_encoder_2=_initialise(second_encoder, seed + 2),
        text_encoder_3=_initialise(t5, seed + 3) if with_t5 else None,
        tokenizer=first_tokenizer,
        tokenizer_2=second_tokenizer,
        tokenizer_3=t5_tokens if with_t5 else None,
        transformer=_initialise(transformer, seed + 4),
        scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
    )
    return _save_pipeline(pipe, folder)


def t5_tokenizer() -> Any:
    """Return a tokenizer of letters and a few words that appends </s> and prepends nothing."""
    from transformers import T5Tokenizer

    letters = "abcdefghijklmnopqrstuvwxyz,."
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    scores += [(f"▁{word}", -3.0) for word in WORDS if len(word) > 1] + [(letter, -4.0) for letter in letters]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=T5_LENGTH)


def _unet(**more: Any) -> dict[str, Any]:
    return {
        "sample_size": 4,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        **more,
    }


def _vae(**more: Any) -> Any:
    """Return a VAE with four stages, so that latents are 8 times smaller along each side."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=2,
        layers_per_block=1,
        latent_channels=4,
        sample_size=32,
        **more,
    )


def _text_encoder(encoder_class: Any, width: int, activation: str, **more: Any) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig

    tokenizer = clip_tokenizer()
    tokenizer.model_max_length = LENGTH
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_act=activation,
        **_vocabulary_config(tokenizer),
        **more,
    )
    return tokenizer, encoder_class(config)


def _vocabulary_config(tokenizer: Any) -> dict[str, int]:
    named = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {"vocab_size": len(tokenizer), **named}


def _betas(prediction: str, changes: dict[str, Any]) -> dict[str, Any]:
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    return {**betas, "prediction_type": prediction, "clip_sample": False, "set_alpha_to_one": False, **changes}


def _initialise(model: Any, seed: int) -> Any:
    """Initialise weights large enough that every part of the input affects the output."""
    import torch

    draw, others = (torch.Generator().manual_seed(number) for number in (seed, seed + 1000))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter[0].numel() ** -0.5 * torch.randn(parameter.shape, generator=draw))
            elif parameter.numel() > 1 and parameter.std() > 0:  # initialised at random by the library
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=others))
    return model.eval()


def _save_pipeline(pipe: Any, folder: Path) -> Path:
    with _without_progress_bars():
        pipe.save_pretrained(folder)
    return folder


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
