"""Payloads as docs/weight_sync.md describes them, written in the plainest way: what kernels and decoder are held against."""

from __future__ import annotations

import numpy as np

from asyncrl.weights.codec import BLOCK_ELEMENTS


def encode(new: np.ndarray, indices: np.ndarray, *, mode: str) -> bytes:
    """The payload that puts `new`, a whole run, at the ascending `indices` that changed."""
    if mode == "dense":
        return new.tobytes()
    if not len(indices):
        return b""
    values = new[indices].tobytes()
    if mode == "bitmap":
        flags = np.zeros(len(new), np.bool_)
        flags[indices] = True
        return np.packbits(flags, bitorder="little").tobytes() + values
    counts = [np.count_nonzero(indices // BLOCK_ELEMENTS == block) for block in range(-(-len(new) // BLOCK_ELEMENTS))]
    return np.array(counts, "<u4").tobytes() + (indices % BLOCK_ELEMENTS).astype("<u2").tobytes() + values
