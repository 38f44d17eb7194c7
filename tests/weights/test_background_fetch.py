from __future__ import annotations

import threading

import pytest

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.background_fetch import BackgroundFetch
from asyncrl.weights.manifest import Manifest

TIMEOUT_S = 20


def manifest(version):
    return Manifest(run_epoch=0, version=version, base=None, parts=(), tensors=(), state_hash=version)


class Slow:
    """A fetch that ends when it is told to."""

    def __init__(self):
        self.fetched, self.begun, self.may_end = [], threading.Semaphore(0), threading.Semaphore(0)
        self.error = None

    def __call__(self, manifest):
        self.begun.release()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        self.fetched.append(manifest.version)
        if self.error:
            raise self.error
        return {"": manifest.state_hash}

    def end(self, fetching):
        """Let one fetch end and wait for the thread, or for the next one to begin."""
        thread = fetching._thread
        self.may_end.release()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@pytest.fixture
def slow():
    return Slow()


def test_the_caller_goes_on_while_it_is_fetched(slow):
    fetching = BackgroundFetch(slow)
    fetching.begin(manifest(1))
    assert fetching.busy
    assert fetching.outcome(manifest(1)) is None
    fetching.begin(manifest(1))
    slow.end(fetching)
    assert not fetching.busy
    assert fetching.outcome(manifest(1)) == {"": 1}
    fetching.begin(manifest(1))
    assert slow.fetched == [1]


def test_a_version_that_another_follows_is_dropped_and_the_last_one_counts(slow):
    fetching = BackgroundFetch(slow)
    fetching.begin(manifest(1))
    assert slow.begun.acquire(timeout=TIMEOUT_S)
    fetching.begin(manifest(2))
    fetching.begin(manifest(3))
    with pytest.raises(WeightSyncError, match="version 1 is not being fetched: version 3 was asked for instead"):
        fetching.outcome(manifest(1))
    slow.may_end.release()
    assert slow.begun.acquire(timeout=TIMEOUT_S)
    assert fetching.outcome(manifest(3)) is None
    slow.end(fetching)
    assert fetching.outcome(manifest(3)) == {"": 3}
    assert slow.fetched == [1, 3]


def test_an_error_keeps_its_class_and_the_version_can_be_tried_again(slow):
    fetching = BackgroundFetch(slow)
    slow.error = WrongBase("version 1 builds on 0")
    fetching.begin(manifest(1))
    slow.end(fetching)
    for _ in range(2):
        with pytest.raises(WrongBase, match="builds on 0"):
            fetching.outcome(manifest(1))
    slow.error = None
    fetching.begin(manifest(1))
    slow.end(fetching)
    assert fetching.outcome(manifest(1)) == {"": 1}


def test_what_was_used_is_not_given_again(slow):
    fetching = BackgroundFetch(slow)
    fetching.begin(manifest(1))
    slow.end(fetching)
    fetching.forget()
    with pytest.raises(WeightSyncError, match=r"version 1 is not being fetched$"):
        fetching.outcome(manifest(1))


def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_time_works(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    slow = Slow()
    fetching = BackgroundFetch(slow)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            fetching.begin(manifest(1))
    assert not fetching.busy
    fetching.begin(manifest(1))
    slow.end(fetching)
    assert fetching.outcome(manifest(1)) == {"": 1}
