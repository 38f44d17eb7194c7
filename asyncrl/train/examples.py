"""Examples of supervised training: rows of several shapes as tokens, and a mask of what is learned. Needs no torch.

A row is one of

    {"prompt": text, "completion": text}             the completion ends with the token engines stop at, which is learned too
    {"prompt": messages, "completion": messages}     rendered with the model's chat template; a completion may be the answer's text
    {"messages": messages}                           every answer of the assistant is learned, nothing else
    {"prompt": ids, "completion": ids}               token ids as they are
    {"tokens": ids, "loss_mask": booleans}           the same, learned where the mask says so

or a pair (prompt, completion). Prompt and completion are encoded apart, as they meet again when the model is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.model_folder import reading
from asyncrl.tokenizer import Tokenizer

Row = Any
"""See above; or an `Example`."""
_SHAPES = ({"prompt", "completion"}, {"messages"}, {"tokens", "loss_mask"})
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence, and which of its tokens are learned."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], never set at the first token."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedExamples:
    """N examples laid end to end."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T]"""
    cu_seqlens: NDArray[np.int64]
    """[N + 1] where each starts, and T."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> PackedExamples:
        """In their order."""
        return cls(tokens=np.concatenate([example.tokens for example in examples]),
                   loss_mask=np.concatenate([example.loss_mask for example in examples]),
                   cu_seqlens=np.concatenate([[0], np.cumsum([len(example.tokens) for example in examples])]).astype(np.int64))

    @property
    def num_loss_tokens(self) -> int:
        """The denominator of a mean over tokens."""
        return int(np.count_nonzero(self.loss_mask))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, as they travel to the ranks."""
        return {"tokens": self.tokens, "loss_mask": self.loss_mask, "cu_seqlens": self.cu_seqlens}


