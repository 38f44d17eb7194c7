"""Cases of advantages, aggregation and ESS control with random inputs, answered from the formulas in plain NumPy, without asyncrl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Case = dict[str, Any]
Array = np.ndarray


def _quarters(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Array:
    """Numbers that float32 holds exactly: what the two precisions then differ by is the library's."""
    return rng.integers(-8, 9, shape) / 4


def _groups(rng: np.random.Generator) -> Case:
    """Groups of 4, 2, 1 and 3 in any order, one of equal rewards."""
    group = rng.permutation([3] * 4 + [9] * 2 + [5] + [1] * 3)
    inputs = {}
    for name in ("a", "b"):
        rewards = rng.integers(0, 3, len(group)).astype(float) if name == "a" else _quarters(rng, len(group))
        rewards[group == 1] = 0.7
        inputs[f"rewards_{name}"] = rewards.tolist()
    expected = {name: _group_advantages(np.array(inputs[f"rewards_{name}"]), group) for name in ("a", "b")}
    return {"inputs": inputs | {"group": group.tolist()}, "expected": expected}


def _group_advantages(rewards: Array, group: Array) -> dict[str, Array]:
    out = {name: np.zeros(len(group)) for name in ("grpo_unbiased", "grpo_biased", "dr_grpo", "rloo", "maxrl")}
    for one in np.unique(group):
        rows = np.flatnonzero(group == one)
        r = rewards[rows]
        if len(r) < 2 or np.ptp(r) == 0:
            continue
        out["grpo_unbiased"][rows] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        out["grpo_biased"][rows] = (r - r.mean()) / (r.std() + 1e-6)
        out["dr_grpo"][rows] = r - r.mean()
        out["rloo"][rows] = [r[i] - np.delete(r, i).mean() for i in range(len(r))]
        out["maxrl"][rows] = (r - r.mean()) / r.mean() if r.mean() > 0 else 0.0
    return out


def _opo(rng: np.random.Generator) -> Case:
    size = int(rng.integers(2, 9))
    rewards, lengths = _quarters(rng, size), rng.integers(1, 50, size).astype(float)
    baseline = np.repeat(rewards, lengths.astype(int)).mean()
    return {"inputs": {"rewards": rewards.tolist(), "lengths": lengths.tolist()},
            "expected": {"baseline": baseline, "adv": rewards - baseline}}


def _gae(rng: np.random.Generator) -> Case:
    size = int(rng.integers(3, 12))
    mask = rng.random(size) > 0.4
    mask[rng.permutation(size)[:3]] = True
    rewards, values = _quarters(rng, size), np.where(mask, _quarters(rng, size), rng.choice([-9.0, 9.0], size))
    gamma, lam = round(rng.uniform(0.5, 1.0), 3), round(rng.uniform(0.0, 1.0), 3)
    skip, whitened = np.zeros(size), np.zeros(size)
    skip[mask] = _gae_matrix(rewards[mask], values[mask], gamma, lam)
    whitened[mask] = _whitened(skip[mask])
    return {"inputs": {"rewards": rewards.tolist(), "values": values.tolist(), "mask": mask.astype(int).tolist(), "gamma": gamma,
                       "lam": lam},
            "expected": {"adv_skip": skip, "returns_skip": np.where(mask, skip + values, 0.0),
                         "adv_no_skip": _gae_matrix(rewards, values, gamma, lam), "adv_skip_whitened": whitened}}


