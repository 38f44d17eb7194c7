"""The checkpoint that the ranks are writing, and the history that begins anew with each that is whole. Needs no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncrl.channel import Reply
from asyncrl.train import checkpoint_store
from asyncrl.train.history import History, Saving

Call = Callable[[str, dict[str, Any]], Awaitable[list[Reply]]]
"""An operation by name on every rank."""


class CheckpointSaving:
    """One checkpoint at a time is written beside the steps; one that becomes whole is counted in `history`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._saving: Saving | None = None
        self._automatic = False

    async def begin(self, folder: Path, state: bytes, *, version: int, automatic: bool, run_epoch: Callable[[], int], call: Call) -> None:
        """Returns once the ranks hold a copy of their state. Raises what `call` does, and CheckpointError; nothing is left then.

        Args:
            automatic: one of those the run makes and deletes by itself.
            run_epoch: asked afterwards, for a recovery within `call` may begin another.
        """
        try:
            with checkpoint_store.disk_errors_named(folder):
                place = checkpoint_store.begin(folder)
                replies = await call("save", {"folder": str(place)})
        except BaseException:
            checkpoint_store.abandon(folder)
            raise
        self._automatic = automatic
        self._saving = Saving(folder, version=version, updates=replies[0].body["updates"], run_epoch=run_epoch(), state=state,
                              model=replies[0].body.get("model", ""))

    async def commit(self, call: Call, *, wait: bool) -> bool:
        """Make it whole, once its files are written; whether one became whole. Raises CheckpointError, and what `call` does."""
        saving = self._saving
        if saving is None:
            return False
        with checkpoint_store.disk_errors_named(saving.folder):
            replies = [reply.body for reply in await call("saved", {"wait": wait})]
            if not all(reply["done"] for reply in replies):
                return False
            saving.commit(replies)
        self._saving = None
        if self._automatic or self._history.is_base(saving.folder):
            self._history.rebase(saving.folder, saving.version)
        if self._automatic:
            self._history.keep(saving.folder)
        return True

    def give_up(self) -> bool:
        """Forget what is not whole; whether there was any."""
        if self._saving is None:
            return False
        checkpoint_store.abandon(self._saving.folder)
        self._saving = None
        return True
