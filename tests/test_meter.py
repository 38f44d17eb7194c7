"""Rates and waits between steps, by hand numbers on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.clock import now_s, run_virtual
from asyncrl.meter import Meter
from asyncrl.rollout.probe import Parity
from tests.buffer.buffer_fakes import rollout


class Engines:
    """Busy from the beginning."""

    def busy_s(self) -> float:
        return now_s()


def test_an_evaluation_counts_neither_as_work_nor_as_waiting():
    async def main():
        meter = Meter(Engines())  # type: ignore[arg-type]
        await asyncio.sleep(4)
        with meter.aside():
            await asyncio.sleep(6)
        meter.scored(rollout(0, 0, (0, 30)))
        first = meter.step(waited_s=1.0, trained_tokens=12).result()
        await asyncio.sleep(2)
        second = meter.step(waited_s=0.0, trained_tokens=12).result()
        return first, second
    first, second = run_virtual(main())
    assert first["train/period_s/last"] == pytest.approx(4.0)
    assert first["trainer/wait_frac/last"] == pytest.approx(0.25)
    assert first["train/tokens_per_s/last"] == pytest.approx(4.0)
    assert first["rollout/tokens_per_s/last"] == pytest.approx(3.0)
    assert first["engine/wait_frac/last"] == pytest.approx(0.0)
    assert second["train/period_s/last"] == pytest.approx(2.0)
    assert second["engine/wait_frac/last"] == pytest.approx(0.0)


def test_the_newest_probe_splits_the_gap_of_a_batch():
    async def main():
        meter = Meter(Engines())  # type: ignore[arg-type]
        step = {"correction/logprob_gap/mean": 0.5}
        before = meter.split(step)
        for gap in (0.3, 0.2):
            meter.probed(Parity(mean_abs=gap, max_abs=gap, mean_signed=0.0, num_tokens=1))
        return before, meter.split(step), meter.split({})
    before, split, unmeasured = run_virtual(main())
    assert before == unmeasured == {}
    assert split == {"correction/gap_by_mismatch_probe/value": 0.2, "correction/gap_by_drift_probe/value": 0.3}
