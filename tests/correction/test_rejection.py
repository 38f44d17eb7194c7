import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction import Bounds, Correction, CorrectionBatch, SecondMoment, correct, weigh
from asyncrl.correction.rules import Rule, dppo_kl, dppo_tv, geometric, kpop, opsm, outlier, vaco, veto

NAN = math.nan


def batch_of(log_ratios: list[list[float]], *, advantages: list[float] | None = None, rollout: float = -1.0,
             versions: list[list[int]] | None = None, turns: list[list[int]] | None = None) -> CorrectionBatch:
    """Sequences with these log-ratios; NaN stands for a token that is no loss token."""
    flat = torch.tensor([x for row in log_ratios for x in row], dtype=torch.float64)
    lengths = torch.tensor([0, *(len(row) for row in log_ratios)])
    per_sequence = torch.tensor(advantages or [1.0] * len(log_ratios), dtype=torch.float64)

    def integers(rows: list[list[int]] | None) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row]) if rows else torch.zeros(len(flat), dtype=torch.int64)

    return CorrectionBatch(rollout_logprobs=torch.full_like(flat, rollout), proximal_logprobs=rollout + flat,
                           advantages=per_sequence.repeat_interleave(lengths[1:]), loss_mask=~flat.isnan(), turn_ids=integers(turns),
                           policy_versions=integers(versions), cu_seqlens=lengths.cumsum(0),
                           group_ids=torch.arange(len(log_ratios)), version=3)


def kept(rule: Rule, batch: CorrectionBatch) -> list[bool]:
    return weigh(batch, Correction(level="none", reject=(rule,))).keep_mask.tolist()


def test_a_veto_drops_the_whole_sequence_of_one_catastrophic_token() -> None:
    batch = batch_of([[-0.1, -9.5, NAN], [0.3, -9.0, -20.0], [0.0, -9.2]])
    assert kept(veto(), batch) == [False, False, False, False, False, False, True, True]
    assert kept(outlier(), batch_of([[4.7, 0.0], [4.6, 0.0]])) == [False, False, True, True]


def test_a_geometric_bound_looks_at_the_mean_and_a_product_at_the_sum() -> None:
    batch = batch_of([[0.2, 0.2, 0.2, 0.2], [0.5, NAN, -0.5]])
    assert kept(geometric(low=0.8, high=1.25), batch) == [True, True, True, True, True, False, True]
    product = Bounds(statistic="ratio", level="sequence", reduce="sum", low=0.5, high=2.0)
    assert kept(product, batch) == [False, False, False, False, True, False, True]


def test_a_product_far_out_of_range_is_still_compared() -> None:
    batch = batch_of([[-30.0] * 50, [30.0] * 50])
    rule = Bounds(statistic="ratio", level="sequence", reduce="sum", low=1e-4, high=1e4)
    assert not any(kept(rule, batch))


def test_turns_are_judged_one_by_one() -> None:
    batch = batch_of([[0.1, 0.1, 2.0, 0.1]], turns=[[0, 0, 1, 2]])
    assert kept(Bounds(statistic="k2", level="turn", reduce="max", high=0.5), batch) == [True, True, False, True]


