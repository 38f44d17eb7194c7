import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.plan.shapes import (
    Jobs,
    async_gain,
    async_s,
    balanced_async_s,
    best_split,
    colocated_s,
    disaggregated_s,
    fitted_floor,
    one_step_s,
    removal_cap,
)

SECONDS = st.floats(1, 1000)
REFERENCE = Jobs(gpus=64, throughput_s=405.33, tail_s=196.36, train_s=207.77)


def test_the_shapes_of_the_reference() -> None:
    assert colocated_s(REFERENCE) == pytest.approx(809.46)
    assert disaggregated_s(REFERENCE, rollout_gpus=46) == pytest.approx(1499, rel=1e-3)
    assert one_step_s(REFERENCE, rollout_gpus=46, sync_s=2.8) == pytest.approx(763, rel=1e-3)
    assert async_s(REFERENCE, rollout_gpus=42) == pytest.approx(617.6, rel=1e-3)


@given(throughput=SECONDS, tail=st.floats(0, 1000), train=SECONDS)
def test_balanced_async_is_colocated_without_its_tail(throughput: float, tail: float, train: float) -> None:
    jobs = Jobs(gpus=64, throughput_s=throughput, tail_s=tail, train_s=train)
    assert balanced_async_s(jobs) + tail == pytest.approx(colocated_s(jobs))
    f, generation = tail / (throughput + tail), throughput + tail
    assert async_gain(jobs) == pytest.approx(1 / (1 - f * generation / (generation + train)))
    assert all(async_s(jobs, rollout_gpus=n) >= balanced_async_s(jobs) - 1e-9 for n in range(1, 64))


@given(throughput=SECONDS, tail=st.floats(0, 1000), train=SECONDS, unit=st.sampled_from([1, 2, 8]))
def test_no_split_is_faster_than_the_one_found(throughput: float, tail: float, train: float, unit: int) -> None:
    jobs = Jobs(gpus=32, throughput_s=throughput, tail_s=tail, train_s=train)
    best = best_split(32, unit_gpus=unit, step_s=lambda rollout: one_step_s(jobs, rollout_gpus=rollout))
    assert best.rollout_gpus % unit == 0
    assert best.rollout_gpus + best.train_gpus == 32
    assert all(one_step_s(jobs, rollout_gpus=n) >= best.step_s for n in range(unit, 32, unit))


def test_a_split_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="colocate"):
        best_split(8, unit_gpus=8, step_s=float)
    with pytest.raises(ConfigError, match="whole ones"):
        best_split(64, unit_gpus=48, step_s=float)
    with pytest.raises(ConfigError, match="enough memory"):
        best_split(64, unit_gpus=8, step_s=float, train_fits=lambda gpus: False)
    with pytest.raises(ConfigError, match="rollout_gpus = 0"):
        async_s(REFERENCE, rollout_gpus=0)
    with pytest.raises(ConfigError, match="rollout_gpus = 64"):
        async_s(REFERENCE, rollout_gpus=64)


def test_a_floor_is_found_where_it_is() -> None:
    counts = [1, 2, 4, 8]
    assert fitted_floor(counts, throughput=[1 / (0.7 / n + 0.3) for n in counts]) == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="two at least"):
        fitted_floor([1], throughput=[1])


def test_taking_a_job_out_has_its_cap() -> None:
    assert removal_cap(356.3, removed_s=177.85) == pytest.approx(1.997, rel=1e-3)
    with pytest.raises(ConfigError, match="removed_s"):
        removal_cap(1.0, removed_s=1.0)
