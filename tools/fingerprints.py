"""Do two versions of the code compute the same numbers? `python tools/fingerprints.py --against COMMIT`

Trains every bundled recipe in its tiny form (tests/small_recipes.py), and a few with a technique, for three steps on one
thread, and hashes the tensors of the last checkpoint file by file, the samples of each step and the metrics without their
times. With `--against`, the same is done with the code of another commit, and what differs is listed (exit 1). `--out FILE`
keeps the hashes, `--compare A B` compares two such files. Hashes hold for one machine and one set of packages.
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
TIMES = ("seconds", "per_second", "wait", "gib", "percent")
"""How the names of metrics end that differ from run to run."""
WITH_TECHNIQUES: dict[str, tuple[str, dict[str, Any]]] = {
    "language + lora": ("language", {"techniques": ["lora"]}),
    "classify + lora": ("classify", {"techniques": ["lora"]}),
    "image + lora": ("image", {"techniques": ["lora"]}),
    "classify + adapter": ("classify", {"techniques": ["adapter"]}),
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
        with checked_out(arguments.against) as tree:
            before = in_tree(tree, arguments.names)
        return compare(before, in_tree(ROOT, arguments.names))
    hashes = dict(fingerprints(arguments.names))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(hashes, indent=1) + "\n")
    else:
        print(json.dumps(hashes, indent=1))
    return 0


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="bottega-fingerprints-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def in_tree(tree: Path, names: list[str]) -> dict[str, Any]:
    """The hashes with the code of another tree, and with this tree's tiny recipes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, *names, "--out", file.name], env=env, check=True)
        return dict(json.loads(Path(file.name).read_text()))


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    differ = 0
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name, {}), after.get(name, {})
        parts = sorted(part for part in a.keys() | b.keys() if a.get(part) != b.get(part))
        if parts:
            differ += 1
            print(f"{name}: {', '.join(parts)}")
    print(f"{len(before.keys() | after.keys())} recipes, {differ} differ")
    return 1 if differ else 0


def fingerprints(names: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and hashes of each recipe; a process of its own trains each, and what it cannot do is part of the answer."""
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import bottega  # noqa: F401 - imported once, for all children
    import small_recipes

    torch.set_num_threads(1)
    # The path is part of some hashes of data, so it is the same for both trees.
    with fixed_folder() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        data = small_recipes.write_data(folder)
        for name in names or [*recipe_names(), *WITH_TECHNIQUES]:
            recipe, more = WITH_TECHNIQUES.get(name, (name, {}))
            settings = {**small_recipes.settings(recipe, data, folder / "runs"), **more, "name": "run"}
            hashes = trained_in_child(recipe, settings, folder)
            print(f"{name}: {hashes.get('error', 'done')}", file=sys.stderr, flush=True)
            yield name, hashes


@contextlib.contextmanager
def fixed_folder() -> Iterator[Path]:
    import shutil

    folder = Path(tempfile.gettempdir()) / "bottega-fingerprints"
    folder.mkdir()  # somebody else's run of this tool would be in the way
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def recipe_names() -> list[str]:
    import bottega

    folder = Path(bottega.__file__).parent / "recipes"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def trained_in_child(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, str]:
    import shutil

    answer = folder / "answer.json"
    child = os.fork()
    if not child:
        try:
            with open(folder / "log.txt", "w") as log:
                os.dup2(log.fileno(), 2)
            answer.write_text(json.dumps(train_and_hash(recipe, settings)))
        except BaseException as error:
            answer.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    hashes = dict(json.loads(answer.read_text()))
    answer.unlink()
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return hashes


def train_and_hash(recipe: str, settings: dict[str, Any]) -> dict[str, str]:
    import bottega

    run = bottega.train(recipe, settings)
    path = Path(run.path)
    hashes = {file.name: tensors_hash(file) for file in sorted((path / "checkpoints" / "last").glob("*.safetensors"))}
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    hashes["metrics"] = digest([{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in rows])
    hashes["samples"] = digest([ledger(path, step) for step in (1, 2, 3)])
    return hashes


def tensors_hash(file: Path) -> str:
    from safetensors.numpy import load_file

    whole = hashlib.sha256()
    for name, array in sorted(load_file(file).items()):
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]


def ledger(run: Path, step: int) -> Any:
    """The samples of a step, as the verb tells them; its exit code where it does not."""
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
