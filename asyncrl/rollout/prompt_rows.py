"""Prompts as data hold them, and made whole: rows of a JSONL file, conversations rendered, text made tokens exactly once."""

from __future__ import annotations

import codecs
import dataclasses
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.channel import pack, unpack
from asyncrl.errors import ConfigError
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt

_TEMPLATE_COLUMN = "chat_template_kwargs"
"""TRL's name for the variables that a row hands to the chat template."""
_MOST_ROW_BYTES = 16 << 20
"""Longer ones are a file without line ends: a context of a million tokens has 4 MB."""


def complete_prompt(prompt: Prompt, *, prompt_id: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt with id, text and tokens filled in where they were empty.

    Messages become text by the model's chat template, which also gets what the column `chat_template_kwargs` holds. Raises
    ConfigError when it is no Prompt, holds nothing, or holds messages that cannot be rendered.
    """
    require_prompt(prompt)
    text = prompt.text or _rendered(prompt, tokenizer)
    tokens = _token_ids(prompt.tokens) or tokenizer.encode(text)
    if not tokens:
        raise ConfigError("prompts", value=text, allowed="prompts of at least one token",
                          remedy="Remove empty prompts from the data.")
    return dataclasses.replace(prompt, prompt_id=prompt.prompt_id or prompt_id, tokens=tokens, text=text or tokenizer.decode(tokens),
                               messages=tuple(prompt.messages))


def pack_prompts(prompts: Iterable[Prompt]) -> bytes:
    """The prompts as bytes for another process, or a later one. Raises ConfigError naming the column that cannot travel."""
    kept = list(prompts)
    try:
        return pack([prompt.to_wire() for prompt in kept])
    except (TypeError, OverflowError, ValueError):
        for prompt in kept:
            _require_columns(prompt.columns, field="prompts.columns")
        raise


def unpack_prompts(data: bytes) -> tuple[Prompt, ...]:
    """The prompts `pack_prompts` was given; tuples in their columns are lists now, NumPy scalars numbers."""
    return tuple(map(Prompt.from_wire, unpack(data)))


def _require_columns(columns: Mapping[str, Any], *, field: str) -> None:
    for name, value in columns.items():
        try:
            pack(value)
        except (TypeError, OverflowError, ValueError) as error:
            raise ConfigError(f"{field}.{name}", value=type(value).__name__,
                              allowed="what msgpack can carry: text, numbers, lists, mappings, bytes",
                              remedy=f"Make the column one of these: {error}.") from error


def _rendered(prompt: Prompt, tokenizer: Tokenizer) -> str:
    if not prompt.messages or prompt.tokens:
        return ""
    _require_conversation(prompt.messages, field="prompts.messages")
    variables = prompt.columns.get(_TEMPLATE_COLUMN) or {}
    if not isinstance(variables, Mapping):
        raise ConfigError(f"prompts.{_TEMPLATE_COLUMN}", value=variables, allowed="variables for the chat template, by name",
                          remedy="Make it an object, such as {\"enable_thinking\": false}, or rename the column.")
    return tokenizer.render(prompt.messages, variables)


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError as error:
        raise ConfigError("prompts.tokens", value=tokens, allowed="token ids", remedy=f"Make them whole numbers: {error}.") from error
    if min(ids, default=0) < 0:
        raise ConfigError("prompts.tokens", value=min(ids), allowed="token ids of 0 and above", remedy="Remove padding and masked labels.")
    return ids


def _require_conversation(messages: object, *, field: str) -> None:
    """Raise ConfigError unless these are messages that the assistant is to answer."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(field, value=messages, allowed="a list of at least one message",
                          remedy="Remove empty conversations from the data.")
    for message in messages:
        content = message.get("content", 0) if isinstance(message, Mapping) and isinstance(message.get("role"), str) else 0
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ConfigError(field, value=message, allowed='a text under "role" and one (or a list of parts) under "content"',
                              remedy="Rename the keys of the messages.")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(field, value=messages[-1], allowed="a conversation that the assistant is to answer",
                          remedy="Its last message is the assistant's own: make it a column, or render the beginning of an answer to text.")


def require_prompt(prompt: object) -> None:
    """Raise ConfigError unless it is a Prompt."""
    if not isinstance(prompt, Prompt):
        raise ConfigError("prompts", value=prompt, allowed="an iterable of asyncrl.Prompt",
                          remedy="Make each one: Prompt(text=..., columns={...}).")


def read_jsonl(path: Path, *, source: str = "train") -> list[Prompt]:
    """Prompts of a JSONL file: `prompt` is a text or a list of messages, every other key a column. Raises ConfigError naming the row."""
    return list(jsonl_prompts(path, source=source))


def jsonl_prompts(path: Path, *, source: str) -> Iterator[Prompt]:
    """The same one by one, in the memory of one row."""
    try:
        if not path.is_file():
            raise ConfigError("prompts.path", value=str(path), allowed="an existing JSONL file",
                              remedy="Check the path: a recipe's paths are looked for beside it, then in the working folder.")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_ROW_BYTES + 1), b""), 1):
                if len(line) > _MOST_ROW_BYTES:
                    raise ConfigError(f"prompts.path line {number}", value=line[:80], allowed=f"rows of at most {_MOST_ROW_BYTES} bytes",
                                      remedy="Write one prompt a line, ended by a line feed.")
                text = _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number=number)
                if text:
                    yield _row_prompt(text, field=f"prompts.path line {number}", source=source)
    except OSError as error:
        raise ConfigError("prompts.path", value=str(path), allowed="a file that can be read", remedy=f"{error}.") from error


def _decoded(line: bytes, *, number: int) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts.path line {number}", value=line[:80], allowed="UTF-8 text",
                          remedy=f"Save the file as UTF-8: {error.reason} at byte {error.start} of the line.") from error


def _row_prompt(line: str, *, field: str, source: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(field, value=line[:80], allowed="one JSON object a line", remedy=f"Mend the row: {error}.") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
        raise ConfigError(field, value=line[:80], allowed="an object with a text or a list of messages under 'prompt'",
                          remedy="Rename the column.")
    prompt = row.pop("prompt")
    _require_columns(row, field=f"{field} columns")
    if isinstance(prompt, str):
        return Prompt(text=prompt, columns=row, source=source)
    _require_conversation(prompt, field=field)
    return Prompt(messages=tuple(prompt), columns=row, source=source)
