"""Texts of three classes, each with its own words, and settings of small classifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS = {
    "cook": ("salt", "onion", "boil", "bake", "knife"),
    "sail": ("mast", "rope", "harbour", "tide", "anchor"),
    "sing": ("choir", "tenor", "verse", "hum", "note"),
}
COMMON = ("the", "a", "with", "and", "then", "slowly")
SMALL: dict[str, Any] = {
    "data.validation.split": 0.25,
    "data.test": None,
    "training.max_steps": 8,
    "training.batch_size": 8,
    "training.ema": None,
    "training.scheduler.warmup_steps": 2,
    "evaluation.every": 4,
    "evaluation.baseline": False,
    "checkpoint.every": 4,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "ngrams": {"model.num_buckets": 512},
    "transformer": {"model.hidden_size": 16, "model.num_layers": 2, "model.num_heads": 2},
    "cnn": {"model.embed_size": 8, "model.num_filters": 6, "model.filter_sizes": [2, 3]},
}


def make_rows(count: int = 96, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return texts of 4 to 12 words, half of them specific to the class."""
    draw = np.random.default_rng(seed)
    result = []
    for number in range(count):
        label = list(WORDS)[number % 3]
        length = int(draw.integers(4, 13))
        words = [str(draw.choice(WORDS[label] if index % 2 else COMMON)) for index in range(length)]
        result.append({"text": " ".join(words) + ".", "label": label})
    return result


def write_texts(folder: Path, name: str = "texts.jsonl", **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(**options)))
    return path


def settings(folder: Path, kind: str = "transformer", **changes: Any) -> dict[str, Any]:
    run_settings = {"output_dir": str(folder), "model.kind": kind, "data.train.path": str(write_texts(folder))}
    return {**SMALL, **SIZES[kind], **run_settings, **changes}


def write_encoder(folder: Path) -> Path:
    """Write an untrained BERT with two layers, as transformers saves it, and a tokenizer of `COMMON` and `WORDS`."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        ".",
        *COMMON,
        *(word for group in WORDS.values() for word in group),
    ]
    core = tokenizers.Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    core.save(str(folder / "tokenizer.json"))
    special = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
