"""Ratios, weights and rejection in plain NumPy on padded arrays, row by row; nothing of asyncrl is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Inputs = dict[str, Any]


def padded_inputs(seed: int, shape: tuple[int, int]) -> Inputs:
    """Logprobs of three policies and advantages, [N, L], with garbage under a mask that has holes; each row has a loss token."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) > 0.3
    mask[:, 0] |= ~mask.any(axis=1)
    behave = -rng.exponential(1.0, shape)
    values = {"behave_logp": behave, "prox_logp": behave + rng.normal(0, 0.8, shape), "cur_logp": behave + rng.normal(0, 0.8, shape),
              "adv": rng.normal(0, 1, shape)}
    garbage = rng.choice([7.0, 1e6, -1e6, np.nan, np.inf], shape)
    return {"mask": mask.astype(int).tolist()} | {name: np.where(mask, row, garbage).round(6).tolist() for name, row in values.items()}


def case_of(name: str, seed: int) -> dict[str, Any]:
    """A case of this kind, its shape and numbers drawn from the seed."""
    rng = np.random.default_rng([seed, len(name)])
    inputs = padded_inputs(seed, (int(rng.integers(1, 6)), int(rng.integers(1, 9)))) | SETTINGS[name]
    mask = np.array(inputs["mask"]) > 0
    if name == "turn_level_weights":
        inputs["turn_id"] = rng.integers(0, 3, mask.shape).tolist()
    if name == "veto_catastrophic_token":
        inputs["log_ratio"] = np.where(mask, rng.normal(0, 5, mask.shape), np.nan).round(6).tolist()
    return {"name": name, "inputs": inputs, "expected": KINDS[name](inputs)}


def _rows(inputs: Inputs, name: str) -> list[Array]:
    """The loss tokens of each sequence."""
    return [np.array(row)[np.array(seen) > 0] for row, seen in zip(inputs[name], inputs["mask"], strict=True)]


def _log_ratios(inputs: Inputs) -> list[Array]:
    return [p - b for p, b in zip(_rows(inputs, "prox_logp"), _rows(inputs, "behave_logp"), strict=True)]


def _padded(rows: list[Array], inputs: Inputs) -> list[list[float]]:
    """Back to [N, L], 0 where masked."""
    out = np.zeros(np.array(inputs["mask"]).shape)
    for n, row in enumerate(rows):
        out[n][np.array(inputs["mask"][n]) > 0] = row
    return out.tolist()


def _kept(rows: list[Array], inputs: Inputs) -> list[list[bool]]:
    return (np.array(_padded(rows, inputs)) > 0).tolist()


def _self_normalise(inputs: Inputs) -> dict[str, Any]:
    raw = [np.exp(row) for row in _log_ratios(inputs)]
    weights = [np.minimum(row, inputs["cap"]) for row in raw]
    mean = np.concatenate(weights).mean()
    return {"raw_ratio": _padded(raw, inputs), "weight": _padded(weights, inputs), "mean_weight": mean,
            "weight_normalised": _padded([row / mean for row in weights], inputs), "normalised_mean": 1.0}


def _sequence_weights(inputs: Inputs) -> dict[str, Any]:
    rows, cap = _log_ratios(inputs), inputs["cap"]
    sums, means = (np.array([fold(row) for row in rows]) for fold in (np.sum, np.mean))
    product = np.minimum(np.exp(sums), cap)
    return {"seq_sum_log_ratio": sums, "seq_mean_log_ratio": means, "product_ratio": np.exp(sums), "geometric_ratio": np.exp(means),
            "product_weight": product, "geometric_weight": np.minimum(np.exp(means), cap),
            "product_weight_seq_normalised": product / product.mean(),
            "product_weight_tokens": _padded([np.full(len(row), weight) for row, weight in zip(rows, product, strict=True)], inputs)}


def _k(rows: list[Array]) -> dict[str, list[Array]]:
    return {"k1": [-x for x in rows], "k2": [x**2 / 2 for x in rows], "k3": [np.exp(x) - 1 - x for x in rows],
            "areal_k3": [np.exp(-x) - 1 + x for x in rows]}


def _estimators(inputs: Inputs) -> dict[str, Any]:
    tokens = _k(_log_ratios(inputs))
    folded = {name: {fold: [getattr(np, fold)(row) for row in rows] for fold in ("sum", "mean", "max")} for name, rows in tokens.items()}
    return folded | {f"token_{name}": _padded(rows, inputs) for name, rows in tokens.items()}


