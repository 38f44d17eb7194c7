"""How old the tokens of a batch are: the version it trains from minus the version that wrote each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from asyncrl.errors import StalenessError
from asyncrl.types import NOT_SAMPLED, Batch, Rollout, Span


def token_staleness(batch: Batch) -> Counter[int]:
    """Sampled tokens by staleness."""
    counts: Counter[int] = Counter()
    for _, span in _spans(batch):
        counts[batch.version - span.policy_version] += span.end - span.start
    return counts


def rollout_staleness(batch: Batch) -> list[int]:
    """Staleness of the first token of each rollout that has one."""
    return [batch.version - r.first_version for r in batch.rollouts if r.first_version != NOT_SAMPLED]


def check_staleness(batch: Batch, version: int, *, least: int, most: int | None) -> None:
    """Raise StalenessError unless the batch trains from `version` and each token's staleness is in [`least`, `most`]."""
    if batch.version != version:
        raise StalenessError(f"a batch of version {batch.version} was offered to a trainer at version {version}")
    for rollout, span in _spans(batch):
        staleness = version - span.policy_version
        if staleness < least or (most is not None and staleness > most):
            allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
            raise StalenessError(f"rollout {rollout.index} of group {rollout.group_id}: tokens [{span.start}, {span.end}) were written by "
                                 f"version {span.policy_version} and would train version {version}: staleness {staleness}, not {allowed}")


def _spans(batch: Batch) -> Iterator[tuple[Rollout, Span]]:
    for rollout in batch.rollouts:
        for sequence in rollout.sequences:
            for span in sequence.spans:
                yield rollout, span
