"""Memory that `bottega plan` predicts against the peak that training reports, for several tasks and sizes.

    python benchmarks/plan_memory.py                        # on a GPU: trains a few steps of each case
    python benchmarks/plan_memory.py --device cpu --cases cpu
    python benchmarks/plan_memory.py --against seen.json    # predictions of this machine, peaks recorded on another
    python benchmarks/plan_memory.py --fit 24GB --cases fit # trains within that memory, as the recipe is and as plan says
    python benchmarks/plan_memory.py --fit 2GB --device cpu --cases fit-cpu # its memory as the recipe is and as plan says

Each case runs in two processes of its own: `bottega train` for a few steps, whose memory.json has the peak of the
allocator, and `bottega plan`, which neither needs a GPU nor allocates the model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRANSFORMER = "model.hidden_size={0} model.num_layers={1} model.num_heads={2}"
LANGUAGE = (
    "language data.train.kind=text data.train.path=corpus-{vocab}.txt data.tokenizer.kind=bpe data.tokenizer.vocab_size={vocab} "
    "data.sequence_length={length} data.validation.split=0.02 batch_size={batch} training.optimizer.name=adamw"
)
IMAGE = "image data.train.kind=images data.train.path=images-{side} data.image_size={side} model.patch_size=4 batch_size={batch}"
CLASSIFY = "classify/transformer data.sequence_length={length} batch_size={batch}"
CASES = {
    "language-small": f"{LANGUAGE.format(vocab=8192, length=256, batch=64)} {TRANSFORMER.format(384, 6, 6)}",
    "language-medium": f"{LANGUAGE.format(vocab=50304, length=1024, batch=16)} {TRANSFORMER.format(768, 12, 12)}",
    "language-large": f"{LANGUAGE.format(vocab=50304, length=1024, batch=8)} {TRANSFORMER.format(1024, 24, 16)}",
    "image-small": f"{IMAGE.format(side=32, batch=256)} {TRANSFORMER.format(384, 12, 6)}",
    "image-medium": f"{IMAGE.format(side=64, batch=128)} {TRANSFORMER.format(768, 12, 12)}",
    "image-large": f"{IMAGE.format(side=64, batch=128)} {TRANSFORMER.format(1024, 24, 16)}",
    "classify-small": f"{CLASSIFY.format(length=128, batch=256)} {TRANSFORMER.format(256, 4, 4)}",
    "classify-medium": f"{CLASSIFY.format(length=256, batch=128)} {TRANSFORMER.format(512, 8, 8)}",
    "classify-large": f"{CLASSIFY.format(length=256, batch=128)} {TRANSFORMER.format(1024, 16, 16)}",
}
_MEDIUM = CASES["language-medium"]
FURTHER_CASES = {
    "language-eager": f"{_MEDIUM} compile=false",
    "language-checkpointing": f"{_MEDIUM} gradient_checkpointing=true",
    "language-fp32": f"{_MEDIUM} mixed_precision=fp32",
    "language-micro": f"{_MEDIUM} micro_batch_size=4",
    "language-muon": _MEDIUM.replace("adamw", "muon"),
    "language-ema": f"{_MEDIUM} training.ema=0.999",
    "image-micro": f"{CASES['image-medium']} micro_batch_size=32",
    "image-checkpointing": f"{CASES['image-medium']} gradient_checkpointing=true",
    "classify-eager": f"{CASES['classify-medium']} compile=false",
    "classify-cnn": "classify/cnn batch_size=512 model.hidden_size=256",
    "classify-image": "classify/image data.train.kind=images data.train.path=images-64 data.image_size=64 batch_size=128 "
    "model.hidden_size=128",
}
CPU_CASES = {
    "language": "language",
    "language-wide": f"{LANGUAGE.format(vocab=8192, length=256, batch=32)} {TRANSFORMER.format(512, 6, 8)}",
    "image": "image",
    "image-wide": f"{IMAGE.format(side=32, batch=128)} {TRANSFORMER.format(384, 8, 6)}",
    "classify": "classify/transformer",
    "classify-wide": f"{CLASSIFY.format(length=256, batch=64)} {TRANSFORMER.format(512, 6, 8)}",
}
FIT_CASES = {
    "image-fit": CASES["image-large"],
    "language-fit": CASES["language-large"].replace("batch_size=8", "batch_size=64"),
    "classify-fit": CASES["classify-large"].replace("batch_size=128", "batch_size=256"),
}
FIT_CPU_CASES = {name: CPU_CASES[name] for name in ("language-wide", "image-wide", "classify-wide")}
GROUPS = {"fit": FIT_CASES, "fit-cpu": FIT_CPU_CASES, "gpu": CASES, "further": FURTHER_CASES, "cpu": CPU_CASES}
MIB = 1 << 20
QUIET = (
    "max_steps=8 evaluation.every=0 samples.every=0 checkpoint.every=0 logging.report=false logging.tensorboard=false"
)


def write_corpus(folder: Path, vocab_size: int) -> None:
    """Write a text of random words from which a tokenizer of `vocab_size` can be trained."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 12))) for _ in range(vocab_size)]
    lines = [" ".join(rng.choices(words, k=100)) for _ in range(4000)]
    (folder / f"corpus-{vocab_size}.txt").write_text("\n".join(lines), encoding="utf-8")


