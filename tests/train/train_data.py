"""Batches of made-up rollouts, and a rank in the test's own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from asyncrl.paths import RunPaths
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.config import validated
from asyncrl.train.rank import RankTrainer
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.step import StepOutcome, train_step
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Rollout, RolloutGroup, Sampling, Sequence, SequenceBuilder, Status
from asyncrl.weights.ends import TransportSpec

BETA1 = 0.9


def sequence(prompt: list[int], completion: list[int], *, logprobs: list[float] | None = None, version: int = 0) -> Sequence:
    builder = SequenceBuilder(prompt)
    values = [-2.0] * len(completion) if logprobs is None else logprobs
    builder.sampled(np.array(completion, np.int32), logprobs=np.array(values, np.float32), policy_version=version, kv_fresh=True, turn=0)
    return builder.build()


def rollout(group_id: int, index: int, *sequences: Sequence, reward: float = 0.0, status: Status = Status.STOP,
            temperature: float = 1.0) -> Rollout:
    return Rollout(prompt_id=f"p{group_id}", group_id=group_id, index=index, sequences=sequences, status=status,
                   rewards={} if status.is_error else {"match": reward}, sampling=Sampling(temperature=temperature))


def batch_of(*rollouts: Rollout, version: int = 0) -> Batch:
    ids = sorted({rollout.group_id for rollout in rollouts})
    groups = tuple(RolloutGroup(group_id=n, prompt=Prompt(), rollouts=tuple(r for r in rollouts if r.group_id == n)) for n in ids)
    return Batch(version=version, groups=groups)


def random_batch(seed: int, *, version: int = 0, groups: int = 4, group_size: int = 4, longest: int = 9, temperature: float = 1.0) -> Batch:
    """Prompts of 2 to 6 tokens, completions of 1 to `longest`, rewards 0 or 1; no two equal in every group."""
    random = np.random.default_rng(seed)
    rollouts = []
    for group in range(groups):
        prompt = random.integers(2, 16, random.integers(2, 7)).tolist()
        for index in range(group_size):
            count = int(random.integers(1, longest + 1))
            rollouts.append(rollout(group, index, sequence(prompt, random.integers(1, 16, count).tolist(), version=version,
                                                           logprobs=random.normal(-2.5, 0.3, count).tolist()),
                                    reward=float(index % 2), temperature=temperature))
    return batch_of(*rollouts, version=version)


def unequal_batch(version: int) -> Batch:
    """475 tokens in one group, 100 in another: shares that would need 5 micro-batches here and 1 there."""
    groups = ([95] * 5, [50, 50])
    return batch_of(*(rollout(group, n, sequence([2], [3 + n] * length), reward=float(n % 2))
                      for group, lengths in enumerate(groups) for n, length in enumerate(lengths)), version=version)


async def start(trainer: Trainer, folder: Path) -> None:
    paths = RunPaths(root=folder, shared=folder / "shared")
    paths.make()
    await trainer.start(paths)


def inline_rank(model: Path, store: Path, *, advantages: object = "grpo", correction: object = "token_tis", loss: object = "decoupled_ppo",
                reference: object = "none", lora: object = "none", **settings: object) -> RankTrainer:
    settings = {"learning_rate": 1e-2, "processes": 0, "max_grad_norm": 1e9, **settings}
    config = validated({"trainer": settings, "advantages": advantages, "correction": correction, "loss": loss, "reference": reference,
                        "lora": lora})
    return RankTrainer(RankSpec(model=str(model), rank=0, world_size=1, rendezvous=None, transport=TransportSpec(store),
                                published_dtype="bfloat16", config=config))


def step_on(rank: RankTrainer, batch: Batch | PackedBatch) -> StepOutcome:
    return train_step(rank._trainee, batch if isinstance(batch, PackedBatch) else pack(batch))


def first_gradient(rank: RankTrainer, batch: Batch) -> dict[str, Tensor]:
    """The gradient of a fresh rank's first update, read from AdamW's first moment."""
    step_on(rank, batch)
    return {name.removeprefix("exp_avg/"): moment / (1 - BETA1)
            for name, moment in rank._trainee.optimizer.moments().items() if name.startswith("exp_avg/")}


def weights(rank: RankTrainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank._lm.named_parameters()}
