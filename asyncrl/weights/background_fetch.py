"""A receiver's `fetch` in a thread of its own, so that whoever owns the receiver goes on; the last version asked for counts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncrl.errors import WeightSyncError
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import Shares


class BackgroundFetch:
    """One fetch at a time. A version that another one follows before it is there is given up; what its thread still finds is dropped.

    Args:
        fetch: `Receiver.fetch`. While `busy` nothing else may be asked of the receiver.
    """

    def __init__(self, fetch: Callable[[Manifest], Shares]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._wanted: Manifest | None = None
        self._outcome: Shares | Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the thread works, on what is wanted or on what was given up."""
        with self._lock:
            return self._thread is not None

    def begin(self, manifest: Manifest) -> None:
        """Fetch this version next; one that is wanted already goes on, one that failed is tried again."""
        with self._lock:
            if self._wanted == manifest and not isinstance(self._outcome, Exception):
                return
            if self._thread is None:
                # a daemon: an engine that ends does not wait for a file system that does not answer
                thread = threading.Thread(target=self._work, name="asyncrl-fetch", daemon=True)
                thread.start()  # may raise; it waits for the lock
                self._thread = thread
            self._wanted, self._outcome = manifest, None

    def outcome(self, manifest: Manifest) -> Shares | None:
        """What the fetch of `manifest` gave; None while it is under way. Raises its error, WeightSyncError when it was given up."""
        with self._lock:
            if self._wanted != manifest:
                successor = f": version {self._wanted.version} was asked for instead" if self._wanted else ""
                raise WeightSyncError(f"version {manifest.version} is not being fetched{successor}")
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome

    def forget(self) -> None:
        """What was fetched was used, or is of no use."""
        with self._lock:
            self._wanted, self._outcome = None, None

    def _work(self) -> None:
        while (manifest := self._next()) is not None:
            try:
                found: Shares | Exception = self._fetch(manifest)
            except Exception as error:  # any: it is told to whoever asks for the outcome
                found = error
            with self._lock:
                if self._wanted == manifest:
                    self._outcome = found

    def _next(self) -> Manifest | None:
        """The version to fetch; None, and the thread's end, when there is none."""
        with self._lock:
            wanted = self._wanted if self._outcome is None else None
            if wanted is None:
                self._thread = None
            return wanted
