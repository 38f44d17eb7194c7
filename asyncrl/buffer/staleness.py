"""How old the tokens of a batch are: the version it trains from minus the version that wrote each token."""

from __future__ import annotations

import dataclasses
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


def mask_older(batch: Batch, *, least_version: int) -> Batch:
    """The batch without gradient for tokens of versions before `least_version`; sequences that have none stay as they are."""
    if all(span.policy_version >= least_version for _, span in _spans(batch)):
        return batch

    def masked(rollout: Rollout) -> Rollout:
        sequences = (dataclasses.replace(sequence, loss_mask=sequence.loss_mask & (sequence.policy_versions >= least_version))
                     if any(span.policy_version < least_version for span in sequence.spans) else sequence for sequence in rollout.sequences)
        return dataclasses.replace(rollout, sequences=tuple(sequences))

    groups = (dataclasses.replace(group, rollouts=tuple(masked(rollout) for rollout in group.rollouts)) for group in batch.groups)
    return dataclasses.replace(batch, groups=tuple(groups))


def check_staleness(batch: Batch, version: int, *, least: int, most: int | None, masked: bool = True) -> None:
    """Raise StalenessError unless the batch trains from `version` and each token's staleness is in [`least`, `most`].

    Spans without any gradient count only with `masked`.
    """
    if batch.version != version:
        raise StalenessError(f"a batch of version {batch.version} was offered to a trainer at version {version}")
    for rollout, span in _spans(batch, masked=masked):
        staleness = version - span.policy_version
        if staleness < least or (most is not None and staleness > most):
            allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
            raise StalenessError(f"rollout {rollout.index} of group {rollout.group_id}: tokens [{span.start}, {span.end}) were written by "
                                 f"version {span.policy_version} and would train version {version}: staleness {staleness}, not {allowed}")


def _spans(batch: Batch, *, masked: bool = True) -> Iterator[tuple[Rollout, Span]]:
    for rollout in batch.rollouts:
        for sequence in rollout.sequences:
            for span in sequence.spans:
                if masked or sequence.loss_mask[span.start:span.end].any():
                    yield rollout, span
