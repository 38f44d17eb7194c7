"""Parts made smaller for disks and long lines: bytes sorted into planes, then zstd. The one file that imports `zstandard`.

A part is cut into blocks of `BLOCK_BYTES`, the last one shorter. Of each block first the bytes 0, 2, 4 …, then 1, 3, 5 …: signs and
exponents, and the upper halves of indices, repeat and come to lie together, apart from mantissas and lower halves, which do not. All of it
is one zstd frame. The same bytes give the same frame, with one version of the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import zstandard
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.weights.transport import Buffer

BLOCK_BYTES = 1 << 18
"""A plane of it is as long as zstd's own blocks, so each has a code of its own."""
PLANES = 2
LEVEL = 1
"""Higher ones cost several times as much for some percent."""
WINDOW_BYTES = 8 << 20
"""More than level 1 uses, and all that a frame may ask of whoever unpacks it."""


def pack(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """The file, piece by piece; needs some blocks of memory beside its input."""
    stream = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False).compressobj()
    for block in _blocks(chunks):
        yield stream.compress(_split(block).tobytes())
    yield stream.flush()


def unpack(data: NDArray[np.uint8], *, size: int) -> NDArray[np.uint8]:
    """The part that was packed, read-only. Raises WeightSyncError unless it is a frame of exactly `size` bytes; never makes more of it."""
    part = np.empty(size, np.uint8)
    filled = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).stream_reader(data) as reader:
            while filled < size:
                block = np.empty(min(BLOCK_BYTES, size - filled), np.uint8)
                _fill(reader, block)
                part[filled:filled + len(block)] = _join(block)
                filled += len(block)
            if reader.read(1):
                raise WeightSyncError(f"it has more than {size} bytes")
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"it cannot be unpacked: {error}") from error
    part.flags.writeable = False
    return part


def _fill(reader: zstandard.ZstdDecompressionReader, block: NDArray[np.uint8]) -> None:
    view = memoryview(block)
    while view:
        count = reader.readinto(view)
        if not count:
            raise WeightSyncError("it ends too early")
        view = view[count:]


def _blocks(chunks: Iterable[Buffer]) -> Iterator[NDArray[np.uint8]]:
    """The same bytes cut anew: blocks do not depend on where chunks end."""
    block, filled = np.empty(BLOCK_BYTES, np.uint8), 0
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        while len(data):
            count = min(len(data), BLOCK_BYTES - filled)
            block[filled:filled + count] = data[:count]
            filled, data = filled + count, data[count:]
            if filled == BLOCK_BYTES:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


def _split(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([block[plane::PLANES] for plane in range(PLANES)])


def _join(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    block = np.empty_like(planes)
    start = 0
    for plane in range(PLANES):
        count = len(block[plane::PLANES])
        block[plane::PLANES] = planes[start:start + count]
        start += count
    return block
