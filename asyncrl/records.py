"""What an engine records of tokens beside their logprobs, for a trainer that is to compute the same ones. NumPy only.

    kept set         the ids a token was sampled among, where top_p, top_k or min_p left some out: the trainer renormalises over them
    routed experts   where each layer of a mixture of experts sent a token: the trainer sends it there too

Both are optional on every way, and what is absent costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ShapeError

NO_EXPERT = -1
"""In the place of an expert where none was recorded."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine is asked to record."""

    kept_sets: bool = False
    routed_experts: bool = False


NOTHING_WANTED = Wanted()


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The ids that each of n tokens was sampled among, as ragged rows.

    Ids and not bits: of 150,000 tokens top-p keeps some ten as a rule, 40 bytes, where a bitmap has 19 KB for every token. Counts and not
    offsets: those of several parts are joined as they are.
    """

    counts: NDArray[np.int32]
    """[n] size of each set; 0 for the whole vocabulary."""
    ids: NDArray[np.int32]
    """[K] the sets end to end, K the sum of the counts."""

    @classmethod
    def of(cls, sets: Iterable[NDArray[np.int32]]) -> KeptSets:
        """One set for each token; an empty one is the whole vocabulary."""
        rows = list(sets)
        return cls(np.array([len(row) for row in rows], np.int32), np.concatenate([np.empty(0, np.int32), *rows]).astype(np.int32))

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[n + 1] where the set of each token starts, and K."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def take(self, places: NDArray[np.int64]) -> KeptSets:
        """The sets of these tokens, in this order."""
        counts, starts = self.counts[places], self.offsets[:-1][places]
        before = np.cumsum(counts, dtype=np.int64) - counts
        return KeptSets(counts, self.ids[np.repeat(starts - before, counts) + np.arange(int(counts.sum()))])

    def check(self, tokens: NDArray[np.int32]) -> None:
        """Raise ShapeError unless there is a set for each token, and it holds the token or is the whole vocabulary."""
        if len(self) != len(tokens) or int(self.counts.sum()) != len(self.ids):
            raise ShapeError(f"{len(tokens)} tokens came with {len(self)} kept sets, {int(self.counts.sum())} ids in {len(self.ids)}")
        owners = np.repeat(np.arange(len(tokens)), self.counts)
        found = np.zeros(len(tokens), np.bool_)
        found[owners[self.ids == tokens[owners]]] = True
        lost = np.flatnonzero(~found & (self.counts > 0))
        if len(lost):
            raise ShapeError(f"token {tokens[lost[0]]} is not in the kept set of {self.counts[lost[0]]} ids it was sampled among")


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecords:
    """Of a row of tokens, T of them."""

    kept: KeptSets | None = None
    """Of each token; of those that were not sampled the whole vocabulary."""
    experts: NDArray[np.int16] | None = None
    """[T, L, k] the k experts of each of L layers that the token went through as input; `NO_EXPERT` where that is not known."""

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Those there are, by a name of their own; `of_arrays` takes them."""
        kept = {} if self.kept is None else {"kept_counts": self.kept.counts, "kept_ids": self.kept.ids}
        return kept if self.experts is None else kept | {"experts": self.experts}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TokenRecords:
        """What `arrays` gave; others in the mapping are passed over."""
        kept = KeptSets(arrays["kept_counts"], arrays["kept_ids"]) if "kept_counts" in arrays else None
        return cls(kept, arrays.get("experts"))

    def check(self, tokens: NDArray[np.int32]) -> None:
        """Raise ShapeError unless the records are those of so many tokens."""
        if self.kept is not None:
            self.kept.check(tokens)
        if self.experts is not None and (self.experts.ndim != 3 or len(self.experts) != len(tokens)):
            raise ShapeError(f"{len(tokens)} tokens came with experts of shape {self.experts.shape}, not [T, layers, experts of a token]")


NOTHING = TokenRecords()


def joined(parts: Sequence[tuple[TokenRecords, int]]) -> TokenRecords:
    """The records of rows of tokens laid end to end, each given with its length. Raises ShapeError for experts of several models."""
    kept = None
    if any(part.kept is not None for part, _ in parts):
        counts = [np.zeros(length, np.int32) if part.kept is None else part.kept.counts for part, length in parts]
        kept = KeptSets(np.concatenate(counts), np.concatenate([part.kept.ids for part, _ in parts if part.kept is not None]))
    shapes = {part.experts.shape[1:] for part, _ in parts if part.experts is not None}
    if len(shapes) > 1:
        raise ShapeError(f"experts of (layers, experts of a token) {sorted(shapes)} cannot be of one model")
    experts = None
    for shape in shapes:
        experts = np.concatenate([_unknown(length, shape) if part.experts is None else part.experts for part, length in parts])
    return TokenRecords(kept, experts)


class RecordsBuilder:
    """Gathers the records of a growing row of tokens. Of a token that goes through the model again the first record stays: it is the one
    that the logprob of the token after it came from."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, KeptSets]] = []
        self._experts: list[tuple[int, NDArray[np.int16]]] = []

    def add(self, records: TokenRecords, tokens: NDArray[np.int32], *, start: int) -> None:
        """Of sampled tokens that begin at `start`: their kept sets, and the experts of what ends with the token before the last of them.

        Raises ShapeError, and adds nothing.
        """
        kept, experts, end = records.kept, records.experts, start + len(tokens) - 1
        if kept is not None:
            kept.check(tokens)
        if experts is not None and (experts.ndim != 3 or len(experts) > end):
            raise ShapeError(f"experts of shape {experts.shape} came for the {end} tokens before a sampled one")
        if experts is not None and self._experts and self._experts[0][1].shape[1:] != experts.shape[1:]:
            raise ShapeError(f"experts of shape {experts.shape} came after some of shape {self._experts[0][1].shape}")
        if kept is not None and len(tokens):
            self._kept.append((start, kept))
        if experts is not None and len(experts):
            self._experts.append((end, experts))

    def build(self, length: int) -> TokenRecords:
        """Of the whole row."""
        kept = experts = None
        if self._kept:
            counts = np.zeros(length, np.int32)
            for start, part in self._kept:
                counts[start:start + len(part)] = part.counts
            kept = KeptSets(counts, np.concatenate([part.ids for _, part in self._kept]))
        if self._experts:
            experts = _unknown(length, self._experts[0][1].shape[1:])
            for end, rows in self._experts:
                place = experts[end - len(rows):end]
                place[:] = np.where(place == NO_EXPERT, rows, place)
        return TokenRecords(kept, experts)


def _unknown(length: int, shape: tuple[int, ...]) -> NDArray[np.int16]:
    return np.full((length, *shape), NO_EXPERT, np.int16)
