"""One forward's share of a batch: sequences packed end to end, what they share computed once. NumPy only.

The input of a sequence ends before its last predicted token, since nothing is predicted after it. Sequences of one group
start with the same tokens: those get one row. Attention alone sees whole sequences, through two index arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import NO_EXPERT, NOTHING, KeptSets, TokenRecords

LEAST_SAVED = 0.05
"""Rows that sharing must save, of all: attention then gathers its rows and spreads its results, which costs a small model as much."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which tokens of a flat batch a forward needs. N sequences."""

    tokens: NDArray[np.int32]
    """[T]"""
    cu_seqlens: NDArray[np.int64]
    """[N + 1]"""
    targets: NDArray[np.bool_]
    """[T] tokens whose logprob is wanted; never the first of a sequence."""
    temperatures: NDArray[np.float32]
    """[N]"""
    group_ids: NDArray[np.int64]
    """[N] sequences of one group may share their first tokens."""
    costs: NDArray[np.int64]
    """[N] input tokens of each sequence: those before its last target."""
    shared: NDArray[np.int64]
    """[N] how many of them are the same in the whole group, and computed once; 0 where that saves less than `LEAST_SAVED`."""
    records: TokenRecords = NOTHING
    """Of the T tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Where attention finds whole sequences among U rows. E = all tokens of all sequences, shared ones repeated."""

    runs: tuple[tuple[int, int], ...]
    """(n, L): n sequences of length L follow one another; the runs tile E in order."""
    expand: NDArray[np.int64] | None
    """[E] row of each token; None when nothing is shared and rows are already in order."""
    collapse: NDArray[np.int64] | None
    """[U] a place in E that computes each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """U input rows, P predictions."""

    tokens: NDArray[np.int64]
    """[U]"""
    positions: NDArray[np.int64]
    """[U] position of each row in its sequence."""
    segments: Segments
    sources: NDArray[np.int64]
    """[P] row whose hidden state predicts the target."""
    targets: NDArray[np.int64]
    """[P] the token predicted."""
    temperatures: NDArray[np.float32]
    """[P]"""
    places: NDArray[np.int64]
    """[P] index of the target in the batch's [T]."""
    cu_targets: NDArray[np.int64]
    """[S + 1] where the predictions of each of the S sequences start."""
    kept: KeptSets | None = None
    """Of the P targets."""
    experts: NDArray[np.int16] | None = None
    """[U, layers, experts of a token] recorded for each row; of a shared row, by the first sequence that has a record of it."""


def layout(tokens: NDArray[np.int32], *, cu_seqlens: NDArray[np.int64], targets: NDArray[np.bool_],
           temperatures: NDArray[np.float32], group_ids: NDArray[np.int64], records: TokenRecords = NOTHING) -> Layout:
    """Adds what each sequence costs and shares to the arrays of a batch (their meaning: `Layout`)."""
    count = len(temperatures)
    costs = np.zeros(count, np.int64)
    places = np.flatnonzero(targets)
    owner = np.searchsorted(cu_seqlens, places, side="right") - 1
    np.maximum.at(costs, owner, places - cu_seqlens[owner])
    shared, saved = np.zeros(count, np.int64), 0
    for group in np.unique(group_ids):
        members = np.flatnonzero((group_ids == group) & (costs > 0))
        if len(members) > 1:
            starts = cu_seqlens[members]
            length = _common_prefix(tokens, starts=starts, length=int(costs[members].min()))
            shared[members] = length if records.experts is None else _same_experts(records.experts, starts=starts, length=length)
            saved += int(shared[members[1:]].sum())
    if saved < LEAST_SAVED * int(costs.sum()):
        shared[:] = 0
    return Layout(tokens=tokens, cu_seqlens=cu_seqlens, targets=targets, temperatures=temperatures, group_ids=group_ids,
                  costs=costs, shared=shared, records=records)


