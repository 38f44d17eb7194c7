"""All ranks of an engine as one receiver: a version is held by every rank or by none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.errors import WeightSyncError, rebuild_error
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.rank_classes import Placement, TensorPlan
from asyncrl.weights.receiver import joined

Answers = list[dict[str, Any]]
"""By rank."""
Ask = Callable[[str, tuple[Any, ...]], Awaitable[Answers]]
"""Calls a method of `WorkerExtension` on every rank."""

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.1
"""Between two questions whether a fetch has ended; each takes a moment between two forward passes, so they grow rarer."""


class EngineRanks:
    """Prepares, fetches and applies on all ranks.

    Args:
        ask: calls a method on every rank.
        where: names the ranks in errors.
    """

    def __init__(self, ask: Ask, *, where: str = "vLLM's worker") -> None:
        self._ask, self._where = ask, where
        self.version: int | None = None
        """That all ranks hold; None before the first and while one of them is poisoned."""
        self.why_none = "none has been applied"
        self._state_hash: int | None = None
        self._fetched: tuple[Manifest, int] | None = None

    async def prepare(self, folder: str, *, transport: Mapping[str, Any], lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Record where weights land on each rank, see that all ranks together hold each element, and prove the base.

        Gives `tensors` and, summed over ranks, the `elements` that are written in place; `whole`: why others are given to the loader;
        `skipped`: those it takes no notice of. Raises WeightSyncError.
        """
        recorded = self._checked(await self._ask("asyncrl_record", (folder,)))
        placements = [{name: Placement.from_plain(plain) for name, plain in rank["placed"].items()} for rank in recorded]
        plan = TensorPlan.of_ranks(placements, whole=[rank["whole"] for rank in recorded])
        bound = self._checked(await self._ask("asyncrl_bind", (folder, transport, plan.to_plain(), lora)))
        reasons = {name: reason for rank in recorded for name, reason in rank["whole"].items()}
        return {"tensors": len(plan.routed), "elements": sum(rank["elements"] for rank in bound), "whole": reasons,
                "skipped": [name for name in recorded[0]["names"] if name not in plan.routed and name not in reasons]}

    async def fetch(self, manifest: Manifest) -> None:
        """Pull and verify a version on every rank while the engine samples; nothing is written.

        Waits for: the slowest rank. Raises what `Receiver.fetch` raises, and WeightSyncError when the ranks together would not come to
        the manifest's state, or another version was asked for meanwhile.
        """
        if self._fetched is not None and self._fetched[0] == manifest:
            return
        self._fetched = None
        text = manifest.to_json()
        self._checked(await self._ask("asyncrl_fetch", (text,)))
        look_s = _FIRST_LOOK_S
        while True:
            answers = self._checked(await self._ask("asyncrl_fetched", (text,)))
            if all(answer["shares"] is not None for answer in answers):
                break
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
        predicted = joined([answer["shares"] for answer in answers])
        if predicted != manifest.state_hash:
            raise WeightSyncError(f"version {manifest.version} would lead to state {predicted:016x}, published was "
                                  f"{manifest.state_hash:016x}: what is held, or what was sent, is not what the manifest was made for")
        self._fetched = manifest, predicted

    async def apply(self, manifest: Manifest, *, adapters: str = "") -> int:
        """Write a version on every rank and return its state hash; fetches what was not fetched. The engine must not sample meanwhile.

        When a rank fails, the others keep what they had if none has written; else all are poisoned, and only an anchor is accepted.
        """
        await self.fetch(manifest)
        assert self._fetched is not None
        predicted, self._fetched = self._fetched[1], None
        try:
            self._checked(await self._ask("asyncrl_apply", (manifest.to_json(), adapters, predicted)))
        except BaseException as error:
            await self._settle(str(error) or type(error).__name__)
            raise
        self.version, self._state_hash, self.why_none = manifest.version, manifest.state_hash, ""
        return manifest.state_hash

    async def peak_memory_bytes(self) -> int:
        """Of all ranks' processes together."""
        return sum(state["peak_memory_bytes"] for state in await self._ask("asyncrl_state", ()))

    async def _settle(self, why: str) -> None:
        """After a failure: the version is still held by all, or by none."""
        held, self.version, self.why_none = self.version, None, f"an update changed the weights and did not end well: {why}"
        states = await self._ask("asyncrl_state", ())
        before = held, self._state_hash if held is not None else None
        if all((state["version"], state["state_hash"]) == before and not state["poisoned"] for state in states):
            self.version, self.why_none = held, "" if held is not None else "none has been applied"
            return
        poisoned = [state["poisoned"] for state in states if state["poisoned"]]
        self.why_none = poisoned[0] if poisoned else self.why_none
        await self._ask("asyncrl_poison", (self.why_none,))

    def _checked(self, answers: Answers) -> Answers:
        """Raises the first rank's own error that has one."""
        for answer in answers:
            if "error" in answer:
                raise rebuild_error(answer["error"], where=self._where)
        return answers