@pytest.mark.parametrize(("statistic", "value"), [
    ("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5), ("k3_reverse", math.exp(-0.5) - 0.5), ("ratio_gap", math.exp(0.5) - 1),
    ("ratio", math.exp(0.5)), ("prob_difference", math.exp(-0.5) - math.exp(-1.0))])
def test_each_statistic_is_its_formula(statistic: str, value: float) -> None:
    batch = batch_of([[0.5]])
    below, above = sorted((value * 0.999, value * 1.001))
    assert kept(Bounds(statistic=statistic, high=above), batch) == [True]
    assert kept(Bounds(statistic=statistic, high=below), batch) == [False]
    assert kept(Bounds(statistic=statistic, low=below), batch) == [True]
    assert kept(Bounds(statistic=statistic, low=above), batch) == [False]


def test_kpop_takes_the_larger_direction_and_dppo_one() -> None:
    batch = batch_of([[0.5]], rollout=-2.0)  # p = e^-1.5, q = e^-2
    p, q = math.exp(-1.5), math.exp(-2.0)

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    assert kl(p, q) > kl(q, p)
    assert kept(kpop(kl(p, q) * 1.001), batch) == [True]
    assert kept(kpop(kl(p, q) * 0.999), batch) == [False]
    assert kept(dppo_kl(kl(q, p) * 1.001), batch) == [True]
    assert kept(dppo_kl(kl(q, p) * 0.999), batch) == [False]


def test_certain_tokens_have_a_finite_binary_kl() -> None:
    assert kept(kpop(1.0), batch_of([[0.0, -0.5]], rollout=0.0)) == [True, False]


def test_what_pushes_back_is_kept() -> None:
    up, down = [[1.0, -1.0]], [[1.0, -1.0]]
    assert kept(dppo_tv(), batch_of(up, advantages=[1.0])) == [False, True]
    assert kept(dppo_tv(), batch_of(down, advantages=[-1.0])) == [True, False]
    assert kept(dppo_tv(low=0.9, high=0.9), batch_of(up, advantages=[1.0])) == [True, True]
    assert kept(vaco(0.5), batch_of(up, advantages=[1.0])) == [False, True]
    assert kept(vaco(3.0), batch_of(up, advantages=[1.0])) == [True, True]


def test_opsm_drops_negative_sequences_that_became_unlikely() -> None:
    batch = batch_of([[-0.2, -0.2], [-0.2, -0.2], [0.2, 0.2]], advantages=[1.0, -1.0, -1.0])
    assert kept(opsm(0.1), batch) == [True, True, False, False, True, True]
    assert kept(opsm(0.3), batch) == [True] * 6


def test_bounds_may_tighten_with_a_tokens_staleness() -> None:
    batch = batch_of([[0.5, 0.5, 0.5, 0.5]], versions=[[3, 2, 1, 0]])
    rule = Bounds(statistic="ratio", high=(2.0, 1.7, 1.2))
    assert kept(rule, batch) == [True, True, False, False]
    weights = weigh(batch, Correction(truncate_high=(2.0, 1.5, 1.2))).weights
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.5), 1.5, 1.2, 1.2], dtype=torch.float64))
    masked = weigh(batch, Correction(mask_low=0.1, mask_high=(2.0, 1.2)))
    assert masked.keep_mask.tolist() == [True, False, False, False]
    floored = weigh(batch, Correction(truncate_low=(1.0, 1.7), truncate_high=2.0)).weights
    torch.testing.assert_close(floored, torch.tensor([math.exp(0.5), 1.7, 1.7, 1.7], dtype=torch.float64))


def test_rules_do_not_see_one_another() -> None:
    """Asked in turn, the second moment would keep the third token once the veto had taken the worst one."""
    batch = batch_of([[0.1, 0.2], [-12.0, 0.5]])
    moment = SecondMoment(limit=0.04)
    both = weigh(batch, Correction(reject=(veto(), moment))).keep_mask
    assert both.tolist() == [a and b for a, b in zip(kept(veto(), batch), kept(moment, batch), strict=True)]
    assert torch.equal(both, weigh(batch, Correction(reject=(moment, veto()))).keep_mask)


def test_each_rule_is_counted_by_its_name_and_dropped_tokens_weigh_nothing() -> None:
    batch = batch_of([[0.1, -12.0], [0.1, 1.0]])
    result = correct(batch, Correction(truncate_high=2.0, reject=(veto(), Bounds(statistic="k2", high=0.3))))
    metrics = result.metrics.result()
    assert metrics["correction/kept/frac"] == 0.25
    torch.testing.assert_close(result.weights, torch.tensor([0.0, 0.0, math.exp(0.1), 0.0], dtype=torch.float64))


def test_what_the_denominator_counts() -> None:
    batch = batch_of([[0.1, -12.0], [0.1, NAN]])
    assert weigh(batch, Correction(reject=(veto(),))).counted.tolist() == batch.loss_mask.tolist()
    assert weigh(batch, Correction(reject=(veto(),), denominator="kept")).counted.tolist() == [False, False, True, False]


