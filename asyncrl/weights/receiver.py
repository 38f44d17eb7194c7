"""The engine's side: verify everything, then write in place into the runtime model. Wrong base or bad bytes change nothing.

    fetch   order → chain → layout → checksums → decode → predicted state hash      may run while the engine samples; nothing is written
    apply   write, each piece read back                                             any failure here: poisoned until an anchor

Several versions are applied as one: the union of their changes, the last writer of an element winning. The state hash is computed from the
values that are about to be replaced and those that replace them, so a delta on any other state than its base is refused before the
first write. The receiver keeps no copy of a weight and derives none: what a model caches from its weights (a float32 head, a fused
projection) must be a target itself or be rebuilt by the engine after `apply`.

Where ranks of one engine share a tensor, or each has a copy of it, no rank knows the whole state hash. Each gives its share by *class*,
the set of ranks that hold a tensor; `joined` compares what the members of a class say, and counts it once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.codec import EVERYWHERE, Changes
from asyncrl.weights.manifest import Manifest, TensorEntry
from asyncrl.weights.merge import Link, Run, merged_runs
from asyncrl.weights.side_by_side import side_by_side
from asyncrl.weights.state_hash import MODULUS, hash_at, hash_bits, hash_delta, tensor_seed
from asyncrl.weights.targets import Target, check_manifest
from asyncrl.weights.transport import HeldVersion, PartSource

AUDIT_EVERY_DELTAS = 50
"""A delta proves only what it touches. Hashing all of memory costs about as much as an anchor: as rare as the parity probe by default."""
KEPT_BYTES = 256 << 20
"""Decoded changes that are kept between `fetch` and `apply`, so that the pause covers the writing alone; larger ones are decoded twice."""
MOST_WRITERS = 4
"""Threads that write in the pause, when nothing else of the engine runs: one core alone gets half of what memory gives, or less."""
_MANY_CHANGES = 1 << 18
"""A millisecond's work."""
_AUDIT_ELEMENTS = 1 << 22
"""Read at a time."""

Shares = Mapping[str, int]
"""State hash by class of tensors, modulo 2^64."""

ALONE = ""
"""The class of what one rank holds alone."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A state that was proved."""

    manifest: Manifest
    shares: Shares
    dtypes: Mapping[str, str]
    """Published dtype by tensor."""

    @property
    def version(self) -> HeldVersion:
        return HeldVersion(self.manifest.run_epoch, self.manifest.version)


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """A version that can be written."""

    manifest: Manifest
    links: tuple[Link, ...]
    on: _Held | None
    """What was held when it was verified."""
    shares: Shares
    """That would result."""
    kept: Sequence[Run] | None
    """Its changes, where they are small enough to be kept."""

    @property
    def writers(self) -> int:
        """Threads that are worth it."""
        changed = sum(entry.count for link in self.links for entry in link.manifest.tensors)
        return min(MOST_WRITERS, len(os.sched_getaffinity(0))) if changed >= _MANY_CHANGES else 1

    def runs(self) -> Iterator[Run]:
        return iter(self.kept) if self.kept is not None else merged_runs(self.links)


