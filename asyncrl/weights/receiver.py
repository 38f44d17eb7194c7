"""The engine's side: verify everything, then write in place into the runtime model. Wrong base or bad bytes change nothing.

    order → layout → checksums → decode → predicted state hash      any failure here: nothing was written
    write, each piece read back                                     any failure here: poisoned until an anchor

The state hash is computed from the values that are about to be replaced and those that replace them, so a delta on any other state
than its base is refused before the first write. The receiver keeps no copy of a weight and derives none: what a model caches from its
weights (a float32 head, a fused projection) must be a target itself or be rebuilt by the engine after `apply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.codec import EVERYWHERE, Changes, decode
from asyncrl.weights.manifest import Manifest, TensorEntry
from asyncrl.weights.state_hash import MODULUS, hash_bits, hash_delta, tensor_seed
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.targets import Target, check_manifest

AUDIT_EVERY_DELTAS = 50
"""A delta proves only what it touches. Hashing all of memory costs about as much as an anchor: as rare as the parity probe by default."""
_AUDIT_ELEMENTS = 1 << 22
"""Read at a time."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A state that was proved."""

    run_epoch: int
    version: int
    state_hash: int
    dtypes: Mapping[str, str]
    """Published dtype by tensor."""


class Receiver:
    """Applies published versions to tensors of the runtime model, in place; tied storage stays tied.

    Args:
        targets: by checkpoint name, tied weights once, no two of them on the same memory (`memory_targets`, `record_routes`).
        store: where parts lie.
    """

    def __init__(self, targets: Mapping[str, Target], *, store: StoreTransport) -> None:
        self._targets = dict(targets)
        self._store = store
        self._held: _Held | None = None
        self._run_epoch: int | None = None
        self._poisoned = ""
        self._deltas_since_proof = 0

    @property
    def version(self) -> int | None:
        """The version the model holds; None before the first anchor and while poisoned."""
        return self._held.version if self._held else None

    @property
    def state_hash(self) -> int | None:
        """Hash of that version."""
        return self._held.state_hash if self._held else None

    @property
    def poisoned(self) -> str:
        """Why only an anchor is accepted; empty when the state is known."""
        return self._poisoned

    def apply(self, manifest: Manifest) -> int:
        """Bring the model to the manifest's version and return the state hash it then holds.

        The version already held is accepted again and changes nothing. Raises WrongBase (nothing changed) when the manifest does not
        follow what is held, WeightSyncError when it is damaged or does not fit (nothing changed), or when writing failed (poisoned).
        Every `AUDIT_EVERY_DELTAS` deltas since the last anchor it ends with an `audit`, and raises as that does.
        """
        held = self._held
        if held and (held.run_epoch, held.version, held.state_hash) == (manifest.run_epoch, manifest.version, manifest.state_hash):
            return held.state_hash
        self._check_order(manifest)
        check_manifest(manifest, self._targets, dtypes=None if manifest.base is None or held is None else held.dtypes)
        parts = [self._store.open_part(part) for part in manifest.parts]
        predicted = self._predict(manifest, parts)
        if predicted != manifest.state_hash:
            raise WeightSyncError(f"version {manifest.version} would lead to state {predicted:016x}, published was "
                                  f"{manifest.state_hash:016x}: what is held, or what was sent, is not what the manifest was made for")
        self._write(manifest, parts)
        self._deltas_since_proof = 0 if manifest.base is None else self._deltas_since_proof + 1
        if self._deltas_since_proof >= AUDIT_EVERY_DELTAS:
            self.audit()
        return manifest.state_hash

    def catch_up(self, manifest: Manifest) -> int:
        """Apply every version the store has between what is held and `manifest`, in order, from the newest anchor when there is one.

        Raises WrongBase when the store lacks a link; after a failure the model holds the last version that was applied whole.
        """
        chain = [manifest]
        while not self._can_start_at(chain[-1]):
            following = chain[-1]
            try:
                chain.append(self._store.manifest(_base_of(following)))
            except WeightSyncError as error:
                raise WrongBase(f"no chain from version {self.version} to {manifest.version}: {error}") from error
            if chain[-1].run_epoch != manifest.run_epoch:
                raise WrongBase(f"version {chain[-1].version} in the store is of run epoch {chain[-1].run_epoch}, not {manifest.run_epoch}")
        for link in reversed(chain):
            self.apply(link)
        return manifest.state_hash

    def release(self, why: str) -> None:
        """Let go of the model's memory, which is given up: no version is held, and nothing can be applied before `rebind`."""
        self._targets = {}
        self._held, self._poisoned = None, why

    def rebind(self, targets: Mapping[str, Target]) -> None:
        """Write to other memory from now on, of the same tensors. No version is held: an anchor is needed."""
        self._targets = dict(targets)
        self._held, self._poisoned = None, self._poisoned or "the model's memory was exchanged"

    def audit(self) -> int:
        """Hash all of the model's memory anew and return it. Raises WeightSyncError, and is poisoned, when it is not what was applied."""
        held = self._held
        if held is None:
            raise WeightSyncError(f"no known version is held: {self._poisoned or 'no anchor was applied yet'}")
        try:
            total = sum(_whole_hash(target, held.dtypes[name]) for name, target in self._targets.items()) % MODULUS
            if total != held.state_hash:
                raise WeightSyncError(f"version {held.version} should hash to {held.state_hash:016x}, memory hashes to {total:016x}")
        except WeightSyncError as error:
            self._held, self._poisoned = None, str(error)
            raise
        self._deltas_since_proof = 0
        return total

    def _can_start_at(self, manifest: Manifest) -> bool:
        held = self._held
        if manifest.base is None:
            return True
        return held is not None and held.run_epoch == manifest.run_epoch and held.version in (manifest.base, manifest.version)

    def _check_order(self, manifest: Manifest) -> None:
        held = self._held
        if self._run_epoch is not None and manifest.run_epoch < self._run_epoch:
            raise WrongBase(f"run epoch {manifest.run_epoch} is over: {self._run_epoch} has begun")
        if manifest.base is not None:
            if self._poisoned:
                raise WrongBase(f"an anchor is needed: {self._poisoned}")
            if held is None or (held.run_epoch, held.version) != (manifest.run_epoch, manifest.base):
                holds = f"version {held.version} of run epoch {held.run_epoch}" if held else "nothing yet"
                raise WrongBase(f"version {manifest.version} builds on {manifest.base} of run epoch {manifest.run_epoch}; held is {holds}")
        if held and held.run_epoch == manifest.run_epoch and manifest.version <= held.version:
            raise WrongBase(f"version {manifest.version} cannot follow version {held.version}: versions only grow within a run epoch")

    def _predict(self, manifest: Manifest, parts: list[NDArray[np.uint8]]) -> int:
        total = self._held.state_hash if self._held and manifest.base is not None else 0
        for entry, changes in _decoded(manifest, parts):
            seed = tensor_seed(entry.name, entry.dtype)
            if manifest.base is None:
                total += hash_bits(seed, changes.values, start=entry.start)
                continue
            old = self._targets[entry.name].read(entry, changes)
            indices = np.arange(entry.length) if changes.indices is None else changes.indices
            total += hash_delta(seed, indices, start=entry.start, old=old, new=changes.values)
        return total % MODULUS

    def _write(self, manifest: Manifest, parts: list[NDArray[np.uint8]]) -> None:
        dtypes = dict(self._held.dtypes) if self._held else {}
        self._held, self._poisoned = None, f"writing version {manifest.version} did not finish"
        for entry, changes in _decoded(manifest, parts):
            self._targets[entry.name].write(entry, changes)
        dtypes |= {entry.name: entry.dtype for entry in manifest.tensors}
        self._held = _Held(manifest.run_epoch, manifest.version, manifest.state_hash, dtypes)
        self._run_epoch, self._poisoned = manifest.run_epoch, ""


def _decoded(manifest: Manifest, parts: list[NDArray[np.uint8]]) -> Iterator[tuple[TensorEntry, Changes]]:
    for entry in manifest.tensors:
        payload = parts[entry.part][entry.offset:entry.offset + entry.bytes]
        yield entry, decode(payload, mode=entry.mode, dtype=entry.dtype, length=entry.length, count=entry.count)


def _whole_hash(target: Target, dtype: str) -> int:
    seed, total = tensor_seed(target.name, dtype), 0
    for start in range(0, target.size, _AUDIT_ELEMENTS):
        length = min(_AUDIT_ELEMENTS, target.size - start)
        entry = TensorEntry(name=target.name, dtype=dtype, shape=target.shape, mode="dense", part=0, offset=0, bytes=0, start=start,
                            length=length, count=length)
        total += hash_bits(seed, target.read(entry, EVERYWHERE), start=start)
    return total


def _base_of(manifest: Manifest) -> int:
    if manifest.base is None or manifest.base >= manifest.version:
        raise WeightSyncError(f"version {manifest.version} names base {manifest.base}: a base is older than its version")
    return manifest.base
