"""The reading of the tokens of texts into the cache of a model in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.engines.host_memory import get_available_memory
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import DecoderCache, Transformer
from bottega.tasks.language.generated_text import FEWER_TEXTS, TextRow, check_cache_memory

CUDA_LENGTH_MULTIPLE = 128
"""The length of a cache on a GPU is a multiple of this, as its attention kernels need for masks."""


def choose_decoding_dtype(model: Transformer, device: torch.device | str) -> torch.dtype:
    """Return the dtype of matrix products and of the cache: that of autocast, or of the weights."""
    device_type = torch.device(device).type
    is_autocast = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_autocast else model.head_weight.dtype


def create_cache(
    shape: TransformerShape,
    *,
    num_rows: int,
    length: int,
    device: torch.device | str,
    dtype: torch.dtype,
    noun: str = "texts",
    advice: str = FEWER_TEXTS,
) -> DecoderCache:
    """Return an empty cache for at least `length` tokens; raise OutOfMemory with its size if that exceeds the free memory."""
    if torch.device(device).type == "cuda":
        length = -(-length // CUDA_LENGTH_MULTIPLE) * CUDA_LENGTH_MULTIPLE
    planned = DecoderCache.empty(shape, batch_size=num_rows, length=length, device="meta", dtype=dtype)
    num_bytes = sum(tensor.nbytes for layer in planned.layers for tensor in layer)
    check_cache_memory(
        num_bytes,
        lambda: _get_free_memory(torch.device(device)),
        what=f"{num_rows:,} {noun} of {length:,} tokens",
        device=str(device),
        advice=advice,
    )
    return DecoderCache.empty(shape, batch_size=num_rows, length=length, device=device, dtype=dtype)


def _get_free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return get_available_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def compute_next_logits(
    model: Transformer, rows: Sequence[TextRow], cache: DecoderCache, *, device: torch.device | str
) -> Tensor:
    """Return the float32 logits of the token after each row, (rows, vocabulary), and extend the cache."""
    context = model.shape.context
    for row in rows:
        if model.shape.has_attention and len(row.window) > context:
            row.window, row.is_cached = row.window[-max(1, context // 2) :], False
    last_hidden = torch.empty(len(rows), model.shape.hidden_size, device=device)
    uncached = [i for i, row in enumerate(rows) if not row.is_cached]
    if len(uncached) < len(rows):
        # All rows take the step together. The result is not used for stopped rows and for rows to be prefilled; the
        # prefill comes later, because the state of a state-space model cannot forget a token.
        last_tokens = torch.tensor([[row.window[-1]] for row in rows], device=device)
        positions = [len(row.window) - 1 for row in rows]
        hidden = model.hidden(last_tokens, cache=cache, position=positions)[:, 0].float()
        cached = [i for i in range(len(rows)) if i not in set(uncached)]
        last_hidden[cached] = hidden[cached]
    if uncached:
        last_hidden[uncached] = _prefill(model, rows, uncached, cache, device=device)
    for row in rows:
        row.is_cached = True
    return model.logits(last_hidden.to(model.head_weight.dtype)).float()


def _prefill(
    model: Transformer, rows: Sequence[TextRow], indices: list[int], cache: DecoderCache, *, device: torch.device | str
) -> Tensor:
    """Read the windows of the rows `indices` from position 0; return the hidden state of each one's last token, (indices, width).

    Short rows are padded on the right, where causal attention does not look. The keys and values of padding are overwritten
    in the cache before a later token sees them, and padding does not enter the state of a state-space model.
    """
    windows = [rows[i].window for i in indices]
    length = max(map(len, windows))
    tokens = torch.tensor([window + [0] * (length - len(window)) for window in windows], device=device)
    is_whole_batch = len(indices) == len(rows)
    dtype = cache.layers[0][0].dtype
    prefill_cache = (
        cache
        if is_whole_batch
        else DecoderCache.empty(model.shape, batch_size=len(indices), length=length, device=device, dtype=dtype)
    )
    prefill_cache.reset()
    hidden = model.hidden(tokens, cache=prefill_cache, lengths=list(map(len, windows)))
    if not is_whole_batch:
        cache.update_rows(prefill_cache, indices, length=length)
    ends = torch.tensor([len(window) - 1 for window in windows], device=device)
    return hidden[torch.arange(len(indices), device=device), ends].float()