class Receiver:
    """Applies published versions to tensors of the runtime model, in place; tied storage stays tied.

    Args:
        targets: by checkpoint name, tied weights once, no two of them on the same memory (`memory_targets`, `record_routes`).
        source: where versions come from.
        classes: of tensors that not this rank alone holds, by name.
    """

    def __init__(self, targets: Mapping[str, Target], *, source: PartSource, classes: Mapping[str, str] | None = None) -> None:
        self._targets = dict(targets)
        self._source = source
        self._classes = dict(classes or {})
        self._held: _Held | None = None
        self._fetched: _Fetched | None = None
        self._run_epoch: int | None = None
        self._poisoned = ""
        self._deltas_since_proof = 0

    @property
    def version(self) -> int | None:
        """The version the model holds; None before the first anchor and while poisoned."""
        return self._held.manifest.version if self._held else None

    @property
    def state_hash(self) -> int | None:
        """Hash of that version."""
        return self._held.manifest.state_hash if self._held else None

    @property
    def poisoned(self) -> str:
        """Why only an anchor is accepted; empty when the state is known."""
        return self._poisoned

    def fetch(self, manifest: Manifest) -> Shares:
        """Pull and verify what leads from what is held to `manifest`, and return the state hash it would give, by class. Writes nothing.

        Safe while the engine samples, in another thread too, as long as nothing else is asked of the receiver meanwhile. Raises WrongBase
        when no chain of versions leads there, WeightSyncError when one is damaged or does not fit.
        """
        if self._holds(manifest):
            assert self._held is not None
            return self._held.shares
        fetched = self._fetched
        if fetched is None or fetched.manifest != manifest or fetched.on is not self._held:
            self._fetched = None
            self._check_order(manifest)
            self._fetched = fetched = self._verified(manifest)
        return fetched.shares

    def apply(self, manifest: Manifest, *, predicted: int | None = None) -> int:
        """Bring the model to the manifest's version and return the state hash it then holds.

        The version already held is accepted again and changes nothing. Fetches what was not fetched, and raises as `fetch` does; nothing
        changed then. Raises WeightSyncError when writing failed (poisoned). Every `AUDIT_EVERY_DELTAS` deltas since the last anchor it
        ends with an `audit`, and raises as that does.

        Args:
            predicted: the state hash that all ranks of the engine fetched together; None: this rank is the only one.
        """
        shares = self.fetch(manifest)
        if predicted is None:
            predicted = joined([shares])
        if predicted != manifest.state_hash:
            self._fetched = None
            raise WeightSyncError(f"version {manifest.version} would lead to state {predicted:016x}, published was "
                                  f"{manifest.state_hash:016x}: what is held, or what was sent, is not what the manifest was made for")
        if not self._holds(manifest):
            fetched, self._fetched = self._fetched, None
            assert fetched is not None
            self._write(fetched)
        if self._deltas_since_proof >= AUDIT_EVERY_DELTAS:
            self.audit()
        return manifest.state_hash

    def release(self, why: str) -> None:
        """Let go of the model's memory, which is given up: no version is held, and nothing can be applied before `rebind`."""
        self._targets = {}
        self._held, self._fetched, self._poisoned = None, None, why

    def rebind(self, targets: Mapping[str, Target]) -> None:
        """Write to other memory from now on, of the same tensors. No version is held: an anchor is needed."""
        self._targets = dict(targets)
        self._held, self._fetched, self._poisoned = None, None, self._poisoned or "the model's memory was exchanged"

    def poison(self, why: str) -> None:
        """Hold no version from now on, though memory was written well: something that belongs to it was not. An anchor is needed."""
        self._held, self._fetched, self._poisoned = None, None, why

    def audit(self) -> Shares:
        """Hash all of the model's memory anew. Raises WeightSyncError, and is poisoned, when it is not what was applied."""
        held = self._held
        if held is None:
            raise WeightSyncError(f"no known version is held: {self._poisoned or 'no anchor was applied yet'}")
        found: dict[str, int] = {}
        try:
            for name, target in self._targets.items():
                dtype = held.dtypes.get(name, target.dtype)  # what has no elements is in no manifest
                _add(found, self._class_of(name), _whole_hash(target, dtype))
            if found != held.shares:
                raise WeightSyncError(f"version {held.manifest.version} should hash to {_text(held.shares)}, "
                                      f"memory hashes to {_text(found)}")
        except WeightSyncError as error:
            self._held, self._fetched, self._poisoned = None, None, str(error)
            raise
        self._deltas_since_proof = 0
        return found

    def _holds(self, manifest: Manifest) -> bool:
        held = self._held and self._held.manifest
        return held is not None and (held.run_epoch, held.version, held.state_hash) == (
            manifest.run_epoch, manifest.version, manifest.state_hash)

    def _check_order(self, manifest: Manifest) -> None:
        held = self._held and self._held.manifest
        if self._run_epoch is not None and manifest.run_epoch < self._run_epoch:
            raise WrongBase(f"run epoch {manifest.run_epoch} is over: {self._run_epoch} has begun")
        if held and held.run_epoch == manifest.run_epoch and manifest.version <= held.version:
            raise WrongBase(f"version {manifest.version} cannot follow version {held.version}: versions only grow within a run epoch")

    def _verified(self, manifest: Manifest) -> _Fetched:
        held = self._held
        try:
            chain = self._source.chain(manifest, held=held.version if held else None)
            self._check_chain(chain, manifest)
        except WrongBase as error:
            raise WrongBase(f"an anchor is needed: {self._poisoned}; {error}") if self._poisoned else error from None
        on = held if chain[0].base is not None else None
        dtypes = on.dtypes if on else None
        for link in chain:
            check_manifest(link, self._targets, dtypes=dtypes)
            dtypes = dict(dtypes or {}) | {entry.name: entry.dtype for entry in link.tensors}
        links = tuple(Link(link, self._source.parts(link)) for link in chain)
        small = sum(entry.count for link in chain for entry in link.tensors) * np.dtype(np.int64).itemsize <= KEPT_BYTES
        kept = list(merged_runs(links)) if small else None
        shares = self._predict(kept if kept is not None else merged_runs(links), on=on)
        return _Fetched(manifest, links, held, shares, kept)

    def _check_chain(self, chain: Sequence[Manifest], manifest: Manifest) -> None:
        if not chain or chain[-1].version != manifest.version or chain[-1].state_hash != manifest.state_hash:
            raise WrongBase(f"the chain that was offered does not end with version {manifest.version}")
        held = self._held and self._held.manifest
        before = None if held is None or held.run_epoch != manifest.run_epoch else held.version
        for link in chain:
            if link.run_epoch != manifest.run_epoch or (link.base is not None and (link.base != before or link.base >= link.version)):
                holds = f"version {held.version} of run epoch {held.run_epoch}" if held else self._poisoned or "nothing yet"
                raise WrongBase(f"version {link.version} builds on {link.base} of run epoch {link.run_epoch}; what comes before it is "
                                f"{before}, held is: {holds}")
            before = link.version

    def _predict(self, runs: Sequence[Run] | Iterator[Run], *, on: _Held | None) -> Shares:
        """With `on` the changed elements replace those in memory; without it they are all there is."""
        found = dict(on.shares) if on else {}
        for whole, all_changes in runs:
            target, seed = self._targets[whole.name], tensor_seed(whole.name, whole.dtype)
            for entry, changes in target.here(whole, all_changes):
                _add(found, self._class_of(entry.name), _share_of(entry, changes, seed=seed, target=target if on else None))
        return found

    def _write(self, fetched: _Fetched) -> None:
        manifest, on = fetched.manifest, fetched.on if fetched.links[0].manifest.base is not None else None
        dtypes = dict(on.dtypes) if on else {}
        self._held, self._poisoned = None, f"writing version {manifest.version} did not finish"
        side_by_side(fetched.runs(), self._write_run, threads=fetched.writers)
        dtypes |= {entry.name: entry.dtype for link in fetched.links for entry in link.manifest.tensors}
        self._held = _Held(manifest, fetched.shares, dtypes)
        self._run_epoch, self._poisoned = manifest.run_epoch, ""
        self._deltas_since_proof = self._deltas_since_proof + len(fetched.links) if on else 0

    def _write_run(self, run: Run) -> None:
        whole, all_changes = run
        target = self._targets[whole.name]
        for entry, changes in target.here(whole, all_changes):
            target.write(entry, changes)

    def _class_of(self, name: str) -> str:
        return self._classes.get(name, ALONE)


