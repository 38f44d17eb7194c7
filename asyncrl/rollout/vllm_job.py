"""One request in vLLM and the versions that wrote its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import EngineError


@dataclass(slots=True)
class Job:
    """One request that has not ended."""

    key: str
    tokens: list[int]
    params: Any
    """vLLM's SamplingParams."""
    label: str = ""
    """Of the version it started under."""
    adapters: Any = None
    """Of that version, where there are adapters."""
    task: asyncio.Task[None] | None = None
    started: int = 0
    """How often it was given to vLLM."""
    sent: int = 0
    """Tokens emitted so far."""
    stamps: list[tuple[str, int]] = field(default_factory=list)
    """(version label, tokens emitted under it)."""
    kv_fresh: bool = True

    @property
    def request_id(self) -> str:
        """Its id in vLLM, where ids are not used twice."""
        return f"{self.key}.{self.started}"

    def check_stamps(self, output: Any) -> None:
        """Raise EngineError unless vLLM's own record, in a CompletionOutput, says that the versions we stamped wrote the tokens."""
        record = [(span.version, span.end - span.start) for span in output.weight_versions or () if span.end > span.start]
        ours: list[tuple[str, int]] = []
        for label, count in self.stamps:
            ours = [*ours[:-1], (label, ours[-1][1] + count)] if ours and ours[-1][0] == label else [*ours, (label, count)]
        if record != ours:
            raise EngineError(f"tokens were stamped with {ours}, vLLM's record is {record}")
