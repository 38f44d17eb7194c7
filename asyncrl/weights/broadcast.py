"""Parts pushed from the trainer's ranks to all engines at once, by broadcasts over a process group that has no other use.

    put_part    a rank keeps the chunks: views of its snapshot where it holds them anyway, else its encoded changes; of one version
    deliver     rank 0 gathers who was asked to take part, and tells all the order: group, and for each part who sends it
    parts       a worker says that it is there, and takes every part, in the order of the manifest

Every member runs the same collectives in the same order, and nothing else on that group. When one dies or hangs, the others end the group
within the time-out and go on, in a new one, without it.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.manifest import Manifest, Part
from asyncrl.weights.meeting import Guests, Line, Meeting, Member, be_alive, connect, rank_name, worker_name
from asyncrl.weights.process_group import Backend, Group
from asyncrl.weights.transport import Buffer, HeldVersion

SLICE_BYTES = 64 << 20
"""Of one collective: what a member needs beside the parts themselves."""
_PATIENCE = 3
"""Time-outs that a member waits for rank 0's word: for others to come, for their collective to end, and for their answers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What rank 0 tells: all run the same."""

    meeting: str
    """A file that makes the group; the name of the group that all are in already makes it no second time."""
    members: tuple[str, ...]
    roots: tuple[int, ...]
    """By part, the member that sends it."""
    backend: Backend

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Plan:
        """Of the message that `asdict` makes."""
        return cls(wire["meeting"], tuple(wire["members"]), tuple(wire["roots"]), wire["backend"])


class _Exchange:
    """A member's half of the collectives; keeps the group from one delivery to the next."""

    def __init__(self, name: str, *, device: str, timeout_s: float) -> None:
        self._name, self._device, self._timeout_s = name, torch.device(device), timeout_s
        self.patience_s = _PATIENCE * timeout_s
        self._group: Group | None = None
        self.joined = ""
        self.gpu = str(torch.cuda.get_device_properties(self._device).uuid) if self._device.type == "cuda" else ""

    def run(self, plan: Plan, parts: Sequence[Part], *, kept: Mapping[str, Sequence[Buffer]] | None) -> list[NDArray[np.uint8]]:
        """All parts, sent or received; a rank (`kept`) gets none back. Raises RuntimeError when a member failed; the group is gone then."""
        received: list[NDArray[np.uint8]] = []
        try:
            me, group = plan.members.index(self._name), self._in_group(plan)
            device = self._device if plan.backend == "nccl" else torch.device("cpu")
            room = torch.empty(min(SLICE_BYTES, max((part.bytes for part in parts), default=0)), dtype=torch.uint8, device=device)
            for part, root in zip(parts, plan.roots, strict=True):
                pieces = slices(kept[part.path], size=SLICE_BYTES) if kept is not None and root == me else None
                whole = np.empty(part.bytes if kept is None else 0, np.uint8)
                for start in range(0, part.bytes, SLICE_BYTES):
                    view = room[:min(SLICE_BYTES, part.bytes - start)]
                    if pieces is not None:
                        view.copy_(torch.from_numpy(next(pieces)))
                    group.broadcast(view, root=root)
                    if kept is None:
                        whole[start:start + len(view)] = view.cpu().numpy()
                received += [whole] if kept is None else []
        except RuntimeError:
            self._leave()
            raise
        return received

    def _in_group(self, plan: Plan) -> Group:
        if self._group is None or self.joined != plan.meeting:
            self._leave()
            self._group = Group(Path(plan.meeting), rank=plan.members.index(self._name), size=len(plan.members), backend=plan.backend,
                                device=self._device, timeout_s=self._timeout_s)
            self.joined = plan.meeting
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self.joined = None, ""


