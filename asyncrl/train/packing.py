"""How sequences spread over ranks and micro-batches. Pure and deterministic, NumPy only.

Two numbers decide. Tokens fill a micro-batch: they take memory, and the budget is in tokens. Work takes time: a token costs the same
wherever it stands, a query costs something more for every key before it, so one sequence of 8k tokens is more work than eight of 1k.
Micro-batches are packed by tokens, and their work is spread: sharded ranks wait for one another in every micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RankPlan = tuple[tuple[int, ...], ...]
"""Sequence numbers of each micro-batch of one rank, in order; an empty micro-batch is a dummy."""

PAIR_COST = 1 / 11500
"""Work of a query and a key, where the model's dimensions are not known: that of Qwen2.5-0.5B, 24 layers of 14 heads of 64 in 494M
weights. Larger models have less."""

PIECES = ((1, 4), (4, 4), (16, 16), (64, 64), (math.inf, math.inf))
"""How finely groups are cut before they are spread, in parts of a budget and of a rank's share, tried in this order until one is good: the
coarser, the more prompt rows are shared."""

GOOD = 0.02
"""Waste and imbalance that are not worth cutting groups for."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Who computes what, and what it loses against a perfect packing."""

    ranks: tuple[RankPlan, ...]
    """Of each rank; all have the same number of micro-batches."""
    waste: float
    """Share of the token budget left empty in the micro-batches that a perfect packing would need too. 0 where fewer could not hold the
    tokens; else, with one micro-batch less on every rank, the share that would still be empty."""
    imbalance: float
    """Share of the ranks' time spent waiting for the slowest one, by work, if they wait for one another in every micro-batch."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Sequences of one group that stay together, since what they share is computed once."""

    tokens: int
    shared: int
    """Of these, rows that another bundle of the group in the same bin has too."""
    work: float
    group: int
    sequences: tuple[int, ...]


class _Bins:
    """What has been put where. Arrays are over bins."""

    def __init__(self, count: int) -> None:
        self.members: list[list[_Bundle]] = [[] for _ in range(count)]
        self.tokens, self.work = np.zeros(count, np.int64), np.zeros(count)
        self._holding: dict[int, list[int]] = {}

    def put(self, bundle: _Bundle, *, budget: int, by_work: bool) -> bool:
        """Into the first bin where it fits, `by_work` the one that then has the least; of its own group's if one fits. Whether one did."""
        for candidates, shared in ((self._holding.get(bundle.group, []), bundle.shared), (slice(None), 0)):
            tokens = self.tokens[candidates]
            fits = np.flatnonzero((tokens == 0) | (tokens + bundle.tokens - shared <= budget))
            if len(fits):
                place = fits[self.work[candidates][fits].argmin() if by_work else 0]
                index = int(place if isinstance(candidates, slice) else candidates[place])
                self.members[index].append(bundle)
                self.tokens[index] += bundle.tokens - shared
                self.work[index] += bundle.work - shared
                holding = self._holding.setdefault(bundle.group, [])
                if index not in holding:
                    holding.append(index)
                return True
        return False


def plan(costs: NDArray[np.int64], *, shared: NDArray[np.int64], group_ids: NDArray[np.int64], ranks: int,
         microbatch_tokens: int, pair_cost: float = PAIR_COST) -> Packing:
    """Which sequences each rank computes, by micro-batch; every rank gets the same number of micro-batches, the fewest that were found.

    Args:
        costs: [N] tokens of each sequence that the forward needs; sequences that need none are left out.
        shared: [N] how many of them are the same for the whole group, and paid once in a micro-batch.
        group_ids: [N]; sequences of a group stay together as far as the budget allows, and as cutting them gains nothing.
        ranks: how many ranks share the work.
        microbatch_tokens: most tokens of one micro-batch; a longer sequence is alone in its own.
        pair_cost: work of one query looking at one key, where a token's way through all layers otherwise is 1.
    """
    if not costs.any():
        return Packing(((),) * ranks, waste=0.0, imbalance=0.0)
    share = math.ceil(int(costs.sum()) / ranks)
    least = math.ceil(_rows(costs, shared=shared, group_ids=group_ids, budget=microbatch_tokens) / (ranks * microbatch_tokens))
    best: tuple[tuple[int, float], Packing] | None = None
    for of_budget, of_share in PIECES:
        limit = math.ceil(min(microbatch_tokens / of_budget, share / of_share))
        bundles = _bundles(costs, shared=shared, group_ids=group_ids, limit=limit, pair_cost=pair_cost)
        bins = _packed(bundles, ranks=ranks, budget=microbatch_tokens, least=least)
        packing, slowest = _dealt(bins, ranks=ranks, budget=microbatch_tokens)
        if best is None or (len(bins.members), slowest) < best[0]:
            best = (len(bins.members), slowest), packing
        if max(packing.waste, packing.imbalance) <= GOOD:
            break
    return best[1]


