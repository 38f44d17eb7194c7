"""Where prompts come from: any iterable of `Prompt`, or a JSONL file in the shape other trainers read."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt


class PromptSource:
    """Prompts in order, each with an id of its own and its token ids.

    Args:
        data: an iterable of Prompt (a list starts again at its end, an iterator ends the data), or the path of a JSONL file
            whose rows hold `prompt` and, beside it, the columns the reward reads.
        epochs: how often to go through the data; None goes on as long as the run asks.

    Raises ConfigError for a missing file, a row without `prompt`, an element that is no Prompt, or no data at all.
    """

    def __init__(self, data: Iterable[Prompt] | str | Path, *, epochs: int | None = None) -> None:
        if epochs is not None and epochs < 1:
            raise ConfigError("prompts.epochs", value=epochs, allowed="an integer of at least 1, or None",
                              remedy="None goes on as long as the run asks.")
        if not isinstance(data, Iterable | Path):
            raise ConfigError("prompts", value=data, allowed="an iterable of asyncrl.Prompt, or the path of a JSONL file",
                              remedy="Return a list, or yield the prompts.")
        self._data = read_jsonl(Path(data)) if isinstance(data, str | Path) else data
        self._epochs = epochs
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """How many prompts have been handed out."""
        return self._cursor

    def stream(self, tokenizer: Tokenizer) -> Iterator[Prompt]:
        """The prompts with ids and tokens filled in; ends with the data."""
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            before = self._cursor
            for prompt in self._data:
                yield self._complete(prompt, tokenizer)
            if self._cursor == before:
                if epoch == 0:
                    raise ConfigError("prompts", value="no prompt", allowed="at least one prompt",
                                      remedy="Check the data set, or the arguments of the function that makes it.")
                return
            epoch += 1

    def _complete(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        _require_prompt(prompt)
        ordinal, self._cursor = self._cursor, self._cursor + 1
        return complete_prompt(prompt, prompt_id=f"{prompt.source}/{ordinal}", tokenizer=tokenizer)


def complete_prompt(prompt: Prompt, *, prompt_id: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt with id and tokens filled in where they were empty. Raises ConfigError when it is none, or holds nothing."""
    _require_prompt(prompt)
    tokens = _token_ids(prompt.tokens) or tokenizer.encode(_encodable(prompt.text))
    if not tokens:
        raise ConfigError("prompts", value=prompt.text, allowed="prompts of at least one token",
                          remedy="Remove empty prompts from the data.")
    text = prompt.text or tokenizer.decode(tokens)
    return dataclasses.replace(prompt, prompt_id=prompt.prompt_id or prompt_id, tokens=tokens, text=text)


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError as error:
        raise ConfigError("prompts.tokens", value=tokens, allowed="token ids", remedy=f"Make them whole numbers: {error}.") from error
    if min(ids, default=0) < 0:
        raise ConfigError("prompts.tokens", value=min(ids), allowed="token ids of 0 and above", remedy="Remove padding and masked labels.")
    return ids


def _encodable(text: str) -> str:
    """The text; JSON may hold halves of surrogate pairs (`"\\ud83d"`), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20):error.end + 20]
        raise ConfigError("prompts", value=around, allowed="text that UTF-8 can hold",
                          remedy=f"Mend or remove character {error.start} of this prompt: half of a surrogate pair.") from error
    return text


def _require_prompt(prompt: object) -> None:
    if not isinstance(prompt, Prompt):
        raise ConfigError("prompts", value=prompt, allowed="an iterable of asyncrl.Prompt",
                          remedy="Make each one: Prompt(text=..., columns={...}).")


def read_jsonl(path: Path, *, source: str = "train") -> list[Prompt]:
    """Prompts of a JSONL file: `prompt` is the text, every other key a column. Raises ConfigError naming the row."""
    if not path.is_file():
        raise ConfigError("prompts.path", value=str(path), allowed="an existing JSONL file", remedy="Check the path; it is relative to "
                          "the folder the command runs in.")
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"prompts.path line {number}", value=line[:80], allowed="one JSON object a line",
                              remedy=f"Mend the row: {error}.") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ConfigError(f"prompts.path line {number}", value=line[:80], allowed="an object with a text under 'prompt'",
                              remedy="Rename the column, or render the prompt to text first.")
        prompts.append(Prompt(text=row.pop("prompt"), columns=row, source=source))
    return prompts
