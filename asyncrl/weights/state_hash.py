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
from asyncrl.weights.kernels import kernels_for

MODULUS = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15


def tensor_seed(name: str, dtype: str) -> int:
    """What sets one tensor's multipliers apart from another's; the dtype (safetensors name) is part of the identity."""
    return xxhash.xxh3_64_intdigest(f"{name}\0{dtype}".encode())


def origin(seed: int, index: int) -> np.uint64:
    """What the finaliser is applied to for the element with flat index `index`; that of its neighbour is larger by the golden constant."""
    return np.uint64((seed + index * _GOLDEN) % MODULUS)


def hash_bits(seed: int, bits: Bits, *, start: int) -> int:
    """Share of the elements `bits`, whose first one has flat index `start` in its tensor."""
    return int(kernels_for(len(bits)).hash_runs(np.array([len(bits)]), np.array([origin(seed, start)]), bits))


def hash_delta(seed: int, indices: NDArray[np.int64] | None, *, start: int, old: Bits, new: Bits) -> int:
    """What to add to H when the elements at `start + indices`, or all from `start` on, go from `old` to `new`, all [k]."""
    if indices is None:
        return (hash_bits(seed, new, start=start) - hash_bits(seed, old, start=start)) % MODULUS
    return int(kernels_for(len(indices)).hash_change(origin(seed, start), indices, old, new))


def hash_at(seed: int, indices: NDArray[np.int64], bits: Bits, *, start: int) -> int:
    """Share of the elements `bits` at `start + indices`, both [k]."""
    return int(kernels_for(len(indices)).hash_places(origin(seed, start), indices, bits))
