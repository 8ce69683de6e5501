"""TensorBoard summaries of scalars, texts, images, audio and histograms, without torch or TensorFlow."""

from __future__ import annotations

import io
import math
import wave
from itertools import pairwise
from typing import Any

from bottega.core.callback import Histogram
from bottega.redaction import redact_text

PNG_SIGNATURE, GIF_SIGNATURES = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a")


def make_scalar_summary(tag: str, value: float) -> Any:
    """Return a scalar as a `Summary`."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def make_text_summary(tag: str, text: str) -> Any:
    """Return a text as a `Summary`, indented so that TensorBoard shows it as it is, not as Markdown."""
    indented = "    " + text.replace("\n", "\n    ")
    return make_bytes_summary(f"{tag}/text_summary", redact_text(indented).encode(), plugin="text", shape=(1,))


def make_bytes_summary(tag: str, data: bytes, *, plugin: str, shape: tuple[int, ...] = ()) -> Any:
    """Return bytes for one of TensorBoard's plugins as a `Summary`."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    dimensions = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
    tensor = TensorProto(dtype="DT_STRING", string_val=[data], tensor_shape=dimensions)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def make_media_summary(data: bytes, tag: str) -> Any:
    """Return the bytes of a .png, .gif or .wav as a `Summary`; None if the content is none of these.

    TensorBoard's `add_image` would decode and re-encode it, `add_audio` would rescale it, and neither keeps an animated GIF.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    if data[:8] == PNG_SIGNATURE:
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    elif data[:6] in GIF_SIGNATURES:
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    else:
        return _make_audio_summary(data, tag)
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _make_audio_summary(data: bytes, tag: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        with wave.open(io.BytesIO(data)) as file:
            parameters = file.getparams()
    except (wave.Error, EOFError):
        return None
    audio = Summary.Audio(
        sample_rate=parameters.framerate,
        num_channels=parameters.nchannels,
        length_frames=parameters.nframes,
        encoded_audio_string=data,
        content_type="audio/wav",
    )
    return Summary(value=[Summary.Value(tag=tag, audio=audio)])


def make_histogram_summary(tag: str, histogram: Histogram) -> Any:
    """Return a histogram as a `Summary`; None if it is empty or its edges are not finite.

    Sums are those of the middles of the bins, since the values themselves are not known.
    """
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary

    edges, counts = histogram.edges, histogram.counts
    filled = [number for number, count in enumerate(counts) if count]
    if not filled or not all(map(math.isfinite, edges)):
        return None
    # TensorBoard drops empty bins at both ends and extends the outermost filled ones to `min` and `max`.
    first, last = filled[0], filled[-1]
    middles = [(left + right) / 2 for left, right in pairwise(edges)]
    proto = HistogramProto(
        min=edges[first],
        max=edges[last + 1],
        num=sum(counts),
        sum=sum(middle * count for middle, count in zip(middles, counts, strict=True)),
        sum_squares=sum(middle * middle * count for middle, count in zip(middles, counts, strict=True)),
        bucket_limit=edges[1:],
        bucket=counts,
    )
    return Summary(value=[Summary.Value(tag=tag, histo=proto)])
