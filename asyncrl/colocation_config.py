"""Settings of a device that engines and trainer share. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from asyncrl.settings import TAGGED, Section


class NoColocation(Section):
    """Engines and trainer keep what they hold."""

    kind: Literal["none"] = "none"


class TurnsColocation(Section):
    """Engines and trainer hold their memory in turns: engines sleep while the trainer trains."""

    kind: Literal["turns"] = "turns"
    trainer: Literal["offload", "keep"] = "offload"
    """What becomes of weights, optimizer and gradients while engines write: they move to the memory of the host, or stay on the device."""


ColocationConfig = Annotated[NoColocation | TurnsColocation, TAGGED]
