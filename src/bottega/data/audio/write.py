"""Write waveforms as wav, flac or ogg files, with a plot of their spectrograms."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio.decode import encode_flac, encode_wav
from bottega.data.audio.spectrogram_plot import TitledWaveform, plot_spectrograms
from bottega.data.output_files import build_numbered_paths, is_folder, require_suffix
from bottega.plots.figure import try_plot
from bottega.storage.durable import replacing_file

WRITABLE_SUFFIXES = (".wav", ".flac", ".ogg")
SILENCE_SECONDS = 0.2
"""Pause between clips in one file."""
BLOCK_SAMPLES = 1 << 16
# A plot of more spectrograms would be too tall for many image viewers.
MAX_SPECTROGRAMS = 16


def write_audio(samples: np.ndarray, rate: int, path: Path) -> float:
    """Write float32 `(samples,)` as 16-bit wav, flac or ogg, by the suffix of `path`; wav needs no extra package.

    A waveform that exceeds ±1 would be clipped, which is audible, so all of it is scaled down. Returns the factor, 1.0 if
    nothing was scaled. Values that are not finite become 0.
    """
    suffix = require_suffix(path, WRITABLE_SUFFIXES)
    scaled, factor = _scale_to_range(samples)
    with replacing_file(path) as temporary:
        if suffix == ".ogg":
            temporary.write_bytes(_encode_ogg(scaled, rate))
        else:
            temporary.write_bytes(encode_wav(scaled, rate) if suffix == ".wav" else encode_flac(scaled, rate))
    return factor


def write_audio_files(
    waveforms: np.ndarray | Sequence[np.ndarray], rate: int, path: Path, *, captions: Sequence[str] | None = None
) -> list[Path]:
    """Write waveforms, `(clips, samples)` or of different lengths, and return the paths of the files.

    A `path` without a suffix is a folder and gets 00.wav, ... and spectrograms.png. Otherwise all clips are written one after
    the other into the file `path`, and their spectrograms into a PNG of the same name. A PNG shows the first 16 clips;
    without matplotlib there is none.
    """
    assert len(waveforms), "no waveforms"
    if is_folder(path):
        files, plot = build_numbered_paths(path, len(waveforms), ".wav"), path / "spectrograms.png"
        for samples, file in zip(waveforms, files, strict=True):
            write_audio(samples, rate, file)
    else:
        files, plot = [path], path.with_suffix(".png")
        write_audio(join_with_silence([_scale_to_range(samples)[0] for samples in waveforms], rate), rate, path)
    names = captions if captions is not None else [f"{number:02d}" for number in range(len(waveforms))]
    titled_waveforms = [_add_title(name, samples, rate) for name, samples in zip(names, waveforms, strict=True)]
    return [
        *files,
        *([plot] if try_plot(partial(plot_spectrograms, titled_waveforms[:MAX_SPECTROGRAMS]), plot) else []),
    ]


def join_with_silence(waveforms: Sequence[np.ndarray], rate: int) -> np.ndarray:
    """Concatenate waveforms to `(samples,)`, with silence between them."""
    silence = np.zeros(round(SILENCE_SECONDS * rate), np.float32)
    parts = [part for samples in waveforms for part in (samples, silence)]
    return np.concatenate(parts[:-1])


def _scale_to_range(samples: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the waveform scaled into -1 to 1, and the factor."""
    assert samples.ndim == 1, f"{samples.shape} is not one waveform"
    scaled = np.nan_to_num(samples.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(np.abs(scaled).max(initial=0.0))
    factor = 1.0 if peak <= 1 else 1 / peak
    return (scaled if factor == 1 else scaled * np.float32(factor)), factor


def _add_title(name: str, samples: np.ndarray, rate: int) -> TitledWaveform:
    """Return title, samples and rate for the plot; the title says how the samples were changed."""
    scaled, factor = _scale_to_range(samples)
    num_non_finite = int((~np.isfinite(samples)).sum())
    changes = [f"{-20 * np.log10(factor):.1f} dB quieter than generated"] if factor != 1 else []
    changes += [f"{num_non_finite:,} samples not finite, silenced"] if num_non_finite else []
    return (f"{name}   ({', '.join(changes)})" if changes else name), scaled, rate


def _encode_ogg(samples: np.ndarray, rate: int) -> bytes:
    # In memory, because for a full disk the library only says "System error". In blocks, because it keeps the samples of one
    # Vorbis write on the stack, and a minute of audio in one call crashes the process.
    encoded = io.BytesIO()
    with _import_soundfile().SoundFile(encoded, "w", rate, 1, format="OGG", subtype="VORBIS") as file:
        for start in range(0, len(samples), BLOCK_SAMPLES):
            file.write(samples[start : start + BLOCK_SAMPLES])
    return encoded.getvalue()


def _import_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(
            f".ogg needs soundfile; pip install 'bottega[audio]' ({error}); or use .wav"
        ) from error
    return soundfile
