"""Sounds as files for people: to listen to, and their spectrograms to look at."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio.decode import encode_flac, encode_wav
from bottega.data.audio.spectrogram_plot import TitledWaveform, plot_spectrograms
from bottega.data.output_files import build_numbered_paths, is_folder, require_suffix
from bottega.storage.durable import replacing_file

WRITABLE_SUFFIXES = (".wav", ".flac", ".ogg")
SILENCE_SECONDS = 0.2
"""Between sounds in one file: enough to hear where one ends."""
BLOCK = 1 << 16
# A sheet of more is taller than viewers like to open: 16 of them are 9,256 pixels.
MAX_SPECTROGRAMS = 16


def write_audio(samples: np.ndarray, rate: int, path: Path) -> float:
    """float32 [n] as 16-bit wav, which needs no further package; or as flac or ogg, as the ending says.

    What goes beyond 1 would be cut off, which crackles. So the whole sound is made quieter then, and only then: returned
    is the factor, 1.0 where the file has the samples as they are. What is not finite becomes silence.
    """
    kind = require_suffix(path, WRITABLE_SUFFIXES)
    sound, factor = _within(samples)
    with replacing_file(path) as temporary:
        if kind == ".ogg":
            temporary.write_bytes(_encode_ogg(sound, rate))
        else:
            temporary.write_bytes(encode_wav(sound, rate) if kind == ".wav" else encode_flac(sound, rate))
    return factor


def write_audio_files(
    waveforms: np.ndarray | Sequence[np.ndarray], rate: int, path: Path, *, captions: Sequence[str] | None = None
) -> list[Path]:
    """float32 [b, n], or several [n] of their own lengths. Returns the files.

    With a `path` without an ending 00.wav, ... and spectrograms.png; else all in that file one after the other, and a PNG
    of the same name with their spectrograms (of the first 16). Without Pillow there are only sounds.
    """
    assert len(waveforms), "no sounds"
    if is_folder(path):
        files, picture = build_numbered_paths(path, len(waveforms), ".wav"), path / "spectrograms.png"
        for samples, file in zip(waveforms, files, strict=True):
            write_audio(samples, rate, file)
    else:
        files, picture = [path], path.with_suffix(".png")
        write_audio(join_with_silence([_within(samples)[0] for samples in waveforms], rate), rate, path)
    names = captions if captions is not None else [f"{number:02d}" for number in range(len(waveforms))]
    shown = [_titled(name, samples, rate) for name, samples in zip(names, waveforms, strict=True)]
    try:
        with replacing_file(picture) as temporary:
            plot_spectrograms(shown[:MAX_SPECTROGRAMS], temporary)
    except EnvironmentProblem:  # no Pillow: what was asked for is there to be heard
        return files
    return [*files, picture]


def join_with_silence(waveforms: Sequence[np.ndarray], rate: int) -> np.ndarray:
    """One after the other [n], with silence between."""
    silence = np.zeros(round(SILENCE_SECONDS * rate), np.float32)
    parts = [part for samples in waveforms for part in (samples, silence)]
    return np.concatenate(parts[:-1])


def _within(samples: np.ndarray) -> tuple[np.ndarray, float]:
    """The sound from -1 to 1, and what it was multiplied by for that."""
    assert samples.ndim == 1, f"{samples.shape} is not one sound"
    sound = np.nan_to_num(samples.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(np.abs(sound).max(initial=0.0))
    factor = 1.0 if peak <= 1 else 1 / peak
    return (sound if factor == 1 else sound * np.float32(factor)), factor


def _titled(name: str, samples: np.ndarray, rate: int) -> TitledWaveform:
    """As it is in the file; what was changed for that is said where it is seen."""
    sound, factor = _within(samples)
    broken = int((~np.isfinite(samples)).sum())
    said = [f"{-20 * np.log10(factor):.1f} dB quieter than generated"] if factor != 1 else []
    said += [f"{broken:,} samples not finite, silenced"] if broken else []
    return (f"{name}   ({', '.join(said)})" if said else name), sound, rate


def _encode_ogg(sound: np.ndarray, rate: int) -> bytes:
    # In memory: of a full disk the library says "System error". In blocks: it puts a whole Vorbis write on the stack, and a
    # minute of sound in one call ends the process.
    out = io.BytesIO()
    with _library().SoundFile(out, "w", rate, 1, format="OGG", subtype="VORBIS") as file:
        for start in range(0, len(sound), BLOCK):
            file.write(sound[start : start + BLOCK])
    return out.getvalue()


def _library() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(
            f".ogg needs soundfile: pip install 'bottega[audio]' ({error}); or use .wav"
        ) from error
    return soundfile
