"""CRC-32C (Castagnoli), the checksum of TFRecord, for many spans of a buffer at once.

The remainder is linear: the remainder of A followed by B is the remainder of A shifted by len(B) zero bytes, xor the
remainder of B. So a message is folded in half repeatedly, with four table look-ups per word of the shifted half, and numpy
does this for all words of all messages at once. A Python loop over bytes reaches only about 10 MB/s.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

POLYNOMIAL = 0x82F63B78  # reflected
ONES = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8
# Up to this many bytes a plain loop is faster than numpy.
MAX_LOOP_BYTES = 1024
# Bytes of messages that are folded at once: few enough for the second-level cache.
BLOCK_BYTES = 1 << 18


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    if len(data) > MAX_LOOP_BYTES:
        return int(crc32c_of_spans(data, np.zeros(1, np.int64), np.array([len(data)]))[0])
    table, crc = _build_byte_table(), ONES
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ ONES


def mask_crc(crc: int) -> int:
    """Mask a CRC as TFRecord stores it, since a CRC over data that contains CRCs is weak."""
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & ONES


def mask_crcs(crcs: np.ndarray) -> np.ndarray:
    """Mask an array of CRCs, uint32."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(MASK_DELTA)


def crc32c_of_spans(data: bytes | np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the CRC of data[start:stop] for each pair: uint32 (n,)."""
    lengths = stops - starts
    crcs = np.empty(len(starts), np.uint32)
    if not len(starts):
        return crcs
    # Leading zero bytes do not change the bare remainder, so messages of similar length are padded to the longest.
    order = np.argsort(lengths, kind="stable")
    max_padded_length = int(lengths[order[-1]]) + 3 & ~3
    buffer = np.concatenate([np.zeros(max_padded_length, np.uint8), np.frombuffer(data, np.uint8)])
    position = 0
    while position < len(order):
        shortest = int(lengths[order[position]])
        max_length = max(16, shortest + (shortest >> 2))
        max_rows = max(1, BLOCK_BYTES // (max_length + 4))
        count = int(np.searchsorted(lengths[order[position : position + max_rows]], max_length, side="right"))
        rows = order[position : position + count]
        position += count
        crcs[rows] = _compute_remainders(buffer, stops[rows] + max_padded_length, lengths[rows])
    return crcs ^ _shift_initial_register(lengths) ^ np.uint32(ONES)


def _compute_remainders(buffer: np.ndarray, stops: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the bare remainders, with an initial register of zero, of messages sorted by length that end at `stops`."""
    width = int(lengths[-1]) + 3 & ~3
    if width == 0:
        return np.zeros(len(stops), np.uint32)
    if len(stops) == 1:
        rows = buffer[None, int(stops[0]) - width : int(stops[0])].copy()
        rows[0, : width - int(lengths[0])] = 0
    else:
        rows = np.lib.stride_tricks.sliding_window_view(buffer, width)[stops - width]
        rows *= np.arange(width) >= (width - lengths)[:, None]
    return _fold(rows.view("<u4"))


def _fold(words: np.ndarray) -> np.ndarray:
    """Reduce the words of each message, uint32 (n, words), to its remainder (n,)."""
    while (num_words := words.shape[1]) > 1:
        power = (num_words - 1).bit_length() - 1
        half = 1 << power
        words[:, half:] ^= _shift(words[:, : num_words - half], power + 2)
        words = words[:, num_words - half :]
    return _shift(words[:, 0], 2)


def _shift(words: np.ndarray, power: int) -> np.ndarray:
    """Shift registers by 2**power zero bytes."""
    table = _build_shift_tables(power)
    out = table[0][words & np.uint32(255)]
    out ^= table[1][(words >> np.uint32(8)) & np.uint32(255)]
    out ^= table[2][(words >> np.uint32(16)) & np.uint32(255)]
    out ^= table[3][words >> np.uint32(24)]
    return out


@cache
def _build_shift_tables(power: int) -> np.ndarray:
    """Return the image of each byte of a register after 2**power zero bytes: uint32 (4, 256)."""
    if power:
        return _shift(_build_shift_tables(power - 1), power - 1)
    values = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    return np.array(_build_byte_table(), np.uint32)[values & np.uint32(255)] ^ (values >> np.uint32(8))


@cache
def _build_byte_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


def _shift_initial_register(lengths: np.ndarray) -> np.ndarray:
    """Return the contribution of the initial register of ones after a message of each length."""
    distinct_lengths, inverse = np.unique(lengths, return_inverse=True)
    return np.array([_shift_ones(int(length)) for length in distinct_lengths], np.uint32)[inverse]


@lru_cache(maxsize=1 << 16)
def _shift_ones(length: int) -> int:
    register = np.array([ONES], np.uint32)
    for power in range(length.bit_length()):
        if length >> power & 1:
            register = _shift(register, power)
    return int(register[0])
