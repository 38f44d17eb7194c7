"""What the trainer has published: which manifest comes next, a delta or an anchor, and under which run epoch. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from asyncrl.errors import WeightSyncError
from asyncrl.paths import RunPaths
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.density import Prediction, total_density
from asyncrl.weights.ends import TransportSpec, log_of
from asyncrl.weights.manifest import Manifest, RankPublication, merge

SNAPSHOT_LOST: Mapping[str, Any] = {"snapshot": "lost"}
"""The reply of a rank that is asked for a delta and no longer has what it was to be made against."""


class Publication:
    """The controller's half of publishing; the ranks encode, this commits."""

    def __init__(self, paths: RunPaths, *, config: WeightsConfig) -> None:
        self.transport = TransportSpec.of(paths)
        """What the ranks make their ends from."""
        self._log = log_of(self.transport)
        self._config = config
        self._manifest: Manifest | None = None
        self._count = 0
        self._ranks_hold_it = False
        self.predicted_density: float | None = None
        """Of the newest version; None of an anchor, and where the ranks could not tell."""
        epoch = self._log.newest_epoch()
        self.run_epoch = 0 if epoch is None else epoch + 1

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """Of published parameters."""
        return self._config.dtype

    @property
    def manifest(self) -> Manifest:
        """The newest."""
        assert self._manifest is not None
        return self._manifest

    @property
    def last_version(self) -> int | None:
        """Of the newest manifest; None without one."""
        return None if self._manifest is None else self._manifest.version

    @property
    def is_pushed(self) -> bool:
        """Whether ranks send versions, and engines do not pull them."""
        return self.transport.is_pushed

    def is_to_be_kept(self, version: int) -> bool:
        """Whether the ranks could still take this version back."""
        return self.last_version == version and not self._ranks_hold_it

    def holds(self, version: int) -> bool:
        """Whether this version is the published one."""
        return self.last_version == version

    def request(self, version: int) -> dict[str, Any]:
        """What the ranks are asked for: a delta on what their publishers hold, or an anchor."""
        every = self._config.anchor_every_versions
        anchor = not self._ranks_hold_it or (every is not None and self._count % every == 0)
        return {"version": version, "base": None if anchor else self.last_version}

    def commit(self, publications: Sequence[Mapping[str, Any]], *, version: int) -> bool:
        """Make what the ranks answered visible; deltas may follow once they have it as their snapshot. Raises WeightSyncError.

        False, and nothing is visible, where a rank has lost its snapshot: the next request is for an anchor.
        """
        if SNAPSHOT_LOST in publications:
            self.lose_snapshot()
            return False
        ranks = [RankPublication.from_wire(wire["publication"]) for wire in publications]
        predictions = [Prediction(**wire["predicted"]) if wire["predicted"] else None for wire in publications]
        manifest = merge(ranks, run_epoch=self.run_epoch, version=version, base=ranks[0].base)
        self._log.commit(manifest)
        self._manifest, self._ranks_hold_it = manifest, False
        self.predicted_density = total_density(predictions)
        self._count += 1
        return True

    def commit_anchor(self, publications: Sequence[Mapping[str, Any]]) -> Manifest:
        """Make the newest version visible once more, whole. Raises WeightSyncError."""
        ranks = [RankPublication.from_wire(wire["publication"]) for wire in publications]
        manifest = merge(ranks, run_epoch=self.run_epoch, version=ranks[0].version, base=None)
        if manifest.state_hash != self.manifest.state_hash:
            raise WeightSyncError(f"the anchor of version {manifest.version} has state {manifest.state_hash:016x}, published was "
                                  f"{self.manifest.state_hash:016x}")
        self._log.commit(manifest)
        return manifest

    def taken_up(self) -> None:
        """Every rank has the committed version as its snapshot."""
        self._ranks_hold_it = True

    def retain(self, slowest: int | None) -> None:
        """Let go of what no engine needs: see `VersionLog.retain`."""
        self._log.retain(slowest)

    def lose_snapshot(self) -> None:
        """The ranks are new: until they adopt the published version, only an anchor can follow."""
        self._ranks_hold_it = False

    def adopt(self, hash_shares: Sequence[int]) -> None:
        """New ranks took up the published version: proved by its state hash, or else what they hold is another history."""
        if sum(hash_shares) % (1 << 64) == self.manifest.state_hash:
            self._ranks_hold_it = True
        else:
            self.restart(run_epoch=self.run_epoch + 1)

    def restart(self, *, run_epoch: int) -> None:
        """Versions may be made again, and differ: engines are to take the next one as an anchor of a new epoch."""
        self.run_epoch = run_epoch
        self._manifest, self._ranks_hold_it = None, False
