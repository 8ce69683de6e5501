"""`bottega evaluate`: a run's loss on held-out data, and where it generates, what its samples are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.errors import UsageError
from bottega.saved import SavedRun, open_run

TITLES = {"generated": "generated", "real": "real, held out", "through_codec": "real, through codec"}


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    split: str = "validation",
    checkpoint: str | int = "best",
    device: str = "auto",
    count: int | None = None,
    inception: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """`bottega.evaluate`: {"metrics": ...} and, of a generator, the same measures of real data beside them.

    `count` samples are drawn for that; 0 measures the loss alone.
    """
    if count is not None and count < 0:
        raise UsageError(f"--count {count}: expected 0, for the loss alone, or more")
    saved = open_run(Path(run), checkpoint=checkpoint, device=device)
    metrics = {**saved.evaluate(data, split=split), **_codes_used(saved, data, split)}
    result: dict[str, Any] = {"metrics": metrics, "checkpoint": str(saved.checkpoint)}
    if not _generates(saved) or count == 0:
        return result
    from rich.console import Console

    from bottega.callbacks.bars import bars
    from bottega.insight.scores import score

    with bars(Console(stderr=True, quiet=quiet)) as say:
        scores = score(
            saved,
            split=split,
            data=str(data) if data is not None else None,
            count=count,
            inception=Path(inception) if inception is not None else None,
            say=say,
            quiet=quiet,
        )
    result["metrics"] = {**metrics, **scores.generated}
    result["real"] = scores.real
    if scores.through_codec:
        result["through_codec"] = scores.through_codec
    result["counts"] = scores.counts
    return result


def show(result: dict[str, Any]) -> str:
    """The loss, and a table of what was drawn beside what is real."""
    compared = result.get("real", {})
    lines = [f"{name:<20}{value:.4f}" for name, value in result["metrics"].items() if name not in compared]
    if compared:
        columns = {"generated": result["metrics"], **{name: result[name] for name in TITLES if name in result}}
        lines += ["", " " * 20 + "".join(f"{TITLES[name]:>22}" for name in columns)]
        lines += [
            f"{measure:<20}" + "".join(f"{values[measure]:>22.4f}" for values in columns.values())
            for measure in compared
        ]
        counts = result["counts"]
        lines.append(f"{'samples':<20}" + "".join(f"{counts.get(n, counts['real']):>22,}" for n in columns))
        some = f"{counts['training']:,} of {counts['training_available']:,} training samples"
        lines.append(f"compared with {some}, distributions at {counts['compared']:,} samples each")
    return "\n".join(lines)


def _codes_used(saved: SavedRun, data: str | Path | None, split: str) -> dict[str, float]:
    """Of a tokenizer: how many of its codes the same data uses."""
    from bottega.branches.tokens import TokensBranch

    branch = saved.branch
    if not isinstance(branch, TokensBranch):
        return {}
    own = branch.test if split == "test" else branch.validation
    source = branch.other(str(data)) if data is not None else own()
    assert source is not None, "its loss was measured"
    with saved.engine.sampling() as models:
        return branch.measured(models, source, device=saved.engine.device)


def _generates(saved: SavedRun) -> bool:
    from bottega.branches.generation import GenerationBranch

    return isinstance(saved.branch, GenerationBranch)
