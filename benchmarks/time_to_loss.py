"""Tokens and seconds until a validation loss: our language recipes beside a plain AdamW GPT-2 with the settings of nanoGPT.

    BOTTEGA_DATA=... python benchmarks/time_to_loss.py novels      # one GPU: 30 M parameters, 50 novels, 5 of them held back
    python benchmarks/time_to_loss.py embedded --device cpu        # a CPU: the quick start's million parameters
    BOTTEGA_DATA=... python benchmarks/time_to_loss.py novels --rows changes --seeds 0 --steps 250   # one change at a time, from AdamW on

The learning rate of each method is chosen by a sweep of as many values, on one seed; then three seeds of each. The baseline's final loss,
the mean over seeds, is the goal. A method gets a fraction of the baseline's tokens, with a schedule of that length: it
reaches the goal if its final loss is at most that. Seconds are those of the steps, without compilation and evaluations, which
are the same for all; they come from short runs alone on the machine, one method after the other. Prints a line a run, a table,
and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
EVALUATIONS, TIMED_STEPS = 1, 60
HELD_BACK = slice(4, None, 10)
"""Every tenth novel, from the fifth on."""


@dataclass(frozen=True)
class Corpus:
    """Data, shape and length of the runs."""

    recipe: str
    """The bundled recipe for data of this size."""
    words: str
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    baseline_rates: tuple[float, ...] | None = None
    """Learning rates of the plain loop, if not the same."""


CORPORA = {
    "novels": Corpus(
        "language/verse",
        "data.train.kind=jsonl data.train.path=train.jsonl data.train.field=text data.validation.kind=jsonl "
        "data.validation.path=valid.jsonl data.validation.field=text data.validation.split=null data.tokenizer.kind=bpe "
        "data.tokenizer.vocab_size=8192 model.size=null model.num_layers=8 model.hidden_size=512 model.num_heads=4 "
        "model.num_kv_heads=4 model.head_size=128 model.context=512",
        128,
        240,
        (1e-3, 2e-3, 4e-3),
        (5e-4, 1e-3, 2e-3),
    ),
    "embedded": Corpus("language", "", 16, 600, (1.5e-3, 3e-3, 6e-3)),
}


@dataclass(frozen=True)
class Method:
    """A recipe with overrides, or the plain loop, and its lengths."""

    recipe: str | None = ""
    """Empty is the recipe of the corpus, None the plain loop."""
    overrides: str = ""
    fractions: tuple[float, ...] = (1.0,)
    """Fractions of the baseline's tokens."""
    batch_share: float = 1.0
    """Batch size relative to the baseline's; as many more steps use the same tokens."""
    rate_of: str | None = None
    """Method whose learning rate it takes; None has a sweep of its own."""
    rates: tuple[float, ...] | None = None
    """Learning rates of its sweep; None are those of the corpus."""