class ExampleReader:
    """Makes examples for the model of a Hugging Face folder. Raises ConfigError for one without an end-of-sequence token."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer(folder)
        config = _json(folder / "config.json")
        text = config.get("text_config") or config
        self._vocab_size: int = text["vocab_size"]
        self._context_tokens: int | None = text.get("max_position_embeddings")
        self._eos_tokens = _end_of_sequence(folder, config)

    def read(self, rows: Iterable[Row], *, field: str) -> Iterator[Example]:
        """The example of each row, one by one. Raises ConfigError, with the number of the row, for one it cannot be made of."""
        for number, row in enumerate(rows, start=1):
            try:
                example = row if isinstance(row, Example) else self._example(row, field=field)
                self._check(example, field=field)
            except ConfigError as error:
                if error.field not in (field, "prompts"):  # the model's fault, not the row's
                    raise
                raise error.moved(error.field, f"{field} row {number}") from error
            yield example

    def _example(self, row: Row, *, field: str) -> Example:
        if isinstance(row, tuple) and len(row) == 2:
            row = dict(zip(("prompt", "completion"), row, strict=True))
        if not isinstance(row, Mapping) or not any(shape <= set(row) for shape in _SHAPES):
            raise ConfigError(field, value=row, allowed="prompt and completion, messages, or tokens and loss_mask",
                              remedy="Rename the columns; docs/sft.md has every shape of a row.")
        if "messages" in row:
            return self._conversation(row["messages"], after=0, field=field)
        if "tokens" in row:
            return Example(_ids(row["tokens"], field=field), _mask(row["loss_mask"], field=field))
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return _joined(self._tokenizer.encode(prompt), (*self._tokenizer.encode_rest(completion), self._eos_tokens[0]))
        if _are_messages(prompt):
            answer = [{"role": _ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
            if isinstance(answer, list | tuple):
                return self._conversation([*prompt, *answer], after=len(prompt), field=field)
        return _joined(_ids(prompt, field=field), _ids(completion, field=field))

    def _conversation(self, messages: Any, *, after: int, field: str) -> Example:
        """Every answer from message `after` on is learned, up to the token that ends it; what the template writes after that is not."""
        answers = [n for n, message in enumerate(messages) if n >= after and message.get("role") == _ASSISTANT] \
            if _are_messages(messages) else []
        if not answers:
            raise ConfigError(field, value=messages, allowed="messages with an answer of the assistant", remedy="Give a list of "
                              '{"role": …, "content": …}, one of them of the role assistant.')
        tokens: list[int] = []
        learned: list[bool] = []
        text = ""
        for n in answers:
            asked = self._tokenizer.render(messages[:n])
            answered = self._tokenizer.render(messages[:n + 1], add_generation_prompt=False)
            if not (asked.startswith(text) and answered.startswith(asked)):
                raise ConfigError(field, value=messages, allowed="a conversation to which the chat template adds, turn after turn",
                                  remedy="This model's template rewrites what came before. Give one row an answer, {prompt: messages, "
                                         "completion: text}; where that fails too, the prompt as text.")
            given = (self._tokenizer.encode if not tokens else self._tokenizer.encode_rest)(asked[len(text):])
            answer = self._answer(answered[len(asked):], is_last=n == answers[-1])
            tokens += [*given, *(token for token, _ in answer)]
            learned += [*(False for _ in given), *(is_learned for _, is_learned in answer)]
            text = answered
        return Example(np.array(tokens, np.int32), np.array(learned, np.bool_))

    def _answer(self, text: str, *, is_last: bool) -> list[tuple[int, bool]]:
        """Its tokens, and which are learned: those up to the last at which engines stop. A last one without such a token gets it."""
        tokens = self._tokenizer.encode_rest(text)
        ends = [place for place, token in enumerate(tokens) if token in self._eos_tokens]
        if ends:
            return [(token, place <= ends[-1]) for place, token in enumerate(tokens)]
        return [(token, True) for token in (*tokens, *self._eos_tokens[:is_last])]

    def _check(self, example: Example, *, field: str) -> None:
        tokens, mask = example.tokens, example.loss_mask
        if tokens.shape != mask.shape or not mask.any() or mask[0]:
            raise ConfigError(field, value=f"{len(tokens)} tokens, {int(mask.sum())} of {len(mask)} learned",
                              allowed="as many places in the mask as tokens, at least one of them learned, and not the first",
                              remedy="Nothing stands before the first that could predict it. Mend the row, or leave it out.")
        if int(tokens.max()) >= self._vocab_size or int(tokens.min()) < 0:
            raise ConfigError(field, value=f"a token {int(tokens.max())}", allowed=f"token ids from 0, below the model's vocab_size "
                              f"{self._vocab_size}", remedy="Use the model's own tokenizer, or resize its embeddings.")
        if self._context_tokens is not None and len(tokens) > self._context_tokens:
            raise ConfigError(field, value=f"{len(tokens)} tokens", allowed=f"at most {self._context_tokens}, the model's context",
                              remedy="Shorten the row, or leave it out.")


def jsonl_rows(path: Path, *, field: str) -> list[Row]:
    """The objects of a JSONL file. Raises ConfigError with the line that is none."""
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ConfigError(f"{field} line {number}", value=line[:200], allowed="one JSON object a line",
                                      remedy=f"Mend the row: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, value=str(path), allowed="a JSONL file in UTF-8 that can be read", remedy=f"{error}.") from error
    return rows


def _joined(prompt: Sequence[int] | NDArray[np.int32], completion: Sequence[int] | NDArray[np.int32]) -> Example:
    return Example(np.array([*prompt, *completion], np.int32), np.arange(len(prompt) + len(completion)) >= len(prompt))


def _ids(values: Any, *, field: str) -> NDArray[np.int32]:
    array = _array(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(field, value=values, allowed="text, messages, or a list of token ids, both columns alike",
                          remedy="docs/sft.md has every shape of a row.")
    return np.clip(array, -1, np.iinfo(np.int32).max).astype(np.int32)


def _mask(values: Any, *, field: str) -> NDArray[np.bool_]:
    array = _array(values)
    if array.ndim != 1 or array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        raise ConfigError(field, value=values, allowed="a loss_mask of booleans, or of 0 and 1, one for each token",
                          remedy="Labels with -100 are no mask, and neither is text: write true where a token is learned.")
    return array.astype(np.bool_)


def _array(values: Any) -> NDArray[Any]:
    """Empty, and of numbers that are not whole, where the values make none."""
    try:
        return np.asarray(values) if isinstance(values, list | tuple | np.ndarray) and len(values) else np.empty(0)
    except (ValueError, OverflowError):  # lists of several lengths
        return np.empty(0)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _end_of_sequence(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens at which engines stop, the one that is written first."""
    generation = folder / "generation_config.json"
    eos = (_json(generation) if generation.is_file() else config).get("eos_token_id")
    if eos is None or eos == []:
        raise ConfigError("model", value=str(folder), allowed="a generation_config.json with an eos_token_id",
                          remedy="Set model.generation_config.eos_token_id before the model is saved.")
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))
