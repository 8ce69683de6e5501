"""Our contestant in a data benchmark: text to packed tokens and shuffled batches of them; images from tar shards.

The benchmark that interleaves the others (HF datasets, tokenizers, tiktoken, webdataset, ...) calls this one through its
`--extra`, with the task in BENCH_* variables. Prints one JSON line.

  BENCH_STORE=decoded    images: serve decoded pixels instead of decoding PNG files as the others do
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bottega.config.data import Source as SourceOptions
from bottega.config.data import TextData
from bottega.data.image.config import ImageData
from bottega.data.loading.loader import Loader
from bottega.data.prepare.media import prepare_media
from bottega.data.text.tokens import TokenWindows
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.generation.config import Generator, ImageRecipe
from bottega.tasks.language.prepare import prepare_language
from crops import Crops


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_text() -> dict[str, Any]:
    corpus, out = os.environ["BENCH_CORPUS"], Path(os.environ["BENCH_OUT"])
    block, batch = int(os.environ["BENCH_BLOCK"]), int(os.environ["BENCH_BATCH"])
    data = TextData(train=SourceOptions(path=corpus))
    spec = TokenizerSpec(kind="pretrained", path=os.environ["BENCH_TOKENIZER"])
    start, used_seconds = time.perf_counter(), cpu_seconds()
    prepared = prepare_language(data, spec, progress=lambda stage, done, total: None, cache=out / "cache")
    seconds, used_seconds = time.perf_counter() - start, cpu_seconds() - used_seconds
    stream = prepared.table("train").values("tokens")
    # A window of `block` tokens includes the target of its last input.
    loader = Loader(TokenWindows(prepared.folder, "train", sequence_length=block - 1, seed=0), batch, seed=0)
    rates = []
    for epoch in range(3):
        steps = int(loader.steps_per_epoch)
        batches = loader(epoch * steps)
        start, count = time.perf_counter(), 0
        for _ in range(steps):
            ids = torch.from_numpy(next(batches)["input_ids"]).long()
            count += ids.numel()
        rates.append(count / (time.perf_counter() - start))
        assert ids.shape == (batch, block)
    return {
        "tokens": len(stream),
        "prep_tokens_per_s": len(stream) / seconds,
        "mb_per_s": os.path.getsize(corpus) / seconds / 1e6,
        "cpu_s": used_seconds,
        "serve_tokens_per_s": median(rates),
        "crc": zlib.crc32(stream.astype(np.uint16).tobytes()),
        "crc_block0": zlib.crc32(stream[:block].astype(np.uint16).tobytes()),
    }


def run_image() -> dict[str, Any]:
    out, batch, workers = (
        Path(os.environ["BENCH_OUT"]),
        int(os.environ["BENCH_BATCH"]),
        int(os.environ["BENCH_WORKERS"]),
    )
    store = os.environ.get("BENCH_STORE", "encoded")
    source = SourceOptions(path=os.environ["BENCH_TAR"], kind="webdataset")
    recipe = ImageRecipe(model=Generator(condition="class"), data=ImageData(train=source, store=store))
    prepared = prepare_media(recipe, progress=lambda stage, done, total: None, cache=out / "cache")
    crops = Crops(prepared.table("train"))
    torch.set_num_threads(1)
    loader = Loader(crops, batch, seed=0, workers=workers if store == "encoded" else 0)
    steps = len(crops) // batch
    rates, firsts, used_seconds = [], [], cpu_seconds()
    for epoch in range(2):
        start = time.perf_counter()
        batches = loader(epoch * steps)
        for step in range(steps):
            rows = next(batches)
            images, labels = torch.from_numpy(rows["image"]), torch.from_numpy(rows["label"])
            if step == 0:
                first = time.perf_counter()
            assert images.shape == (batch, 224, 224, 3)
            assert len(labels) == batch
        rates.append((steps - 1) * batch / (time.perf_counter() - first))
        firsts.append(first - start)
        batches.close()
    per_image = 1e3 * (cpu_seconds() - used_seconds) / 2 / (steps * batch)
    return {"images_per_s": median(rates), "first_batch_s": median(firsts), "cpu_ms_per_image": per_image}


if __name__ == "__main__":
    print(json.dumps({"text": run_text, "image": run_image}[os.environ["BENCH_TASK"]]()))
