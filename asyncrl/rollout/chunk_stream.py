"""The stream of results that an engine's child sends to its controller; see `child_engine` for what travels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from asyncrl.channel import Channel
from asyncrl.types import Status


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of one request that are to be delivered, and how it ended, if it did."""

    key: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    kv_fresh: bool
    finish: Status | None
    error: str = ""


class ChunkStream:
    """Emissions as messages. `messages` counts them, for a controller that must know when it has read all."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stream_id: int | None = None
        self.messages = 0

    def opened(self, request_id: int) -> None:
        """The controller asked for the stream with this request; it does so before it sends work."""
        self._stream_id = request_id

    def send(self, emissions: Iterable[Emission], *, version: int | None) -> None:
        """One message with everything given; none when that is nothing. All tokens are of `version`."""
        emissions = list(emissions)
        if not emissions:
            return
        assert self._stream_id is not None, "the controller opens the stream before it sends a request"
        rows = [(emission.key, len(emission.tokens), emission.kv_fresh, emission.finish and emission.finish.value, emission.error)
                for emission in emissions]
        arrays = {"tokens": np.fromiter(chain.from_iterable(emission.tokens for emission in emissions), dtype=np.int32),
                  "logprobs": np.fromiter(chain.from_iterable(emission.logprobs for emission in emissions), dtype=np.float32)}
        self.messages += 1
        self._channel.reply(self._stream_id, {"version": version, "rows": rows}, arrays=arrays, last=False)
