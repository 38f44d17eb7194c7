"""Why a complete group would not be trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from asyncrl.types import Rollout


def valid_rewards(rollouts: Iterable[Rollout]) -> list[float]:
    """Rewards of the rollouts that ended without error."""
    return [rollout.reward for rollout in rollouts if not rollout.status.is_error]


def is_zero_variance(rewards: Sequence[float], *, tolerance: float) -> bool:
    """Whether two or more rewards differ by at most `tolerance` (max − min; a single reward has no group to be equal to)."""
    return len(rewards) > 1 and max(rewards) - min(rewards) <= tolerance


def reward_histogram(rewards: Iterable[float], *, most_lines: int = 5) -> str:
    """`reward 0: 120 groups, reward 1: 8 groups`: the commonest rewards of groups whose rollouts all earned the same."""
    counts = Counter(f"{reward:.4g}" for reward in rewards).most_common()
    text = ", ".join(f"reward {reward}: {count} groups" for reward, count in counts[:most_lines])
    rest = sum(count for _, count in counts[most_lines:])
    return f"{text}, others: {rest} groups" if rest else text
