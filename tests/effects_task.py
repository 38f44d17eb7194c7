"""Functions that the configurations of `test_config_effects.py` name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from asyncrl.types import Prompt


def questions(count: int = 4) -> list[Prompt]:
    """Prompts 0+1=, 1+1=, …"""
    return [Prompt(text=f"{number}+1=") for number in range(count)]


def other_questions(count: int = 4) -> list[Prompt]:
    """The same with a minus."""
    return [Prompt(text=f"{number}-1=") for number in range(count)]


def too_long() -> list[Prompt]:
    """Two prompts that no small context has room for."""
    return [Prompt(text=digit * 5000) for digit in "12"]


def always_one(prompt: Prompt, completion: str) -> float:
    """1."""
    return 1.0


def varied(prompt: Prompt, completion: str) -> float:
    """Another reward for most completions."""
    return (sum(map(ord, completion)) + len(completion)) % 13 / 13.0


def broken(prompt: Prompt, completion: str) -> float:
    """Raises."""
    raise ZeroDivisionError("a line of the reward")


def broken_after_a_while(prompt: Prompt, completion: str) -> float:
    """As `varied` for the first 60 answers of a worker, then raises."""
    return varied(prompt, completion) if next(_JUDGED) < 60 else broken(prompt, completion)


_JUDGED = itertools.count()


def always_two(prompt: Prompt, completion: str) -> float:
    """2."""
    return 2.0


def seeded_copies(seed: int = 0, noise: float = 0.0) -> Iterator[tuple[str, str]]:
    """`4=` is answered by `4`; the seed says with which digit to begin. Endless."""
    digits = [(seed + number) % 10 for number in range(10)]
    return itertools.cycle([(f"{digit}=", str(digit)) for digit in digits])
