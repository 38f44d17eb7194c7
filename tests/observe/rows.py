"""Rows as a run writes them, ordinary and impossible, for the tests of what shows them."""

from __future__ import annotations

import math

from asyncrl.observe.health import RunSettings

SETTINGS = RunSettings(name="sums", steps=100, max_staleness=2, staleness_bound=2.0, group_size=4, probe_limit=0.02)

METRICS = {
    "reward/total/mean": 0.4375, "reward/rollouts/sum": 512.0, "reward/zero_or_one/frac": 1.0, "reward/source.sums/mean": 0.5,
    "reward/source.words/mean": 0.25, "reward/function.right/mean": 0.4, "reward/function.short/mean": 0.0375,
    "staleness/token/mean": 1.25, "staleness/token/max": 2.0, "buffer/depth/last": 72.0, "buffer/held/last": 70.0,
    "buffer/ready/last": 13.0, "buffer/length_bias/last": 1.0, "buffer/zero_variance/frac": 0.125,
    "buffer/dropped_zero_variance/groups": 4.0, "buffer/dropped_zero_variance/tokens": 64.0, "probe/gap/mean": 1.2e-6,
    "correction/logprob_gap/mean": 0.0123, "correction/ess/frac": 0.987, "correction/clipped/frac": 0.031,
    "correction/kept/frac": 1.0, "correction/truncated/frac": 0.004, "rollout/truncated_frac/mean": 0.02, "rollout/errors/sum": 0.0,
    "rollout/tokens_per_s/last": 12345.0, "train/tokens_per_s/last": 23456.0, "train/period_s/last": 1.5, "train/loss/mean": -0.0001,
    "train/entropy/mean": 0.32, "train/grad_norm/last": 0.89, "train/learning_rate/last": 6e-4, "train/skipped_steps/sum": 0.0,
    "train/nonfinite_steps/sum": 0.0, "trainer/wait_frac/last": 0.42, "engine/wait_frac/last": 0.03, "weights/sync_s/mean": 0.0456,
    "weights/density/mean": 0.321, "weights/payload_bytes/mean": 662272.0}

STRANGE = {"huge": 1e300, "minus huge": -1e300, "large": 123456789.0, "tiny": 1e-300, "minus tiny": -3.2e-17, "nan": math.nan, "null": None,
           "infinite": math.inf, "minus infinite": -math.inf, "zero": 0.0, "one": 1.0, "minus zero": -0.0, "almost one": 0.9999}


def step_row(step: int = 1, **changed: float | None) -> dict[str, float | None]:
    """A row of a step; `changed` has `__` for the slashes of a metric's name."""
    return {"trainer_step": step, "step": step, "version": step, **METRICS,
            **{name.replace("__", "/"): value for name, value in changed.items()}}


def strange_rows() -> list[dict[str, float | None]]:
    """Steps and evaluations in which every value is the same strange one, or missing; with names nobody would choose."""
    rows: list[dict[str, float | None]] = [{"trainer_step": 1, "step": 1}]
    for number, value in enumerate(STRANGE.values(), 2):
        names = {**dict.fromkeys(METRICS, value), "reward/source.a source with a name that goes on and on and on/mean": value,
                 "rollout/error.reward_timeout/sum": value, f"buffer/dropped_{'x' * 60}/groups": value,
                 **{f"reward/source.{source}/mean": value for source in range(40)}}
        rows += [{"trainer_step": number, "step": number, **names},
                 {"eval_version": number, "eval/held\nout/reward/mean": value, "eval/held\nout/errors/sum": value,
                  "eval/held\nout/pass_at_4/mean": value}]
    return [*rows, {"trainer_step": 10**9, "step": 10**9, **METRICS}]
