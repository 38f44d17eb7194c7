"""The rows of one data set in the order they are asked, epoch after epoch, with a cursor that is exact across processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash

from asyncrl.errors import ConfigError
from asyncrl.rollout.data_config import BufferShuffle, DataSettings, FullShuffle, PassRateCurriculum
from asyncrl.rollout.names import check_source
from asyncrl.rollout.prompt_rows import require_prompt
from asyncrl.rollout.seeds import derive_seed
from asyncrl.types import Prompt

Data = Iterable[Prompt] | Callable[[], Iterable[Prompt]]

Row = tuple[int, Prompt]
"""A prompt and its place in the data, the same in every epoch."""


class DataSet:
    """Goes through the data row by row; `state` and `restore` carry the place over to another process.

    Args:
        data: a list, which starts again at its end; a function that gives the prompts, called again for each epoch unless it gave a list;
            or an iterator, which ends the data.
        settings: epochs and shuffle.
        seed: of the shuffles.

    Raises ConfigError for what is no data, and for settings the data cannot follow.
    """

    def __init__(self, data: Data, *, settings: DataSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._again = data if callable(data) and not isinstance(data, Iterable) else None
        self._data = _iterable(self._again() if self._again else data)
        self._begun = False
        self._check_settings()
        self.epoch = 0
        """Complete passes."""
        self.rows = len(self._data) if isinstance(self._data, Sequence) else None
        """How many there are; known of a list at once, of others after an epoch."""
        self._position = 0
        self._passed = 0
        self._whole: int | None = None
        self._ahead: Iterator[Row] | None = None

    def next(self) -> Row | None:
        """The next row; None at the end of the data. Raises ConfigError when there is no prompt at all."""
        while not self._is_over:
            if self._ahead is None:
                self._ahead = self._epoch_rows()
            row = next(self._ahead, None)
            if row is not None:
                self._pass(row)
                return row
            if self._position == 0:
                raise ConfigError("prompts", value="no prompt", allowed="at least one prompt in each epoch",
                                  remedy="Check the data set, or the arguments of the function that makes it.")
            self.rows, self._whole = self._position, self._passed
            self._begin_epoch(self.epoch + 1)
        return None

    def state(self) -> dict[str, Any]:
        """The place in the data, and checksums of what was passed, as JSON can hold it."""
        return {"epoch": self.epoch, "position": self._position, "rows": self.rows, "passed": self._passed, "whole": self._whole,
                "order": [self._seed, self._settings.shuffle.model_dump()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the last row passed when `state` was made. What lies before it is read once, and compared.

        Raises ConfigError when the data or their order are others than they were.
        """
        _require_same("order", state["order"], self.state()["order"], "Resume with the seed and the shuffle the run began with.")
        if self.rows is not None and state["rows"] is not None:
            _require_same("rows", state["rows"], self.rows, _REMEDY)
        self._begin_epoch(state["epoch"])
        self.rows, self._whole = state["rows"], state["whole"]
        if state["position"] and not self._is_over:
            self._ahead = self._epoch_rows()
            for row in itertools.islice(self._ahead, state["position"]):
                self._pass(row)
        _require_same("checksum", [state["position"], state["passed"]], [self._position, self._passed], _REMEDY)
        if self._whole is not None and isinstance(self._data, Sequence):
            _require_same("checksum", self._whole, sum(map(checksum, enumerate(self._data))) % 2**64, _REMEDY)

    @property
    def _is_over(self) -> bool:
        epochs = 1 if self._is_once else self._settings.epochs
        return epochs is not None and self.epoch >= epochs

    @property
    def _is_once(self) -> bool:
        return isinstance(self._data, Iterator) and self._again is None

    def _begin_epoch(self, number: int) -> None:
        self.epoch, self._position, self._passed, self._ahead = number, 0, 0, None

    def _epoch_rows(self) -> Iterator[Row]:
        """All rows of this epoch in order."""
        shuffle, seed = self._settings.shuffle, derive_seed(self._seed, "epoch", self.epoch)
        if isinstance(shuffle, FullShuffle):
            return ((row, self._data[row]) for row in permutation(len(self._data), seed=seed).tolist())  # type: ignore[arg-type, index]
        if self._begun and self._again and isinstance(self._data, Iterator):
            self._data = _iterable(self._again())
        self._begun = True
        rows = enumerate(self._data)
        return buffered(rows, size=shuffle.rows, seed=seed) if isinstance(shuffle, BufferShuffle) else rows

    def _pass(self, row: Row) -> None:
        require_prompt(row[1])
        check_source(row[1].source)
        self._position += 1
        self._passed = (self._passed + checksum(row)) % 2**64

    def _check_settings(self) -> None:
        settings, is_list = self._settings, isinstance(self._data, Sequence)
        if isinstance(settings.shuffle, FullShuffle) and not is_list:
            raise ConfigError("prompts.shuffle", value="full", allowed="full with a list alone",
                              remedy="Return a list, or use shuffle: {kind: buffer, rows: 1024}.")
        if self._is_once and (settings.epochs or 1) > 1:
            raise ConfigError("prompts.epochs", value=settings.epochs, allowed="1 with an iterator, which cannot start again",
                              remedy="Give a list, or the function that makes the iterator.")
        if isinstance(settings.curriculum, PassRateCurriculum) and not is_list and (settings.epochs or 1) == 1:
            raise ConfigError("prompts.curriculum", value="pass_rate", allowed="pass_rate with prompts that come again",
                              remedy="Return a list; or, if the function's prompts end and it gives the same ones again, set epochs.")


def permutation(rows: int, *, seed: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """[rows] the numbers from 0 in an order that depends on the seed alone: NumPy keeps the raw stream of PCG64 as it is."""
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


def buffered(rows: Iterable[Row], *, size: int, seed: int) -> Iterator[Row]:
    """The rows, each drawn at random from `size` of them: the place of one drawn is taken by the next to come."""
    draws, waiting, coming = np.random.PCG64(seed), [], iter(rows)
    waiting.extend(itertools.islice(coming, size))
    while waiting:
        place = int(draws.random_raw()) % len(waiting)
        drawn = waiting[place]
        following = next(coming, None)
        if following is None:
            waiting[place] = waiting[-1]
            waiting.pop()
        else:
            waiting[place] = following
        yield drawn


def checksum(row: Row) -> int:
    """64 bits of a row and its place; sums of them do not depend on the order. Of an object that msgpack cannot hold the type counts."""
    number, prompt = row
    content = [number, prompt.text, prompt.tokens, prompt.columns, prompt.source, prompt.prompt_id, prompt.messages]
    try:
        packed = msgpack.packb(content, default=_plain, unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError):
        # Integers of more than 64 bits; JSON takes them, ten times as slowly.
        packed = json.dumps(content, default=_plain, skipkeys=True).encode()
    return xxhash.xxh3_64_intdigest(packed)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if hasattr(value, "keys") else type(value).__qualname__


def _iterable(data: object) -> Iterable[Prompt]:
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | dict):
        raise ConfigError("prompts", value=data, allowed="an iterable of asyncrl.Prompt, a function that gives one, or a JSONL file's path",
                          remedy="Return a list, or yield the prompts.")
    return data


_REMEDY = "The data are not those the run began with: bring them back, or begin a new run."


def _require_same(what: str, saved: object, now: object, remedy: str) -> None:
    if saved != now:
        raise ConfigError(f"prompts {what}", value=now, allowed=f"{saved}, as when the cursor was saved", remedy=remedy)
