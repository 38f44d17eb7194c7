"""Engines that answer from a script, sessions and workers on top of them, and a tokenizer of one token a character."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from asyncrl.accounting import Ledger
from asyncrl.rollout.engine import Chunk, Engine, GenerationRequest, Interruption
from asyncrl.rollout.env import Outcome, Session
from asyncrl.rollout.fake_engine import FakeEngine, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.rollout.worker import Requests, RolloutWorker
from asyncrl.types import Prompt, Sampling, Status

KEY = (4, 2, 0)


def chunk(*tokens: int, logprobs: object = "given", version: int = 0, finish: Status | None = None) -> Chunk:
    """A chunk of tokens with a logprob of -0.5 each, or with what `logprobs` says."""
    values = np.full(len(tokens), -0.5) if isinstance(logprobs, str) else logprobs
    array = None if values is None else np.asarray(values, dtype=np.float32)
    return Chunk(np.asarray(tokens, dtype=np.int32), array, version, True, finish)  # type: ignore[arg-type]


class ScriptedEngine(FakeEngine):
    """Answers the n-th request with the n-th script, chunk by chunk."""

    def __init__(self, *scripts: list[Chunk], context_tokens: int = 4096, name: str = "scripted") -> None:
        super().__init__(name=name, context_tokens=context_tokens)
        self._scripts = iter(scripts)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.calls.append(("generate", request))
        for item in next(self._scripts):
            yield item


def requests_of(engine: FakeEngine) -> list[GenerationRequest]:
    """The requests an engine was sent."""
    return [argument for name, argument in engine.calls if name == "generate"]  # type: ignore[misc]


async def router_of(*engines: Engine, version: int = 0) -> Router:
    """A router whose engines serve `version`."""
    router = Router(engines)
    await router.update(fake_manifest(version), Interruption.KEEP)
    return router


def session_of(router: Router, *, ledger: Ledger | None = None, max_new_tokens: int = 10, temperature: float = 1.0) -> Session:
    """The session of rollout `KEY`."""
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    return Session(router, key=KEY, seed=7, sampling=sampling, ledger=ledger or Ledger())


class FunctionEnv:
    """An environment that is one function."""

    def __init__(self, function: Callable[[Prompt, Session], Awaitable[Outcome]]) -> None:
        self._function = function

    def start(self, logs: Path, tokenizer: object) -> None:
        """Nothing to start."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        return await self._function(prompt, session)

    async def close(self) -> None:
        """Nothing to close."""


async def one_turn(prompt: Prompt, session: Session) -> Outcome:
    """One completion with reward 1."""
    turn = await session.generate(prompt.tokens)
    return Outcome(turn.finish) if turn.finish.is_error else Outcome(turn.finish, {"total": 1.0})


def worker_of(router: Router, function: Callable[[Prompt, Session], Awaitable[Outcome]] = one_turn, *, ledger: Ledger | None = None,
              max_new_tokens: int = 4, error_budget: float = 0.5, deterministic: bool = False) -> RolloutWorker:
    """A worker whose environment is `function`."""
    return RolloutWorker(router, FunctionEnv(function), sampling=Sampling(max_new_tokens=max_new_tokens), ledger=ledger or Ledger(), seed=3,
                         error_budget=error_budget, requests=Requests(deterministic))


def write_tokenizer(folder: Path, *, adds_bos: bool = False) -> Path:
    """A `tokenizer.json` of one token a character: 0 pads, 1 begins (`<s>`), 2 ends, 3 is "0" and so on. Returns the folder."""
    special = ["<pad>", "<s>", "</s>"]
    tokenizer = FastTokenizer(WordLevel({token: index for index, token in enumerate([*special, *"0123456789+="])}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(special)
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
