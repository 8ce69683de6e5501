"""The sample files that trackers show: which ones of a folder, and the frames of a video as one image."""

from __future__ import annotations

import io
from pathlib import Path

CONTACT_SHEET_STEMS = ("sheet", "spectrograms")
MAX_MEDIA_FILES = 16
"""Files of each kind that are logged per step, to limit the size of event files."""
NUM_STRIP_FRAMES, STRIP_HEIGHT, MAX_DECODED_FRAMES = 8, 128, 512


def find_media(folder: Path, suffix: str) -> list[Path]:
    """Return the files of one kind to log: the contact sheet if there is one, else the first single files."""
    files = sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
    return [path for path in files if path.stem in CONTACT_SHEET_STEMS] or files[:MAX_MEDIA_FILES]


def render_film_strip(path: Path) -> bytes | None:
    """Return a PNG of up to eight frames of a video side by side; None if it cannot be decoded here.

    Needs PyAV and Pillow. Only the first 512 frames are read: a sample is short, and any other video should not hold up training.
    """
    try:
        import av
        from PIL import Image

        frames = []
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                width = max(1, round(frame.width * STRIP_HEIGHT / frame.height))
                frames.append(frame.to_image().resize((width, STRIP_HEIGHT)))
                if len(frames) == MAX_DECODED_FRAMES:
                    break
        numbers = sorted(
            {round(i * (len(frames) - 1) / (NUM_STRIP_FRAMES - 1)) for i in range(NUM_STRIP_FRAMES)} if frames else ()
        )
        strip = Image.new("RGB", (sum(frames[number].width for number in numbers), STRIP_HEIGHT))
        left = 0
        for number in numbers:
            strip.paste(frames[number], (left, 0))
            left += frames[number].width
        data = io.BytesIO()
        strip.save(data, format="PNG")
    except FileNotFoundError:
        raise
    except Exception:  # no PyAV, no Pillow, or any of the errors that a damaged video causes in them
        return None
    return data.getvalue() if frames else None
