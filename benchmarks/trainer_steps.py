"""Optimizer steps of a batch with lognormal lengths: asyncrl beside TRL and two loops over plain transformers, and over 1, 2, 4 ranks."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from asyncrl.paths import RunPaths
from asyncrl.train.batch import pack
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Rollout, RolloutGroup, Sampling, SequenceBuilder, Status
from benchmarks.contestants import contest, ratio
from benchmarks.machine import ROOT
from tests.parity.peers.client import is_installed, python_of
from tests.tiny_model import character_tokenizer

SEED, SPREAD, PROMPT_TOKENS, GROUP_SIZE = 0, 0.8, 8, 8
"""`SPREAD` is the standard deviation of the logarithm of the lengths."""
LOGPROB = -3.0
"""Of every token in the rollouts; how far it is from the model's changes no time."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and a batch."""

    config: PretrainedConfig
    sequences: int
    mean_tokens: int
    max_tokens: int
    microbatch_tokens: int
    rounds: int
    targets: dict[str, float]
    """What ours must at least be in tokens a second, and at most in memory, over TRL as it comes."""


def tiny() -> Qwen3Config:
    """The quickstart's architecture at 0.6M parameters."""
    return Qwen3Config(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                       num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0,
                       eos_token_id=1, bos_token_id=None)


def smollm2() -> LlamaConfig:
    """SmolLM2-135M."""
    return LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                       num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
                       bos_token_id=None)


SETTINGS = {"0.6M": Setting(tiny(), 64, 256, 1000, 1024, 3, {"tokens_per_s": 6.0, "memory": 0.5}),
            "135M": Setting(smollm2(), 8, 208, 640, 768, 2, {"tokens_per_s": 2.0, "memory": 0.5})}
QUICK = {"0.6M": Setting(tiny(), 16, 32, 64, 256, 1, {"tokens_per_s": 0.0, "memory": 1e9})}
"""Says that the benchmark runs, nothing else."""


def make_model(config: PretrainedConfig, folder: Path) -> Path:
    """A Hugging Face folder with random weights, and a tokenizer that nobody's words go through."""
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    character_tokenizer(16).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}), encoding="utf-8")
    return folder


def draw(setting: Setting) -> dict[str, Any]:
    """One prompt, completions of lognormal lengths that end with the end of sequence, rewards 0 and 1 in turn."""
    rng = np.random.default_rng(SEED)
    lengths = rng.lognormal(np.log(setting.mean_tokens) - SPREAD**2 / 2, SPREAD, setting.sequences).astype(int)
    vocabulary = setting.config.vocab_size
    completions = [[*rng.integers(2, vocabulary, max(1, length) - 1).tolist(), 1] for length in lengths.clip(2, setting.max_tokens)]
    return {"prompt": rng.integers(2, vocabulary, PROMPT_TOKENS).tolist(), "completions": completions,
            "logprobs": [[LOGPROB] * len(row) for row in completions], "rewards": [float(n % 2) for n in range(setting.sequences)],
            "group_size": GROUP_SIZE}


def batch_of(drawn: dict[str, Any], *, version: int = 0) -> Batch:
    """The same as the buffer would hand it over."""
    groups = []
    for start in range(0, len(drawn["completions"]), GROUP_SIZE):
        rollouts = []
        for index in range(GROUP_SIZE):
            completion = np.array(drawn["completions"][start + index], np.int32)
            builder = SequenceBuilder(drawn["prompt"])
            builder.sampled(completion, logprobs=np.full(len(completion), LOGPROB, np.float32), policy_version=version, kv_fresh=True,
                            turn=0)
            rollouts.append(Rollout(prompt_id=f"p{start}", group_id=start, index=index, sequences=(builder.build(),), status=Status.STOP,
                                    rewards={"match": drawn["rewards"][start + index]}, sampling=Sampling()))
        groups.append(RolloutGroup(group_id=start, prompt=Prompt(), rollouts=tuple(rollouts)))
    return Batch(version=version, groups=tuple(groups))


def tokens_of(drawn: dict[str, Any]) -> int:
    """Of all sequences, prompts included; what is padding, or shared, is nobody's gain."""
    return sum(len(drawn["prompt"]) + len(row) for row in drawn["completions"])


