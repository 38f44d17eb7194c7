"""A hash of all published weights that adds over shards and follows a change at the cost of the change.

    H = Σ over tensors Σ over elements  m(name, dtype, i) · (bits_i + 1)   mod 2^64

with i the flat index in the whole tensor and m an odd number: splitmix64 of (xxh3_64(name, dtype) + i·golden), lowest bit set.
An odd factor is invertible, so a change of any one element always changes H; a swap, a shift or a value under another name does with
probability 1 − 2^−63. Sums over disjoint pieces add up to the same H however a tensor is cut. It proves equality between parties that
do not deceive each other; it is not a cryptographic digest.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.weights.codec import Bits

MODULUS = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 15
"""Elements at a time: temporaries of 256 KiB stay in the second-level cache."""


def tensor_seed(name: str, dtype: str) -> int:
    """What sets one tensor's multipliers apart from another's; the dtype (safetensors name) is part of the identity."""
    return xxhash.xxh3_64_intdigest(f"{name}\0{dtype}".encode())


def hash_bits(seed: int, bits: Bits, *, start: int) -> int:
    """Share of the elements `bits`, whose first one has flat index `start` in its tensor."""
    total = 0
    steps = np.arange(min(_CHUNK, len(bits)), dtype=np.uint64) * np.uint64(_GOLDEN)
    for low in range(0, len(bits), _CHUNK):
        chunk = bits[low:low + _CHUNK].astype(np.uint64) + np.uint64(1)
        origin = np.uint64((seed + (start + low) * _GOLDEN) % MODULUS)
        total += int(np.sum(_mix(steps[:len(chunk)] + origin) * chunk))
    return total % MODULUS


def hash_delta(seed: int, indices: NDArray[np.int64], *, start: int, old: Bits, new: Bits) -> int:
    """What to add to H when the elements at `start + indices` go from `old` to `new`, all [k]."""
    total = 0
    origin = np.uint64((seed + start * _GOLDEN) % MODULUS)
    for low in range(0, len(indices), _CHUNK):
        part = slice(low, low + _CHUNK)
        change = new[part].astype(np.uint64) - old[part].astype(np.uint64)
        total += int(np.sum(_mix(indices[part].astype(np.uint64) * np.uint64(_GOLDEN) + origin) * change))
    return total % MODULUS


def hash_at(seed: int, indices: NDArray[np.int64], bits: Bits, *, start: int) -> int:
    """Share of the elements `bits` at `start + indices`, both [k]."""
    nothing = np.zeros(min(_CHUNK, len(indices)), np.uint64)
    total = 0
    for low in range(0, len(indices), _CHUNK):
        part = slice(low, low + _CHUNK)
        raised = bits[part].astype(np.uint64) + np.uint64(1)
        total += hash_delta(seed, indices[part], start=start, old=nothing[:len(raised)], new=raised)
    return total % MODULUS


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser in place, made odd."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x
