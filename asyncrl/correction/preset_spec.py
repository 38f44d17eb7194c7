"""What a preset is: a correction with a name, the loss it belongs with, where both come from and what holds them there. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.correction.spec import Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset(Correction):
    """A correction with a name, the loss it belongs with, and where both come from."""

    name: str
    """`ours`, or `project/setting`."""
    loss: str = "decoupled_ppo"
    """The function of `losses`, `sequence_losses` or `catalog` that the origin uses with it."""
    loss_settings: tuple[tuple[str, float], ...] = ()
    """Its arguments where they are not our defaults."""
    aggregation: str = "token_mean"
    """A mode of `aggregate`."""
    origin: str
    """Project, version and setting that it reproduces; or the paper."""
    paper: str = ""
    """Where the idea was published, where the origin is a project."""
    departs: str = "nothing known"
    """Where ours is not theirs."""
    evidence: tuple[str, ...]
    """What holds the two together: `oracle NAME`, a numerical case that tests/parity answers through this library's public functions;
    `parity PEER/NAME`, a comparison with the project itself as it installs, `make peers`."""


def beside_its_origin(known: Preset) -> Preset:
    """With the comparison that tests/parity makes of this preset and its project."""
    return replace(known, evidence=(*known.evidence, f"parity {known.name.replace('/', '/preset_')}"))
