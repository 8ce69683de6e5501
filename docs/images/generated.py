"""Draw what the offline recipes of images, sound and video generate: python docs/images/generated.py [RUNS] [--steps N]

Trains `image`, `audio` and `video` in the folder RUNS, or finds them trained there, and writes generated-digits.png,
generated-tones.png and generated-moving.png beside this file. `--steps` makes the runs shorter.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
NAMES = {"image": "digits", "audio": "tones", "video": "moving"}
NOTES = ("C4", "A4")
CLIPS = ("digit=3 direction=left", "digit=7 direction=right", "digit=0 direction=up", "digit=5 direction=down")


def opened(recipe: str, runs: Path, steps: int | None) -> Any:
    import bottega

    run = runs / NAMES[recipe]
    if (run / "recipe.yaml").is_file():
        return bottega.load(run)
    settings = {"output_dir": str(runs), "name": NAMES[recipe], **({"training.max_steps": steps} if steps else {})}
    return bottega.load(bottega.train(recipe, settings).path)


def digits(saved: Any) -> np.ndarray:
    """Two rows that were drawn and two that were held out, a class in each column: uint8 [height, width]."""
    drawn = saved.generate(**{"class": list(saved.branch.facts.classes)}, count=2)
    source = saved.branch.raw("validation")
    index = np.arange(len(source))
    rows = source.rows(index, np.zeros_like(index))
    pixels = saved.branch.to_medium(rows["image"])
    real = [pixels[rows["label"] == label][number] for number in range(2) for label in range(10)]
    return tiled([*drawn[0::2], *drawn[1::2], *real], columns=10, times=6)


def clips(saved: Any) -> np.ndarray:
    """A clip in each row, its frames from left to right."""
    films = saved.generate(**{"class": list(CLIPS)}, count=1)
    return tiled([frame for film in films for frame in film], columns=films.shape[1], times=4)


def tiled(pictures: list[np.ndarray], *, columns: int, times: int) -> np.ndarray:
    framed = [np.pad(p[..., 0].repeat(times, 0).repeat(times, 1), 1, constant_values=90) for p in pictures]
    lines = [np.concatenate(framed[i : i + columns], axis=1) for i in range(0, len(framed), columns)]
    return np.concatenate(lines, axis=0)


def tones(saved: Any, path: Path) -> None:
    from PIL import Image

    from bottega.data.audio.write import write_audio_files

    sounds = saved.generate(**{"class": list(NOTES)}, count=1)
    with tempfile.TemporaryDirectory() as folder:
        write_audio_files(sounds, saved.branch.sample_rate, Path(folder) / "notes", captions=NOTES)
        picture = Image.open(Path(folder) / "notes" / "spectrograms.png").convert("RGB")
        picture.reduce(3).quantize(48).save(path, optimize=True)


def main() -> None:
    from PIL import Image

    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", default="runs", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", choices=sorted(NAMES))
    said = parser.parse_args()
    for recipe in [said.only] if said.only else NAMES:
        saved, path = opened(recipe, said.runs, said.steps), HERE / f"generated-{NAMES[recipe]}.png"
        if recipe == "audio":
            tones(saved, path)
        else:
            Image.fromarray(digits(saved) if recipe == "image" else clips(saved)).save(path, optimize=True)


if __name__ == "__main__":
    main()
