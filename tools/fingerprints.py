"""Do two versions of the code compute the same numbers? `python tools/fingerprints.py --against COMMIT`

Trains every bundled recipe in its tiny form (tests/small_recipes.py), and a few with a technique, for three steps on one
thread, and hashes the tensors of the last checkpoint file by file, the samples of each step and the metrics without their
times. With `--against`, the same is done with the code of another commit, and differences are listed (exit 1). `--out FILE`
writes the hashes, `--compare A B` compares two such files. Hashes are valid for one machine and one set of packages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIME_SUFFIXES = ("seconds", "per_second", "wait", "gib", "percent", "share", "watts", "celsius")
"""Suffixes of metrics that differ from run to run."""
DERIVED_METRICS = ("loss_spikes", "skipped_steps", "grad_norm_spread")
"""Metrics that follow from others, and that commits before them do not have."""
WITH_TECHNIQUES: dict[str, tuple[str, dict[str, Any]]] = {
    "language + lora": ("language", {"techniques": ["lora"]}),
    "classify + lora": ("classify/transformer", {"techniques": ["lora"]}),
    "image + lora": ("image", {"techniques": ["lora"]}),
    "classify + adapter": ("classify/transformer", {"techniques": ["adapter"]}),
    "language + online": ("language", {"data.online": {}}),
    "language + muon": ("language", {"training.optimizer.name": "muon"}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="only these recipes (default: all)")
    parser.add_argument("--against", metavar="COMMIT", help="train with the code of this commit as well, and compare")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two files that --out has written")
    parser.add_argument("--out", metavar="FILE", help="write the hashes there as JSON")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*(json.loads(Path(name).read_text()) for name in arguments.compare))
    if arguments.against:
        with checkout_commit(arguments.against) as tree:
            before = fingerprint_tree(tree, arguments.names)
        return compare(before, fingerprint_tree(ROOT, arguments.names))
    hashes = dict(iter_fingerprints(arguments.names))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(hashes, indent=1) + "\n")
    else:
        print(json.dumps(hashes, indent=1))
    return 0


@contextlib.contextmanager
def checkout_commit(commit: str) -> Iterator[Path]:
    """Check out a commit in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bottega-fingerprints-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def fingerprint_tree(tree: Path, names: list[str]) -> dict[str, Any]:
    """Return the hashes of this tree's tiny recipes with the code of `tree`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, *names, "--out", file.name], env=env, check=True)
        return dict(json.loads(Path(file.name).read_text()))


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the hashes that differ, by recipe; return the exit code."""
    num_different = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, {}), after.get(name, {})
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if changed:
            num_different += 1
            print(f"{name}: {', '.join(changed)}")
    print(f"{len(before.keys() | after.keys())} recipes, {num_different} differ")
    return 1 if num_different else 0


def iter_fingerprints(names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and hashes of each recipe, trained in its own process; an error is part of the result."""
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import bottega  # noqa: F401 - imported once, for all children
    import small_recipes

    torch.set_num_threads(1)
    # The path is part of some data hashes, so both trees use the same one.
    with open_fixed_folder() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        data = small_recipes.write_data(folder)
        for name in names or [*list_recipes(), *WITH_TECHNIQUES]:
            recipe, technique_settings = WITH_TECHNIQUES.get(name, (name, {}))
            settings = {**small_recipes.settings(recipe, data, folder / "runs"), **technique_settings, "name": "run"}
            settings.pop("logging.report", None)  # a commit before the report does not know it
            hashes = train_in_child(recipe, settings, folder)
            print(f"{name}: {hashes.get('error', 'done')}", file=sys.stderr, flush=True)
            yield name, hashes


@contextlib.contextmanager
def open_fixed_folder() -> Iterator[Path]:
    import shutil

    folder = Path(tempfile.gettempdir()) / "bottega-fingerprints"
    folder.mkdir()  # fails if another run of this tool is active
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def list_recipes() -> list[str]:
    import bottega

    folder = Path(bottega.__file__).parent / "recipes"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def train_in_child(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, str]:
    import shutil

    result_file = folder / "result.json"
    child = os.fork()
    if not child:
        try:
            with open(folder / "log.txt", "w") as log:
                os.dup2(log.fileno(), 2)
            result_file.write_text(json.dumps(train_and_hash(recipe, settings)))
        except BaseException as error:
            result_file.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    hashes = dict(json.loads(result_file.read_text()))
    result_file.unlink()
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return hashes


def train_and_hash(recipe: str, settings: dict[str, Any]) -> dict[str, str]:
    import bottega

    run = bottega.train(recipe, settings)
    path = Path(run.path)
    hashes = {file.name: hash_tensors(file) for file in sorted((path / "checkpoints" / "last").glob("*.safetensors"))}
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    hashes["metrics"] = digest(
        [{k: v for k, v in row.items() if not k.endswith((*TIME_SUFFIXES, *DERIVED_METRICS))} for row in rows]
    )
    hashes["samples"] = digest([read_ledger(path, step) for step in (1, 2, 3)])
    return hashes


def hash_tensors(file: Path) -> str:
    from safetensors.numpy import load_file

    sha = hashlib.sha256()
    for name, array in sorted(load_file(file).items()):
        sha.update(f"{name} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def read_ledger(run: Path, step: int) -> Any:
    """Return the samples and epochs of a step from `bottega ledger`, and its exit code."""
    from bottega.cli import main as command

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = command(["ledger", str(run), "--step", str(step), "--json"])
    report = json.loads(out.getvalue()) if code == 0 else {}
    return [report.get("samples"), report.get("epochs"), code]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
