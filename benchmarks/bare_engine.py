"""An engine with nothing of asyncrl around it, in a process of its own, for rollout_overhead.py.

`python benchmarks/bare_engine.py SPEC.json` reads a round a line of JSON from standard input, {prompts, lengths, clients}, and answers each
with a line {tokens, seconds}. When its input ends it ends, in the middle of a round too, and its process group with it. vLLM is AsyncLLM
under `clients` coroutines, each sending its next request when its last has ended, results whole. Transformers is continuous batching that
is handed all requests at once and gives each result whole.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], None]
Rounds = queue.SimpleQueue[dict[str, Any] | None]
GRACE_S = 10.0
"""Between the end of input and the end of every process of the group: vLLM's own would go on without the one that started them."""
RESULT_TIMEOUT_S = 120.0
"""Between two results of continuous batching; a loop that has failed gives none."""


def main() -> None:
    """Serve rounds until standard input ends."""
    os.setsid()
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer, rounds = _take_standard_output(), Rounds()
    threading.Thread(target=_read, args=(rounds,), daemon=True).start()
    if spec["kind"] == "vllm":
        asyncio.run(_serve_vllm(spec, answer, rounds))
    else:
        _serve_transformers(spec, answer, rounds)


def _read(rounds: Rounds) -> None:
    for line in sys.stdin:
        rounds.put(json.loads(line))
    rounds.put(None)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _take_standard_output() -> Answer:
    """Answers go to standard output; what anything else prints there goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(body: dict[str, Any]) -> None:
        stream.write(json.dumps(body) + "\n")
        stream.flush()

    return answer


async def _serve_vllm(spec: dict[str, Any], answer: Answer, rounds: Rounds) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl.rollout.vllm_child import IN_PROCESS
    from asyncrl.weights.vllm_plugin import VARIABLE

    executor = {"distributed_executor_backend": IN_PROCESS} if current_platform.is_cpu() and VARIABLE in os.environ else {}
    arguments = AsyncEngineArgs(model=spec["folder"], logprobs_mode="processed_logprobs", generation_config="vllm",
                                enable_prefix_caching=True, enforce_eager=current_platform.is_cpu(), disable_log_stats=True,
                                **executor, **spec["arguments"])
    engine = AsyncLLM.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
    try:
        answer({})
        number = 0
        while (work := await asyncio.to_thread(rounds.get)) is not None:
            answer(await _vllm_round(engine, work, number))
            number += 1
    finally:
        engine.shutdown(timeout=0)


async def _vllm_round(engine: Any, work: dict[str, Any], number: int) -> dict[str, Any]:
    from asyncrl.rollout.vllm_child import sampling_params

    requests = enumerate(zip(work["prompts"], work["lengths"], strict=True))

    async def client() -> int:
        tokens = 0
        for index, (prompt, length) in requests:
            params = sampling_params(budget=length, temperature=1.0, stop=[], eos_tokens=[])
            async for output in engine.generate({"prompt_token_ids": prompt}, params, f"{number}.{index}"):
                tokens += len(output.outputs[0].logprobs.logprobs)
        return tokens

    began_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(work["clients"]))))
    return {"tokens": tokens, "seconds": time.perf_counter() - began_s}


def _serve_transformers(spec: dict[str, Any], answer: Answer, rounds: Rounds) -> None:
    import torch

    from asyncrl.rollout.loaded_model import load_model

    torch.set_num_threads(spec["threads"])
    manager = _manager(load_model(Path(spec["folder"]), dtype=spec["dtype"]), spec["limits"], seed=spec["seed"])
    manager.start()
    try:
        answer({})
        while (work := rounds.get()) is not None:
            answer(_transformers_round(manager, work))
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)


def _manager(model: Any, limits: dict[str, int], *, seed: int) -> Any:
    """As `asyncrl.rollout.transformers_sampler` makes it, without what that adds: no guard, no temperature of a request's own."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from asyncrl.rollout.transformers_sampler import PAGE_TOKENS

    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=limits["kv_cache_tokens"] // PAGE_TOKENS, max_batch_tokens=limits["max_batch_tokens"],
        max_requests_per_batch=min(limits["max_running_requests"], limits["max_batch_tokens"]), allow_block_sharing=False,
        use_async_batching=False, return_logprobs=True, seed=seed, auto_switch_to_flash=False)
    return model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)


def _transformers_round(manager: Any, work: dict[str, Any]) -> dict[str, Any]:
    began_s = time.perf_counter()
    for prompt, length in zip(work["prompts"], work["lengths"], strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    tokens = 0
    for _ in work["prompts"]:
        result = manager.get_result(timeout=RESULT_TIMEOUT_S)
        if result is None or result.error:
            raise RuntimeError(f"continuous batching gave {'no result' if result is None else result.error}")
        tokens += len(result.logprobs)
    return {"tokens": tokens, "seconds": time.perf_counter() - began_s}


if __name__ == "__main__":
    main()