COSINE = "training.scheduler={name: cosine, warmup_steps: '10%', min_ratio: 0.1}"
DECAY = "training.scheduler={name: wsd, warmup_steps: '5%', decay_fraction: 0.6}"
MUON = f"'training.optimizer={{name: muon, momentum: 0.95, betas: [0.9, 0.95]}}' weight_decay=0.1 '{DECAY}'"
METHODS = {
    "gpt2": Method(None),
    "default": Method(fractions=(0.5, 0.7)),
    "speedrun": Method("language/speedrun", fractions=(0.33, 0.5), batch_share=0.25),
}
ROWS = {
    "adamw": Method(overrides=f"'training.optimizer={{name: adamw, betas: [0.9, 0.95]}}' weight_decay=0.1 '{COSINE}'"),
    "muon": Method(overrides=MUON, rates=(1e-3, 2e-3, 4e-3, 8e-3)),
    "muon-cosine": Method(overrides=MUON.replace(DECAY, COSINE), rate_of="muon"),
    **{
        name: Method(overrides=overrides, rate_of="muon")
        for name, overrides in {
            "momentum-0.9": MUON.replace("momentum: 0.95", "momentum: 0.9"),
            "decay-0": MUON.replace("weight_decay=0.1", "weight_decay=0"),
            "zero-init": f"{MUON} model.zero_init_residual=true",
            "untied": f"{MUON} model.tie_embeddings=false",
            "embeddings-x3": f"{MUON} 'training.groups=[{{pattern: .*embed.*, scale: 3.0}}, {{pattern: .*, scale: 1.0}}]'",
            "embeddings-x0.3": f"{MUON} 'training.groups=[{{pattern: .*embed.*, scale: 0.3}}, {{pattern: .*, scale: 1.0}}]'",
            "batch-warm-up": f"{MUON} 'data.curriculum.stages=[{{steps: 20%, batch_size: HALF}}, {{steps: 80%, batch_size: REST}}]'",
            "softcap": f"{MUON} model.logit_softcap=15",
            "relu2": f"{MUON} model.activation=relu2",
            "value-embeddings": f"{MUON} model.value_embeddings=true",
            "relu2-values": f"{MUON} model.activation=relu2 model.value_embeddings=true",
        }.items()
    },
    "half-batch": Method(overrides=MUON, batch_share=0.5, rates=(2e-3, 4e-3)),
}
"""One change at a time: from AdamW in our architecture to Muon with a late decay, and from there each of the others."""
SMALL = MUON.replace("momentum: 0.95", "momentum: 0.9")
SMALL_BATCHES = {
    "half": Method(overrides=SMALL, batch_share=0.5, rates=(2e-3, 4e-3)),
    "quarter": Method(overrides=SMALL, batch_share=0.25, rates=(2e-3, 4e-3)),
    "eighth": Method(overrides=SMALL, batch_share=0.125, rates=(1.5e-3, 3e-3)),
    **{
        f"quarter-{name}": Method(overrides=overrides, batch_share=0.25, rate_of="quarter")
        for name, overrides in {
            "momentum-0.85": MUON.replace("momentum: 0.95", "momentum: 0.85"),
            "untied": f"{SMALL} model.tie_embeddings=false",
            "values": f"{SMALL} model.value_embeddings=true",
            "relu2": f"{SMALL} model.activation=relu2",
            "relu2-values": f"{SMALL} model.activation=relu2 model.value_embeddings=true",
            "decay-0": SMALL.replace("weight_decay=0.1", "weight_decay=0"),
        }.items()
    },
}
"""Smaller batches with a shorter momentum, and changes to the smallest but one."""
ROW_SETS = {"changes": ROWS, "batches": SMALL_BATCHES}
ALL_METHODS = {**METHODS, **ROWS, **SMALL_BATCHES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--methods", help="names of methods, separated by commas; without gpt2 there is no table")
    parser.add_argument("--rows", choices=ROW_SETS, help="one change at a time instead of the recipes")
    parser.add_argument("--seeds", type=int, default=3, help="0 is the sweep alone")
    parser.add_argument("--steps", type=int, help="length of the baseline; default: that of the corpus")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates of the sweep; one: no sweep")
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side; those that are timed are alone")
    parser.add_argument("--timing-rounds", type=int, default=2, help="rounds of short runs for the seconds; 0: none")
    arguments = parser.parse_args()
    corpus = CORPORA[arguments.corpus]
    if arguments.rates:
        corpus = replace(corpus, rates=tuple(arguments.rates), baseline_rates=None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.corpus == "novels":
            write_novels(folder)
        bench = Bench(folder, corpus, arguments.device, arguments.steps or corpus.steps)
        names = (
            arguments.methods.split(",")
            if arguments.methods
            else list(ROW_SETS[arguments.rows] if arguments.rows else METHODS)
        )
        report = bench.compare(names, seeds=arguments.seeds, jobs=arguments.jobs)
        report["step_seconds"] = bench.time_steps(names, rounds=arguments.timing_rounds)
    if "gpt2" in names and arguments.timing_rounds:
        print_table(report)
    print(json.dumps({"bench": "time_to_loss", "corpus": arguments.corpus, **report}))


def write_novels(folder: Path) -> None:
    """Write the novels for training and those held back as JSON Lines."""
    path = Path(os.environ["BOTTEGA_DATA"]) / "text-lm-novels" / "novels.jsonl.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    held_back = lines[HELD_BACK]
    (folder / "valid.jsonl").write_text("".join(held_back), encoding="utf-8")
    (folder / "train.jsonl").write_text("".join(line for line in lines if line not in held_back), encoding="utf-8")


class Run(NamedTuple):
    """A method, its fraction of the baseline's tokens, its learning rate and its seed."""

    method: str
    fraction: float
    rate: float
    seed: int


@dataclass(frozen=True)
class Bench:
    """Runs of one corpus on one device."""

    folder: Path
    corpus: Corpus
    device: str
    steps: int

    def compare(self, methods: list[str], *, seeds: int, jobs: int) -> dict[str, Any]:
        """Sweep the rate of each method, then train each with the best rate and `seeds` seeds; with 0, the first lengths alone."""
        results: dict[Run, dict[str, Any]] = {}

        def train(runs: list[Run]) -> None:
            missing = [run for run in runs if run not in results]
            with ThreadPoolExecutor(jobs) as pool:
                results.update(zip(missing, pool.map(self.run, missing), strict=True))

        self.run(Run("gpt2", 1.0, 1e-3, 0), steps=2)  # prepares the data
        first = {name: ALL_METHODS[name].fractions[0] for name in methods}
        swept = {name: self.list_rates(name) for name in methods if not ALL_METHODS[name].rate_of}
        train([Run(name, first[name], rate, 0) for name, values in swept.items() for rate in values])
        sweep = dict(results)
        best = {
            name: min(values, key=lambda rate: results[Run(name, first[name], rate, 0)]["loss"])
            for name, values in swept.items()
        }
        rates = {name: best[ALL_METHODS[name].rate_of or name] for name in methods}
        rows = [(name, f) for name in methods for f in (ALL_METHODS[name].fractions if seeds else [first[name]])]
        runs = {
            (name, fraction): [Run(name, fraction, rates[name], seed) for seed in range(max(1, seeds))]
            for name, fraction in rows
        }
        train([run for seed in range(max(1, seeds)) for run in (runs[row][seed] for row in rows)])
        return {
            "rates": rates,
            "sweep": [{"method": run.method, "rate": run.rate, **result} for run, result in sweep.items()],
            "rows": [
                {"method": name, "fraction": fraction, "runs": [results[run] for run in runs[name, fraction]]}
                for name, fraction in rows
            ],
        }

    def list_rates(self, name: str) -> tuple[float, ...]:
        """Return the learning rates of a method's sweep; as many for the baseline as for the recipes, around its own best."""
        method = ALL_METHODS[name]
        baseline = self.corpus.baseline_rates if method.recipe is None else None
        return method.rates or baseline or self.corpus.rates

    def time_steps(self, methods: list[str], *, rounds: int) -> dict[str, float]:
        """Return the seconds of a step of each method, from short runs alone in interleaved rounds."""
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(rounds):
            for name in methods:
                seconds[name].append(self.run(Run(name, 1.0, 1e-3, 0), steps=TIMED_STEPS)["seconds"] / TIMED_STEPS)
        return {name: statistics.median(values) for name, values in seconds.items() if values}

    def run(self, run: Run, *, steps: int | None = None) -> dict[str, Any]:
        """Train once; return the final validation loss, the seconds of all steps, and the losses on the way."""
        name, fraction, rate, seed = run
        num_steps = steps or round(fraction * self.steps)
        method = ALL_METHODS[name]
        num_steps = round(num_steps / method.batch_share)
        if method.recipe is None:
            result = self._run_plain(num_steps, rate, seed)
        else:
            result = self._run_recipe(name, method, num_steps, rate, seed)
        print(
            f"{name:<22} {num_steps:>6} steps  rate {rate:<8g} seed {seed}  loss {result['loss']:.4f}  {result['seconds']:.1f} s",
            flush=True,
        )
        return result

    def _run_plain(self, num_steps: int, rate: float, seed: int) -> dict[str, Any]:
        words = f"{self.corpus.recipe} {self.corpus.words} batch_size={self.corpus.batch_size} device={self.device}"
        command = [
            sys.executable,
            str(HERE / "plain_gpt2.py"),
            "--words",
            words,
            "--steps",
            str(num_steps),
            "--evaluations",
            str(EVALUATIONS),
        ]
        output = run_command([*command, "--learning-rate", str(rate), "--seed", str(seed)], self.folder)
        result = json.loads(output.splitlines()[-1])
        return {"loss": result["losses"][-1][1], **result}

    def _run_recipe(self, label: str, method: Method, num_steps: int, rate: float, seed: int) -> dict[str, Any]:
        name = f"{label}-{num_steps}-{rate:g}-{seed}"
        size = round(self.corpus.batch_size * method.batch_share)
        overrides = method.overrides.replace("HALF", str(size // 2)).replace("REST", str(round(1.125 * size)))
        words = (
            f"{method.recipe or self.corpus.recipe} {self.corpus.words} {overrides} batch_size={size} device={self.device} name={name} seed={seed} max_steps={num_steps} learning_rate={rate} "
            f"evaluation.every={max(1, num_steps // EVALUATIONS)} evaluation.max_batches=null compile={str(self.device == 'cuda').lower()} "
            "samples.every=null checkpoint.every=null logging.tensorboard=false logging.report=false logging.modules=false --quiet --fresh"
        )
        run_command([sys.executable, "-m", "bottega", "train", *shlex.split(words)], self.folder)
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        losses = [(row["step"], row["loss"]) for row in rows if row["kind"] == "eval"]
        # The first logged steps compile.
        step_seconds = statistics.median([row["step_seconds"] for row in rows if row["kind"] == "train"][1:] or [0.0])
        return {"loss": losses[-1][1], "losses": losses, "seconds": num_steps * step_seconds}


def run_command(command: list[str], folder: Path) -> str:
    """Run a command in a folder; return what it prints."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{result.stderr[-3000:]}")
    return result.stdout


def print_table(report: dict[str, Any]) -> None:
    """Print the final loss of each method and its tokens and seconds relative to the baseline's."""
    baseline = next(row for row in report["rows"] if row["method"] == "gpt2")
    goal = statistics.mean(run["loss"] for run in baseline["runs"])
    print(f"\n{'method':<22}{'rate':>9}{'tokens':>9}{'seconds':>9}{'loss':>9}{'spread':>9}  reaches {goal:.4f}")
    for row in report["rows"]:
        losses = [run["loss"] for run in row["runs"]]
        ratio = row["fraction"] * report["step_seconds"][row["method"]] / report["step_seconds"]["gpt2"]
        print(
            f"{row['method']:<22}{report['rates'][row['method']]:>9g}{row['fraction']:>9.2f}{ratio:>9.2f}"
            f"{statistics.mean(losses):>9.4f}{max(losses) - min(losses):>9.4f}  {'yes' if statistics.mean(losses) <= goal else 'no'}"
        )


if __name__ == "__main__":
    main()
