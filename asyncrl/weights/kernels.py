"""Which kernels work on raw bits: compiled ones where numba is installed and the work is worth it, else NumPy's.

The results are the same, bit for bit.
"""

from __future__ import annotations

import functools
from types import ModuleType

from asyncrl.weights import numpy_kernels

COMPILED_FROM_ELEMENTS = 1 << 20
"""Compiling takes seconds where no cache of it is found, NumPy a millisecond or two for that many: a small run never waits for it."""


def kernels_for(elements: int) -> ModuleType:
    """The functions of `numpy_kernels`, or their compiled twins, for work on so many elements."""
    return _compiled() if elements >= COMPILED_FROM_ELEMENTS else numpy_kernels


@functools.cache
def _compiled() -> ModuleType:
    try:
        from asyncrl.weights import numba_kernels
    except ImportError:
        return numpy_kernels
    return numba_kernels
