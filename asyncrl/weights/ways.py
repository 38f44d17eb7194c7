"""Which committed versions lead an engine from what it holds to the one it is asked for. Pure."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.weights.manifest import Manifest
from asyncrl.weights.transport import HeldVersion

Find = Callable[[int, bool], Manifest | None]
"""The manifest of a version, of its anchor (True) or its delta; None where it is missing, damaged or of another run epoch."""


def ways(manifest: Manifest, *, held: HeldVersion | None, find: Find) -> tuple[list[list[Manifest]], str]:
    """Every chain, oldest version first: the deltas since `held`, and each anchor on the way with the deltas since that; and why no other.

    An anchor that is asked for is the only way: it heals memory that is not what it is thought to be. For a delta that is asked for, the
    anchor of the same version may stand.
    """
    found: list[list[Manifest]] = []
    since: list[Manifest] = []
    link: Manifest | None = manifest
    base: int | None = None
    while link is not None:
        anchor = link if link.base is None else find(link.version, True)
        if anchor is not None and anchor.state_hash == link.state_hash:
            found.append([anchor, *since])
        if link.base is None:
            return found, "an anchor is the beginning"
        since.insert(0, link)
        if held == HeldVersion(manifest.run_epoch, link.base):
            return [*found, since], "what is held is the beginning"
        if link.base >= link.version:
            return found, f"version {link.version} names base {link.base}: a base is older than its version"
        base, link = link.base, find(link.base, False) or find(link.base, True)
    return found, f"version {base} is not in the store, or not whole, or not of run epoch {manifest.run_epoch}"
