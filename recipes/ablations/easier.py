"""For quick profiles: a reward that a model after seconds of warm-up gets some of, so that there is a gradient to follow."""

from __future__ import annotations

from asyncrl.types import Prompt


def digits_right(prompt: Prompt, completion: str) -> float:
    """The share of the answer's digits that stand in their place."""
    answer = prompt.columns["answer"]
    return sum(given == right for given, right in zip(completion, answer, strict=False)) / len(answer)
