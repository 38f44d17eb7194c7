"""How sequences spread over ranks and micro-batches. Pure and deterministic, NumPy only."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RankPlan = tuple[tuple[int, ...], ...]
"""Sequence numbers of each micro-batch of one rank, in order; an empty micro-batch is a dummy."""

BUNDLES_PER_BIN = 4
"""How finely large groups are cut before they are spread: load differs between ranks by at most about a quarter of a micro-batch."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Sequences of one group that stay together, since what they share is computed once."""

    cost: int
    first: int
    sequences: tuple[int, ...]


def plan(costs: NDArray[np.int64], *, shared: NDArray[np.int64], group_ids: NDArray[np.int64], ranks: int,
         microbatch_tokens: int) -> tuple[RankPlan, ...]:
    """Which sequences each rank computes, by micro-batch; every rank gets the same number of micro-batches.

    Args:
        costs: [N] tokens of each sequence that the forward needs; sequences that need none are left out.
        shared: [N] how many of them are the same for the whole group, and paid once in a micro-batch.
        group_ids: [N]; sequences of a group stay together as far as the budget allows.
        ranks: how many ranks share the work.
        microbatch_tokens: most tokens of one micro-batch; a longer sequence is alone in its own.
    """
    total = int(costs.sum())
    if total == 0:
        return ((),) * ranks
    limit = min(microbatch_tokens, max(1, math.ceil(total / (ranks * BUNDLES_PER_BIN))))
    bundles = _bundles(costs, shared=shared, group_ids=group_ids, limit=limit)
    count = math.ceil(sum(min(bundle.cost, microbatch_tokens) for bundle in bundles) / (ranks * microbatch_tokens))
    while True:
        bins = _spread(bundles, count * ranks)
        if all(len(members) <= 1 or sum(b.cost for b in members) <= microbatch_tokens for members in bins):
            break
        count += 1
    ordered = [tuple(sorted(n for bundle in members for n in bundle.sequences)) for members in bins]
    return tuple(tuple(ordered[rank::ranks]) for rank in range(ranks))


def _bundles(costs: NDArray[np.int64], *, shared: NDArray[np.int64], group_ids: NDArray[np.int64], limit: int) -> list[_Bundle]:
    bundles: list[_Bundle] = []
    order = np.lexsort((np.arange(len(costs)), group_ids))
    members: list[int] = []
    cost = 0
    for n in order[costs[order] > 0].tolist():
        own = int(costs[n] - shared[n])
        if members and (group_ids[n] != group_ids[members[0]] or cost + own > limit):
            bundles.append(_Bundle(cost, members[0], tuple(members)))
            members, cost = [], 0
        cost += own if members else int(costs[n])
        members.append(n)
    bundles.append(_Bundle(cost, members[0], tuple(members)))
    return bundles


def _spread(bundles: list[_Bundle], count: int) -> list[list[_Bundle]]:
    """Largest first, each into the emptiest bin; bins come back fullest first, so that ranks taken in turn are even."""
    heap = [(0, index) for index in range(count)]
    bins: list[list[_Bundle]] = [[] for _ in range(count)]
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.cost, bundle.first)):
        load, index = heapq.heappop(heap)
        bins[index].append(bundle)
        heapq.heappush(heap, (load + bundle.cost, index))
    loads = {index: load for load, index in heap}
    return [bins[index] for index in sorted(range(count), key=lambda index: (-loads[index], index))]