def steps(name: str, setting: Setting, *, folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Every trainer's step in a process of its own, in turns. TRL takes part where it is installed."""
    drawn, model = draw(setting), make_model(setting.config, folder / "model")
    pack(batch_of(drawn)).save(folder / "batch.safetensors")
    contestants = {"asyncrl": ("asyncrl", {"microbatch_tokens": setting.microbatch_tokens}), "sequences": ("sequences", {}),
                   "packed": ("packed", {})}
    if is_installed("trl"):
        contestants |= {"trl": ("trl", {}), "trl_in_eights": ("trl", {"per_device_train_batch_size": 8}),
                        "trl_in_eights_no_checkpointing": ("trl", {"per_device_train_batch_size": 8, "gradient_checkpointing": False})}
    if setting.sequences == 8:  # all hold their memory at once: those that need most stay away, and eights are the whole batch
        contestants = {name: contestants[name] for name in ("asyncrl", "sequences", "trl") if name in contestants}
    commands = {}
    for contestant, (trainer, settings) in contestants.items():
        spec = folder / f"{contestant}.json"
        spec.write_text(json.dumps({**drawn, "model": str(model), "batch": str(folder / "batch.safetensors"), "threads": threads,
                                    "settings": settings}), encoding="utf-8")
        python = python_of("trl") if trainer == "trl" else sys.executable
        commands[contestant] = [str(python), str(ROOT / "benchmarks" / "step_contestant.py"), trainer, str(spec)]
    found = contest(commands, threads=threads, rounds=rounds, logs=folder)
    tokens, longest = tokens_of(drawn), len(drawn["prompt"]) + max(map(len, drawn["completions"]))
    for row in found.values():
        row["tokens_per_s"] = round(tokens / row["median_s"], 1)
    ours = found["asyncrl"]
    ratios = {other: {"tokens_per_s": round(1 / ratio(ours, row), 3), "memory": round(ours["peak_mib"] / row["peak_mib"], 3)}
              for other, row in found.items() if other != "asyncrl"}
    return {"model": name, "sequences": setting.sequences, "tokens": tokens, "padded_tokens": setting.sequences * longest,
            "microbatch_tokens": setting.microbatch_tokens, "trainers": found, "ratios": ratios}


async def _ranks_step_s(model: Path, drawn: dict[str, Any], *, ranks: int, rounds: int, folder: Path) -> dict[str, Any]:
    paths = RunPaths(root=folder / f"run-{ranks}", shared=folder / f"shared-{ranks}")
    paths.make()
    trainer = Trainer(model, correction="token_tis", processes=ranks, learning_rate=1e-6, checkpoint_every_steps=None,
                      microbatch_tokens=2048)
    await trainer.start(paths)
    try:
        seconds, metrics = [], {}
        for number in range(rounds + 1):
            batch, began_s = batch_of(drawn, version=number), time.perf_counter()
            metrics = (await trainer.step(batch)).metrics.result()
            seconds.append(time.perf_counter() - began_s)
    finally:
        await trainer.close()
    return {"seconds": [round(value, 4) for value in seconds[1:]], "median_s": round(statistics.median(seconds[1:]), 4),
            "packing_waste": round(metrics["train/packing_waste/mean"], 4),
            "rank_imbalance": round(metrics["train/rank_imbalance/mean"], 4)}


def scaling(setting: Setting, *, folder: Path, rounds: int, counts: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Steps of 1, 2 and 4 ranks of one thread each, as child processes on gloo."""
    drawn, model = draw(setting), make_model(setting.config, folder / "model")
    found = {str(ranks): asyncio.run(_ranks_step_s(model, drawn, ranks=ranks, rounds=rounds, folder=folder)) for ranks in counts}
    for row in found.values():
        row["tokens_per_s"] = round(tokens_of(drawn) / row["median_s"], 1)
        row["over_one"] = round(found[str(counts[0])]["median_s"] / row["median_s"], 3)
    return {"tokens": tokens_of(drawn), "microbatch_tokens": 2048, "ranks": found}
