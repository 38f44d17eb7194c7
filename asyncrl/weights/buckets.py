"""Payloads gathered into parts of bounded size; one is written while the next fills, and there are never more."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.manifest import Part
from asyncrl.weights.transport import PartSink


class Buckets:
    """The parts of one rank's publication. As a context: when it is left, nothing is being written any more."""

    def __init__(self, sink: PartSink, *, version: int, rank: int, part_bytes: int) -> None:
        self._sink, self._version, self._rank, self._part_bytes = sink, version, rank, part_bytes
        self._parts: list[Part] = []
        self._number = 0
        self._chunks: list[NDArray[np.uint8]] = []
        self._payloads = self._size = self._owned = 0
        self._writer: ThreadPoolExecutor | None = None
        self._written: Future[Part] | None = None
        self._written_owned = 0

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.shutdown()

    def add(self, payloads: NDArray[np.uint8], sizes: Sequence[int], *, owned: bool, beside: int = 0) -> list[tuple[int, int]]:
        """Part and offset of each of several payloads that lie back to back. May wait for a part to be written, and raise as that does.

        Args:
            sizes: of the payloads.
            owned: they take memory of their own, and are no view of what is there anyway.
            beside: bytes that the publication holds elsewhere; with them, what is gathered and being written stay under two buckets.
        """
        if self._written is not None and beside + self._written_owned + self._owned + owned * len(payloads) > 2 * self._part_bytes:
            self._wait()
        places = []
        first = end = 0
        for size in sizes:
            if self._payloads and self._size + size > self._part_bytes:
                self._take(payloads[first:end], owned=owned)
                self._hand_over()
                first = end
            places.append((self._number, self._size))
            self._payloads += 1
            self._size += size
            end += size
        self._take(payloads[first:end], owned=owned)
        return places

    def close(self) -> tuple[Part, ...]:
        """All parts, written."""
        self._wait()
        if self._payloads:
            self._parts.append(self._put(self._number, self._chunks))
        return tuple(self._parts)

    def _take(self, chunk: NDArray[np.uint8], *, owned: bool) -> None:
        if len(chunk):
            self._chunks.append(chunk)
            self._owned += owned * len(chunk)

    def _hand_over(self) -> None:
        self._wait()
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="publish-part")
        self._written, self._written_owned = self._writer.submit(self._put, self._number, self._chunks), self._owned
        self._number += 1
        self._chunks, self._payloads, self._size, self._owned = [], 0, 0, 0

    def _wait(self) -> None:
        if self._written is not None:
            self._parts.append(self._written.result())
            self._written, self._written_owned = None, 0

    def _put(self, number: int, chunks: list[NDArray[np.uint8]]) -> Part:
        return self._sink.put_part(self._version, rank=self._rank, bucket=number, chunks=chunks)
