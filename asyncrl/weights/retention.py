"""Which published versions may be deleted. Pure.

    what must stay    the newest version; from the slowest serving engine's version on, whatever leads to the newest
    history           the newest anchor before that and the deltas since: how an engine that comes late gets there without the trainer
    the rest          nobody can use it: older run epochs, deltas that something newer replaces, links of a chain that is broken
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredLink:
    """One committed manifest and its parts."""

    run_epoch: int
    version: int
    base: int | None
    """None: an anchor."""
    bytes: int
    """Of its files."""


def superfluous(links: Collection[StoredLink], *, slowest: int | None, keep_bytes: int | None) -> list[StoredLink]:
    """What to delete, oldest first.

    Args:
        slowest: version, of the newest run epoch, that the slowest serving engine holds; None while none serves.
        keep_bytes: history goes, oldest first, until everything that stays has no more bytes; None: all of it stays.
    """
    if not links:
        return []
    epoch = max(link.run_epoch for link in links)
    current = [link for link in links if link.run_epoch == epoch]
    needed, history = _split(current, slowest=slowest)
    size = sum(link.bytes for link in {*needed, *history})
    while history and keep_bytes is not None and size > keep_bytes:
        size -= history.pop(0).bytes
    return sorted(set(links) - {*needed, *history}, key=_age)


def _split(links: Collection[StoredLink], *, slowest: int | None) -> tuple[set[StoredLink], list[StoredLink]]:
    """What must stay; and the history, oldest first."""
    anchors = {link.version: link for link in links if link.base is None}
    deltas = {link.version: link for link in links if link.base is not None}
    newest = max(link.version for link in links)
    steps, reached = _back_from(newest, deltas=deltas, anchors=anchors)
    start = next((version for version in steps if version in anchors), None)
    needed = {link for link in links if link.version == newest}
    if slowest is not None:
        needed |= {deltas[version] for version in steps if version in deltas and version > slowest}
    if start is not None and (slowest is None or (slowest < newest and slowest not in reached)):
        needed |= {anchors[start], *(deltas[version] for version in steps if version > start)}
    usable = [deltas[version] for version in steps if version in deltas and (start is None or version > start)]
    if start is not None:
        usable.append(anchors[start])
    return needed, sorted(set(usable) - needed, key=_age)


def _back_from(newest: int, *, deltas: Mapping[int, StoredLink], anchors: Mapping[int, StoredLink]) -> tuple[list[int], set[int]]:
    """Versions from the newest back along deltas, as far as there are any; and those an engine may hold to go on with them."""
    steps: list[int] = []
    bases: set[int] = set()
    version: int | None = newest
    while version is not None and (version in deltas or version in anchors):
        steps.append(version)
        base = deltas[version].base if version in deltas else None
        if base is not None:
            bases.add(base)
        version = base if base is not None and base < version else None
    return steps, bases


def _age(link: StoredLink) -> tuple[int, int, bool]:
    return link.run_epoch, link.version, link.base is not None
