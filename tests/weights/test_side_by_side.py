import threading

import pytest

from asyncrl.weights.side_by_side import side_by_side


@pytest.mark.parametrize("threads", [1, 3])
def test_every_item_is_worked_on_once(threads):
    done = []
    side_by_side(iter(range(100)), done.append, threads=threads)
    assert sorted(done) == list(range(100))


def test_two_work_at_a_time():
    meeting = threading.Barrier(2)
    side_by_side(iter(range(4)), lambda item: meeting.wait(60), threads=2)


@pytest.mark.parametrize("threads", [1, 3])
def test_after_a_failure_nothing_is_begun_and_nothing_goes_on(threads):
    begun, working = [], threading.active_count()

    def work(item):
        begun.append(item)
        if item == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        side_by_side(iter(range(10_000)), work, threads=threads)
    assert len(begun) < 10_000
    assert threading.active_count() == working


@pytest.mark.parametrize("threads", [1, 3])
def test_work_that_runs_out_of_something_is_no_end_of_the_items(threads):
    with pytest.raises((StopIteration, RuntimeError)):
        side_by_side(iter(range(3)), lambda item: next(iter(())), threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_cannot_be_taken_is_a_failure_too(threads):
    def items():
        yield 1
        raise OSError("damaged")

    with pytest.raises(OSError, match="damaged"):
        side_by_side(items(), lambda item: None, threads=threads)
