"""A run of thousands of steps takes no more memory than one of hundreds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory

    return memory


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_every_process_is_flat_over_two_thousand_steps(memory: ModuleType, processes: int) -> None:
    measured = memory.measured_apart(processes)
    assert measured["steps"][-1] == 2_000
    assert set(measured["growth"]) == {"controller", "reward zygote", "reward worker"} | ({"trainer rank"} if processes else set())
    assert measured["flat"], measured["growth"]


def test_a_leak_of_a_twentieth_is_seen_and_the_warm_up_is_not(memory: ModuleType) -> None:
    at_steps = [100, 300, 1_000, 2_000]
    flat, leaking = [50.0, 100.0, 102.0, 101.0], [50.0, 100.0, 103.0, 106.0]
    judged = memory.judged({"steps": at_steps, "resident_mb": {"controller": flat, "trainer rank": leaking}})
    assert judged["growth"] == {"controller": 0.02, "trainer rank": 0.06}
    assert not judged["flat"]
