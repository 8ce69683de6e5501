"""Personalised generation in the shapes of LLaMA-7B and Stable Diffusion 1.5, with random weights, on one GPU.

First the table of `bottega plan --memory`: a training step by micro-batch, with and without gradient checkpointing. Then
ours compared with a plain implementation (transformers with the prefixes in a cache, diffusers, AdamW), both in bf16, in
interleaved short windows to share clock and thermal effects; medians are compared.

    python benchmarks/gpu_personalize.py [--prompt 600] [--max-micro-batch 16] [--rounds 3] [--steps 4] [--tiny] [--out FILE]

Weights are random because their values do not affect speed; --tiny checks this script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bottega.analysis.memory import format_report, measure_memory
from bottega.config.training import Training
from bottega.core.model_spec import ModelSpec
from bottega.engines.torch.engine import TorchEngine
from bottega.models.frozen.config import SoftPromptShape
from bottega.models.frozen.image import FrozenImageModel, PipelineMetadata
from bottega.models.frozen.language import FrozenLanguageModel
from bottega.models.frozen.prefix_attention import register_prefix_attention
from bottega.models.frozen.soft_prompts import SoftPrompts, build_soft_prompts
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.personalize.task import Personalize

SIZES: dict[str, Any] = {
    "language": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "vocab": 32000,
    "unet": (320, 640, 1280, 1280),
    "vae": (128, 256, 512, 512),
    "text": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "image": 512,
}
TINY: dict[str, Any] = {
    "language": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vocab": 100,
    "unet": (32, 32, 32, 32),
    "vae": (32, 32, 32, 32),
    "text": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "image": 128,
}
TEXT_TOKENS, TEXT_VOCAB, DOWNSAMPLE, LATENT_CHANNELS = 77, 49408, 8, 4


class RandomPersonalize(Personalize):
    """The task with frozen models of random weights, built on their device."""

    sizes: dict[str, Any]
    device: str

    def specs(self) -> dict[str, ModelSpec]:
        torch.manual_seed(0)
        language, (unet, vae, text) = (
            build_language_model(self.sizes, self.device),
            build_image_parts(self.sizes, self.device),
        )
        if self.checkpointing:
            unet.enable_gradient_checkpointing()
        models = {
            "model": build_soft_prompts(self.shape, 0),
            "language_model": FrozenLanguageModel(language, supports_prefixes=True, checkpointing=self.checkpointing),
            "image_model": FrozenImageModel(build_metadata(self.sizes), denoiser=unet, encoders=[text], vae=vae),
        }
        return {name: ModelSpec.of(model) for name, model in models.items()}


def build_language_model(sizes: dict[str, Any], device: str, *, attention: str | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes["language"], vocab_size=sizes["vocab"], max_position_embeddings=4096)
    config._attn_implementation = attention or register_prefix_attention()
    return build_frozen(lambda: LlamaForCausalLM(config), device)


def build_image_parts(sizes: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    """Return the U-Net, the autoencoder and the text encoder."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    text = sizes["text"]
    unet = build_frozen(
        lambda: UNet2DConditionModel(
            sample_size=sizes["image"] // DOWNSAMPLE,
            block_out_channels=sizes["unet"],
            cross_attention_dim=text["hidden_size"],
            attention_head_dim=8,
        ),
        device,
    )
    vae = build_frozen(
        lambda: AutoencoderKL(
            block_out_channels=sizes["vae"],
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            sample_size=sizes["image"],
        ),
        device,
    )
    config = CLIPTextConfig(**text, vocab_size=TEXT_VOCAB, max_position_embeddings=TEXT_TOKENS)
    return unet, vae, build_frozen(lambda: CLIPTextModel(config), device)


