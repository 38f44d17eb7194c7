"""What a checkpoint costs the run that makes it, at 135M parameters. `python benchmarks/checkpoint.py`

A model of SmolLM2-135M's shape with random weights, one rank. For each of several checkpoints: how long the trainer was held up while
the rank copied its state, how long until the checkpoint was whole beside the steps that went on, and what the same checkpoint costs
when it is waited for. Steps with and without a write beside them are alternated. Writes results/checkpoint.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from machine import ROOT, commit, machine

sys.path.insert(0, str(ROOT))

from asyncrl.paths import RunPaths
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Rollout, RolloutGroup, Sampling, SequenceBuilder, Status

RESULT = ROOT / "benchmarks" / "results" / "checkpoint.json"
ROUNDS = 5
LIMIT_S = 580.0


def make_model(folder: Path) -> Path:
    """SmolLM2-135M's shape, random weights; the trainer reads no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def batch(version: int) -> Batch:
    """Two groups of two short rollouts: the step is small, so that the checkpoint shows."""
    import numpy as np

    random = np.random.default_rng(version)

    def rollout(group: int, index: int) -> Rollout:
        builder = SequenceBuilder(random.integers(0, 49152, 16).tolist())
        builder.sampled(random.integers(0, 49152, 48).astype(np.int32), logprobs=np.full(48, -10.8, np.float32), policy_version=version,
                        kv_fresh=True, turn=0)
        return Rollout(prompt_id=f"p{group}", group_id=group, index=index, sequences=(builder.build(),), status=Status.STOP,
                       rewards={"made up": float(index)}, sampling=Sampling())

    return Batch(version, tuple(RolloutGroup(group, Prompt(), tuple(rollout(group, index) for index in range(2))) for group in range(2)))


async def seconds(work: Awaitable[object]) -> float:
    """How long it took."""
    began_s = time.perf_counter()
    await work
    return time.perf_counter() - began_s


async def measure(folder: Path) -> dict[str, list[float]]:
    """Each round: a step alone, a checkpoint begun, a step beside its write, the rest of the wait, and one that is waited for."""
    paths = RunPaths(root=folder / "run", shared=folder / "shared")
    paths.make()
    trainer = Trainer(make_model(folder / "model"), correction="token_tis", learning_rate=1e-6, processes=1)
    await trainer.start(paths)
    taken: dict[str, list[float]] = {name: [] for name in ("step_s", "held_up_s", "step_beside_write_s", "whole_after_s", "waited_for_s")}
    try:
        for _ in range(ROUNDS + 1):
            taken["step_s"].append(await seconds(trainer.step(batch(trainer.version))))
            began_s = time.perf_counter()
            taken["held_up_s"].append(await seconds(trainer.checkpoint()))
            taken["step_beside_write_s"].append(await seconds(trainer.step(batch(trainer.version))))
            await trainer.settle()
            taken["whole_after_s"].append(time.perf_counter() - began_s)
            taken["waited_for_s"].append(await seconds(trainer.save(folder / "saved")))
    finally:
        await trainer.close()
    return {name: values[1:] for name, values in taken.items()}


def main() -> None:
    """Measure, print and write the JSON."""
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(asyncio.wait_for(measure(Path(folder)), LIMIT_S))
        size = sum(file.stat().st_size for file in (Path(folder) / "saved").iterdir())
    medians = {name: round(statistics.median(values), 3) for name, values in taken.items()}
    result = {"benchmark": "checkpoint", "commit": at, "machine": machine(), "rounds": ROUNDS, "checkpoint_bytes": size, "median": medians,
              "held_up_over_waited_for": round(medians["held_up_s"] / medians["waited_for_s"], 3),
              "seconds": {name: [round(value, 3) for value in values] for name, values in taken.items()}}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    main()
