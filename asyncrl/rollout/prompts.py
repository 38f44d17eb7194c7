"""Where prompts come from: one data set, or several mixed by weight, in an order that another process can take up at any point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.metrics import Metrics
from asyncrl.rollout.data_config import DataSettings
from asyncrl.rollout.data_set import Data, DataSet
from asyncrl.rollout.names import check_name
from asyncrl.rollout.prompt_rows import read_jsonl
from asyncrl.rollout.source import Source
from asyncrl.settings import validated
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout


class PromptSource:
    """Prompts in order, each with an id of its own and its token ids.

    Args:
        data: an iterable of Prompt (a list starts again at its end, an iterator ends the data); a function that gives one, called again
            for each epoch unless it gave a list; or the path of a JSONL file whose rows hold `prompt`, a text or a list of messages,
            and, beside it, the columns the reward reads.
        seed: of the shuffles.
        settings: the fields of `DataSettings`: epochs, shuffle, max_prompt_tokens, curriculum.

    Raises ConfigError for a missing file, a row without `prompt`, an element that is no Prompt, or no data at all.
    """

    def __init__(self, data: Data | str | Path, *, seed: int = 0, **settings: Any) -> None:
        checked = validated(DataSettings, settings, name="prompts")
        rows = read_jsonl(Path(data)) if isinstance(data, str | Path) else data
        self._begin((Source(DataSet(rows, settings=checked, seed=seed), settings=checked),))

    def _begin(self, sources: tuple[Source, ...]) -> None:
        self._sources = sources
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """How many prompts have been handed out."""
        return self._cursor

    @property
    def skipped(self) -> int:
        """How many prompts have been passed over, whatever the reason."""
        return sum(source.skipped for source in self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """The sources of a mixture, in its order; empty for one data set, whose prompts name their own."""
        return tuple(source.name for source in self._sources if source.name)

    def stream(self, tokenizer: Tokenizer) -> Iterator[Prompt]:
        """The prompts from the cursor on, with ids and tokens filled in; ends with the data. One stream at a time.

        A mixture hands out the source that is furthest behind its share, so that no share of what was handed out is ever off by
        more than half as many prompts as there are sources (one at least). A source that ends drops out, the rest goes on.
        """
        while running := [source for source in self._sources if not source.ended]:
            source = min(running, key=lambda source: (source.handed_out + 0.5) / source.weight)
            prompt = source.next(tokenizer, ordinal=self._cursor)
            if prompt is not None:
                self._cursor += 1
                yield prompt

    @property
    def goes_by_rewards(self) -> bool:
        """Whether the rewards that have come in decide what is asked next."""
        return any(source.goes_by_rewards for source in self._sources)

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Count a prompt that was handed out and cannot be asked."""
        self._source_of(prompt).skip(prompt, reason)

    def passed_over(self) -> list[str]:
        """What has been passed over, a line for each reason and source, with the first rows since the start of this process."""
        return [line for source in self._sources for line in source.passed_over()]

    def observe(self, prompt: Prompt, rollout: Rollout) -> None:
        """A rollout of a prompt is finished: what a curriculum goes by."""
        self._source_of(prompt).observe(prompt, rollout)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON and msgpack can hold it: what has been handed out so far will not be handed out again after `restore`."""
        return {"cursor": self._cursor, "sources": {source.name: source.state() for source in self._sources}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the next prompt that was not handed out when `state` was made. Comes before the first `stream`.

        What is skipped is read and compared, not tokenised: of a list by place, of a function or iterator by going through it again.
        Raises ConfigError when sources, order or data are others than they were; RuntimeError once a prompt was handed out.
        """
        if self._cursor:
            raise RuntimeError("restore() comes before the first prompt")
        saved = {source.name for source in self._sources}
        if saved != set(state["sources"]):
            raise ConfigError("prompts.sources", value=sorted(saved), allowed=f"those of the checkpoint, {sorted(state['sources'])}",
                              remedy="Resume with the sources the run began with, or begin a new run.")
        for source in self._sources:
            source.restore(state["sources"][source.name])
        self._cursor = state["cursor"]

    def metrics(self) -> Metrics:
        """Counts over the whole run by source, and the epoch of each data set."""
        bag = Metrics()
        bag.last("prompts/skipped/last", self.skipped)
        for source in self._sources:
            source.measure(bag)
        return bag

    def _source_of(self, prompt: Prompt) -> Source:
        return next(source for source in self._sources if source.name in ("", prompt.source))


class Mixture(PromptSource):
    """Several sources asked by weight: `Mixture({"sums": PromptSource(sums()), ...}, weights={"sums": 2.0})`.

    Args:
        sources: by the name their prompts get as `source`.
        weights: shares, relative to one another; 1 for those left out.

    Raises ConfigError for no source, a name that is no part of a metric's, a weight that is not above 0, one without source, or a source
    that is a mixture itself.
    """

    def __init__(self, sources: Mapping[str, PromptSource], *, weights: Mapping[str, float] | None = None) -> None:
        weights = dict(weights or {})
        unknown = sorted(weights.keys() - sources.keys())
        if unknown or not sources:
            raise ConfigError("prompts.sources, weights", value=(sorted(sources), unknown), allowed="sources, and weights, by name",
                              remedy=f"Name a source {unknown[0]!r}, or drop its weight." if unknown else "Name at least one source.")
        parts = []
        for name, source in sources.items():
            check_name(name, field="prompts.sources")
            if not isinstance(source, PromptSource) or source.names or source.cursor:
                raise ConfigError(f"prompts.sources.{name}", value=source, allowed="an unused PromptSource of one data set",
                                  remedy="Wrap the data: PromptSource(...); name the sources of an inner mixture in the outer one.")
            parts.append(source._sources[0].renamed(name, weight=weights.get(name, 1.0)))
        self._begin(tuple(parts))
