"""Sums of two numbers up to 20, asked in a chat; the wanted form is shown by one worked example of another kind.

Told in words how to answer, a model this small hardly ever does. Shown one example, it copies the form four times in ten and is right
one time in four, so both parts of the reward differ within a group from the first step on. An example that is a sum itself would be
copied nine times in ten, with little left to learn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from asyncrl.types import Prompt

LARGEST = 20
EXAMPLE = (("user", "What is 9 minus 4?"), ("assistant", "9 minus 4 is 5. Answer: 5"))

_ENDS_AS_ASKED = re.compile(r"Answer: \d+\Z")
_NUMBER = re.compile(r"\d+")


def chat(question: str) -> str:
    """The conversation in ChatML, up to where the assistant's answer begins. The special tokens are text here, one token each encoded.

    No system message: the one the model's own template puts in front would add 21 tokens to each prompt.
    """
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (*EXAMPLE, ("user", question)))
    return f"{turns}<|im_start|>assistant\n"


def is_held_out(left: int, right: int) -> bool:
    """A fixed eighth of the 400 pairs, by a generator seeded with the pair."""
    return random.Random(100 * left + right).random() < 0.125


def pairs(seed: int, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """Endless random pairs of one side of the split."""
    generator = random.Random(seed)
    while True:
        left, right = generator.randint(1, LARGEST), generator.randint(1, LARGEST)
        if is_held_out(left, right) == held_out:
            yield left, right


def sums(seed: int = 0) -> Iterator[Prompt]:
    """Training prompts, endless."""
    return (as_prompt(left, right, source="sums") for left, right in pairs(seed, held_out=False))


def held_out_sums(count: int = 64) -> list[Prompt]:
    """Prompts of held-out pairs."""
    source = pairs(1, held_out=True)
    return [as_prompt(*next(source), source="held_out") for _ in range(count)]


def as_prompt(left: int, right: int, *, source: str) -> Prompt:
    """The prompt, with the sum as a column for the reward."""
    return Prompt(text=chat(f"What is {left} + {right}?"), columns={"sum": left + right}, source=source)


def ends_as_asked(prompt: Prompt, completion: str) -> float:
    """1 when the last words are `Answer: ` and a whole number, right or wrong."""
    return float(_ENDS_AS_ASKED.search(completion.strip()) is not None)


def is_right(prompt: Prompt, completion: str) -> float:
    """1 when the last number written is the sum, in whatever form: the two parts are earned apart."""
    numbers = _NUMBER.findall(completion)
    return float(bool(numbers) and numbers[-1].lstrip("0") == str(prompt.columns["sum"]))
