"""Media of a run as parts of the page: images, sheets, audio, video and text, inlined within limits."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bottega.callbacks.media_files import CONTACT_SHEET_STEMS
from bottega.redaction import redact_text
from bottega.run_files.reading import is_regular_file, list_folder

MAX_FILE_BYTES = 4 << 20
"""A larger file is named with its path, not inlined."""
MAX_TEXT_CHARACTERS = 20_000
MAX_STEPS = 12
"""Steps of a run whose samples are shown, at equal distances, the first and the last included."""
MAX_FILES_OF_A_KIND = 16
"""Texts, sounds, videos or images of a step, beside sheets of all of them; the others are counted."""
Kind = Literal["image", "audio", "video", "text"]
TYPES: dict[str, tuple[Kind, str]] = {
    ".png": ("image", "image/png"),
    ".gif": ("image", "image/gif"),
    ".jpg": ("image", "image/jpeg"),
    ".wav": ("audio", "audio/wav"),
    ".flac": ("audio", "audio/flac"),
    ".mp4": ("video", "video/mp4"),
    ".txt": ("text", "text/plain"),
}
SIGNATURES = {
    ".png": (0, b"\x89PNG"),
    ".gif": (0, b"GIF8"),
    ".jpg": (0, b"\xff\xd8"),
    ".wav": (8, b"WAVE"),
    ".flac": (0, b"fLaC"),
    ".mp4": (4, b"ftyp"),
}
"""Suffix -> position and bytes that a file of this kind has near its beginning."""
_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class MediaItem:
    """One file on the page; `source` is a data address, or None if the file is not inlined, for the reason in `note`."""

    kind: Kind
    name: str
    path: str
    source: str | None = None
    text: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class SampleStep:
    """The samples of one step."""

    step: int
    items: list[MediaItem]


@dataclass
class MediaBudget:
    """Bytes of media that may still be inlined into a page."""

    remaining: int

    def take(self, size: int) -> bool:
        """Return whether `size` more bytes fit, and count them."""
        if size > self.remaining:
            return False
        self.remaining -= size
        return True


def collect_samples(run: Path, budget: MediaBudget) -> list[SampleStep]:
    """Return the samples of a run by step. Links are not followed, so that a page shows files of the run only."""
    folders = {
        int(match[1]): path
        for path in list_folder(run / "samples", run)
        if (match := _STEP_FOLDER.fullmatch(path.name))
    }
    steps = sorted(folders)
    if len(steps) > MAX_STEPS:
        steps = sorted({steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)})
    # The newest samples come first, since they are what people look at when the budget is short.
    collected = {step: collect_media(folders[step], run, budget) for step in reversed(steps)}
    return [SampleStep(step, items) for step in steps if (items := collected[step])]


def collect_media(folder: Path, run: Path, budget: MediaBudget) -> list[MediaItem]:
    """Return the files of a folder to show: sheets first; single images only if there is no sheet of them."""
    files = [path for path in list_folder(folder, run) if path.suffix in TYPES and not path.name.startswith(".")]
    sheets = [path for path in files if path.stem in CONTACT_SHEET_STEMS]
    if any(path.suffix == ".gif" for path in sheets):
        sheets = [path for path in sheets if path.suffix == ".gif"]  # the same samples as the still sheet, moving
    items = [read_item(path, run, budget) for path in sheets]
    kinds: tuple[Kind, ...] = ("image", "video", "audio", "text")
    for kind in kinds:
        singles = [path for path in files if TYPES[path.suffix][0] == kind and path.stem not in CONTACT_SHEET_STEMS]
        if kind == "image" and sheets:
            continue
        items += [read_item(path, run, budget) for path in singles[:MAX_FILES_OF_A_KIND]]
        if num_more := len(singles[MAX_FILES_OF_A_KIND:]):
            path = folder.relative_to(run).as_posix()
            items.append(MediaItem(kind, folder.name, path, note=f"{num_more} more of this kind are in this folder"))
    return items


def _has_signature(content: bytes, suffix: str) -> bool:
    """Return whether the content of a file begins as files of its kind do."""
    position, signature = SIGNATURES[suffix]
    return content[position : position + len(signature)] == signature


def read_item(path: Path, run: Path, budget: MediaBudget) -> MediaItem:
    """Read one file; a file that is gone, is a link or is too large is named with the reason."""
    kind, content_type = TYPES[path.suffix]
    relative = path.relative_to(run).as_posix()
    if not is_regular_file(path, run):
        return MediaItem(kind, path.name, relative, note="not a file of this run, such as a link elsewhere; left out")
    try:
        size = path.stat().st_size
        if kind == "text" and budget.take(min(size, 4 * MAX_TEXT_CHARACTERS)):
            with path.open("rb") as file:
                text = file.read(4 * MAX_TEXT_CHARACTERS).decode("utf-8", "replace")
            is_cut = len(text) > MAX_TEXT_CHARACTERS or size > 4 * MAX_TEXT_CHARACTERS
            note = f"the first {MAX_TEXT_CHARACTERS:,} characters" if is_cut else None
            return MediaItem(kind, path.name, relative, text=redact_text(text[:MAX_TEXT_CHARACTERS]), note=note)
        if size > MAX_FILE_BYTES or not budget.take(size):
            return MediaItem(kind, path.name, relative, note=f"{size / 2**20:.1f} MiB, not included in this page")
        content = path.read_bytes()
        if not _has_signature(content, path.suffix):
            return MediaItem(kind, path.name, relative, note=f"damaged: not a {path.suffix} file")
        data = base64.b64encode(content).decode("ascii")
    except OSError as error:
        return MediaItem(kind, path.name, relative, note=f"cannot be read: {error.strerror}")
    return MediaItem(kind, path.name, relative, source=f"data:{content_type};base64,{data}")