def test_normalised_weights_have_mean_one_over_what_is_counted() -> None:
    batch = batch_of([[0.5, -1.0, 2.0], [0.1, NAN], [-12.0]])
    by_token = weigh(batch, Correction(truncate_high=2.0, normalize="token"))
    assert by_token.weights.sum().item() / 5 == pytest.approx(1.0, rel=1e-12)
    rejecting = weigh(batch, Correction(truncate_high=2.0, normalize="token", reject=(veto(),)))
    torch.testing.assert_close(rejecting.weights, by_token.weights * rejecting.keep_mask)
    by_sequence = weigh(batch, Correction(level="sequence", truncate_high=2.0, normalize="sequence")).weights
    assert (by_sequence[0] + by_sequence[3] + by_sequence[5]).item() / 3 == pytest.approx(1.0, rel=1e-12)
    all_dropped = weigh(batch_of([[-12.0]]), Correction(reject=(veto(),), normalize="token"))
    assert all_dropped.weights.tolist() == [0.0]


def test_nan_at_a_loss_token_is_never_rejected_in_silence() -> None:
    batch = batch_of([[0.1, 0.2]])
    broken = CorrectionBatch(**{name: getattr(batch, name) for name in batch.__dataclass_fields__}
                             | {"proximal_logprobs": torch.tensor([NAN, -0.8], dtype=torch.float64)})
    for rule in (veto(), geometric(low=0.9, high=1.1), kpop(0.01), dppo_tv(), vaco(0.1), SecondMoment(), SecondMoment(form="tau")):
        assert kept(rule, broken)[0], rule


RULES = (veto(0.3), outlier(2.0), geometric(low=0.8, high=1.3), opsm(0.1), vaco(0.4), kpop(0.05), dppo_tv(low=0.1, high=0.1), dppo_kl(0.02),
         SecondMoment(limit=0.2), SecondMoment(limit=0.2, form="tau"), Bounds(statistic="k3", level="turn", reduce="sum", high=0.3),
         Bounds(statistic="k3_reverse", level="sequence", reduce="mean", high=0.3, drop="negative"))


@given(st.integers(0, 2**32 - 1), st.sampled_from(RULES))
def test_sequences_may_stand_in_any_order(seed: int, rule: Rule) -> None:
    rng = np.random.default_rng(seed)
    rows = [np.where(rng.random(n) > 0.2, rng.normal(0, 0.6, n).round(3), NAN).tolist() for n in rng.integers(1, 6, 5)]
    advantages = rng.normal(size=5).round(2).tolist()
    turns = [np.sort(rng.integers(0, 3, len(row))).tolist() for row in rows]
    plain = kept(rule, batch_of(rows, advantages=advantages, turns=turns))
    starts = np.cumsum([0, *map(len, rows)])
    order = rng.permutation(5)
    moved = kept(rule, batch_of([rows[n] for n in order], advantages=[advantages[n] for n in order], turns=[turns[n] for n in order]))
    assert moved == [plain[t] for n in order for t in range(starts[n], starts[n + 1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.2, 2.0, 3.0, 5.0])
def test_a_ratio_that_is_its_bound_is_inside_wherever_the_bound_is_written(bound: float, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([bound, 1.0 / bound], dtype=dtype).log()
    batch = batch_of([log_ratio.double().tolist()])
    zeros = torch.zeros(2, dtype=dtype)
    exact = CorrectionBatch(**{name: getattr(batch, name) for name in batch.__dataclass_fields__}
                            | {"rollout_logprobs": zeros, "proximal_logprobs": log_ratio, "advantages": zeros})
    decisions = [weigh(exact, correction).keep_mask.tolist() for correction in (
        Correction(mask_high=bound), Correction(mask_high=(bound,)), Correction(reject=(Bounds(statistic="ratio", high=bound),)),
        Correction(reject=(Bounds(statistic="ratio", high=(bound, bound)),)))]
    assert decisions == [decisions[0]] * 4
    assert decisions[0][1]


def test_the_most_off_policy_tokens_are_beyond_a_bound_on_k3() -> None:
    assert kept(Bounds(statistic="k3", high=100.0), batch_of([[-200.0, -30.0]])) == [False, True]
    assert kept(Bounds(statistic="k3", level="sequence", reduce="sum", high=25.0), batch_of([[-30.0], [-20.0]])) == [False, True]
