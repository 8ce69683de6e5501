"""Make the small data of the pages about data: python docs/images/samples.py [FOLDER]

Everything is written or drawn here: reviews, notes and pages from a few words, digits in Pillow's own font, tones from
sines, clips of a disc that moves. With `--pictures` it also draws docs/images/digits.png and docs/images/tones.png.
"""

from __future__ import annotations

import csv
import json
import sys
import wave
from pathlib import Path

import numpy as np

SUBJECTS = ("The paint", "This brush", "The canvas", "My easel", "The varnish", "That frame", "The ink", "This chalk")
PRAISE = ("dries evenly", "lasts for years", "is worth its price", "keeps its colour", "feels light in the hand")
BLAME = ("cracked in a week", "smells of tar", "came late and broken", "fades in the sun", "is far too thin")
ENDINGS = ("and I would buy it again", "and my teacher agrees", "as everyone in the shop knows", "to my surprise")
NOTES = {"c": 261.63, "e": 329.63, "g": 392.0}
RATE = 8000


def make(folder: Path) -> None:
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [review(n, random) for n in range(240)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "reviews.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "parted").mkdir(parents=True, exist_ok=True)
    for name, part in {"train": lines[:200], "dev": lines[200:220], "test": lines[220:]}.items():
        (folder / "parted" / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    notes = [{"body": note(n, random), "difficulty": n % 10} for n in range(120)]
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in notes), encoding="utf-8")
    found = [{"text": text} for text in pages([str(row["text"]) for row in rows])]
    (folder / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows((int(row["label"] == "good"), row["text"]) for row in rows)
    with (folder / "titled.csv").open("w", newline="", encoding="utf-8") as out:
        parts = [(*str(row["text"]).split(" ", 3), row["label"]) for row in rows]
        cells = [(" ".join(words[:-2]), words[-2], words[-1]) for words in parts]
        csv.writer(out).writerows([("title", "description", "topic"), *cells])
    for digit in range(10):
        for number in range(12):
            path = folder / "digits" / str(digit) / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_digit(digit, path, random)
    tones(folder / "tones", random)
    for shape in ("across", "down"):
        for number in range(4):
            clip(folder / "clips" / shape / f"{number}.mp4", shape, speed=1 + number)


def review(number: int, random: np.random.Generator) -> dict[str, object]:
    good = number % 2 == 0
    said = [random.choice(words) for words in (SUBJECTS, PRAISE if good else BLAME, ENDINGS)]
    text = f"{' '.join(said)}; order {number} of {1400 + number // 12}."
    return {"text": text, "label": "good" if good else "bad", "user": f"user-{number % 20}", "stars": 4 if good else 1}


def note(number: int, random: np.random.Generator) -> str:
    colours = random.choice(("ochre", "umber", "sienna", "lead white", "vermilion", "azurite"), 1 + number % 4)
    return f"Day {number}: ground {', '.join(colours)}, and swept the floor.\n"


def pages(texts: list[str]) -> list[str]:
    """Texts as they are found: repeated, nearly repeated, marked up, in another language, hardly there."""
    long = " ".join(texts[:20]).split()
    near = [word if number % 60 else "linseed" for number, word in enumerate(long)]
    unlike = [word if number % 20 else "linseed" for number, word in enumerate(long)]
    marked = "<p>The <b>paint</b> is&nbsp;new.</p><script>track()</script><p>It keeps its colour in the sun.</p>"
    german = "Das ist ein kurzer Text, der von der Farbe und dem Pinsel handelt."
    joined = [" ".join(words) for words in (long, near, unlike)]
    return [*texts[:40], *(text.upper() for text in texts[:5]), *joined, marked, german, "ok"]


def draw_digit(digit: int, path: Path, random: np.random.Generator) -> None:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("L", (28, 28))
    at = tuple((14 + random.uniform(-3, 3, 2)).tolist())
    font = ImageFont.load_default(size=int(random.integers(18, 25)))
    ImageDraw.Draw(picture).text(at, str(digit), fill=int(random.integers(150, 256)), font=font, anchor="mm")
    picture.save(path)


def tones(folder: Path, random: np.random.Generator) -> None:
    """Three notes, each with overtones that fade, and a table that says which is which."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(12):
        note = "ceg"[number % 3]
        seconds = np.arange(int(RATE * random.uniform(0.5, 1.0))) / RATE
        phase = 2 * np.pi * NOTES[note] * (seconds + 0.002 * np.sin(2 * np.pi * 3 * seconds))
        sound = sum(np.sin(k * phase) / k for k in (1, 2, 3, 5)) * np.exp(-3 * seconds)
        write_wav(folder / f"{number:02}.wav", 0.3 * sound)
        rows.append({"file_name": f"{number:02}.wav", "label": note, "text": f"the note {note.upper()}"})
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as out:
        table = csv.DictWriter(out, rows[0])
        table.writeheader()
        table.writerows(rows)


def write_wav(path: Path, sound: np.ndarray) -> None:
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((sound * 32767).astype("<i2").tobytes())


def clip(path: Path, direction: str, *, speed: int) -> None:
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:32, :48]
    with av.open(path, "w") as out:
        stream = out.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for number in range(24):
            centre = (16, (speed * number) % 48) if direction == "across" else ((speed * number) % 32, 24)
            disc = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 36
            pixels = np.where(disc[..., None], (240, 200, 80), (30, 40, 70)).astype(np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())


def pictures(folder: Path) -> None:
    """What `bottega data digits` and `bottega data tones` draw, the latter at half its size and without its lower half."""
    from PIL import Image

    from bottega.analysis.data_report import data_command

    for name, drawn in (("digits", "images.png"), ("tones", "spectrograms.png")):
        data_command([str(folder / name)], examples=3, out=folder)
        picture = Image.open(folder / drawn).convert("RGB")
        if name == "tones":
            picture = picture.crop((0, 0, picture.width, picture.height // 2)).reduce(2)
        picture.quantize(128).save(Path(__file__).with_name(f"{name}.png"), optimize=True)


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    here = Path(named[0] if named else ".")
    make(here)
    if "--pictures" in sys.argv:
        pictures(here)