class BroadcastSink:
    """A trainer rank's end. Keeps the parts of the version put last, and of no other."""

    def __init__(self, folder: Path, *, rank: int, ranks: int, device: str, timeout_s: float) -> None:
        self._folder, self._rank, self._ranks, self._timeout_s = folder, rank, ranks, timeout_s
        self._exchange = _Exchange(rank_name(rank), device=device, timeout_s=timeout_s)
        self._meeting = Meeting(folder) if rank == 0 else None
        self._grouped: tuple[str, ...] = ()
        self._meets_at = ""
        self._version: int | None = None
        self._kept: dict[str, tuple[Buffer, ...]] = {}

    def put_part(self, version: int, *, rank: int, bucket: int, chunks: Iterable[Buffer]) -> Part:
        """See `PartSink.put_part`. The chunks are kept, not copied: what they lie in stays as it is until the next version is put."""
        if version != self._version:
            self._kept.clear()
            self._version = version
        kept, digest = tuple(chunks), xxhash.xxh3_128()
        for chunk in kept:
            digest.update(chunk)
        part = Part(f"v{version:06d}/part-{rank}-{bucket}-{digest.hexdigest()[:16]}", sum(map(len, kept)), digest.hexdigest())
        self._kept[part.path] = kept
        return part

    def deliver(self, manifest: Manifest, *, engines: Sequence[str]) -> None:
        """See `PartSink.deliver`. Raises WeightSyncError when no engine has it, naming who is missing; says it when some have not."""
        me = Member(_delivery(manifest), rank_name(self._rank), engine="", workers=0, gpu=self._exchange.gpu, group=self._exchange.joined,
                    holds=[number for number, part in enumerate(manifest.parts) if part.path in self._kept])
        if self._meeting is None:
            _take_part(connect(self._folder, timeout_s=self._timeout_s), me, manifest, exchange=self._exchange, kept=self._kept)
        else:
            missing = self._lead(self._meeting, me, manifest, engines)
            if missing:
                print(f"version {manifest.version} was delivered without {_named(missing)}", flush=True)  # into the rank's log
        self._kept.clear()

    def _lead(self, meeting: Meeting, me: Member, manifest: Manifest, engines: Sequence[str]) -> Mapping[str, str]:
        """Rank 0's half: deliver, again without those who are lost; returns who is missing, and why."""
        guests, missing = meeting.gather(me.delivery, ranks=self._ranks, engines=engines, timeout_s=self._timeout_s)
        error = "rank 0 failed"
        try:
            served = 0
            self._leave_out(guests, missing, manifest)
            while guests.engines():
                plan = self._plan(manifest, [me, *guests.in_order()])
                guests.send(asdict(plan))
                failure = self._try(plan, manifest)
                done, lost = guests.outcomes(self._timeout_s)
                served += len(done)
                if failure or lost or guests.engines():
                    self._grouped = ()  # those that are left make a new group
                if not done and not lost:
                    raise WeightSyncError(f"version {manifest.version} could not be sent, and nobody is missing: {failure}")
                missing |= lost
                self._leave_out(guests, lost, manifest)
            if not served:
                raise WeightSyncError(f"version {manifest.version} reached no engine: {_named(missing)}")
            error = ""
        except WeightSyncError as why:
            error = str(why)
            raise
        finally:
            guests.send({"over": True, "error": error})
            guests.close()
        return missing

    def _leave_out(self, guests: Guests, missing: Mapping[str, str], manifest: Manifest) -> None:
        guests.dismiss_engines(missing, f"version {manifest.version} is delivered without this engine: {_named(missing)}")
        if any(rank_name(rank) in missing for rank in range(self._ranks)):
            raise WeightSyncError(f"version {manifest.version} cannot be delivered whole: {_named(missing)}")

    def _try(self, plan: Plan, manifest: Manifest) -> str:
        try:
            self._exchange.run(plan, manifest.parts, kept=self._kept)
        except RuntimeError as error:
            return str(error)
        return ""

    def _plan(self, manifest: Manifest, members: Sequence[Member]) -> Plan:
        roots = [next((place for place, member in enumerate(members) if number in member.holds), -1)
                 for number in range(len(manifest.parts))]
        if -1 in roots:
            raise WeightSyncError(f"no rank keeps {manifest.parts[roots.index(-1)].path}: it was delivered, or the ranks are new")
        names, gpus = tuple(member.name for member in members), {member.gpu for member in members}
        if names != self._grouped or {member.group for member in members} != {self._exchange.joined}:
            self._meets_at = str(self._folder / f"group-{uuid.uuid4().hex}")
        self._grouped = names
        return Plan(self._meets_at, names, tuple(roots), "nccl" if "" not in gpus and len(gpus) == len(members) else "gloo")