def _gae_matrix(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """Σ_k (γλ)^k δ as one upper triangular product."""
    errors = rewards + gamma * np.append(values[1:], 0.0) - values
    ahead = np.arange(len(errors))[None, :] - np.arange(len(errors))[:, None]
    return np.where(ahead >= 0, (gamma * lam) ** np.maximum(ahead, 0), 0.0) @ errors


def _whitened(values: Array) -> Array:
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def _reinforce_plus_plus(rng: np.random.Generator) -> Case:
    shape = (int(rng.integers(2, 5)), int(rng.integers(3, 7)))
    mask = rng.random(shape) > 0.4
    mask[:, 0] = True
    rewards, gamma = np.where(mask, _quarters(rng, shape), 77.0), round(rng.uniform(0.5, 1.0), 3)
    returns, advantages = np.zeros(shape), np.zeros(shape)
    for row, kept in enumerate(mask):
        own = rewards[row, kept]
        returns[row, kept] = [sum(own[k] * gamma ** (k - t) for k in range(t, len(own))) for t in range(len(own))]
    advantages[mask] = _whitened(returns[mask])
    return {"inputs": {"token_rewards": rewards.tolist(), "mask": mask.astype(int).tolist(), "gamma": gamma},
            "expected": {"returns": returns, "adv": advantages}}


def _aggregation(rng: np.random.Generator) -> Case:
    def microbatch() -> list[list[float]]:
        return [rng.normal(size=rng.integers(1, 6)).round(4).tolist() for _ in range(rng.integers(1, 4))]

    ranks = [[microbatch() for _ in range(rng.integers(1, 4))] for _ in range(rng.integers(1, 5))]
    longest = int(rng.integers(1, 20))
    sequences = [np.array(s) for rank in ranks for held in rank for s in held]
    tokens = np.concatenate(sequences)

    def mean(parts: list[list[float]]) -> float:
        return float(np.concatenate(parts).mean())

    return {"inputs": {"losses": {f"rank{i}": rank for i, rank in enumerate(ranks)}, "dp": len(ranks), "l_max": longest},
            "expected": {"token-mean": tokens.mean(), "token-sum": tokens.sum(),
                         "seq-mean-token-sum": np.mean([s.sum() for s in sequences]),
                         "seq-mean-token-mean": np.mean([s.mean() for s in sequences]),
                         "dr-grpo": np.mean([s.sum() / longest for s in sequences]),
                         "n_tokens": len(tokens), "n_seqs": len(sequences),
                         "naive_mean_of_microbatch_token_means": np.mean([mean(held) for rank in ranks for held in rank]),
                         "naive_mean_of_rank_token_means": np.mean([mean([s for held in rank for s in held]) for rank in ranks]),
                         "microbatch_backward_values_token_mean": [[sum(map(sum, held)) * len(ranks) / len(tokens) for held in rank]
                                                                  for rank in ranks]}}


def _vcpo(rng: np.random.Generator) -> Case:
    weights, base = np.exp(rng.normal(0.0, 1.5, rng.integers(1, 12))).round(4), round(rng.uniform(0.2, 1.0), 3)
    shares = weights / weights.sum()
    ess = 1 / (shares**2).sum()
    ratio = ess / len(weights)
    return {"inputs": {"seq_weights": weights.tolist(), "base_ess_ratio": base},
            "expected": {"ess": ess, "ess_ratio": ratio, "lr_scale_sqrt": np.sqrt(min(1.0, ratio / base)),
                         "lr_scale_linear": min(1.0, ratio / base)}}


def _overlong(rng: np.random.Generator) -> Case:
    most = int(rng.integers(10, 1000))
    cache = int(rng.integers(1, most + 1))
    lengths = rng.integers(0, 2 * most, 6)
    paper = np.interp(lengths, [most - cache, most], [0.0, -1.0])
    return {"inputs": {"lengths": lengths.tolist(), "l_max": most, "l_cache": cache},
            "expected": {"penalty_paper": paper, "penalty_unclamped": np.where(lengths > most, (most - cache - lengths) / cache, paper)}}


KINDS: dict[str, Callable[[np.random.Generator], Case]] = {
    "advantages_group": _groups, "advantage_opo_length_weighted": _opo, "gae_skip_observation_tokens": _gae,
    "reinforce_plus_plus": _reinforce_plus_plus, "aggregation_across_microbatches_and_ranks": _aggregation,
    "vcpo_ess_step_scaling": _vcpo, "dapo_overlong_shaping": _overlong}


def case_of(name: str, seed: int) -> Case:
    """The case of this kind that the seed makes."""
    return {"name": name} | KINDS[name](np.random.default_rng(seed))


def cases() -> list[Case]:
    """Two of each kind."""
    return [case_of(name, seed) for name in KINDS for seed in range(2)]
