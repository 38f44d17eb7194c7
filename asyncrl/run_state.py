"""What a run needs, beside the trainer's weights, to go on in another process: saved with each checkpoint.

Rollouts that were buffered or in flight are not among it. Their tokens are accounted as dropped for `resume`, their prompts are
issued again: a prompt is trained on or dropped for a reason of its own exactly once, whatever process did it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.accounting import Account
from asyncrl.channel import pack, unpack
from asyncrl.errors import CheckpointError, ConfigError, ProtocolError
from asyncrl.rollout.prompt_rows import pack_prompts, unpack_prompts
from asyncrl.train.checkpoint_store import newest, read_state, tidy
from asyncrl.types import Prompt

Resume = Literal["newest", "auto"] | None
"""`newest`: from the newest whole checkpoint, which must be there. `auto`: from it if there is one. None: a new run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two steps."""

    index: int
    """Steps so far."""
    version: int
    """Policy version they made."""
    prompts: Mapping[str, Any]
    """Where the prompt source was: `PromptSource.restore` takes it."""
    unfinished: tuple[Prompt, ...]
    """Handed out by the source and neither trained on nor dropped, in that order."""
    account: Account
    """The ledger, closed: nothing buffered, nothing in flight."""
    buffer: Mapping[str, Any]
    """`ReplayBuffer.restore` takes it."""
    notes: Mapping[str, Any]
    """The caller's own."""

    def to_bytes(self) -> bytes:
        """As it lies in a checkpoint. Raises ConfigError for a column that msgpack cannot hold, TypeError or OverflowError for a note."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return pack(fields | {"unfinished": pack_prompts(self.unfinished), "account": self.account.to_wire()})

    @classmethod
    def from_bytes(cls, data: bytes) -> RunState:
        """The state that `to_bytes` wrote. Raises CheckpointError for anything else."""
        try:
            fields = unpack(data)
            return cls(**fields | {"unfinished": unpack_prompts(fields["unfinished"]), "account": Account.from_wire(fields["account"])})
        except (ProtocolError, TypeError, KeyError) as error:
            raise CheckpointError(f"this checkpoint was not saved by a run, one does not resume from it: {error}") from error


def find_checkpoint(folder: Path, resume: Resume) -> Path | None:
    """The checkpoint to go on from, among those in `folder`, after mending what a kill left there; None for a new run.

    Raises ConfigError when one is asked for and there is none, and when a new run would begin among the checkpoints of another.
    """
    if resume is None:
        if any(folder.glob("step-*")):
            raise ConfigError("run.name", value=str(folder.parent), allowed="a folder without checkpoints for a new run",
                              remedy="Resume that run (--resume, RunOptions(resume='auto')), move its folder, or choose another name.")
        return None
    tidy(folder)
    found = newest(folder)
    if found is None and resume == "newest":
        raise ConfigError("resume", value=str(folder), allowed="a run with at least one whole checkpoint",
                          remedy="Check run.folder and run.name; 'auto' begins anew when there is none.")
    return found


def load_state(checkpoint: Path) -> RunState:
    """The run's state in a checkpoint folder. Raises CheckpointError."""
    return RunState.from_bytes(read_state(checkpoint))
