"""A model's own chat template: a list of messages to the text the model was taught to answer. Needs jinja2 alone."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.errors import ConfigError
from asyncrl.model_folder import reading

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names of tokens a template may use, as Hugging Face hands them over."""


_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"})
"""What a prompt decides, or nothing here offers."""


class ChatTemplate:
    """The template of a Hugging Face model folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

    Of several named ones it is `default`. Its language is the one Hugging Face renders with, in the same sandbox; special tokens
    are those the folder names. Raises ConfigError for a folder without a template, or one that is no valid Jinja.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        settings = _json_file(self._folder / "tokenizer_config.json")
        source = self._source(settings)
        with reading(self._folder):
            self._template = _environment().from_string(source)
        tokens = _json_file(self._folder / "special_tokens_map.json") | settings
        self._tokens = {name: _content(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name) is not None}

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({}), *,
               add_generation_prompt: bool = True) -> str:
        """The conversation as text, up to where the assistant's answer begins. `variables` reach the template (`enable_thinking`).
        Without `add_generation_prompt` it ends with its last message.

        Raises ConfigError with the template's own words when it refuses the messages, and for variables that are not the caller's.
        """
        if reserved := sorted(_RESERVED & set(variables)):
            raise ConfigError("prompts.chat_template_kwargs", value=reserved, allowed=f"names other than {', '.join(sorted(_RESERVED))}",
                              remedy="Leave them out: a prompt is a conversation without tools that waits for its answer.")
        given = self._tokens | {"tools": None, "documents": None} | dict(variables)
        try:
            return self._template.render(given | {"messages": list(messages), "add_generation_prompt": add_generation_prompt})
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError) as error:
            raise ConfigError("prompts", value=messages, allowed=f"messages that the chat template of {self._folder} renders",
                              remedy=f"It says: {type(error).__name__}: {error}.") from error

    def _source(self, settings: Mapping[str, Any]) -> str:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            with reading(path):
                return path.read_text(encoding="utf-8")
        source = settings.get("chat_template")
        if isinstance(source, list):
            source = {named["name"]: named["template"] for named in source}.get("default")
        if not isinstance(source, str):
            raise ConfigError("model", value=str(self._folder), allowed="a folder with a chat template, where prompts are messages",
                              remedy="Put chat_template.jinja into it, use the instruction-tuned model, or give prompts as text.")
        return source


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what an assistant wrote; in a prompt it is what stands inside."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """Jinja's own filter writes `<` as an escape, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _json_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _content(token: str | Mapping[str, Any]) -> str:
    """The text of a token, which a folder writes plainly or with its flags."""
    return token if isinstance(token, str) else str(token["content"])
