"""Which kernels work on raw bits: compiled ones where numba is installed and the work is worth it, else NumPy's.

The results are the same, bit for bit.
"""

from __future__ import annotations

import functools
from types import ModuleType

from asyncrl.weights import numpy_kernels

COMPILED_FROM_ELEMENTS = 1 << 20
"""Compiling takes seconds where no cache of it is found, NumPy a millisecond or two for that many: a small run never waits for it."""
LOADED_FROM_ELEMENTS = 1 << 9
"""In a process that has waited, compiled functions do the small work beside the large: the changes of a large run may be few."""


def kernels_for(elements: int) -> ModuleType:
    """The functions of `numpy_kernels`, or their compiled twins, for work on so many elements."""
    threshold = LOADED_FROM_ELEMENTS if _compiled.cache_info().currsize else COMPILED_FROM_ELEMENTS
    return _compiled() if elements >= threshold else numpy_kernels


@functools.cache
def _compiled() -> ModuleType:
    try:
        from asyncrl.weights import numba_kernels
    except ImportError:
        return numpy_kernels
    return numba_kernels
