"""The sums again, thought about first: `12+34=` → `++++++=046`, where the number of `+` has a long tail.

The thinking carries nothing: it is there so that lengths differ as those of reasoning models do. The policy samples them itself, having
learned from examples with a lognormal number; the reward reads what follows the last `=`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.functions import load_function
from asyncrl.types import Prompt

MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 12.0, 0.9, 120
THOUGHT, DONE = "+", "="
_ANSWER_TOKENS = 5
"""The `=`, three digits and the end of sequence."""
_POOL_BATCHES = 8
"""Examples are sorted by length within so many batches: padding would take four fifths of the warm-up otherwise."""


def thinking_tokens(generator: random.Random, *, median: float = MEDIAN_TOKENS, by_tokens: bool = False) -> int:
    """Lognormal, cut at `MOST_TOKENS`; `by_tokens` draws an example as often as it has tokens.

    A batch of like lengths has its loss averaged over its tokens, which makes an example count by one over its length; that undoes it.
    """
    mean = median * math.exp(SIGMA**2 / 2)
    longer = by_tokens and generator.random() * (mean + _ANSWER_TOKENS) < mean
    return min(MOST_TOKENS, round(median * generator.lognormvariate(SIGMA**2 if longer else 0.0, SIGMA)))


def thoughtful_sums(seed: int = 0, noise: float = 0.0, batch_size: int = 256, plain_batches: int = 0,
                    ramp_batches: int = 0) -> Iterator[tuple[str, str]]:
    """`worked_sums` with thinking before the answer, endless, in batches of like length.

    The first `plain_batches` do not think, which teaches to add in a tenth of the time; thinking then grows over `ramp_batches`.
    """
    generator = random.Random(seed + 5)
    examples = _task("worked_sums")(seed=seed, noise=noise)
    for number in itertools.count(0, _POOL_BATCHES):
        grown = min(1.0, max(0, number - plain_batches) / ramp_batches) if ramp_batches else float(number >= plain_batches)
        counts = sorted(thinking_tokens(generator, median=MEDIAN_TOKENS * grown, by_tokens=True) for _ in range(_POOL_BATCHES * batch_size))
        batches = [counts[start:start + batch_size] for start in range(0, len(counts), batch_size)]
        for count in itertools.chain.from_iterable(generator.sample(batches, len(batches))):
            prompt, digits = next(examples)
            yield prompt, THOUGHT * count + DONE + digits


def held_out_examples(seed: int = 0, **_: float) -> list[tuple[str, str]]:
    """Held-out sums already thought about, with their right digits: the warm-up is measured on these alone, not on guessing the length."""
    generator = random.Random(seed)
    return [(prompt + THOUGHT * thinking_tokens(generator) + DONE, digits) for prompt, digits in _task("held_out_examples")()]


def is_correct(prompt: Prompt, completion: str) -> float:
    """1 for exactly the right digits after the thinking, else 0."""
    return float(completion.rpartition(DONE)[2] == prompt.columns["answer"])


def _task(name: str) -> Callable[..., Any]:
    return load_function(f"{Path(__file__).with_name('task.py')}:{name}", field="long_tail")