def _decisions(inputs: Inputs) -> dict[str, Any]:
    rows = _log_ratios(inputs)
    k = _k(rows)
    sums, geo = np.array([row.sum() for row in rows]), np.exp([row.mean() for row in rows])
    low, high = inputs["prod_lower"], inputs["prod_upper"]
    inside = [(np.exp(x) >= inputs["token_ratio_lower"]) & (np.exp(x) <= inputs["token_ratio_upper"]) for x in rows]
    return {"keep_seq_geo": (geo >= inputs["geo_lower"]) & (geo <= inputs["geo_upper"]),
            "keep_seq_prod_documented": (np.exp(sums) >= low) & (np.exp(sums) <= high),
            "verl_actual_seq_sum_k1": (-sums >= np.log(low)) & (-sums <= np.log(high)),
            "keep_seq_mean_k3": [row.mean() <= inputs["seq_mean_k3_upper"] for row in k["k3"]],
            "keep_seq_max_k2": [row.max() <= inputs["seq_max_k2_upper"] for row in k["k2"]],
            "keep_token_k3": _kept([row <= inputs["token_k3_upper"] for row in k["k3"]], inputs), "keep_token_ratio": _kept(inside, inputs)}


def _veto(inputs: Inputs) -> dict[str, Any]:
    rows = [np.exp(row) for row in _rows(inputs, "log_ratio")]
    return {"keep_seq": [bool(row.min() >= inputs["low"] and row.max() <= inputs["high"]) for row in rows]}


def _kpop(inputs: Inputs) -> dict[str, Any]:
    p, q = ([np.clip(np.exp(row), 1e-8, 1 - 1e-8) for row in _rows(inputs, name)] for name in ("prox_logp", "behave_logp"))

    def kl(a: Array, b: Array) -> Array:
        return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))

    one, other = ([kl(*pair) for pair in zip(*rows, strict=True)] for rows in ((p, q), (q, p)))
    larger = [np.maximum(*pair) for pair in zip(one, other, strict=True)]
    return {"kl_prox_behave": _padded(one, inputs), "kl_behave_prox": _padded(other, inputs), "statistic": _padded(larger, inputs),
            "keep": _kept([row <= inputs["upper"] for row in larger], inputs)}


def _vaco(inputs: Inputs) -> dict[str, Any]:
    rows, advantages = _log_ratios(inputs), _rows(inputs, "adv")
    gaps = [np.abs(np.exp(row) - 1).mean() for row in rows]
    keep = [(gap <= inputs["upper"]) | ~(np.sign(row) * adv > 0) for row, adv, gap in zip(rows, advantages, gaps, strict=True)]
    return {"mean_abs_ratio_minus_1": gaps, "keep": _kept(keep, inputs)}


def _seq_mask_tis(inputs: Inputs) -> dict[str, Any]:
    rows = _log_ratios(inputs)
    keep = [bool(inputs["lower"] <= np.exp(row.mean()) <= inputs["upper"]) for row in rows]
    return {"keep_seq": keep, "weight": _padded([np.exp(row) * kept for row, kept in zip(rows, keep, strict=True)], inputs)}


def _turns(inputs: Inputs) -> dict[str, Any]:
    product, geometric = [], []
    for row, turn in zip(_log_ratios(inputs), _rows(inputs, "turn_id"), strict=True):
        mates = [row[turn == t] for t in turn]
        product.append(np.exp([x.sum() for x in mates]))
        geometric.append(np.exp([x.mean() for x in mates]))
    inside = [(row >= inputs["lower"]) & (row <= inputs["upper"]) for row in geometric]
    return {"turn_product": _padded(product, inputs), "turn_geometric": _padded(geometric, inputs),
            "truncated_product": _padded([np.minimum(row, inputs["cap"]) for row in product], inputs),
            "keep_geometric": _kept(inside, inputs)}


KINDS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "tis_token_truncate_and_self_normalise": _self_normalise, "tis_sequence_product_and_geometric": _sequence_weights,
    "rs_estimators_token_and_sequence": _estimators, "rs_decisions": _decisions, "kpop_binary_kl": _kpop, "vaco_tv_filter": _vaco,
    "seq_mask_tis": _seq_mask_tis, "turn_level_weights": _turns, "veto_catastrophic_token": _veto}
SETTINGS: dict[str, Inputs] = {
    "tis_token_truncate_and_self_normalise": {"cap": 1.4}, "tis_sequence_product_and_geometric": {"cap": 1.7},
    "rs_estimators_token_and_sequence": {}, "kpop_binary_kl": {"upper": 0.04}, "vaco_tv_filter": {"upper": 0.45},
    "rs_decisions": {"geo_lower": 0.6, "geo_upper": 1.6, "prod_lower": 0.3, "prod_upper": 2.0, "seq_mean_k3_upper": 0.25,
                     "seq_max_k2_upper": 0.8, "token_k3_upper": 0.2, "token_ratio_lower": 0.6, "token_ratio_upper": 1.6},
    "seq_mask_tis": {"lower": 0.6, "upper": 1.6}, "turn_level_weights": {"cap": 1.5, "lower": 0.6, "upper": 1.6},
    "veto_catastrophic_token": {"low": 1e-3, "high": 50.0}}
