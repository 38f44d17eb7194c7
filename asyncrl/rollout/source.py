"""One source of prompts: a data set, its share of the mixture, and what is passed over in it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError, RunAborted
from asyncrl.metrics import Metrics
from asyncrl.rollout.curriculum import PassRates
from asyncrl.rollout.data_config import DataSettings, PassRateCurriculum
from asyncrl.rollout.data_set import DataSet
from asyncrl.rollout.prompt_rows import complete_prompt
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout

_MOST_PASSED_OVER = 10_000
"""In a row, of data whose length is not known: the bound of a search that may have no end."""

_SKIPPED = "skipped_"
_ROWS_NAMED = 8


class Source:
    """Hands out the prompts of one data set. `name` is empty when the prompts name their own source."""

    def __init__(self, data: DataSet, *, settings: DataSettings, name: str = "", weight: float = 1.0) -> None:
        if not 0 < weight < math.inf:
            raise ConfigError(f"prompts.sources.{name}.weight", value=weight, allowed="a finite number above 0",
                              remedy="Leave the source out.")
        self.name, self.weight = name, weight
        self.handed_out = 0
        self.ended = False
        self._data, self._settings = data, settings
        self._rates = PassRates(settings.curriculum) if isinstance(settings.curriculum, PassRateCurriculum) else None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first_rows: dict[tuple[str, str], dict[int | None, None]] = {}

    @property
    def goes_by_rewards(self) -> bool:
        """Whether the rewards that have come in decide what is asked next."""
        return self._settings.goes_by_rewards

    @property
    def skipped(self) -> int:
        """How many prompts have been passed over."""
        return sum(count for (what, _), count in self._counts.items() if what.startswith(_SKIPPED))

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Count a prompt that is not asked, under the source it names."""
        self._counts[f"{_SKIPPED}{reason}", prompt.source] += 1
        rows = self._first_rows.setdefault((reason, prompt.source), {})
        if len(rows) < _ROWS_NAMED:
            rows[prompt.row] = None

    def passed_over(self) -> list[str]:
        """What has been passed over, a line for each reason, with the first rows since the start of this process."""
        return [f"{self._counts[f'{_SKIPPED}{reason}', source]} prompts of source {source!r} passed over, {reason}: rows "
                f"{', '.join(map(str, rows))}{', …' if len(rows) == _ROWS_NAMED else ''}"
                for (reason, source), rows in self._first_rows.items()]

    def renamed(self, name: str, *, weight: float) -> Source:
        """The same data as a source of a mixture."""
        return Source(self._data, settings=self._settings, name=name, weight=weight)

    def next(self, tokenizer: Tokenizer, *, ordinal: int) -> Prompt | None:
        """The next prompt that is not passed over; None, and `ended`, at the end of the data.

        When a whole epoch was passed over, verdicts on pass rates expire at once; raises RunAborted when it was for the length alone.
        """
        passed_over, judged = 0, False
        while (row := self._data.next()) is not None:
            prompt = dataclasses.replace(row[1], row=row[0], source=self.name or row[1].source)
            if not (is_judged := self._is_judged(prompt)):
                prompt = complete_prompt(prompt, prompt_id=f"{prompt.source}/{ordinal}", tokenizer=tokenizer)
                if not self._is_too_long(prompt):
                    self.handed_out += 1
                    self._counts["handed_out", prompt.source] += 1
                    return prompt
            passed_over, judged = passed_over + 1, judged or is_judged
            if passed_over >= (2 * self._data.rows - 1 if self._data.rows else _MOST_PASSED_OVER):
                # Wherever they began, and in whatever order, so many hold a whole epoch.
                self._look_again(prompt, passed_over, judged=judged)
                passed_over, judged = 0, False
        if passed_over and not self.handed_out:
            self._look_again(prompt, passed_over, judged=False)
        self.ended = True
        return None

    def observe(self, prompt: Prompt, rollout: Rollout) -> None:
        """A rollout of one of its prompts is finished."""
        if self._rates is not None and prompt.row is not None and not rollout.status.is_error:
            self._rates.observe(prompt.row, rollout.reward, asked=self.handed_out)

    def state(self) -> dict[str, Any]:
        """All of it but the settings, as JSON can hold it."""
        return {"handed_out": self.handed_out, "weight": self.weight, "counts": [[*key, count] for key, count in self._counts.items()],
                "data": self._data.state(), "rates": self._rates.state() if self._rates else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was made. Raises ConfigError when weight, data, order or curriculum are not those of then."""
        for what, saved, now in (("weight", state["weight"], self.weight),
                                 ("curriculum", state["rates"] is not None, self._rates is not None)):
            if now != saved:
                raise ConfigError(f"prompts {what}", value=now, allowed=f"{saved}, as when the cursor of source {self.name!r} was saved",
                                  remedy="Resume with the settings the run began with, or begin a new run.")
        self._data.restore(state["data"])
        self.handed_out = state["handed_out"]
        self._counts = Counter({(what, source): count for what, source, count in state["counts"]})
        if self._rates is not None:
            self._rates.restore(state["rates"])

    def measure(self, bag: Metrics) -> None:
        """Add its counts over the whole run."""
        bag.last(f"prompts/epoch{'.' if self.name else ''}{self.name}/last", self._data.epoch)
        for (what, source), count in self._counts.items():
            bag.last(f"prompts/{what}.{source}/last", count)

    def _is_judged(self, prompt: Prompt) -> bool:
        """Whether a verdict holds the row back. One that has expired is forgotten, and counted."""
        verdict = self._rates.verdict(prompt.row) if self._rates else None
        if verdict is None:
            return False
        if self._rates.has_expired(prompt.row, asked=self.handed_out, rows=self._data.rows):
            self._rates.forget(prompt.row)
            self._counts["rechecked", prompt.source] += 1
            return False
        self.skip(prompt, verdict)
        return True

    def _is_too_long(self, prompt: Prompt) -> bool:
        limit = self._settings.max_prompt_tokens
        if limit is None or len(prompt.tokens) <= limit:
            return False
        self.skip(prompt, "too_long")
        return True

    def _look_again(self, newest: Prompt, passed_over: int, *, judged: bool) -> None:
        if not judged:
            raise RunAborted(f"{passed_over} prompts of source {newest.source!r} in a row are longer than its max_prompt_tokens = "
                             f"{self._settings.max_prompt_tokens}: the newest, row {newest.row}, has {len(newest.tokens)}. "
                             "Raise it, or shorten the prompts.")
        self._rates.void(asked=self.handed_out)
