"""The stream of results that an engine's child sends to its controller; see `child_engine` for what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.channel import Channel
from asyncrl.records import NOTHING, KeptSets, TokenRecords, joined
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
    records: TokenRecords = NOTHING
    """As in `Chunk`."""


class ChunkStream:
    """Emissions as messages. `messages` counts them, for a controller that must know when it has read all."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stream_id: int | None = None
        self.messages = 0

    def opened(self, request_id: int) -> None:
        """The controller asked for the stream with this request; it does so before it sends work."""
        self._stream_id = request_id

    def send(self, emissions: Iterable[Emission], *, version: int | None, passes: Callable[[], tuple[float, float]] | None = None) -> None:
        """One message with everything given; none when that is nothing. All tokens are of `version`; `passes` gives seconds of the engine's
        forward passes since it was last asked, as in `engine.Passes`."""
        emissions = list(emissions)
        if not emissions:
            return
        assert self._stream_id is not None, "the controller opens the stream before it sends a request"
        rows = [(emission.key, len(emission.tokens), emission.kv_fresh, emission.finish and emission.finish.value, emission.error,
                 emission.records.kept is not None, 0 if emission.records.experts is None else len(emission.records.experts))
                for emission in emissions]
        arrays = {"tokens": np.fromiter(chain.from_iterable(emission.tokens for emission in emissions), dtype=np.int32),
                  "logprobs": np.fromiter(chain.from_iterable(emission.logprobs for emission in emissions), dtype=np.float32)}
        arrays |= joined([(TokenRecords(emission.records.kept), len(emission.tokens)) for emission in emissions]).arrays()
        experts = [emission.records.experts for emission in emissions if emission.records.experts is not None]
        arrays |= {"experts": np.concatenate(experts)} if experts else {}
        self.messages += 1
        body = {"version": version, "rows": rows, "passes": passes() if passes else None}
        self._channel.reply(self._stream_id, body, arrays=arrays, last=False)


def records_of(rows: Iterable[Sequence[Any]], arrays: Mapping[str, NDArray[Any]]) -> Iterator[TokenRecords]:
    """The records of each row of a message."""
    whole = TokenRecords.of_arrays(arrays)
    starts = None if whole.kept is None else whole.kept.offsets
    token = routed = 0
    for _, count, _, _, _, has_sets, passed in rows:
        kept = experts = None
        if has_sets and whole.kept is not None and starts is not None and count:
            kept = KeptSets(whole.kept.counts[token:token + count], whole.kept.ids[starts[token]:starts[token + count]])
        if whole.experts is not None and passed:
            experts = whole.experts[routed:routed + passed]
        token, routed = token + count, routed + passed
        yield TokenRecords(kept, experts)
