"""The controller's end of a transport that keeps nothing: a version is there while the ranks keep its parts. Needs no torch."""

from __future__ import annotations

from asyncrl.errors import WeightSyncError
from asyncrl.weights.manifest import Manifest


class PushLog:
    """Knows the newest version; what was committed lives in the engines alone."""

    def __init__(self) -> None:
        self._newest: Manifest | None = None

    def newest_epoch(self) -> int | None:
        """See `VersionLog.newest_epoch`."""
        return None if self._newest is None else self._newest.run_epoch

    def commit(self, manifest: Manifest) -> None:
        """See `VersionLog.commit`."""
        newest, place = self._newest, (manifest.run_epoch, manifest.version)
        known = None if newest is None else (newest.run_epoch, newest.version)
        if newest is not None and known is not None and (place < known or (place == known and manifest.state_hash != newest.state_hash)):
            raise WeightSyncError(f"version {manifest.version} of run epoch {manifest.run_epoch} with state {manifest.state_hash:016x} "
                                  f"cannot follow {known[1]} of {known[0]} with state {newest.state_hash:016x}")
        self._newest = manifest

    def retain(self, slowest: int | None) -> None:
        """See `VersionLog.retain`. Nothing is kept here."""
