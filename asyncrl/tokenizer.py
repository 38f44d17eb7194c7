"""Text to tokens and back in the controller, without torch: the model folder's own `tokenizer.json`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from asyncrl.chat_template import ChatTemplate
from asyncrl.errors import ConfigError
from asyncrl.model_folder import reading


class Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    `encode` applies the folder's post-processor once, and not to a text that already begins with what it would put in front:
    a beginning-of-sequence token, by tokenizer or by template, stands there exactly once. What it would put at the end
    is left out: a prompt goes on.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("model", value=str(folder), allowed="a Hugging Face model folder with a tokenizer.json",
                              remedy="Save the tokenizer beside the weights (tokenizer.save_pretrained(folder)).")
        with reading(path):
            self._tokenizer = FastTokenizer.from_file(str(path))
        self._folder = folder
        self._template: ChatTemplate | None = None

    @property
    def largest_id(self) -> int:
        """Of the tokens it was trained with; -1 when it has none. Added ones may lie above what the model has: some models have no use for
        them, as a text model for the token of an image."""
        return max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({}), *,
               add_generation_prompt: bool = True) -> str:
        """The conversation as text by the folder's chat template, up to where the answer begins, or else to its end. Raises ConfigError
        without one."""
        if self._template is None:
            self._template = ChatTemplate(self._folder)
        return self._template.render(messages, variables, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that goes on, special tokens in front as the folder prescribes. ConfigError for half a pair."""
        encoded = self._tokenizer.encode(_encodable(text))
        added = len(list(itertools.takewhile(bool, encoded.special_tokens_mask)))
        behind = len(list(itertools.takewhile(bool, reversed(encoded.special_tokens_mask[added:]))))
        prefix, rest = encoded.ids[:added], encoded.ids[added:len(encoded.ids) - behind]
        return tuple(rest if rest[:added] == prefix else prefix + rest)

    def encode_rest(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that goes on, without special tokens. Raises what `encode` does."""
        return tuple(self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """Text of `tokens` without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


def _encodable(text: str) -> str:
    """The text; JSON may hold halves of surrogate pairs (`"\\ud83d"`), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20):error.end + 20]
        raise ConfigError("prompts", value=around, allowed="text that UTF-8 can hold",
                          remedy=f"Mend or remove character {error.start} of this text: half of a surrogate pair.") from error
    return text
