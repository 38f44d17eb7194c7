"""Any dataset of reasoning-gym by name, with its own scorer as the reward: puzzles made as they are asked for.

The one file that imports reasoning-gym. A question carries its whole entry to the scorer, as Python literals: some datasets make
another entry when they are asked for the same one again, and some hold what msgpack would change, such as tuples.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.types import Prompt

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError as missing:
    raise ConfigError("recipe", value="recipes/reasoning_gym", allowed="an environment with reasoning-gym",
                      remedy=f"pip install 'asyncrl[reasoning-gym]'. It says: {missing}.") from missing

HELD_OUT_SEED = 2**30
"""Entry i of seed s is entry 0 of seed s + i in many datasets: small seeds share most of their questions, so held-out ones are far off."""


@dataclass(frozen=True)
class Questions:
    """Prompts of one dataset, made anew at each pass. `columns` are what `score` reads."""

    dataset: str
    settings: str
    """JSON, so that it is a key and a column."""
    template: str
    system: str | None
    chat: bool
    answer_tag: str | None
    source: str

    def __len__(self) -> int:
        return len(_dataset(self.dataset, self.settings))

    def __iter__(self) -> Iterator[Prompt]:
        return (self.prompt(index) for index in range(len(self)))

    def prompt(self, index: int) -> Prompt:
        """Question number `index`. Raises ConfigError when its entry cannot be written as literals, or does not fit the template."""
        entry = _dataset(self.dataset, self.settings)[index]
        text = _formatted(self.template, entry)
        columns = {"dataset": self.dataset, "settings": self.settings, "entry": _as_literal(entry, self.dataset),
                   "answer": str(entry["answer"]), "answer_tag": self.answer_tag}
        if not self.chat:
            return Prompt(text=text, columns=columns, source=self.source)
        system = () if self.system is None else ({"role": "system", "content": self.system},)
        return Prompt(messages=(*system, {"role": "user", "content": text}), columns=columns, source=self.source)


def questions(dataset: str, *, size: int = 500, seed: int = 0, settings: Mapping[str, Any] | None = None, template: str = "{question}",
              system: str | None = None, chat: bool = False, answer_tag: str | None = None) -> Questions:
    """Training prompts.

    Args:
        dataset: a name such as `chain_sum`.
        size: how many questions.
        seed: of the generator.
        settings: the dataset's own, such as `{max_terms: 3}`.
        template: how the question is put; `{question}` and each field of the entry's metadata, such as `{expression}`.
        system: a system message; needs `chat`.
        chat: one user message, rendered with the model's chat template, instead of text.
        answer_tag: what of the completion is the answer: None all of it, `answer` what stands in the last `<answer>…</answer>`. None
            is the default because no question asks for a tag: who sets one asks for it in `system` or `template`.

    Raises ConfigError for an unknown dataset, setting or field, or a value the dataset refuses.
    """
    if system is not None and not chat:
        raise ConfigError("prompts.arguments.system", value=system, allowed="None, where prompts are text", remedy="Set chat: true.")
    made = Questions(dataset=dataset, settings=_checked(dataset, size=size, seed=seed, settings=settings or {}), template=template,
                     system=system, chat=chat, answer_tag=answer_tag, source=dataset)
    made.prompt(0)
    return made


def held_out(dataset: str, *, size: int = 256, seed: int = 0, **arguments: Any) -> Questions:
    """Questions of seeds far from those of training; arguments as for `questions`. A small task may still repeat itself."""
    return dataclasses.replace(questions(dataset, size=size, seed=HELD_OUT_SEED + seed, **arguments), source=f"{dataset}/held_out")


def score(prompt: Prompt, completion: str) -> float:
    """What the dataset's own scorer gives the answer in the completion: 1 when right, 0 to 1 when partly so."""
    columns = prompt.columns
    dataset = _dataset(columns["dataset"], columns["settings"])
    return float(dataset.score_answer(_answer(completion, tag=columns["answer_tag"]), ast.literal_eval(columns["entry"])))


def worked(dataset: str, *, seed: int = 0, noise: float = 0.0, **arguments: Any) -> Iterator[tuple[str, str]]:
    """Questions as text with their answers, endless, for the warm-up; a digit is replaced by a random one with probability `noise`.

    Raises ConfigError for questions put as a chat.
    """
    made, generator = _as_text(questions(dataset, **arguments)), random.Random(seed)
    while True:
        prompt = made.prompt(generator.randrange(len(made)))
        yield prompt.text, re.sub(r"\d", lambda digit: generator.choice("0123456789") if generator.random() < noise else digit[0],
                                  prompt.columns["answer"])


def held_out_worked(dataset: str, *, seed: int = 0, noise: float = 0.0, **arguments: Any) -> list[tuple[str, str]]:
    """Held-out questions with their right answers: what the warm-up is measured on."""
    return [(prompt.text, prompt.columns["answer"]) for prompt in _as_text(held_out(dataset, **arguments | {"size": 256}))]


def _as_text(made: Questions) -> Questions:
    if made.chat:
        raise ConfigError("warm_up.arguments.chat", value=True, allowed="questions as text", remedy="A model that chats needs no warm-up "
                          "here; leave chat out, or warm_up.")
    return made


@functools.cache
def _dataset(name: str, settings: str) -> Any:
    """The dataset, made once in the process that asks; forked reward workers inherit it."""
    return reasoning_gym.create_dataset(name, **json.loads(settings))


def _checked(dataset: str, *, size: int, seed: int, settings: Mapping[str, Any]) -> str:
    if dataset not in DATASETS:
        raise ConfigError("prompts.arguments.dataset", value=dataset, allowed="a dataset of reasoning-gym",
                          remedy=f"The nearest are {_nearest(dataset, DATASETS)}.")
    names = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {"size", "seed"}
    for name in settings:
        if name not in names:
            raise ConfigError(f"prompts.arguments.settings.{name}", value=settings[name], allowed=f"a setting of {dataset}",
                              remedy=f"The nearest are {_nearest(name, names)}; size and seed stand beside settings.")
    text = json.dumps({**settings, "size": size, "seed": seed}, sort_keys=True)
    try:
        _dataset(dataset, text)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError("prompts.arguments", value=text, allowed=f"values that {dataset} takes",
                          remedy=f"It says: {error or type(error).__name__}.") from error
    return text


def _nearest(name: str, known: Any) -> list[str]:
    return difflib.get_close_matches(name, known, n=5, cutoff=0.3) or sorted(known)


def _formatted(template: str, entry: Mapping[str, Any]) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        return template.format(**fields)
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError("prompts.arguments.template", value=template, allowed=f"text with fields of {sorted(fields)}",
                          remedy=f"Mend it ({type(error).__name__}: {error}); a brace of its own is written twice.") from error


def _as_literal(entry: Mapping[str, Any], dataset: str) -> str:
    try:
        text = repr(_plain(entry))
        faithful = bool(ast.literal_eval(text) == entry)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        faithful = False
    if not faithful:
        raise ConfigError("prompts.arguments.dataset", value=dataset, allowed="a dataset whose entries are plain values",
                          remedy="An entry of it cannot be handed to a reward worker unchanged; write a reward that makes it anew.")
    return text


def _plain(value: Any) -> Any:
    """The value with NumPy's scalars as Python's, which alone are literals."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(inner) for inner in value)
    return value.item() if hasattr(value, "item") else value


def _answer(completion: str, *, tag: str | None) -> str | None:
    """The answer in the completion; None without one between tags."""
    if tag is None:
        return completion.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, flags=re.DOTALL)
    return found[-1].strip() if found else None
