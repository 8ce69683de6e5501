"""A tiny CLIP text encoder and tokenizer, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LENGTH = 12
WORDS = ("bright", "dark", "square", "red")


def tokenizer() -> Any:
    """Return a tokenizer with all bytes, inside words and at their end, and a few complete words."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    symbols = sorted(ByteLevel.alphabet())
    names = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    merges = []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
            names.append(parts[0])
    names = list(dict.fromkeys([*names, "<|startoftext|>", "<|endoftext|>"]))
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=list(dict.fromkeys(merges)))


def save_clip(folder: Path, *, seed: int = 0) -> Path:
    """Write encoder and tokenizer to one folder; the seed determines the weights."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel
    from transformers.utils import logging

    clip_tokenizer = tokenizer()
    clip_tokenizer.save_pretrained(folder)
    config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
    return folder
