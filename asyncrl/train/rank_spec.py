"""What a trainer rank is told when it starts. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.train.config import TrainConfig
from asyncrl.weights.ends import TransportSpec


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything a rank needs to come up."""

    model: str
    """A Hugging Face folder."""
    rank: int
    world_size: int
    rendezvous: str | None
    """A file that is new for this start; None: alone, without a process group."""
    transport: TransportSpec
    """Where published versions go."""
    published_dtype: Literal["bfloat16", "float32"]
    config: TrainConfig
    deterministic: bool = False
    """Only algorithms that give the same bits every time; torch raises where it has none."""

    def to_wire(self) -> dict[str, Any]:
        """A form msgpack can carry; `from_wire` gives the spec back."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "config": self.config.model_dump(), "transport": self.transport.to_wire()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RankSpec:
        """The spec `to_wire` described."""
        return cls(**(dict(wire) | {
            "config": TrainConfig.model_validate(wire["config"]), "transport": TransportSpec.from_wire(wire["transport"])}))
