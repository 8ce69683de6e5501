"""Small data sets of user preferences: record files, and collections in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 12


def write_image(path: Path, number: int) -> Path:
    """Write a random image that is different for each number."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (SIDE, SIDE + 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def item(number: int) -> dict[str, Any]:
    return {"id": f"i{number}", "caption": f"thing {number}", "image": f"pictures/{number}.png"}


def record(user: int, history: list[int], target: int, **more: Any) -> dict[str, Any]:
    return {"user": f"u{user}", "history": [item(n) for n in history], "target": item(target), **more}


def records(users: int = 10, each: int = 2, liked: int = 4, items: int = 24) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = []
    for user in range(users):
        for _ in range(each):
            *history, target = draw.permutation(items)[: liked + 1].tolist()
            rows.append(record(user, history, target))
    return rows


def write_records(folder: Path, rows: list[dict[str, Any]] | None = None, name: str = "people.jsonl") -> Path:
    """Write a record file and its images."""
    rows = records() if rows is None else rows
    for number in range(24):
        if not (folder / f"pictures/{number}.png").exists():
            write_image(folder / f"pictures/{number}.png", number)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(lines if name.endswith(".jsonl") else json.dumps(rows))
    return folder / name


def write_flickr(
    folder: Path, *, seed: int = 0, workers: int = 6, pictures: int = 20, order: int | None = None
) -> Path:
    """Write FLICKR-AES: a header with spaces, and a score of 1 to 5 from each worker for most images."""
    draw = np.random.default_rng(seed)
    rows = [
        f"A{worker}, farm{number}.jpg, {int(draw.integers(1, 6))}"
        for worker in range(workers)
        for number in draw.permutation(pictures)[: pictures - 4].tolist()
    ]
    rows += [f"ALAZY, farm{number}.jpg, 5" for number in range(2)]
    if order is not None:
        rows = np.random.default_rng(order).permutation(rows).tolist()
    for number in range(pictures):
        if not (folder / f"40K/farm{number}.jpg").exists():
            write_image(folder / f"40K/farm{number}.jpg", number)
    header = "worker, imagePair, score"
    (folder / "FLICKR-AES_image_labeled_by_each_worker.csv").write_text("\n".join((header, *rows)) + "\n")
    (folder / "FLICKR-AES_image_score.txt").write_text("farm0.jpg 0.5\n")
    captions = {f"farm{number}": f"a photo of {number}" for number in range(pictures)}
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def write_pog(folder: Path, *, seed: int = 0, users: int = 12) -> Path:
    """Write POG: three text files, and images of some items."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    outfits = {f"o{number}": draw.permutation(30)[:4].tolist() for number in range(9)}
    lines = [f"{name}," + ";".join(f"t{item}" for item in items) for name, items in outfits.items()]
    (folder / "outfit_data.txt").write_text("\n".join(lines) + "\n")
    clicks = [
        f"p{user}," + ";".join(f"t{item}" for item in draw.integers(0, 30, 14).tolist()) + f",o{int(draw.integers(9))}"
        for user in range(users)
        for _ in range(2)
    ]
    (folder / "user_data.txt").write_text("\n".join([*clicks, clicks[0]]) + "\n")
    items = [f"t{item},c{item % 3},//img.example/{item}.jpg,a coat, number {item}" for item in range(30)]
    (folder / "item_data.txt").write_text("\n".join(items) + "\n")
    for number in range(0, 30, 2):
        write_image(folder / f"images/t{number}.jpg", number)
    return folder


def write_ser(folder: Path, *, topics: int = 6) -> Path:
    """Write SER30K: numbered packs of stickers, some with an emotion."""
    rows = []
    for topic in range(topics):
        for number in range(2 + topic):
            write_image(folder / f"Images/0{topic}-panda/sticker_{number}.png", 100 * topic + number)
            rows.append(
                {"topic": f"0{topic}-panda", "file_name": f"sticker_{number}.png", "anno": number % 2, "text": ""}
            )
    (folder / "Annotations/image-level").mkdir(parents=True)
    content = {"categories": {"happiness": 0, "anger": 1}, "annotations": rows[:-1]}
    (folder / "Annotations/all_annos.json").write_text(json.dumps(content))
    (folder / "Annotations/image-level/train.json").write_text(json.dumps({**content, "annotations": rows[:2]}))
    captions = {f"{row['topic']}/{row['file_name']}": f"a panda, {row['file_name']}" for row in rows}
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def write_captioning_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a BLIP model of transformers with random weights and a small vocabulary."""
    import torch
    from transformers import BertTokenizerFast, BlipConfig, BlipForConditionalGeneration
    from transformers.utils import logging

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "star", "moon", "[DEC]"]
    tokens = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 16,
    }
    config = BlipConfig(
        text_config={
            **small,
            "vocab_size": len(words),
            "encoder_hidden_size": 16,
            "max_position_embeddings": 64,
            "bos_token_id": words.index("[DEC]"),
            "eos_token_id": words.index("[SEP]"),
            "sep_token_id": words.index("[SEP]"),
            "pad_token_id": 0,
        },
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model = BlipForConditionalGeneration(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
            if name.endswith("predictions.bias"):  # so that every caption has words
                parameter[words.index("[SEP]")] = -4.0
    logging.disable_progress_bar()
    try:
        tokens.save_pretrained(folder)
        model.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
    size = {"height": 16, "width": 16}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "BlipImageProcessor", "size": size})
    )
    return folder