def write_images(folder: Path, side: int) -> None:
    """Write random images of two classes."""
    from PIL import Image

    rng = random.Random(0)
    for name in ("a", "b"):
        (folder / f"images-{side}" / name).mkdir(parents=True)
        for number in range(160):
            image = Image.frombytes("RGB", (side, side), rng.randbytes(3 * side * side))
            image.save(folder / f"images-{side}" / name / f"{number}.png")


def run_bottega(folder: Path, words: list[str], *, expected: tuple[int, ...] = (0,)) -> str:
    """Run a command in a folder and return what it prints; `expected` are the exit codes that are not errors."""
    command = [sys.executable, "-m", "bottega", *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode not in expected:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result.stdout


def list_settings(words: list[str], device: str) -> list[str]:
    """Return the settings of a few quiet steps, compiled on a GPU as a long run would be unless `words` say otherwise."""
    is_set = any(word.startswith("compile=") for word in words)
    return [f"device={device}", *QUIET.split(), *(["compile=true"] if device == "cuda" and not is_set else [])]


def measure_peak(folder: Path, name: str, words: list[str], *, device: str) -> dict[str, int]:
    """Train a few steps and return the memory of its peak by category, and the sum."""
    run_bottega(folder, ["train", *words, f"name={name}", *list_settings(words, device), "--fresh", "--quiet"])
    memory: dict[str, Any] = json.loads((folder / "runs" / name / "memory.json").read_text(encoding="utf-8"))
    return memory


def predict_peak(folder: Path, words: list[str], *, device: str) -> int:
    """Return the peak that `bottega plan` predicts for a device, whether it is here or not."""
    command = ["plan", *words, *list_settings(words, device), "--json"]
    report = json.loads(run_bottega(folder, command, expected=(0, 5)))
    return int(report["prediction"]["memory"]["peak"])


WITHIN_MEMORY = """
import sys, torch
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((float(sys.argv[1]) - 2**30) / total)  # 1 GiB for the driver
from bottega.cli import main
sys.exit(main(sys.argv[2:]))
"""


def train_within(folder: Path, name: str, words: list[str], memory: int) -> str:
    """Train with at most `memory` bytes of the GPU; return the last line that it prints if it fails, else "trains"."""
    train = ["train", *words, f"name={name}", *list_settings(words, "cuda"), "--fresh", "--quiet"]
    command = [sys.executable, "-c", WITHIN_MEMORY, str(memory), *train]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    last_line = next(iter(result.stderr.splitlines()[-1:]), "")
    return f"exit {result.returncode}: {last_line[:150]}" if result.returncode else "trains"


def check_fit(folder: Path, name: str, words: list[str], size: str, *, device: str) -> None:
    """Print whether a recipe trains within a memory, as it is and with the overrides that `plan --fit` gives.

    A process is limited to that memory on a GPU; on a CPU its peak is compared with it.
    """
    report = json.loads(run_bottega(folder, ["plan", *words, *list_settings(words, device), "--fit", size, "--json"]))[
        "fit"
    ]
    overrides = report["overrides"]
    if device == "cpu":
        for suffix, more in (("", []), ("-fits", overrides)):
            peak = measure_peak(folder, f"{name}{suffix}", [*words, *more], device=device)["peak"]
            print(
                f"{name}: {' '.join(more) or 'as it is'}: {peak / MIB:,.0f} of {report['memory'] / MIB:,.0f} MiB",
                flush=True,
            )
        return
    print(f"{name}: as it is: {train_within(folder, name, words, report['memory'])}", flush=True)
    result = train_within(folder, f"{name}-fits", [*words, *overrides], report["memory"])
    print(f"{name}: {' '.join(overrides)}: {result}", flush=True)


def main() -> None:
    """Measure and predict the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", default="gpu", help="gpu, further, cpu, fit, fit-cpu, or names of cases, separated by commas"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", metavar="FILE", help="write the measured peaks")
    parser.add_argument("--against", metavar="FILE", help="predict only, and compare with recorded peaks")
    parser.add_argument("--fit", metavar="SIZE", help="train within this memory, such as 24GB")
    arguments = parser.parse_args()
    every_case = {name: words for group in GROUPS.values() for name, words in group.items()}
    names = [name for group in arguments.cases.split(",") for name in GROUPS.get(group, [group])]
    recorded = json.loads(Path(arguments.against).read_text(encoding="utf-8")) if arguments.against else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for vocab_size in (8192, 50304):
            write_corpus(folder, vocab_size)
        for side in (32, 64):
            write_images(folder, side)
        for name in names if arguments.fit else ():
            check_fit(folder, name, every_case[name].split(), arguments.fit, device=arguments.device)
        if arguments.fit:
            return
        print(f"{'case':<24}{'predicted':>12}{'peak, MiB':>12}{'ratio':>9}")
        for name in names:
            words = every_case[name].split()
            recorded.setdefault(name, None)
            if recorded[name] is None:
                recorded[name] = measure_peak(folder, name, words, device=arguments.device)
            if arguments.record:
                Path(arguments.record).write_text(json.dumps(recorded, indent=1), encoding="utf-8")
            peak = recorded[name]["peak"]
            predicted = predict_peak(folder, words, device=arguments.device)
            print(f"{name:<24}{predicted / MIB:>12,.0f}{peak / MIB:>12,.0f}{predicted / peak:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
