"""The parity probe: does the engine report the logprobs the trainer computes, at equal weights?

It measures mismatch alone, free of staleness: every token is of exactly the trainer's version.
"""

from __future__ import annotations

from collections.abc import Awaitable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import RunAborted
from asyncrl.types import Rollout, Sequence


class Score(Protocol):
    """The trainer's logprobs of sequences, each at its own temperature."""

    def __call__(self, sequences: SequenceOf[Sequence], *, temperature: SequenceOf[float]) -> Awaitable[list[NDArray[np.float32]]]:
        """[T] for each."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Engine logprob − trainer logprob over the probe's tokens, in nats."""

    mean_abs: float
    max_abs: float
    mean_signed: float
    num_tokens: int
    temperatures: tuple[float, ...] = (1.0,)
    """That the probe's rollouts were sampled at, from low to high."""


async def measure_parity(rollouts: SequenceOf[Rollout], *, score: Score, version: int) -> Parity:
    """Compare the rollouts with the trainer's own logprobs. Raises RunAborted when a token is not of `version`."""
    rows = [(sequence, rollout.sampling.temperature) for rollout in rollouts for sequence in rollout.sequences if sequence.spans]
    sequences, temperatures = [sequence for sequence, _ in rows], [temperature for _, temperature in rows]
    versions = {span.policy_version for sequence in sequences for span in sequence.spans}
    if versions - {version}:
        raise RunAborted(f"parity probe: the engine wrote tokens of versions {sorted(versions)}, the trainer is at {version}")
    if not sequences:
        failures = sorted({rollout.error or rollout.status.value for rollout in rollouts})
        raise RunAborted(f"parity probe: the engine wrote no token: {failures}")
    scored = await score(sequences, temperature=temperatures)
    gaps = np.concatenate([(sequence.rollout_logprobs - logprobs)[sequence.policy_versions >= 0]
                           for sequence, logprobs in zip(sequences, scored, strict=True)]).astype(np.float64)
    return Parity(float(np.abs(gaps).mean()), float(np.abs(gaps).max()), float(gaps.mean()), len(gaps),
                  tuple(sorted(set(temperatures))))


def judge(parity: Parity, *, max_mean_gap: float) -> None:
    """Raise RunAborted with the likely cause when the mean gap is over the limit or not finite."""
    if parity.mean_abs <= max_mean_gap:
        return
    raise RunAborted(
        f"parity probe: engine and trainer logprobs differ by {parity.mean_abs:.2e} nats on average (max {parity.max_abs:.2e}, "
        f"signed mean {parity.mean_signed:+.2e}) over {parity.num_tokens} tokens at equal version; allowed: {max_mean_gap:g}. "
        f"Likely cause: {_likely_cause(parity)}")


def _likely_cause(parity: Parity) -> str:
    if not np.isfinite(parity.mean_abs):
        return "NaN or infinite logits on one side"
    one_sided = abs(parity.mean_signed) > 0.95 * parity.mean_abs
    if one_sided and parity.mean_signed > 0:
        return "a constant offset: the engine renormalises over a kept set (top-p, top-k, min-p), or a penalty is on"
    if parity.temperatures != (1.0,):
        return f"logprobs taken before the temperature ({', '.join(f'{each:g}' for each in parity.temperatures)}) on one side"
    if one_sided:
        return "a constant offset: the engine's distribution is broader than the trainer's"
    return "different weights (a sync that did not land), a stale prefix cache, or arithmetic in another precision"
