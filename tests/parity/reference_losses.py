"""Policy losses, reference KL and log-linear logprobs in plain NumPy, row by row and token by token; nothing of asyncrl is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.parity.reference_weights import padded_inputs

Array = np.ndarray
Inputs = dict[str, Any]
Row = dict[str, Array]


def case_of(name: str, seed: int) -> dict[str, Any]:
    """A case of this kind, its shape, numbers and settings drawn from the seed."""
    rng = np.random.default_rng([seed, len(name)])
    inputs = MAKERS.get(name, _padded)(rng, seed) | {setting: rng.choice(values).item() for setting, values in SETTINGS[name].items()}
    return {"name": name, "inputs": inputs, "expected": KINDS[name](inputs)}


def _padded(rng: np.random.Generator, seed: int) -> Inputs:
    """Advantages are one number in a row, at times 0; a row may have no loss token, but not all of them."""
    inputs = padded_inputs(seed, (int(rng.integers(1, 6)), int(rng.integers(1, 9))))
    rows = len(inputs["mask"])
    if rows > 1 and rng.random() < 0.3:
        inputs["mask"][-1] = [0] * len(inputs["mask"][-1])
    advantages = rng.choice([-1.3, -0.4, 0.0, 0.7, 2.0], (rows, 1))
    inputs["adv"] = np.where(np.array(inputs["mask"]) > 0, advantages, np.nan).tolist()
    return inputs


def _by_sequence(rng: np.random.Generator, seed: int) -> Inputs:
    inputs = _padded(rng, seed)
    del inputs["adv"]
    return inputs | {"adv_seq": rng.choice([-1.3, -0.4, 0.0, 0.7], len(inputs["mask"])).tolist()}


def _kernel(rng: np.random.Generator, seed: int) -> Inputs:
    inputs = _by_sequence(rng, seed)
    return {"mask": inputs["mask"], "num_logp": inputs["cur_logp"], "den_logp": inputs["prox_logp"], "adv_seq": inputs["adv_seq"]}


def _ratios(rng: np.random.Generator, seed: int) -> Inputs:
    tokens = int(rng.integers(1, 12))
    return {"ratio": np.exp(rng.normal(0, 1.0, tokens)).round(6).tolist(), "adv": rng.choice([-1.3, 0.0, 0.7], tokens).tolist()}


def _row(rng: np.random.Generator, seed: int) -> Inputs:
    tokens = int(rng.integers(1, 9))
    drawn = {name: (-rng.exponential(1.0, tokens)).round(6).tolist() for name in ("cur_logp", "ref_logp", "behave_logp")}
    return drawn | {"token_version": rng.integers(-1, 10, tokens).tolist()}


def _rows(inputs: Inputs, *names: str) -> list[Row]:
    """The loss tokens of each sequence, by name."""
    taken = []
    for n, seen in enumerate(inputs["mask"]):
        chosen = np.array(seen) > 0
        taken.append({name: np.array(inputs[name][n], float)[chosen] for name in names})
    return taken


def _spread(rows: list[Any], inputs: Inputs) -> list[list[Any]]:
    """Back to [N, L], 0 or False where masked."""
    out = np.zeros(np.array(inputs["mask"]).shape, np.result_type(*rows))
    for n, row in enumerate(rows):
        out[n][np.array(inputs["mask"][n]) > 0] = row
    return out.tolist()


def _tokens(inputs: Inputs) -> int:
    return int(np.sum(np.array(inputs["mask"]) > 0))


def _sequences(inputs: Inputs) -> int:
    return int(np.sum((np.array(inputs["mask"]) > 0).any(axis=1)))


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else 0.0


def _dual_clip(inputs: Inputs) -> dict[str, Any]:
    out = {"per_token_loss": [], "grad": [], "clipped": [], "dual_clipped": []}
    for r, a in zip(inputs["ratio"], inputs["adv"], strict=True):
        held = min(max(r, 1 - inputs["eps_low"]), 1 + inputs["eps_high"])
        loss, dual = max(-a * r, -a * held), a < 0 and max(-a * r, -a * held) > -a * inputs["c"]
        out["clipped"].append(loss > -a * r)
        out["dual_clipped"].append(dual)
        out["per_token_loss"].append(-a * inputs["c"] if dual else loss)
        out["grad"].append(0.0 if dual or loss > -a * r else -a * r)
    return out


def _gspo(inputs: Inputs) -> dict[str, Any]:
    ratios, losses, open_, grads = [], [], [], []
    for row in _rows(inputs, "cur_logp", "prox_logp", "adv"):
        n, a = len(row["adv"]), row["adv"][0] if len(row["adv"]) else 0.0
        s = math.exp(_mean(row["cur_logp"] - row["prox_logp"]))
        held = min(max(s, 1 - inputs["eps_low"]), 1 + inputs["eps_high"])
        ratios.append(s)
        losses.append(max(-a * s, -a * held))
        open_.append(-a * s >= -a * held)
        grads.append(np.full(n, -a * s / max(n, 1) / _sequences(inputs) * open_[-1]))
    return {"seq_ratio": ratios, "per_seq_loss": losses, "unclipped": open_, "loss": sum(losses) / _sequences(inputs),
            "grad_cur_logp": _spread(grads, inputs)}


def _cispo(inputs: Inputs) -> dict[str, Any]:
    rows = _rows(inputs, "cur_logp", "prox_logp", "adv")
    weights = [np.minimum(np.exp(row["cur_logp"] - row["prox_logp"]), 1 + inputs["eps_high_relative"]) for row in rows]
    losses = [-(w * row["adv"] * row["cur_logp"]).sum() for w, row in zip(weights, rows, strict=True)]
    return {"weight": _spread(weights, inputs), "loss": sum(losses) / _tokens(inputs),
            "grad_cur_logp": _spread([-w * row["adv"] / _tokens(inputs) for w, row in zip(weights, rows, strict=True)], inputs)}


def _sapo(inputs: Inputs) -> dict[str, Any]:
    gates, grads, loss = [], [], 0.0
    for row in _rows(inputs, "cur_logp", "prox_logp", "adv"):
        r = np.exp(row["cur_logp"] - row["prox_logp"])
        tau = np.where(row["adv"] > 0, inputs["tau_pos"], inputs["tau_neg"])
        share = 1 / (1 + np.exp(-tau * (r - 1)))
        gates.append(4 / tau * share)
        grads.append(-row["adv"] * 4 * share * (1 - share) * r / _tokens(inputs))
        loss -= (gates[-1] * row["adv"]).sum() / _tokens(inputs)
    return {"gate": _spread(gates, inputs), "loss": loss, "grad_cur_logp": _spread(grads, inputs)}


def _binary_kl(q: Array, p: Array) -> Array:
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def _dppo(inputs: Inputs) -> dict[str, Any]:
    out: dict[str, Any] = {name: [] for name in ("prob_diff", "binary_kl_behave_cur", "keep_tv", "keep_kl", "grad_cur_logp_tv")}
    losses = {"tv": 0.0, "kl": 0.0}
    for row in _rows(inputs, "cur_logp", "behave_logp", "adv"):
        p, q, a = np.exp(row["cur_logp"]), np.clip(np.exp(row["behave_logp"]), 1e-8, 1 - 1e-8), row["adv"]
        weight = np.minimum(np.exp(row["cur_logp"] - row["behave_logp"]), inputs["c"])
        far = _binary_kl(q, np.clip(p, 1e-8, 1 - 1e-8))
        moved = p - np.exp(row["behave_logp"])
        keep_tv = np.where(a > 0, moved <= inputs["delta_tv"], moved >= -inputs["delta_tv"])
        keep_kl = (far <= inputs["delta_kl"]) | np.where(a > 0, moved <= 0, moved >= 0)
        for name, value in (("prob_diff", moved), ("binary_kl_behave_cur", far), ("keep_tv", keep_tv), ("keep_kl", keep_kl),
                            ("grad_cur_logp_tv", -a * weight * keep_tv / _tokens(inputs))):
            out[name].append(value)
        for name, keep in (("tv", keep_tv), ("kl", keep_kl)):
            losses[name] -= (a * weight * row["cur_logp"] * keep).sum() / _tokens(inputs)
    return {name: _spread(rows, inputs) for name, rows in out.items()} | {"loss_tv": losses["tv"], "loss_kl": losses["kl"]}


def _prime_rl(inputs: Inputs) -> dict[str, Any]:
    keeps, kept_ipo, grads, default, ipo = [], [], [], 0.0, 0.0
    for row in _rows(inputs, "cur_logp", "behave_logp", "adv"):
        log_ratio, a = row["cur_logp"] - row["behave_logp"], row["adv"]
        moved = np.exp(row["cur_logp"]) - np.exp(row["behave_logp"])
        keep = np.where(a > 0, moved <= inputs["mask_high"], moved >= -inputs["mask_low"])
        keep_ipo = np.abs(moved) <= inputs["ipo_threshold"]
        back = inputs["kl_tau"] * log_ratio**2
        default += (-a * np.exp(log_ratio) * keep + back).sum()
        ipo += (-a * np.exp(log_ratio) * keep_ipo + back).sum()
        keeps.append(keep)
        kept_ipo.append(keep_ipo)
        grads.append((-a * np.exp(log_ratio) * keep + 2 * inputs["kl_tau"] * log_ratio) / _tokens(inputs))
    return {"keep_default": _spread(keeps, inputs), "loss_default": default / _tokens(inputs), "loss_default_sum": default,
            "grad_cur_logp": _spread(grads, inputs), "keep_ipo": _spread(kept_ipo, inputs), "loss_ipo": ipo / _tokens(inputs)}


def _vespo(inputs: Inputs) -> dict[str, Any]:
    whole = [(row["num_logp"] - row["den_logp"]).sum() for row in _rows(inputs, "num_logp", "den_logp")]
    shape = [(2.0, 3.0) if a >= 0 else (3.0, 2.0) for a in inputs["adv_seq"]]
    return {"seq_log_ratio": whole, "phi": [math.exp(lam) * math.exp(log) ** k * math.exp(-lam * math.exp(log))
                                            for log, (k, lam) in zip(whole, shape, strict=True)]}


def _opsm(inputs: Inputs) -> dict[str, Any]:
    means = [_mean(row["behave_logp"] - row["cur_logp"]) for row in _rows(inputs, "behave_logp", "cur_logp")]
    empty = [not any(seen) for seen in inputs["mask"]]
    return {"mean_kl": means, "keep_seq": [none or not (a < 0 and mean > inputs["delta"])
                                           for none, a, mean in zip(empty, inputs["adv_seq"], means, strict=True)]}


def _gepo(inputs: Inputs) -> dict[str, Any]:
    rows = _rows(inputs, "cur_logp", "behave_logp")
    p, q = ([math.exp(_mean(row[name])) for row in rows] for name in ("cur_logp", "behave_logp"))
    members = [value for value, row in zip(q, rows, strict=True) if len(row["cur_logp"])]
    expectation = sum(value**2 for value in members) / sum(members)
    return {"p": p, "q": q, "group_expectation": expectation, "plain_ratio": [a / b for a, b in zip(p, q, strict=True)],
            "weight": [value / expectation if len(row["cur_logp"]) else 0.0 for value, row in zip(p, rows, strict=True)]}


def _aspo(inputs: Inputs) -> dict[str, Any]:
    def slope(r: float, a: float) -> float:
        if a > 0:
            return 0.0 if r > 1 + inputs["eps_high"] else -a * min(1 / r, inputs["c_pos"])
        return 0.0 if r < 1 - inputs["eps_low"] else -a * min(r, inputs["c_neg"])

    return {"grad": [slope(r, a) for r, a in zip(inputs["ratio"], inputs["adv"], strict=True)]}


def _reference_kl(inputs: Inputs) -> dict[str, Any]:
    cur, ref, behave = (np.array(inputs[name]) for name in ("cur_logp", "ref_logp", "behave_logp"))
    d, weight = cur - ref, np.exp(cur - behave)
    k3 = np.exp(-d) - 1 + d
    return {"k1": d, "k2": d**2 / 2, "k3": k3, "grad_k2": d, "grad_k3": 1 - np.exp(-d), "unbiased_loss": weight * k3,
            "unbiased_grad": weight * k3 + weight * (1 - np.exp(-d))}


def _gmpo(inputs: Inputs) -> dict[str, Any]:
    ratios, losses = [], []
    for row in _rows(inputs, "cur_logp", "prox_logp", "adv"):
        log_ratio, a = row["cur_logp"] - row["prox_logp"], row["adv"][0] if len(row["adv"]) else 0.0
        held = np.clip(log_ratio, -inputs["eps"], inputs["eps"])
        ratios.append(math.exp(_mean(np.minimum(log_ratio, held) if a > 0 else np.maximum(log_ratio, held))))
        losses.append(-a * ratios[-1])
    return {"seq_ratio": ratios, "loss": sum(losses) / _sequences(inputs)}


def _tinker(inputs: Inputs) -> dict[str, Any]:
    gain, dro, grads = 0.0, 0.0, []
    for row in _rows(inputs, "cur_logp", "behave_logp", "adv"):
        moved, a = row["cur_logp"] - row["behave_logp"], row["adv"]
        gain -= (np.exp(moved) * a).sum()
        dro -= (row["cur_logp"] * a - 0.5 * inputs["beta"] * moved**2).sum()
        grads.append(-a + inputs["beta"] * moved)
    return {"importance_sampling": gain, "dro": dro, "dro_grad": _spread(grads, inputs)}


def _m2po(inputs: Inputs) -> dict[str, Any]:
    """The mask drops the largest squares one by one; τ is found by bisection."""
    rows = _rows(inputs, "cur_logp", "prox_logp", "behave_logp", "adv")
    before = [(row["prox_logp"] - row["behave_logp"]) ** 2 for row in rows]
    kept = np.sort(np.concatenate(before))
    while len(kept) > 1 and kept.mean() >= inputs["threshold"]:
        kept = kept[:-1]
    away = [(row["cur_logp"] - row["behave_logp"]) * row["adv"] > 0 for row in rows]
    squares = np.concatenate([(row["cur_logp"] - row["behave_logp"])[pushed] ** 2 for row, pushed in zip(rows, away, strict=True)])
    budget = inputs["threshold"] * len(squares)
    if squares.sum() <= budget:
        exact = authors = math.inf
    else:
        low, high = 0.0, float(np.sqrt(squares.max()))
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(squares, middle**2).sum() < budget else (low, middle)
        exact = low
        authors = math.sqrt(max([one for one in squares if np.minimum(squares, one).sum() < budget], default=0.0))
    return {"second_moment_all": np.concatenate(before).mean(), "keep_mask_form": _spread([row <= kept[-1] for row in before], inputs),
            "kept_second_moment": kept.mean(), "harmful": _spread(away, inputs),
            "harmful_mean_d2": squares.mean() if len(squares) else math.nan, "tau_exact": exact, "clip_low_exact": math.exp(-exact),
            "clip_high_exact": math.exp(exact), "tau_reference_code": authors,
            "clip_reference_after_miniclip": [min(0.7, math.exp(-authors)), max(1.5, math.exp(authors))]}


def _log_linear(inputs: Inputs) -> dict[str, Any]:
    cur, behave = np.array(inputs["cur_logp"]), np.array(inputs["behave_logp"])
    theta, prox = inputs["version_theta"], inputs["version_theta"] - inputs["behind"]
    inputs["version_prox"] = prox
    alpha = np.array([0.0 if v < 0 or v >= theta else min(max((prox - v) / (theta - v), 0.0), 1.0) for v in inputs["token_version"]])
    guess = behave + alpha * (cur - behave)
    return {"alpha": alpha, "prox_loglinear": guess, "prox_linear_prob": np.log((1 - alpha) * np.exp(behave) + alpha * np.exp(cur)),
            "behave_weight_loglinear": np.exp(guess - behave), "trust_ratio_loglinear": np.exp(cur - guess),
            "grad_cur_unclipped_adv1": -np.exp(cur - behave)}


KINDS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "dual_clip_and_clip_higher": _dual_clip, "gspo_value_and_grad": _gspo, "cispo_value_and_grad": _cispo, "sapo_soft_gate": _sapo,
    "dppo_binary_tv_and_kl": _dppo, "prime_rl_default_and_ipo": _prime_rl, "vespo_gamma_weight": _vespo, "opsm_sequence_mask": _opsm,
    "gepo_group_expectation_ratio": _gepo, "aspo_flipped_ratio_gradient": _aspo, "kl_to_reference_estimators": _reference_kl,
    "gmpo_geometric_mean": _gmpo, "tinker_importance_sampling_dro": _tinker, "m2po_second_moment": _m2po,
    "prox_loglinear_by_version": _log_linear}
MAKERS: dict[str, Callable[[np.random.Generator, int], Inputs]] = {
    "dual_clip_and_clip_higher": _ratios, "aspo_flipped_ratio_gradient": _ratios, "vespo_gamma_weight": _kernel,
    "opsm_sequence_mask": _by_sequence, "kl_to_reference_estimators": _row, "prox_loglinear_by_version": _row}
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "dual_clip_and_clip_higher": {"eps_low": [0.1, 0.2], "eps_high": [0.2, 0.28], "c": [1.5, 3.0]},
    "gspo_value_and_grad": {"eps_low": [3e-4, 0.02, 0.2], "eps_high": [4e-4, 0.02, 0.3]},
    "cispo_value_and_grad": {"eps_high_relative": [0.0, 0.28, 4.0]}, "sapo_soft_gate": {"tau_pos": [0.5, 1.0], "tau_neg": [1.05, 2.0]},
    "dppo_binary_tv_and_kl": {"delta_tv": [0.0, 0.15, 0.3], "delta_kl": [0.01, 0.05], "c": [1.5, 20.0]},
    "prime_rl_default_and_ipo": {"mask_low": [0.1, 0.2], "mask_high": [0.15, 0.2], "kl_tau": [0.0, 1e-3, 0.1], "ipo_threshold": [0.1, 0.3]},
    "vespo_gamma_weight": {}, "opsm_sequence_mask": {"delta": [1e-4, 0.1]}, "gepo_group_expectation_ratio": {},
    "aspo_flipped_ratio_gradient": {"eps_low": [0.1, 0.2], "eps_high": [0.2, 0.28], "c_pos": [1.5, 3.0], "c_neg": [2.0, 3.0]},
    "kl_to_reference_estimators": {}, "gmpo_geometric_mean": {"eps": [0.1, 0.4]},
    "tinker_importance_sampling_dro": {"beta": [0.0, 0.05, 1.0]},
    "m2po_second_moment": {"threshold": [0.04, 0.3]}, "prox_loglinear_by_version": {"version_theta": [8, 10], "behind": [1, 2]}}