def build(whole: Layout, sequences: tuple[int, ...]) -> Microbatch:
    """The micro-batch of these sequences. Without any, a dummy: one row, no prediction."""
    if not sequences:
        zero = np.zeros(1, np.int64)
        none = np.zeros(0, np.int64)
        return Microbatch(tokens=zero, positions=zero, segments=Segments(((1, 1),), None, None), sources=none, targets=none,
                          temperatures=np.zeros(0, np.float32), places=none, cu_targets=zero)
    chosen = np.asarray(sequences, np.int64)
    chosen = chosen[np.lexsort((chosen, whole.costs[chosen]))]
    lengths = whole.costs[chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    inputs = np.repeat(whole.cu_seqlens[chosen], lengths) + positions
    tokens = whole.tokens[inputs].astype(np.int64)
    rows, first = _rows(whole, chosen, positions=positions, starts=starts)
    places, sources = _predictions(whole, chosen, starts=starts)
    cu_targets = np.searchsorted(sources, starts)
    plain = len(first) == len(tokens)
    values, counts = np.unique(lengths, return_counts=True)
    segments = Segments(tuple(zip(counts.tolist(), values.tolist(), strict=True)), None if plain else rows, None if plain else first)
    return Microbatch(tokens=tokens[first], positions=positions[first], segments=segments, sources=rows[sources],
                      targets=whole.tokens[places].astype(np.int64), places=places, cu_targets=cu_targets,
                      temperatures=np.repeat(whole.temperatures[chosen], np.diff(cu_targets)),
                      kept=None if whole.records.kept is None else whole.records.kept.take(places),
                      experts=_experts(whole.records, inputs=inputs, rows=rows, first=first))


def _rows(whole: Layout, chosen: NDArray[np.int64], *, positions: NDArray[np.int64],
          starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[E] row of each token, and [U] the first place of each row. A shared token's place is in its group's first sequence."""
    _, leader, group = np.unique(whole.group_ids[chosen], return_index=True, return_inverse=True)
    lengths = np.diff(starts)
    is_shared = positions < np.repeat(whole.shared[chosen], lengths)
    canonical = np.where(is_shared, np.repeat(starts[leader[group]], lengths) + positions, np.arange(len(positions)))
    first, rows = np.unique(canonical, return_inverse=True)
    return rows, first


def _experts(records: TokenRecords, *, inputs: NDArray[np.int64], rows: NDArray[np.int64],
             first: NDArray[np.int64]) -> NDArray[np.int16] | None:
    """[U, L, k] of what was recorded of the tokens at `inputs`, [E], the first record of each row."""
    if records.experts is None:
        return None
    known = records.experts[inputs, 0, 0] != NO_EXPERT
    recorded, where = np.unique(rows[known], return_index=True)
    chosen = first.copy()
    chosen[recorded] = np.flatnonzero(known)[where]
    return records.experts[inputs[chosen]]


def _predictions(whole: Layout, chosen: NDArray[np.int64], *,
                 starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[P] the target's index in the batch, and the place in E of the token before it. The one place that shifts by one."""
    lengths = whole.costs[chosen]
    after = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) + np.repeat(whole.cu_seqlens[chosen], lengths) + 1
    sources = np.flatnonzero(whole.targets[after])
    return after[sources], sources


def _common_prefix(tokens: NDArray[np.int32], *, starts: NDArray[np.int64], length: int) -> int:
    heads = tokens[starts[:, None] + np.arange(length)]
    differs = np.flatnonzero((heads != heads[0]).any(axis=0))
    return int(differs[0]) if len(differs) else length


def _same_experts(experts: NDArray[np.int16], *, starts: NDArray[np.int64], length: int) -> int:
    """How many of the first tokens no two sequences have different records of."""
    heads = experts[starts[:, None] + np.arange(length)]
    known = heads[:, :, 0, 0] != NO_EXPERT
    first = heads[known.argmax(axis=0), np.arange(length)]
    differs = np.flatnonzero(((heads != first).any(axis=(2, 3)) & known).any(axis=0))
    return int(differs[0]) if len(differs) else length
