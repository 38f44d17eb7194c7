"""vLLM in a child: the contract through the whole proxy, and what can go wrong with processes that have processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ChildDied, ConfigError, EngineError
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.vllm_engine import VLLMEngine
from asyncrl.types import Sampling, Status
from tests.rollout import engine_contract, start_contract
from tests.rollout.engine_contract import BFLOAT16_TOLERANCE, Rig
from tests.rollout.model_rig import EOS_TOKENS, PublishedModel, prompts, publish_model
from tests.tiny_model import make_tiny_model

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, needs_vllm]
BLOCK_TOKENS = 128
"""Of vLLM's key-value cache on a CPU: the least that its prefix cache shares."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    return publish_model(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def rig(model: PublishedModel) -> Iterator[Rig]:
    with _started(model, max_running_requests=16) as rig:
        yield rig


def test_nothing_is_sampled_before_an_anchor(rig: Rig) -> None:
    rig.run(start_contract.an_engine_without_a_version_does_not_sample(rig.engine))


def test_started_again_it_is_a_new_engine(model: PublishedModel, rig: Rig) -> None:
    rig.run(start_contract.started_again_it_is_a_new_engine(rig, model.paths))


@pytest.mark.parametrize("rule", [*engine_contract.RULES, *engine_contract.MODEL_RULES], ids=lambda rule: rule.__name__)
def test_contract(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_every_token_over_three_versions_has_the_logprob_of_its_own(rig: Rig, kind: Interruption) -> None:
    rig.run(engine_contract.every_token_over_three_versions_has_the_logprob_of_its_own(rig, kind))


@pytest.mark.parametrize("kind", list(Interruption))
def test_a_cached_prefix_is_not_shared_across_versions(rig: Rig, kind: Interruption) -> None:
    prompt = np.resize(np.concatenate(rig.prompts), BLOCK_TOKENS + 40)

    async def main() -> None:
        await rig.begin()
        rig.check(await rig.write(prompt, Sampling(max_new_tokens=4)))
        await rig.update(1, 0, kind)
        rig.check(await rig.write(prompt, Sampling(max_new_tokens=4)))

    rig.run(main())


def test_prompts_half_read_or_waiting_at_an_update_are_read_again_under_the_new_version(model: PublishedModel) -> None:
    prompt = np.resize(np.concatenate(prompts(24)), BLOCK_TOKENS + 60)
    with _started(model, max_batch_tokens=16, max_running_requests=16) as rig:
        async def main() -> list[engine_contract.Written]:
            await rig.begin()
            many = [asyncio.create_task(rig.write(prompt, Sampling(max_new_tokens=30), seed=seed)) for seed in range(40)]
            done, waiting = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
            await rig.update(1, 0, Interruption.KEEP)
            assert len(waiting) > 16 > len(done)
            return await asyncio.gather(*many)

        written = rig.run(main())
    for one in written:
        rig.check(one)
    assert sum(one.spans[0][1:] == (1, True) for one in written) > 16


def test_a_stop_string_ends_a_completion_also_across_an_update(rig: Rig, model: PublishedModel) -> None:
    stop = Sampling(max_new_tokens=100, stop=("0", "34"))

    async def main() -> None:
        await rig.begin()
        tasks = [asyncio.create_task(rig.write(prompt, stop, seed=seed)) for seed, prompt in enumerate(rig.prompts)]
        await rig.write(rig.prompts[0], Sampling(max_new_tokens=2), seed=99)
        await rig.update(1, 0, Interruption.KEEP)
        return await asyncio.gather(*tasks)

    written = rig.run(main())
    zero, three, four = 2, 5, 6  # token 5 also ends a sequence, so that "34" never comes to be
    assert three in rig.eos_tokens
    ended = {int(one.tokens[-1]) for one in written if one.finish is Status.STOP}
    assert zero in ended
    assert not any((one.tokens[:-1] == zero).any() for one in written)
    assert any((one.tokens == four).any() for one in written)


def test_a_full_cache_costs_time_and_no_token(model: PublishedModel) -> None:
    with _started(model, kv_cache_bytes=2**20, max_running_requests=16) as rig:
        async def main() -> None:
            await rig.begin()
            for one in await rig.write_all([Sampling(max_new_tokens=200)] * len(rig.prompts)):
                rig.check(one)

        rig.run(main())


@pytest.mark.parametrize(("architecture", "tie"), [("qwen3", False), ("llama", True)])
def test_bfloat16_stays_within_its_limits(tmp_path: Path, architecture: str, tie: bool) -> None:
    model = publish_model(tmp_path, dtype="bfloat16", architecture=architecture, tie=tie)
    with _started(model, dtype="bfloat16", tolerance=BFLOAT16_TOLERANCE) as rig:
        rig.run(engine_contract.deltas_lead_to_the_state_of_a_fresh_load(rig))
        rig.run(engine_contract.keep_goes_on_with_old_keys_and_says_so(rig))


@pytest.mark.parametrize(("killed", "busy"), [("EngineCore", False), ("EngineCore", True), ("child", True)])
def test_the_death_of_either_process_ends_every_request_and_leaves_no_other(model: PublishedModel, killed: str, busy: bool) -> None:
    with _started(model) as rig:
        async def main() -> dict[str, int]:
            await rig.begin()
            pids = _processes(rig.engine._child.pid)
            assert set(pids) == {"child", "EngineCore"}
            tasks = []
            if busy:
                tasks, short = rig.start_long(Sampling(max_new_tokens=200))
                await short
            os.kill(pids[killed], signal.SIGKILL)
            async with asyncio.timeout(20):
                await rig.engine._child.wait_exit()
                lost = [end for end in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(end, Exception)]
            assert bool(lost) is busy
            assert all(type(end) is ChildDied for end in lost)
            with pytest.raises(ChildDied, match="signal 9" if killed == "child" else r"exit codes of its core: \[-9\]"):
                await rig.engine.health()
            return pids

        _expect_gone(rig.run(main()).values())


@pytest.mark.parametrize("when", ["as soon as vLLM starts a process", "when it serves"])
def test_nothing_survives_the_death_of_the_controller(model: PublishedModel, tmp_path: Path, when: str) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(folder=str(model.folder), root=str(tmp_path), shared=str(model.paths.shared)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as controller:
        try:
            if when == "when it serves":
                assert controller.stdout is not None
                assert controller.stdout.readline() == "serves\n"
            pids = _wait_for_core(controller.pid)
        finally:
            controller.kill()
    _expect_gone(pids)


CONTROLLER = """
import asyncio
from pathlib import Path
from asyncrl.paths import RunPaths
from asyncrl.rollout.vllm_engine import VLLMEngine

async def main():
    paths = RunPaths(Path({root!r}) / "run", Path({shared!r}))
    paths.make()
    engine = VLLMEngine({folder!r}, kv_cache_bytes=2**26)
    await engine.start(paths)
    print("serves", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_close_ends_in_order_and_leaves_no_process(model: PublishedModel) -> None:
    with _started(model) as rig:
        child = rig.engine._child
        pids = _descendants(child.pid)
        rig.run(rig.engine.close())
        assert child.exit_reason.startswith("exit code 0")
    _expect_gone(pids)


def test_a_cache_too_small_for_one_request_is_refused_at_start(model: PublishedModel) -> None:
    engine = VLLMEngine(make_tiny_model(model.folder.parent / "deep", hidden=128, layers=9), kv_cache_bytes=2**20)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"kv_cache_bytes, engine\.context_tokens.*1179648 bytes for 256 tokens"):
            await engine.start(model.paths)
        await engine.close()

    asyncio.run(main())


def test_heads_that_vllm_cannot_serve_here_are_refused_at_start(tmp_path: Path, model: PublishedModel) -> None:
    engine = VLLMEngine(make_tiny_model(tmp_path / "model", hidden=32), kv_cache_bytes=2**26)

    async def main() -> None:
        with pytest.raises(ConfigError, match="attention heads of size 8"):
            await engine.start(model.paths)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("sampling", "named"), [
    (Sampling(repetition_penalty=1.1), r"sampling\.repetition_penalty"), (Sampling(min_new_tokens=2), r"sampling\.min_new_tokens"),
    (Sampling(temperature=0.001), r"sampling\.temperature = 0\.001"),
])
def test_what_it_cannot_sample_is_refused_by_name(rig: Rig, sampling: Sampling, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        rig.run(rig.write(rig.prompts[0], sampling))


@pytest.mark.parametrize("kept", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda kept: next(iter(kept)))
def test_a_kept_set_of_one_token_is_certain(rig: Rig, kept: dict[str, float]) -> None:
    """What held-out sets may ask for: the logprobs are those of the kept set, and the most likely token is the whole of it."""
    rig.run(rig.begin())
    written = [rig.run(rig.write(rig.prompts[0], Sampling(max_new_tokens=6, **kept), seed=seed)) for seed in (0, 1)]
    assert written[0].tokens.tolist() == written[1].tokens.tolist()
    for one in written:
        np.testing.assert_allclose(one.logprobs, 0.0, atol=1e-6)


def _descendants(ancestor: int) -> dict[int, str]:
    """Every process below one, and its command."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int(entry.name)
            commands[pid] = (entry / "cmdline").read_text()
            parents[pid] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in found - {ancestor}}


def _processes(child: int) -> dict[str, int]:
    """The child and what vLLM started below it, by what vLLM calls them."""
    return {"child": child} | {command.split("::")[1].strip("\0"): pid for pid, command in _descendants(child).items()
                               if command.startswith("VLLM::")}


def _wait_for_core(controller: int) -> list[int]:
    """Everything below the controller once vLLM's core is among it, spawned or already named."""
    deadline = time.monotonic() + 120
    while True:
        found = _descendants(controller)
        if any("spawn_main" in command or command.startswith("VLLM::") for command in found.values()):
            return list(found)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _expect_gone(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


@pytest.mark.slow
def test_two_ranks_follow_updates_and_say_what_they_sample_from(model: PublishedModel) -> None:
    with _started(model, tensor_parallel_size=2, max_running_requests=4) as rig:
        async def main() -> list[engine_contract.Written]:
            await rig.begin()
            written = [await rig.write(rig.prompts[0], Sampling(max_new_tokens=3))]
            fetched = dataclasses.replace(rig.manifest(1, 0), run_epoch=rig.epoch)
            await rig.engine.fetch(fetched)
            ack = await rig.update(1, 0, Interruption.KEEP)
            assert ack.state_hash == fetched.state_hash
            return [*written, await rig.write(rig.prompts[0], Sampling(max_new_tokens=3))]

        for version, written in enumerate(rig.run(main())):
            rig.check(written)
            assert {of for _, of, _ in written.spans} == {version}


@contextlib.contextmanager
def _started(model: PublishedModel, *, tolerance: float = engine_contract.TOLERANCE, **settings: Any) -> Iterator[Rig]:
    with asyncio.Runner() as runner:
        engine = VLLMEngine(model.folder, **{"kv_cache_bytes": 2**26, **settings})
        try:
            runner.run(engine.start(model.paths))
            yield Rig(engine=engine, run=runner.run, manifest=model.manifest, truth=model.truth, eos_tokens=EOS_TOKENS,
                      prompts=prompts(24), tolerance=tolerance)
        finally:
            runner.run(engine.close())
