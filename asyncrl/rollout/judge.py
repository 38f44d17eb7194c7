"""What a reward worker does: call the user's functions on one rollout at a time and check that each gives one finite number."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import reprlib
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.channel import CLOSE, Channel, unpack
from asyncrl.errors import ConfigError, RewardError, text_of
from asyncrl.types import LARGEST_REWARD, Prompt

RewardFunction = Callable[..., object]

_TRAINER_KEYWORDS = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's own trainer also passes: objects of its process, which a worker has none of."""
_TRACE_CHARS = 8000
"""A traceback is cut to its end: deep recursion has thousands of lines."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function, its name in the metrics, and how it is called."""

    name: str
    function: RewardFunction
    keywords: frozenset[str] | None
    """Names TRL's signature accepts; None for `f(prompt, completion)`."""
    takes_all: bool = False
    """Whether it has `**kwargs`."""
    needs: frozenset[str] = frozenset()
    """Those of the names that have no default."""


def named_rewards(functions: Mapping[str, RewardFunction] | Sequence[RewardFunction]) -> tuple[NamedReward, ...]:
    """Functions with unique names and a known signature. Raises ConfigError."""
    if isinstance(functions, Mapping):
        pairs = list(functions.items())
    else:
        pairs = [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names):
        raise ConfigError("reward", value=names, allowed="at least one function, each with a name of its own",
                          remedy="Pass a mapping from name to function.")
    return tuple(_inspected(name, function) for name, function in pairs)


def serve_rewards(channel: Channel, rewards: Sequence[Sequence[NamedReward]]) -> None:
    """Judge the items of each request in order, one answer a function of the pool it names, until the controller closes or goes.

    An answer is {value, seconds}, or {error} which ends its item. The value is None where TRL's signature says that the function
    has nothing to say of this prompt.
    """
    while (request := channel.recv()).op != CLOSE:
        for packed in request.body["items"]:
            item = unpack(packed)
            prompt = Prompt.from_wire(item["prompt"])
            for reward in rewards[request.body["pool"]]:
                answer = _judge(reward, prompt, item["completion"], item["tokens"])
                channel.reply(request.id, answer, last=False)
                if "error" in answer:
                    break


def _judge(reward: NamedReward, prompt: Prompt, completion: str, tokens: list[int]) -> dict[str, Any]:
    began_s = time.perf_counter()
    try:
        try:
            result = _call(reward, prompt, completion, tokens)
            value = _single(reward, result) if reward.keywords is not None else _finite(result, f"reward {reward.name!r} returned")
        finally:
            signal.alarm(0)
    except RewardError as error:
        return {"error": str(error)}
    except BaseException as error:
        text = "".join(_lines_of_the_users_code(error))[-_TRACE_CHARS:]
        bound = " (what a worker may take is env.memory_bytes)" if isinstance(error, MemoryError) else ""
        return {"error": f"reward {reward.name!r} raised {type(error).__name__}: {text_of(error)}{bound}\n{text}"}
    return {"value": value, "seconds": time.perf_counter() - began_s}


def _lines_of_the_users_code(error: BaseException) -> list[str]:
    """The traceback from where this module called the function; none where the call itself failed."""
    frame = users = error.__traceback__
    while frame is not None:
        frame, is_ours = frame.tb_next, frame.tb_frame.f_code.co_filename == __file__
        users = frame if is_ours else users
    return traceback.format_exception(type(error), error, users) if users else []


def _call(reward: NamedReward, prompt: Prompt, completion: str, tokens: list[int]) -> object:
    if reward.keywords is None:
        result = reward.function(prompt, completion)
    else:
        given = {name: [value] for name, value in prompt.columns.items()}
        given |= {"prompts": [list(prompt.messages) or prompt.text], "completion_ids": [tokens],
                  "completions": [[{"role": "assistant", "content": completion}] if prompt.messages else completion]}
        if missing := sorted(reward.needs - given.keys()):
            raise RewardError(f"reward {reward.name!r} asks for {', '.join(missing)}; the columns of this prompt are "
                              f"{', '.join(sorted(prompt.columns)) or 'none'}")
        result = reward.function(**{name: value for name, value in given.items() if reward.takes_all or name in reward.keywords})
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> object:
    return await result


def _single(reward: NamedReward, result: object) -> float | None:
    """The number in the list of one that TRL's signature returns for a list of one completion; None where the list holds None."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != 1:
        raise RewardError(f"reward {reward.name!r} returned {reprlib.repr(result)} ({type(result).__name__}) for 1 completion; "
                          "it must return a list of 1 finite number")
    return None if result[0] is None else _finite(result[0], f"reward {reward.name!r} returned, at index 0,")


def _finite(value: object, what: str) -> float:
    """The value as a float: real numbers, bools, and arrays or tensors of one element. Raises RewardError."""
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    number = value.item() if hasattr(value, "item") and (size() if callable(size) else size) == 1 else value
    try:
        result = float(number) if isinstance(number, numbers.Real) else math.nan
    except OverflowError:
        result = math.inf
    if not abs(result) <= LARGEST_REWARD:
        raise RewardError(f"{what} {reprlib.repr(value)} ({type(value).__name__}); it must be one finite number, in float32")
    return result


def _inspected(name: str, function: RewardFunction) -> NamedReward:
    if not callable(function):
        raise ConfigError(f"reward.{name}", value=function, allowed="a callable", remedy="Pass the function itself.")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some builtins have no signature to look at.
        return NamedReward(name, function, None)
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    if "completions" in kinds:
        needs = frozenset(name for name, kind in kinds.items() if signature.parameters[name].default is inspect.Parameter.empty
                          and kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
        if absent := [name for name in _TRAINER_KEYWORDS if name in needs]:
            raise ConfigError(f"reward.{name}", value=str(signature), allowed="prompts, completions, completion_ids, columns of the data",
                              remedy=f"There is no {absent[0]} in a reward worker: give it a default, or take it out.")
        return NamedReward(name, function, frozenset(kinds), inspect.Parameter.VAR_KEYWORD in kinds.values(), needs)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(f"reward.{name}", value=str(signature), remedy=f"Called with the two it fails: {error}.",
                          allowed="f(prompt, completion), or TRL's f(prompts, completions, **columns)") from error
    return NamedReward(name, function, None)