class BroadcastSource:
    """The end of one worker of an engine."""

    def __init__(self, folder: Path, *, engine: str, worker: int = 0, workers: int = 1, device: str, timeout_s: float) -> None:
        self._folder, self._engine, self._workers, self._timeout_s = folder, engine, workers, timeout_s
        self._name = worker_name(engine, worker)
        weakref.finalize(self, be_alive(folder, self._name).close)
        self._exchange = _Exchange(self._name, device=device, timeout_s=timeout_s)

    def chain(self, manifest: Manifest, *, held: HeldVersion | None) -> Sequence[Manifest]:
        """See `PartSource.chain`: what is pushed is one version, which leads there from its base, or from nothing."""
        if manifest.base is not None and held != HeldVersion(manifest.run_epoch, manifest.base):
            raise WrongBase(f"version {manifest.version} is a delta on version {manifest.base} of run epoch {manifest.run_epoch}, held is "
                            f"{held or 'nothing'}, and no other version is kept")
        return [manifest]

    def parts(self, manifest: Manifest) -> Sequence[NDArray[np.uint8]]:
        """See `PartSource.parts`. Waits for the ranks to deliver."""
        me = Member(_delivery(manifest), self._name, engine=self._engine, workers=self._workers, gpu=self._exchange.gpu,
                    group=self._exchange.joined)
        received = _take_part(connect(self._folder, timeout_s=self._timeout_s), me, manifest, exchange=self._exchange, kept=None)
        for part, data in zip(manifest.parts, received, strict=True):
            if xxhash.xxh3_128_hexdigest(data) != part.xxh3:
                raise WeightSyncError(f"part {part.path} is damaged: its xxh3-128 is not {part.xxh3}")
            data.flags.writeable = False
        return received


def _take_part(line: Line, me: Member, manifest: Manifest, *, exchange: _Exchange,
               kept: Mapping[str, Sequence[Buffer]] | None) -> list[NDArray[np.uint8]]:
    """What rank 0 says, until a worker has everything, or it says that all is over. Raises WeightSyncError as it says."""
    try:
        line.send(asdict(me))
        while not (message := line.receive(exchange.patience_s)).get("over"):
            try:
                received = exchange.run(Plan.from_wire(message), manifest.parts, kept=kept)
            except RuntimeError:
                line.send({"done": False})
            else:
                line.send({"done": True})
                if kept is None:
                    return received
        if message["error"]:
            raise WeightSyncError(message["error"])
        return []
    except OSError as error:
        raise WeightSyncError(f"trainer-0, which leads the delivery of version {manifest.version}, is missing: {error}") from error
    finally:
        line.close()


def slices(chunks: Sequence[Buffer], *, size: int) -> Iterator[NDArray[np.uint8]]:
    """All bytes of the chunks, `size` at a time, in memory that is used again."""
    left = sum(map(len, chunks))
    room, filled = np.empty(min(size, left), np.uint8), 0
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        while len(data):
            taken = min(len(data), min(size, left) - filled)
            room[filled:filled + taken] = data[:taken]
            data, filled = data[taken:], filled + taken
            if filled == min(size, left):
                yield room[:filled]
                left, filled = left - filled, 0


def _delivery(manifest: Manifest) -> str:
    """What tells a delivery from every other."""
    return xxhash.xxh3_128_hexdigest(manifest.to_json().encode())


def _named(missing: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in sorted(missing.items())) or "no engine was asked"
