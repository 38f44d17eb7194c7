"""The buffer's metrics: staleness of what is trained, what is dropped and why, and whether that favours short answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from asyncrl.accounting import Count
from asyncrl.buffer.staleness import rollout_staleness, token_staleness
from asyncrl.metrics import Metrics
from asyncrl.types import Batch, Rollout


class BufferStats:
    """Collects between two calls of `drain`. Length bias and histogram are over the whole run."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Empty, or going on from a `state`."""
        self._bag = Metrics()
        self._rewards: list[tuple[int, int, str, float, Mapping[str, float]]] = []
        self._trained = Count(*state["trained"]) if state else Count()
        self._decided = Count(*state["decided"]) if state else Count()
        self._histogram: Counter[int] = Counter(state["histogram"]) if state else Counter()
        self._mask = MaskBias(*state["mask"]) if state else MaskBias()

    def state(self) -> dict[str, Any]:
        """What is over the whole run."""
        return {"trained": list(self._trained), "decided": list(self._decided), "histogram": dict(self._histogram),
                "mask": list(self._mask)}

    @property
    def staleness_tokens(self) -> Mapping[int, int]:
        """Tokens taken so far, by staleness."""
        return dict(sorted(self._histogram.items()))

    @property
    def length_bias(self) -> float | None:
        """Mean length of trained rollouts over the mean of all whose fate is decided; 1 when dropping does not depend on length.

        Rollouts that ended with an error count among those that are not trained. None before anything was trained.
        """
        if not self._trained.tokens or not self._trained.rollouts:
            return None
        return (self._trained.tokens / self._trained.rollouts) / (self._decided.tokens / self._decided.rollouts)

    def mask(self, taken: Batch, masked: Batch) -> None:
        """The gradient that the policy took from tokens of a batch that was taken."""
        if masked is taken:
            return
        before = self._mask
        self._mask = before.plus(taken, masked)
        self._bag.sum("buffer/masked_too_stale/tokens", (self._mask.all - before.all) - (self._mask.kept - before.kept))

    def take(self, batch: Batch, *, bound: int) -> None:
        """A batch leaves for the trainer; `bound` is the `max_staleness` its tokens are compared with."""
        self.rewarded(batch.rollouts)
        for group in batch.groups:
            self._bag.sum(f"buffer/source.{group.prompt.source}/groups", 1)
            self._bag.sum(f"buffer/source.{group.prompt.source}/tokens", group.num_tokens)
        tokens, rollouts = token_staleness(batch), rollout_staleness(batch)
        self._histogram.update(tokens)
        self._bag.mean("staleness/token/mean", sum(s * n for s, n in tokens.items()), count=tokens.total())
        self._bag.mean("staleness/rollout/mean", sum(rollouts), count=len(rollouts))
        self._bag.sum("staleness/over_bound_tokens/sum", sum(n for s, n in tokens.items() if s > bound))
        for name, values in (("token", tokens), ("rollout", rollouts)):
            if values:
                self._bag.max(f"staleness/{name}/max", max(values))

    def rewarded(self, rollouts: Iterable[Rollout]) -> None:
        """The fate of these is decided. Taken groups count, and those dropped for equal rewards: the mean is that before the filter."""
        self._rewards += [(rollout.group_id, rollout.index, rollout.source, rollout.reward, rollout.rewards)
                          for rollout in rollouts if not rollout.status.is_error]

    def train(self, batch: Batch) -> None:
        """A step was made on the batch."""
        valid = [rollout for rollout in batch.rollouts if not rollout.status.is_error]
        self._trained = self._trained.plus(_tokens(valid), len(valid))
        self._decided = self._decided.plus(_tokens(batch.rollouts), len(batch.rollouts))

    def drop(self, reason: str, dropped: Count, *, groups: int) -> None:
        """A group (or a late rollout of one, with `groups` 0) was dropped."""
        self._decided = self._decided.plus(*dropped)
        self._bag.sum(f"buffer/dropped_{reason}/groups", groups)
        self._bag.sum(f"buffer/dropped_{reason}/tokens", dropped.tokens)

    def complete(self, rollout: Rollout) -> None:
        """A rollout came in for a group that is held."""
        self._bag.sum(f"rollout/status_{rollout.status.value}/sum", 1)

    def zero_variance(self, is_zero: bool) -> None:
        """A group was complete, with or without any difference between its rewards."""
        self._bag.mean("buffer/zero_variance/frac", is_zero, count=1)

    def waited(self, who: str, seconds: float) -> None:
        """`trainer` waited in take, or `admission` in admit."""
        self._bag.sum(f"buffer/{who}_wait_s/sum", seconds)

    def drain(self, gauges: Mapping[str, float]) -> Metrics:
        """Everything since the last drain, and the gauges as they stand."""
        bag, self._bag = self._bag, Metrics()
        self._add_rewards(bag)
        for name, value in gauges.items():
            bag.last(f"buffer/{name}/last", value)
        if self.length_bias is not None:
            bag.last("buffer/length_bias/last", self.length_bias)
        if self._mask.bias is not None:
            bag.last("buffer/mask_length_bias/last", self._mask.bias)
        for staleness, tokens in self.staleness_tokens.items():
            bag.last(f"staleness/tokens_at_{staleness}/last", tokens)
        return bag

    def _add_rewards(self, bag: Metrics) -> None:
        """In order of group and index, whichever came first: the last bits of a sum depend on its order."""
        taken, self._rewards = sorted(self._rewards, key=lambda entry: entry[:2]), []
        for _, _, source, reward, by_function in taken:
            bag.sum("reward/rollouts/sum", 1)
            bag.mean("reward/total/mean", reward, count=1)
            bag.mean("reward/zero_or_one/frac", reward in (0.0, 1.0), count=1)
            bag.mean(f"reward/source.{source}/mean", reward, count=1)
            for name, value in by_function.items():
                bag.mean(f"reward/function.{name}/mean", value, count=1)


class MaskBias(NamedTuple):
    """Sums over the rollouts of batches in which tokens lost their gradient for their age."""

    kept: int = 0
    """Tokens with a gradient left."""
    kept_length: int = 0
    """Σ kept of a rollout × its length."""
    all: int = 0
    """Tokens with a gradient before."""
    all_length: int = 0
    """Σ such tokens of a rollout × its length."""

    @property
    def bias(self) -> float | None:
        """Mean length of the rollout that a token with a gradient stands in, after masking over before; None without any."""
        return (self.kept_length / self.kept) / (self.all_length / self.all) if self.kept else None

    def plus(self, taken: Batch, masked: Batch) -> MaskBias:
        """With one batch more, as it was taken and as it is trained on."""
        kept, kept_length, before, before_length = self
        for whole, left in zip(taken.rollouts, masked.rollouts, strict=True):
            had, has = _tokens_with_gradient([whole]), _tokens_with_gradient([left])
            kept, kept_length = kept + has, kept_length + has * whole.num_tokens
            before, before_length = before + had, before_length + had * whole.num_tokens
        return MaskBias(kept, kept_length, before, before_length)


def _tokens_with_gradient(rollouts: Iterable[Rollout]) -> int:
    return sum(int(sequence.loss_mask.sum()) for rollout in rollouts for sequence in rollout.sequences)


def _tokens(rollouts: Iterable[Rollout]) -> int:
    return sum(rollout.num_tokens for rollout in rollouts)