def joined(shares_by_rank: Sequence[Shares]) -> int:
    """The state hash of an engine from what each of its ranks says. Raises WeightSyncError when members of a class disagree.

    A class is named by the ranks that hold it, as in `0,2`; each counts its own `ALONE`, and its lowest rank counts for a class.
    """
    total = 0
    said: dict[str, tuple[int, int]] = {}
    for rank, shares in enumerate(shares_by_rank):
        for name, share in shares.items():
            first, known = said.setdefault(name, (rank, share))
            if name == ALONE or first == rank:
                total += share
            elif known != share:
                raise WeightSyncError(f"tensors of which ranks {name} each have a copy differ: rank {first} has state {known:016x}, "
                                      f"rank {rank} {share:016x}")
    return total % MODULUS


def _share_of(entry: TensorEntry, changes: Changes, *, seed: int, target: Target | None) -> int:
    if target is None:
        if changes.indices is None:
            return hash_bits(seed, changes.values, start=entry.start)
        return hash_at(seed, changes.indices, changes.values, start=entry.start)
    old = target.read(entry, changes)
    return hash_delta(seed, changes.indices, start=entry.start, old=old, new=changes.values)


def _whole_hash(target: Target, dtype: str) -> int:
    seed, total = tensor_seed(target.name, dtype), 0
    size = int(np.prod(target.shape, dtype=np.int64))
    for start in range(0, size, _AUDIT_ELEMENTS):
        length = min(_AUDIT_ELEMENTS, size - start)
        run = TensorEntry(name=target.name, dtype=dtype, shape=target.shape, mode="dense", part=0, offset=0, bytes=0, start=start,
                          length=length, count=length)
        for entry, changes in target.here(run, EVERYWHERE):
            bits = target.read(entry, changes)
            total += (hash_bits(seed, bits, start=entry.start) if changes.indices is None
                      else hash_at(seed, changes.indices, bits, start=entry.start))
    return total % MODULUS


def _add(shares: dict[str, int], name: str, share: int) -> None:
    shares[name] = (shares.get(name, 0) + share) % MODULUS


def _text(shares: Shares) -> str:
    return ", ".join(f"{name + ': ' if name else ''}{share:016x}" for name, share in sorted(shares.items()))
