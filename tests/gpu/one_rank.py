"""A rank alone in its process group, on a chosen device, and what a step of it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.train import parallel
from asyncrl.train.batch import pack
from asyncrl.train.config import validated
from asyncrl.train.parallel import whole
from asyncrl.train.rank import RankTrainer
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.step import StepOutcome, train_step
from asyncrl.types import Batch
from asyncrl.weights.ends import TransportSpec
from tests.train.train_data import random_batch


class OneRank:
    """Starts trainers on `device`, one at a time."""

    def __init__(self, device: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.device, self._folder, self._patch, self._starts = device, folder, patch, 0

    @contextmanager
    def trainer(self, model: Path, *, algorithm: dict[str, object] | None = None, **settings: object) -> Iterator[RankTrainer]:
        """A started rank, `algorithm` being the sections beside the trainer's; its group is left at the end."""
        self._starts += 1
        config = validated({"trainer": {"learning_rate": 1e-2, "max_grad_norm": 1e9, "processes": 1, **settings}, "advantages": "grpo",
                            "correction": "token_tis", "loss": "decoupled_ppo", **(algorithm or {})})
        with self._patch.context() as patch:
            if self.device == "cpu":
                patch.setattr(parallel.torch.cuda, "is_available", lambda: False)
            threads = torch.get_num_threads()
            rank = RankTrainer(RankSpec(model=str(model), rank=0, world_size=1, rendezvous=str(self._folder / f"meet-{self._starts}"),
                                        transport=TransportSpec(self._folder / f"store-{self._starts}"), published_dtype="bfloat16",
                                        config=config))
            try:
                assert rank._ranks.device.type == self.device
                yield rank
            finally:
                rank.close()
                torch.set_num_threads(threads)

    def gradient(self, model: Path, batch: Batch | None = None, **settings: object) -> dict[str, Tensor]:
        """Of a fresh rank's first update, on the CPU."""
        with self.trainer(model, **settings) as rank:
            step(rank, random_batch(0) if batch is None else batch)
            return {name.removeprefix("exp_avg/"): whole(moment).cpu() / 0.1
                    for name, moment in rank._trainee.optimizer.moments().items() if name.startswith("exp_avg/")}


def step(rank: RankTrainer, batch: Batch) -> StepOutcome:
    outcome = train_step(rank._trainee, pack(batch))
    assert not outcome.skipped
    assert not outcome.nonfinite
    return outcome


def relative_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any element, in units of the largest element."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / max(float(t.abs().max()) for t in theirs.values())
