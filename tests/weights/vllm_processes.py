"""An `AsyncLLM` with its own processes, for `test_vllm_sync` to kill. Prints their ids once it is up, then waits. Run as FOLDER."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.weights.ends import TransportSpec
from asyncrl.weights.engine_ranks import EngineRanks
from asyncrl.weights.vllm_plugin import EXTENSION


def descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [found for child in children for found in descendants(child)]


def processes() -> dict[int, str]:
    """Everything this process started, by id, with its command line."""
    return {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ").strip() for pid in descendants(os.getpid())}


async def main() -> None:
    folder = sys.argv[1]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, worker_extension_cls=EXTENSION))
    ranks = EngineRanks(lambda method, arguments: engine.collective_rpc(method, args=arguments))
    answer = await ranks.prepare(folder, transport=TransportSpec(Path(folder).parent / "store").to_wire())
    print("\n" + json.dumps({"answer": answer, "processes": processes()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
