"""The errors asyncrl raises. A user's mistake names the field, the value, what is allowed and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_SHOWN = 500
"""Characters of a value in a message."""
_MOST_TEXT = 2000
"""Characters of what somebody else's error says."""


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
        super().__init__(f"{field} = {_shown(value)} is not allowed: {allowed}. {remedy}")

    def moved(self, place: str, to: str) -> ConfigError:
        """The same mistake, its fields at and below `place` now at and below `to`."""
        fields = [f"{to}{field[len(place):]}" if f"{field}.".startswith(f"{place}.") else field for field in self.field.split(", ")]
        return ConfigError(", ".join(fields), value=self.value, allowed=self.allowed, remedy=self.remedy)


def _shown(value: object) -> str:
    """The value as code, in the middle of a line: its beginning when it is long, its type when it cannot be shown."""
    try:
        text = repr(value)
    except Exception as error:
        # Of the user's own making, or a number of more digits than Python writes.
        return f"<{type(value).__name__}; {type(error).__name__} when shown>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"


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


class RunStopped(AsyncRLError):
    """Whoever drives the run told it to stop while something was waited for."""


class RunAborted(AsyncRLError):
    """A safety limit ended the run; the message names the limit and the likely cause."""


def note_others(error: BaseException, failures: Sequence[BaseException]) -> None:
    """Keep what else went wrong with the error that is raised."""
    for failure in failures:
        if failure is not error:
            error.add_note(f"the run also failed with {type(failure).__name__}: {failure}")


def text_of(error: BaseException) -> str:
    """What an error says; of a user's code its beginning when it is long, for it may hold a whole answer, or why it says nothing."""
    try:
        text = str(error)
    except Exception as failure:
        return f"<{type(failure).__name__} when shown>"
    return text if len(text) <= _MOST_TEXT or isinstance(error, AsyncRLError) else f"{text[:_MOST_TEXT]}… ({len(text)} characters)"


def describe_error(error: BaseException) -> dict[str, Any]:
    """Class name, text, traceback and plain attributes of an error, as `rebuild_error` takes them."""
    attributes = {name: value if isinstance(value, (str, int, float, type(None))) else repr(value)
                  for name, value in vars(error).items() if not name.startswith("_")}
    return {"kind": type(error).__name__, "message": str(error), "attributes": attributes,
            "traceback": "".join(traceback.format_exception(error))}


def rebuild_error(described: Mapping[str, Any], *, where: str) -> AsyncRLError:
    """The error another process described: the same class when it is one of ours, else RemoteError with that traceback.

    Raises ProtocolError for what `describe_error` did not make.
    """
    fields = {"kind": str, "message": str, "traceback": str, "attributes": dict}
    if not all(isinstance(described.get(name), expected) for name, expected in fields.items()):
        raise ProtocolError(f"an error must be described by {', '.join(fields)}")
    if not all(isinstance(name, str) and not name.startswith("_") for name in described["attributes"]):
        raise ProtocolError("attributes of an error must have public names")
    kind = globals().get(described["kind"])
    if not (isinstance(kind, type) and issubclass(kind, AsyncRLError)):
        return RemoteError(f"{where}: {described['kind']}: {described['message']}\n{described['traceback']}")
    error = kind.__new__(kind, described["message"])
    for name, value in described["attributes"].items():
        setattr(error, name, value)
    error.add_note(f"raised in {where}:\n{described['traceback']}")
    return error
