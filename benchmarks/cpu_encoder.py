"""Training and evaluation speed of a transformers encoder on SST-2, compared with HF's Trainer, on a CPU.

    python benchmarks/cpu_encoder.py --data text-cls-sst2/ --rounds 3

The same BERT (random weights, saved once), tokenizer, sentences, batches of 32 padded to their longest, AdamW at a constant
rate with clipping at 1, loss logged every 10 steps; each contestant runs in its own process, rounds interleaved. Training speed is
measured between logs after the first two; the second evaluation over dev is timed. Prints a table with medians and the
ratio, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

STEPS, BATCH, WINDOW, RATE, LENGTH = 80, 32, 10, 5e-5, 64


def read_rows(file: Path) -> list[tuple[str, int]]:
    rows = (line.rstrip("\n").split("\t") for line in file.open(encoding="utf-8"))
    return [(text, int(label)) for text, label in rows]


def write_base_model(folder: Path, data: Path) -> None:
    """Write the folder both start from: an encoder of 4 layers and width 256, with a tokenizer trained on the sentences."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        [text for text, _ in read_rows(data / "train.tsv")], vocab_size=8000, show_progress=False
    )
    tokenizer.save_model(str(folder))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=128, num_labels=2, **size)
    BertForSequenceClassification(config).save_pretrained(folder)


def run_trainer(folder: Path, data: Path) -> dict[str, Any]:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)

    class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, rows: list[tuple[str, int]]) -> None:
            ids = tokenizer([text for text, _ in rows], truncation=True, max_length=LENGTH)
            self.rows = [
                {"input_ids": i, "attention_mask": m, "labels": label}
                for i, m, (_, label) in zip(ids["input_ids"], ids["attention_mask"], rows, strict=True)
            ]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return self.rows[index]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())

    clock = Clock()
    options = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=WINDOW,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    hf_trainer = Trainer(
        model=model,
        args=options,
        train_dataset=Sentences(read_rows(data / "train.tsv")),
        eval_dataset=Sentences(read_rows(data / "dev.tsv")),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
        callbacks=[clock],
    )
    hf_trainer.train()
    windows = [
        b - a for a, b in zip(clock.times[1 : STEPS // WINDOW - 1], clock.times[2 : STEPS // WINDOW], strict=True)
    ]
    losses = [row["loss"] for row in hf_trainer.state.log_history if "loss" in row]
    hf_trainer.evaluate()
    start = time.perf_counter()
    metrics = hf_trainer.evaluate()
    seconds = time.perf_counter() - start
    count = len(hf_trainer.eval_dataset)  # type: ignore[arg-type]
    return {
        "train": WINDOW * BATCH / median(windows),
        "evaluate": count / seconds,
        "loss": losses[-1],
        "accuracy": metrics["eval_accuracy"],
    }


def run_ours(folder: Path, data: Path) -> dict[str, Any]:
    import bottega

    settings: dict[str, Any] = {
        "model.from": str(folder),
        "data.train.path": str(data / "train.tsv"),
        "data.train.columns": ["text", "label"],
        "data.validation.path": str(data / "dev.tsv"),
        "data.sequence_length": LENGTH,
        "training.num_epochs": None,
        "training.max_steps": STEPS,
        "training.batch_size": BATCH,
        "training.learning_rate": RATE,
        "training.weight_decay": 0.01,
        "training.scheduler": {"name": "constant"},
        "evaluation.every": STEPS,
        "evaluation.batch_size": BATCH,
        "checkpoint.every": STEPS,
        "logging.every": WINDOW,
        "output_dir": str(folder / "runs"),
        "name": f"ours-{os.getpid()}",
    }
    run = bottega.train("classify/pretrained", settings)
    rows = [row for row in run.history() if "samples_per_second" in row]
    saved = bottega.load(run.path)
    saved.evaluate()
    start = time.perf_counter()
    metrics = saved.evaluate()
    seconds = time.perf_counter() - start
    return {
        "train": median(row["samples_per_second"] for row in rows[2:]),
        "evaluate": len(read_rows(data / "dev.tsv")) / seconds,
        "loss": rows[-1]["loss"],
        "accuracy": metrics["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--as", dest="contestant", choices=("trainer", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps({"trainer": run_trainer, "ours": run_ours}[options.contestant](options.folder, options.data)))
        return
    results: dict[str, list[dict[str, Any]]] = {"trainer": [], "ours": []}
    with tempfile.TemporaryDirectory() as name:
        write_base_model(Path(name), options.data)
        for _ in range(options.rounds):
            for contestant, rows in results.items():
                command = [sys.executable, __file__, "--as", contestant, "--folder", name, "--data", str(options.data)]
                process = subprocess.run(
                    [*command, "--threads", str(options.threads)], check=True, stdout=subprocess.PIPE, text=True
                )
                rows.append(json.loads(process.stdout.splitlines()[-1]))
                print(contestant, rows[-1], file=sys.stderr, flush=True)
    medians = {contestant: {k: median(row[k] for row in rows) for k in rows[0]} for contestant, rows in results.items()}
    for key in ("train", "evaluate"):
        theirs, own = medians["trainer"][key], medians["ours"][key]
        print(f"{key:<9} Trainer {theirs:8.1f} texts/s   ours {own:8.1f} texts/s   ratio {own / theirs:.2f}")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
