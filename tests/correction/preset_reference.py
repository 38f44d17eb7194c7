"""What the projects compute for the settings that presets name: NumPy, padded [N, L], one function a project, written from its source.

Each takes ℓ [N, L], the mask, p and q (probabilities under trainer and engine) and advantages in a `Case`, and gives weights [N, L],
0 where dropped, and the mask that the denominator counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    log_ratio: Array
    mask: Array
    p: Array
    q: Array
    advantages: Array

    def sums(self, values: Array) -> Array:
        return (values * self.mask).sum(1, keepdims=True)

    def means(self, values: Array) -> Array:
        return self.sums(values) / np.maximum(self.mask.sum(1, keepdims=True), 1)


Result = tuple[Array, Array]


def verl(case: Case, *, level: str | None = None, threshold: float | tuple[float, float] = 2.0, rejection: str | None = None,
         bounds: tuple[float, float] | float = 0.0, bypass: bool = False) -> Result:
    weights = np.ones_like(case.mask)
    if level is not None:
        weights = np.exp(np.clip(case.log_ratio if level == "token" else case.sums(case.log_ratio) * weights, -20, 20))
        if isinstance(threshold, tuple):
            weights = np.where((weights >= threshold[0]) & (weights <= threshold[1]), weights, 0.0)
        else:
            weights = np.minimum(weights, threshold)
    kept = case.mask
    if rejection is not None:
        tokens = -case.log_ratio if rejection.endswith("k1") else np.exp(case.log_ratio) - 1 - case.log_ratio
        statistic = case.sums(tokens) if "sum" in rejection else case.means(tokens)
        low, high = (np.log(bounds[0]), np.log(bounds[1])) if isinstance(bounds, tuple) else (-np.inf, bounds)
        kept = kept * ((statistic >= low) & (statistic <= high))
    return weights * kept, case.mask if bypass else kept


def areal(case: Case, *, level: str = "token", action: str = "mask", metric: str = "ratio", upper: float = 5.0) -> Result:
    token = np.exp(case.log_ratio)
    weights = token if level == "token" else np.exp(case.means(case.log_ratio)) * np.ones_like(token)
    if action == "clamp":
        return np.minimum(weights, upper) * case.mask, case.mask
    p, q = np.clip(case.p, 1e-8, 1 - 1e-8), np.clip(case.q, 1e-8, 1 - 1e-8)
    one, other = (a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p)))
    return weights * case.mask * ((weights if metric == "ratio" else np.maximum(one, other)) <= upper), case.mask


def areal_m2po(case: Case, *, limit: float = 0.04) -> Result:
    squares = np.sort((case.log_ratio**2)[case.mask > 0])[::-1]
    while len(squares) > 1 and squares.mean() >= limit:
        squares = squares[1:]
    kept = case.mask * (case.log_ratio**2 <= squares[0] if len(squares) else 1.0)
    return kept, kept


def plain(case: Case) -> Result:
    return case.mask, case.mask


def slime(case: Case, *, level: str = "token", mode: str = "truncate", low: float = 0.0, high: float = 2.0,
          veto: float | None = None) -> Result:
    reduced = {"token": case.log_ratio, "sequence": case.sums(case.log_ratio), "geometric": case.means(case.log_ratio)}[level]
    weights = np.exp(np.clip(reduced, -20, 20)) * np.ones_like(case.mask)
    kept = case.mask
    if mode == "mask":
        kept = kept * ((weights >= low) & (weights <= high))
    weights = np.clip(weights, low if mode == "clip" else 0.0, np.inf if mode == "mask" else high)
    if veto is not None:
        kept = kept * ~((case.log_ratio < np.log(veto)) & (case.mask > 0)).any(1, keepdims=True)
    return weights * kept, case.mask


def slime_opsm(case: Case, *, delta: float = 1e-4) -> Result:
    return case.mask * ~((case.advantages < 0) & (case.means(-case.log_ratio) > delta)), case.mask


def trl(case: Case, *, mode: str, high: float = 3.0) -> Result:
    weights = np.exp(case.sums(case.log_ratio) if "sequence" in mode else case.log_ratio) * np.ones_like(case.mask)
    weights = np.minimum(weights, high) if mode.endswith("truncate") else np.where(weights > high, 0.0, weights)
    return weights * case.mask, case.mask


def skyrl(case: Case, *, ratio: str | None = None, high: float = 2.0, metric: str | None = None,
          bounds: tuple[float, float] = (0.0, np.inf), outlier: tuple[float, float] | None = None) -> Result:
    kept, weights = case.mask, np.ones_like(case.mask)
    if outlier is not None:
        token = np.exp(np.clip(case.log_ratio, -20, 20))
        kept = kept * (((token >= outlier[0]) & (token <= outlier[1])) | (case.mask == 0)).all(1, keepdims=True)
    if ratio is not None:
        weights = np.minimum(np.exp(np.clip(case.log_ratio if ratio == "token" else case.sums(case.log_ratio), -20, 20)), high) * weights
    if metric is not None:
        value = np.exp(case.means(case.log_ratio) if metric == "geometric" else case.sums(case.log_ratio))
        kept = kept * ((value >= bounds[0]) & (value <= bounds[1]))
    return weights * kept, case.mask


def gated(case: Case, *, level: str = "token", mode: str = "mask", low: float = 0.0, high: float) -> Result:
    """NeMo-RL's and OpenRLHF's: a token's weight, dropped or clamped by its own ratio or by the sequence's geometric mean."""
    token = np.exp(case.log_ratio)
    statistic = token if level == "token" else np.exp(case.means(case.log_ratio))
    weights = np.clip(token, low, high) if mode == "clip" else np.where((statistic >= low) & (statistic <= high), token, 0.0)
    return weights * case.mask, case.mask


GEO = {"rejection": "seq_mean_k1", "bounds": (0.999, 1.001)}
K3 = {"rejection": "seq_mean_k3", "bounds": 0.01}
ORIGINS: dict[str, Callable[[Case], Result]] = {
    "none": plain, "token_tis": partial(verl, level="token"), "icepop": partial(gated, low=0.5, high=5.0),
    "verl/decoupled_token_is": partial(verl, level="token"), "verl/decoupled_seq_is": partial(verl, level="sequence"),
    "verl/decoupled_token_icepop": partial(verl, level="token", threshold=(0.5, 5.0)),
    "verl/decoupled_seq_is_rs": partial(verl, level="sequence", rejection="seq_sum_k1", bounds=(0.5, 2.0)),
    "verl/decoupled_geo_rs": partial(verl, **GEO), "verl/bypass_ppo_clip": partial(verl, bypass=True),
    "verl/bypass_ppo_clip_geo_rs": partial(verl, **GEO, bypass=True), "verl/bypass_ppo_clip_k3_rs": partial(verl, **K3, bypass=True),
    "verl/bypass_pg_is": partial(verl, level="sequence", bypass=True),
    "verl/bypass_pg_token_icepop": partial(verl, level="token", threshold=(0.5, 5.0), bypass=True),
    "verl/bypass_pg_geo_rs": partial(verl, **GEO, bypass=True),
    "verl/decoupled_geo_rs_seq_tis": partial(verl, level="sequence", **GEO),
    "verl/decoupled_geo_rs_token_tis": partial(verl, level="token", **GEO),
    "verl/bypass_pg_geo_rs_seq_tis": partial(verl, level="sequence", **GEO, bypass=True),
    "verl/bypass_pg_geo_rs_token_tis": partial(verl, level="token", **GEO, bypass=True),
    "verl/decoupled_k3_rs": partial(verl, **K3), "verl/decoupled_k3_rs_seq_tis": partial(verl, level="sequence", **K3),
    "verl/decoupled_k3_rs_token_tis": partial(verl, level="token", **K3), "verl/disabled": verl,
    "areal/decoupled": areal, "areal/decoupled_unweighted": plain, "areal/token_truncate": partial(areal, action="clamp"),
    "areal/sequence_mask": partial(areal, level="sequence"), "areal/sequence_truncate": partial(areal, level="sequence", action="clamp"),
    "areal/kpop": partial(areal, metric="binary_kl", upper=2.0), "areal/m2po": areal_m2po, "areal/loglinear": plain,
    "slime/tis": slime, "slime/icepop": partial(slime, mode="mask"), "slime/mis_token_truncate": partial(slime, veto=1e-4),
    "slime/mis_token_mask": partial(slime, mode="mask", low=0.5, veto=1e-4),
    "slime/mis_token_clip": partial(slime, mode="clip", low=0.5, veto=1e-4),
    "slime/mis_sequence_truncate": partial(slime, level="sequence", veto=1e-4),
    "slime/mis_geometric_mask": partial(slime, level="geometric", mode="mask", low=0.5, veto=1e-4), "slime/opsm": slime_opsm,
    **{f"trl/{mode}": partial(trl, mode=mode) for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "prime_rl/dppo": plain, "prime_rl/ipo": plain,
    "skyrl/token_tis": partial(skyrl, ratio="token"), "skyrl/sequence_tis": partial(skyrl, ratio="sequence", high=5.0),
    "skyrl/geometric_mask": partial(skyrl, metric="geometric", bounds=(0.99, 1.01)),
    "skyrl/product_mask": partial(skyrl, metric="product", bounds=(0.5, 2.0)),
    "skyrl/outlier_mask": partial(skyrl, ratio="token", outlier=(1e-4, 100.0)),
    "nemo_rl/tis": partial(gated, mode="clip", high=5.0), "nemo_rl/icepop": partial(gated, low=0.5, high=5.0),
    "nemo_rl/seq_mask_tis": partial(gated, level="seq", low=0.999, high=1.002),
    "openrlhf/tis": partial(gated, mode="clip", low=0.5, high=5.0), "openrlhf/icepop": partial(gated, low=0.5, high=5.0),
    "openrlhf/seq_mask_tis": partial(gated, level="seq", low=0.5, high=5.0),
}