def build_frozen(build: Callable[[], Any], device: str) -> Any:
    """Build a frozen model directly in half precision: 7 billion float32 parameters would take 26 GiB temporarily."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return build().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default_dtype)


def build_metadata(sizes: dict[str, Any]) -> PipelineMetadata:
    return PipelineMetadata(
        kind="sd",
        folder="random",
        denoiser="random",
        encoders=("random",),
        tokenizers=("random",),
        vae="random",
        lengths=(TEXT_TOKENS,),
        vocab_sizes=(TEXT_VOCAB,),
        num_tokens=TEXT_TOKENS,
        text_size=sizes["text"]["hidden_size"],
        pooled_size=None,
        objective="noise",
        schedule="scaled_linear",
        shift=1.0,
        scale=0.18215,
        latent_shift=0.0,
        downsample=DOWNSAMPLE,
        latent_channels=LATENT_CHANNELS,
        image_size=sizes["image"],
        side_step=DOWNSAMPLE * 8,
        max_side=None,
        zero_unconditional=False,
    )


def build_soft_shape(sizes: dict[str, Any]) -> SoftPromptShape:
    language = sizes["language"]
    heads = language["num_attention_heads"]
    return SoftPromptShape(
        hidden_size=language["hidden_size"],
        num_layers=language["num_hidden_layers"],
        num_kv_heads=heads,
        head_size=language["hidden_size"] // heads,
        text_size=sizes["text"]["hidden_size"],
        num_image_tokens=2,
        num_prefix_tokens=2,
    )


def build_engine(sizes: dict[str, Any], device: str, *, checkpointing: bool, compile: bool = False) -> TorchEngine:
    side = sizes["image"] // DOWNSAMPLE
    task = RandomPersonalize(
        shape=build_soft_shape(sizes),
        path=NoisePath(objective="noise", schedule="scaled_linear"),
        language_model="random",
        image_model="random",
        checkpointing=checkpointing,
        image_size=sizes["image"],
        latent=(side, side, LATENT_CHANNELS),
        empty=((0,) * TEXT_TOKENS,),
        sizes=sizes,
        device=device,
    )
    training = Training(learning_rate=5e-6, compile=compile, max_steps=1)
    return TorchEngine(task, training, rate=lambda step: 5e-6, device=device)


def draw_batch(sizes: dict[str, Any], count: int, prompt_length: int) -> dict[str, np.ndarray]:
    rng, side = np.random.default_rng(0), sizes["image"]
    return {
        "image": rng.uniform(-1, 1, (count, side, side, 3)).astype(np.float32),
        "prompt": rng.integers(0, sizes["vocab"], (count, prompt_length)),
        "prompt_mask": np.ones((count, prompt_length), np.int64),
        "preference_0": rng.integers(0, TEXT_VOCAB, (count, TEXT_TOKENS)),
        "target_0": rng.integers(0, TEXT_VOCAB, (count, TEXT_TOKENS)),
    }


class Plain:
    """A plain implementation of the same step: the prefix as a filled cache, models called in sequence."""

    def __init__(self, sizes: dict[str, Any], device: str) -> None:
        self.sizes, self.device = sizes, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.language = build_language_model(sizes, device, attention="sdpa")
        self.unet, self.vae, self.text = build_image_parts(sizes, device)
        self.soft: SoftPrompts = build_soft_prompts(build_soft_shape(sizes), 0).to(device)
        self.optimizer = torch.optim.AdamW(self.soft.parameters(), lr=5e-6)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
        self.alphas_cumprod = torch.cumprod(1 - betas, 0).float().to(device)

    def compiled(self) -> Plain:
        """Compile each model."""
        self.language.model.compile()
        self.unet.compile()
        self.vae.encoder.compile()
        return self

    def hidden(self, ids: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache, shape, count = DynamicCache(), self.soft.shape, len(ids)
        for layer, pair in enumerate(self.soft.prefixes()):
            heads = [tensor.view(-1, shape.num_kv_heads, shape.head_size).transpose(0, 1) for tensor in pair]
            keys, values = (tensor.to(self.dtype).expand(count, -1, -1, -1) for tensor in heads)
            cache.update(keys, values, layer)
        embeddings = self.language.get_input_embeddings()(ids)
        tokens = self.soft.image_tokens.to(self.dtype).expand(count, -1, -1)
        output = self.language.model(
            inputs_embeds=torch.cat((embeddings, tokens), 1), past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state[:, -len(self.soft.image_tokens) :]

    def step(self, batch: dict[str, Tensor]) -> float:
        count = len(batch["image"])
        with torch.no_grad():
            pixels = batch["image"].movedim(-1, 1).contiguous().to(self.dtype)
            clean = (self.vae.encode(pixels).latent_dist.sample() * 0.18215).float()
            texts = [self.text(batch[name])[0] for name in ("preference_0", "target_0")]
        noise, time = torch.randn_like(clean), torch.randint(0, 1000, (count,), device=self.device)
        level = self.alphas_cumprod[time].view(-1, 1, 1, 1)
        noisy = (level.sqrt() * clean + (1 - level).sqrt() * noise).to(self.dtype)
        soft = self.soft.mapping(self.hidden(batch["prompt"]).float()).to(self.dtype)
        predicted = self.unet(noisy, time, encoder_hidden_states=torch.cat((soft, *texts), 1)).sample
        loss = (predicted.float() - noise).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.soft.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compare_throughput(arguments: argparse.Namespace, sizes: dict[str, Any], device: str) -> dict[str, Any]:
    count = arguments.batch
    batch = draw_batch(sizes, count, arguments.prompt)
    engines = {
        name: build_engine(sizes, device, checkpointing=False, compile=name == "ours")
        for name in ("ours", "ours, eager")
    }
    plains = {"plain": Plain(sizes, device), "plain, compiled": Plain(sizes, device).compiled()}

    def ours(name: str, step: int) -> Any:
        return engines[name].fetch(engines[name].train_step(step, batch))

    def plain(name: str, step: int) -> float:
        # The batch comes from the host for both, as from a loader.
        return plains[name].step({field: torch.from_numpy(value).to(device) for field, value in batch.items()})

    contestants: dict[str, Callable[[int], Any]] = {name: partial(ours, name) for name in engines}
    contestants |= {name: partial(plain, name) for name in plains}
    for name, run_step in contestants.items():
        start = time.perf_counter()
        run_step(0)
        run_step(1)
        print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(arguments.rounds):
        for name, run_step in contestants.items():
            start = time.perf_counter()
            for step in range(arguments.steps):
                run_step(2 + number * arguments.steps + step)
            rates[name].append(count * arguments.steps / (time.perf_counter() - start))
    medians = {name: median(values) for name, values in rates.items()}
    ratios = {name: medians["ours"] / value for name, value in medians.items() if name != "ours"}
    return {"micro_batch": count, "samples_per_second": medians, "ours_to": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--max-micro-batch", type=int, default=16)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    sizes, device = (TINY, "cpu") if arguments.tiny else (SIZES, "cuda")
    results: dict[str, Any] = {"prompt": arguments.prompt}
    for checkpointing in (False, True):
        engine = build_engine(sizes, device, checkpointing=checkpointing)
        report = measure_memory(
            engine,
            lambda size: draw_batch(sizes, size, arguments.prompt),
            batch_size=24,
            max_micro_batch=arguments.max_micro_batch,
            notes=[],
        )
        results["checkpointing" if checkpointing else "plain"] = report
        print(f"\ngradient checkpointing: {checkpointing}\n{format_report(report)}", flush=True)
        engine.close()
        del engine
        if device == "cuda":
            torch.cuda.empty_cache()
    results["side_by_side"] = compare_throughput(arguments, sizes, device)
    print(json.dumps(results["side_by_side"]), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