def _rows(costs: NDArray[np.int64], *, shared: NDArray[np.int64], group_ids: NDArray[np.int64], budget: int) -> int:
    """The fewest that any packing computes: what a group shares once. Beyond the budget a sequence has no more to fill."""
    rows = np.minimum(costs, budget)
    needed = np.flatnonzero(costs > 0)
    _, first = np.unique(group_ids[needed], return_index=True)
    repeated = np.delete(needed, first)
    rows[repeated] = np.maximum(0, rows[repeated] - shared[repeated])
    return int(rows.sum())


def _bundles(costs: NDArray[np.int64], *, shared: NDArray[np.int64], group_ids: NDArray[np.int64], limit: int,
             pair_cost: float) -> list[_Bundle]:
    """Neighbours of a group, up to `limit` tokens; more only where one sequence has more."""
    bundles: list[_Bundle] = []
    members: list[int] = []
    tokens, pairs = 0, 0.0
    order = np.lexsort((np.arange(len(costs)), group_ids))
    for n in order[costs[order] > 0].tolist():
        length = int(costs[n])
        own = length - int(shared[n])
        if members and (group_ids[n] != group_ids[members[0]] or tokens + own > limit):
            bundles.append(_Bundle(tokens, int(shared[members[0]]), tokens + pair_cost * pairs, int(group_ids[members[0]]), tuple(members)))
            members, tokens, pairs = [], 0, 0.0
        tokens += own if members else length
        pairs += length * (length + 1) / 2
        members.append(n)
    bundles.append(_Bundle(tokens, int(shared[members[0]]), tokens + pair_cost * pairs, int(group_ids[members[0]]), tuple(members)))
    return bundles


def _packed(bundles: list[_Bundle], *, ranks: int, budget: int, least: int) -> _Bins:
    """Bins within the budget, a multiple of `ranks`, `least` times or more.

    First-fit-decreasing says how many are enough; the fewest that can be filled evenly are searched below that.
    """
    tight = _Bins(len(bundles))
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.tokens, -bundle.work, bundle.sequences[0])):
        tight.put(bundle, budget=budget, by_work=False)
    enough = math.ceil(np.count_nonzero(tight.tokens) / ranks)
    by_work = sorted(bundles, key=lambda bundle: (-bundle.work, bundle.sequences[0]))
    fewest: _Bins | None = None
    low, high = least, enough
    while low <= high:
        count = (low + high) // 2
        even = _Bins(count * ranks)
        if all(even.put(bundle, budget=budget, by_work=True) for bundle in by_work):
            fewest, high = even, count - 1
        else:
            low = count + 1
    if fewest is not None:
        return fewest
    tight.members = (tight.members + [[] for _ in range(ranks)])[:enough * ranks]
    tight.tokens, tight.work = (np.pad(values, (0, ranks))[:enough * ranks] for values in (tight.tokens, tight.work))
    return tight


def _dealt(bins: _Bins, *, ranks: int, budget: int) -> tuple[Packing, float]:
    """Bins to ranks, the most work first and in turn, so that those computed at one time are alike; and the work of the slowest, summed."""
    order = sorted(range(len(bins.members)), key=lambda index: (-bins.work[index], index))
    work = bins.work[order].reshape(-1, ranks)
    slowest = float(work.max(axis=1).sum())
    fewer = (len(order) - ranks) * budget
    waste = max(0.0, 1 - int(np.minimum(bins.tokens, budget).sum()) / fewer) if fewer else 0.0
    ordered = [tuple(sorted(n for bundle in bins.members[index] for n in bundle.sequences)) for index in order]
    return Packing(tuple(tuple(ordered[rank::ranks]) for rank in range(ranks)), waste=waste,
                   imbalance=1 - float(work.sum()) / (ranks * slowest)), slowest
