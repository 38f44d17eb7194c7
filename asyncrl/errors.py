"""The errors asyncrl raises. A user's mistake names the field, the value, what is allowed and the remedy."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A setting that cannot work. Raised before any process starts.

    Args:
        field: dotted name of the setting, or several joined by ", ".
        value: what was given.
        allowed: what would have been accepted.
        remedy: what to do about it.
    """

    def __init__(self, field: str, *, value: object, allowed: str, remedy: str) -> None:
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy
        super().__init__(f"{field} = {value!r} is not allowed: {allowed}. {remedy}")


class ShapeError(AsyncRLError, ValueError):
    """Arrays whose lengths, dtypes or offsets contradict one another."""


class NonFiniteError(AsyncRLError, ValueError):
    """NaN or infinity where a finite number is needed; the message names index and sequence."""


class StalenessError(AsyncRLError):
    """A batch that breaks the staleness promise, or a version that runs backwards."""


class BufferStarved(AsyncRLError, TimeoutError):
    """The trainer waited longer than allowed for a batch; the message lists what is missing."""


class ChildDied(AsyncRLError):
    """A child process ended while it was needed; the message says how it ended and its last lines."""


class ProtocolError(AsyncRLError, ValueError):
    """Bytes on a socket that are not one of our messages, or one over the size limits."""


class RemoteError(AsyncRLError):
    """An operation failed inside a child; the message holds the child's own traceback."""


class EngineError(AsyncRLError):
    """An engine refused or failed a request; the message holds the engine's own text."""


class AbortNotHonoured(EngineError, TimeoutError):
    """An engine went on sampling after it had acknowledged a pause."""


class RewardError(AsyncRLError):
    """A reward function raised, or returned something that is not one finite number a rollout."""


class RewardTimeout(RewardError, TimeoutError):
    """A reward function ran past its deadline; its worker was killed and replaced."""


class WeightSyncError(AsyncRLError):
    """Weights could not be published, verified or applied."""


class WrongBase(WeightSyncError):
    """A delta was offered to a receiver that does not hold the delta's base version."""


class CheckpointError(AsyncRLError):
    """A checkpoint is incomplete, damaged, or of another model."""


class LedgerError(AsyncRLError):
    """Tokens or rollouts are not accounted for: the ledger does not close."""


class RunAborted(AsyncRLError):
    """A safety limit ended the run; the message names the limit and the likely cause."""
