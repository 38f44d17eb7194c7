"""Cases with expected values computed in plain NumPy on padded arrays, from the formulas alone; nothing of asyncrl is used.

`python tests/parity/reference.py` writes data/correction.json again.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "correction.json"
Case = dict[str, Any]
Array = np.ndarray


def _beside(name: str) -> ModuleType:
    """A module of this folder, however this one was loaded."""
    spec = importlib.util.spec_from_file_location(f"parity_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases() -> list[Case]:
    """Every kind on several shapes, numbers rounded to what the file holds."""
    made = []
    for seed, shape in enumerate([(3, 4), (1, 1), (5, 9)]):
        inputs = _inputs(seed, shape)
        made += [_decoupled_tis(inputs), _decoupled_mask(inputs), _identity(inputs)]
        if shape != (1, 1):
            made.append(_metrics(inputs))
    made += _beside("reference_advantages").cases()
    made.append({"name": "numerics_overflow", "inputs": {"log_ratio": [1000.0, 88.8, -1000.0, 0.5], "cap": 3.0, "icepop": [0.25, 4.0]},
                 "expected": {"truncated": [3.0, 3.0, np.exp(-20.0), np.exp(0.5)], "truncated_if_unclamped": [3.0, 3.0, 0.0, np.exp(0.5)],
                              "icepop_weight": [0.0, 0.0, 0.0, np.exp(0.5)]}})
    return json.loads(json.dumps([{**case, "expected": _rounded(case["expected"])} for case in made]))


def _inputs(seed: int, shape: tuple[int, int]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.integers(1, shape[1] + 1, shape[0]), 1)
    mask = np.arange(shape[1]) < lengths[:, None]
    behave = -rng.exponential(1.0, shape)
    prox, cur = behave + rng.normal(0, 0.8, shape), behave + rng.normal(0, 0.8, shape)
    garbage = rng.choice([7.0, 1e6, -1e6], shape)
    values = {"behave_logp": behave, "prox_logp": prox, "cur_logp": cur, "adv": rng.normal(0, 1, shape)}
    return {"mask": mask.astype(int).tolist()} | {k: np.where(mask, v, garbage).round(6).tolist() for k, v in values.items()}


def _arrays(inputs: dict[str, Any]) -> tuple[Array, ...]:
    mask = np.array(inputs["mask"]) > 0
    return mask, *(np.where(mask, np.array(inputs[name]), 0.0) for name in ("behave_logp", "prox_logp", "cur_logp", "adv"))


def _clipped_loss(log_ratio: Array, adv: Array, *, weight: Array, low: float, high: float) -> tuple[Array, Array, Array]:
    """Token losses, their gradients and which tokens are clipped."""
    ratio = np.exp(log_ratio)
    surrogate, limited = ratio * adv, np.clip(ratio, 1 - low, 1 + high) * adv
    clipped = limited < surrogate
    return -weight * np.minimum(surrogate, limited), np.where(clipped, 0.0, -weight * adv * ratio), clipped


def _decoupled_tis(inputs: dict[str, Any]) -> Case:
    mask, behave, prox, cur, adv = _arrays(inputs)
    cap, low, high = 1.5, 0.2, 0.28
    raw, n = np.exp(prox - behave), mask.sum()
    weight = np.where(mask, np.minimum(raw, cap), 0.0)
    losses, grad, clipped = _clipped_loss(cur - prox, adv, weight=weight, low=low, high=high)
    plain, _, _ = _clipped_loss(cur - prox, adv, weight=mask.astype(float), low=low, high=high)
    return {"name": "decoupled_ppo_token_tis",
            "inputs": inputs | {"eps_low": low, "eps_high": high, "cap": cap, "aggregation": "token-mean"},
            "expected": {"ratio": np.where(mask, np.exp(cur - prox), 0.0), "weight": weight, "clipped": clipped & mask,
                         "per_token_loss": losses, "loss": losses.sum() / n, "grad_cur_logp": grad / n,
                         "loss_without_weight": plain.sum() / n,
                         "clip_fraction": (clipped & mask).sum() / n, "truncated_fraction": ((raw > cap) & mask).sum() / n}}


def _decoupled_mask(inputs: dict[str, Any]) -> Case:
    mask, behave, prox, cur, adv = _arrays(inputs)
    lower, upper = 0.4, 1.7
    raw, n = np.exp(prox - behave), mask.sum()
    keep = mask & (raw >= lower) & (raw <= upper)
    weight = np.where(keep, raw, 0.0)
    losses, grad, _ = _clipped_loss(cur - prox, adv, weight=weight, low=0.1, high=0.3)
    return {"name": "decoupled_ppo_token_mask_denominators",
            "inputs": inputs | {"eps_low": 0.1, "eps_high": 0.3, "lower": lower, "upper": upper},
            "expected": {"keep": keep, "weight": weight, "n_original": n, "n_kept": keep.sum(), "loss_orig_denominator": losses.sum() / n,
                         "loss_kept_denominator": losses.sum() / max(keep.sum(), 1), "rejected_fraction": 1 - keep.sum() / n,
                         "grad_cur_logp_orig": grad / n}}


def _identity(inputs: dict[str, Any]) -> Case:
    mask, behave, prox, cur, adv = _arrays(inputs)
    losses, _, _ = _clipped_loss(cur - behave, adv, weight=mask.astype(float), low=0.2, high=0.2)
    weight = np.where(mask, np.minimum(np.exp(prox - behave), 2.0), 0.0)
    return {"name": "identity_prox_equals_behave", "inputs": inputs | {"eps_low": 0.2, "eps_high": 0.2, "cap": 2.0},
            "expected": {"ppo_vs_behave_loss": losses.sum() / mask.sum(), "first_minibatch_grad": -weight * adv / mask.sum()}}


def _metrics(inputs: dict[str, Any]) -> Case:
    mask, behave, prox, _, _ = _arrays(inputs)
    log_ratio = (prox - behave)[mask]
    ratio, p, q = np.exp(log_ratio), np.exp(prox[mask]), np.exp(behave[mask])
    capped, lengths = np.minimum(ratio, 2.0), mask.sum(1)

    def ess(w: Array) -> float:
        return w.sum() ** 2 / (len(w) * (w**2).sum())

    rollout, training = -behave.sum(1) / lengths, -prox.sum(1) / lengths
    used = {name: inputs[name] for name in ("mask", "behave_logp", "prox_logp")}
    return {"name": "metrics_offpolicy", "inputs": used | {"cap": 2.0}, "expected": {
        "kl": -log_ratio.mean(), "k3_kl": (ratio - 1 - log_ratio).mean(), "chi2_token": (ratio**2).mean() - 1,
        "chi2_seq": np.exp(2 * (prox - behave).sum(1)).mean() - 1, "ess_fraction_raw": ess(ratio), "ess_fraction_capped": ess(capped),
        "logp_abs_diff_mean": np.abs(log_ratio).mean(), "logp_abs_diff_max": np.abs(log_ratio).max(),
        "prob_abs_diff_mean": np.abs(p - q).mean(), "prob_abs_diff_max": np.abs(p - q).max(),
        "prob_abs_diff_std": np.abs(p - q).std(ddof=1), "pearson_prob": np.corrcoef(p, q)[0, 1],
        "rollout_log_ppl": rollout, "training_log_ppl": training, "log_ppl_diff_mean": (training - rollout).mean(),
        "token_mult_prob_error": np.exp(np.abs(log_ratio)).mean(),
        "ratio_quantiles": {str(level): np.quantile(ratio, level) for level in (0.05, 0.5, 0.95)}}}


def _rounded(value: Any) -> Any:
    """Plain lists and numbers; floats to 12 significant digits, so that every machine writes the same file."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [_rounded(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return int(value) if isinstance(value, (int, np.integer)) else float(f"{value:.12g}")


if __name__ == "__main__":
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases()) + "\n]\n")
