"""A seekable random permutation of [0, size), keyed by seed and epoch.

A Feistel network permutes the next power of two, and cycle walking maps values outside back into the range. numpy's and
torch's permutations must be stored to be indexed; here any index of any epoch costs the same, so that the state of a
data stream is one integer.
"""

from __future__ import annotations

import numpy as np

from bottega.core.noise import derive_key

# Number of indices permuted at once: the working arrays fit the processor's cache, which halves the time for a million.
BLOCK_SIZE = 65_536
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
WORD_MASK = 0xFFFFFFFFFFFFFFFF


def permute(index: np.ndarray, *, size: int, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """Return the images of `index` under the permutation of `epoch`, which is one number or one per index."""
    index = np.asarray(index, dtype=np.int64)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if index.size and (index.min() < 0 or index.max() >= size):
        raise ValueError(f"index must be in [0, {size})")
    epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), index.shape).ravel()
    # One key for a whole block is a fifth cheaper than one per index.
    is_single_epoch = np.ndim(epoch) == 0
    flat = index.ravel()
    out = np.empty(flat.shape, dtype=np.int64)
    for start in range(0, len(flat), BLOCK_SIZE):
        block = slice(start, start + BLOCK_SIZE)
        keys = _derive_keys(epochs[block][:1] if is_single_epoch else epochs[block], seed=seed)
        out[block] = _cycle_walk(flat[block].astype(np.uint64), keys, size=size)
    return out.reshape(index.shape)


def _derive_keys(epochs: np.ndarray, *, seed: int) -> np.ndarray:
    low, high = derive_key("order", seed)
    return _scramble(epochs.astype(np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(high << 32 | low))


def _scramble(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * MIX_MULTIPLIER
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cycle_walk(values: np.ndarray, keys: np.ndarray, *, size: int) -> np.ndarray:
    """Apply the Feistel network to each value until it is below `size`."""
    if size == 1:
        return values
    bits = max(2, (size - 1).bit_length())
    values = _apply_feistel(values, keys, bits=bits)
    # The domain is less than twice the size (except for tiny sizes), so each pass leaves at most half of the values outside.
    outside = np.flatnonzero(values >= size)
    while len(outside):
        walked = _apply_feistel(values[outside], keys if len(keys) == 1 else keys[outside], bits=bits)
        values[outside] = walked
        outside = outside[walked >= size]
    return values


def _apply_feistel(values: np.ndarray, keys: np.ndarray, *, bits: int) -> np.ndarray:
    """Apply a Feistel network: each round changes one half by a keyed function of the other, so it is invertible."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask = np.uint64((1 << low_bits) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    # Few bits have few round functions, so small domains need more rounds to make all permutations equally likely.
    for round_number in range(8 if bits >= 16 else 24):
        key = keys + np.uint64(GOLDEN_GAMMA * (round_number + 1) & WORD_MASK)
        if round_number % 2:
            low ^= _hash_half(high, key) >> np.uint64(64 - low_bits)
        else:
            high ^= _hash_half(low, key) >> np.uint64(64 - high_bits)
    return high << np.uint64(low_bits) | low


def _hash_half(half: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Hash half a word with a key: two multiplications with a fold between; the high bits are well mixed."""
    x = (half + np.uint64(1)) * (key | np.uint64(1))
    x ^= x >> np.uint64(32)
    x += key
    x *= MIX_MULTIPLIER
    return x
