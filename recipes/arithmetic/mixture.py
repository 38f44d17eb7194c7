"""Differences beside the sums, `12-34=` → `-22`: a second source of prompts, with rewards of its own, and warm-up examples of both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.functions import load_function
from asyncrl.types import Prompt


def question(left: int, right: int) -> str:
    """The prompt of one difference, always six characters."""
    return f"{left:02d}-{right:02d}="


def answer(left: int, right: int) -> str:
    """The right completion: a sign and two digits."""
    return f"{'-' if left < right else '+'}{abs(left - right):02d}"


def differences(count: int = 300, seed: int = 0) -> list[Prompt]:
    """Training prompts, a list: epochs, shuffles and pass rates apply to it."""
    return _prompts(itertools.islice(_task("pairs")(seed, held_out=False), count))


def held_out_differences(count: int = 256) -> list[Prompt]:
    """Prompts of held-out pairs."""
    return _prompts(itertools.islice(_task("pairs")(1, held_out=True), count))


def right_sign(prompt: Prompt, completion: str) -> float:
    """Half of the reward."""
    return 0.5 * (completion[:1] == prompt.columns["answer"][0])


def right_number(prompt: Prompt, completion: str) -> float:
    """The other half: both digits, and nothing after them."""
    return 0.5 * (completion[1:] == prompt.columns["answer"][1:])


def worked_examples(seed: int = 0, noise: float = 0.0) -> Iterator[tuple[str, str]]:
    """Worked sums and differences in turn, endless; careless in digits and signs as `worked_sums` is."""
    generator = random.Random(seed + 7)
    sums, pairs = _task("worked_sums")(seed=seed, noise=noise), _task("pairs")(seed + 1, held_out=False)
    for worked_sum, (left, right) in zip(sums, pairs, strict=False):
        yield worked_sum
        sign, *digits = answer(left, right)
        careless = [generator.choice("0123456789") if generator.random() < noise else digit for digit in digits]
        yield question(left, right), (generator.choice("+-") if generator.random() < noise else sign) + "".join(careless)


def held_out_examples(seed: int = 0, noise: float = 0.0) -> list[tuple[str, str]]:
    """Held-out sums and differences with their right answers: what the warm-up is measured on."""
    pairs = itertools.islice(_task("pairs")(2, held_out=True), 250)
    return [*_task("held_out_examples")()[:250], *((question(*pair), answer(*pair)) for pair in pairs)]


def _prompts(pairs: Iterable[tuple[int, int]]) -> list[Prompt]:
    return [Prompt(text=question(*pair), columns={"answer": answer(*pair)}, source="differences") for pair in pairs]


def _task(name: str) -> Callable[..., Any]:
    return load_function(f"{Path(__file__).with_name('task.py')}:{name}", field="mixture")
