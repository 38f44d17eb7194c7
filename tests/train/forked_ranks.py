"""Ranks of trainers as forks of one process, which imports torch once for all of them.

Run as `python forked_ranks.py JOBS.json FOLDER`: for each job its ranks train side by side, and rank 0 writes what came of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.channel import Request
from asyncrl.train.batch import pack
from asyncrl.train.config import validated
from asyncrl.train.parallel import local, whole
from asyncrl.train.rank import RankTrainer
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.step import train_step
from asyncrl.weights.ends import TransportSpec
from tests.train.train_data import random_batch, unequal_batch

ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0
"""Several times what all jobs of a test take on two busy cores."""


BATCHES = {"random": random_batch, "unequal": lambda _, *, version: unequal_batch(version)}


@dataclass(frozen=True)
class Job:
    """What the ranks of one trainer do; 0 ranks: one without a process group."""

    name: str
    model: str
    ranks: int
    steps: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    restore: str = ""
    """A checkpoint folder to begin from."""
    batches: str = "random"


@dataclass(frozen=True)
class Outcome:
    """Whole tensors after the job, and numbers of each step."""

    gradients: dict[str, Tensor]
    """Of the first step, as AdamW's first moment has them."""
    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]
    facts: dict[str, Any]
    """What each rank found, by rank."""
    checkpoint: Path
    export: Path


def run_jobs(jobs: list[Job], folder: Path) -> dict[str, Outcome]:
    """What came of each job, by name. Raises with what a rank wrote when one fails."""
    (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, __file__, str(folder / "jobs.json"), str(folder)], env=environment, timeout=LIMIT_S,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {job.name: _outcome(folder / job.name, max(1, job.ranks)) for job in jobs}


def _outcome(place: Path, ranks: int) -> Outcome:
    facts = {rank: json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(ranks)}
    return Outcome(gradients=load_file(place / "gradients.safetensors"), weights=load_file(place / "weights.safetensors"),
                   metrics=facts[0]["metrics"], facts=facts, checkpoint=place / "checkpoint", export=place / "export")


def _rank(job: Job, rank: int, place: Path) -> None:
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "processes": max(1, job.ranks), **job.settings}
    trainer = RankTrainer(RankSpec(
        model=job.model, rank=rank, world_size=max(1, job.ranks), rendezvous=str(place / "meet") if job.ranks else None,
        transport=TransportSpec(place / "store"), published_dtype="float32",
        config=validated({"trainer": settings, "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo"})))
    if job.restore:
        trainer.restore(Request("restore", body={"folder": job.restore, "updates": 1}))
    metrics: list[dict[str, float]] = []
    forwards: list[int] = []
    trainer._trainee.policy.register_forward_pre_hook(lambda _, arguments: forwards.append(len(arguments[0].tokens)))
    gradients: dict[str, Tensor] = {}
    for version in range(job.steps):
        outcome = train_step(trainer._trainee, pack(BATCHES[job.batches](version, version=version)))
        metrics.append({name: value for name, value in outcome.metrics.result().items() if not name.endswith("_s/last")})
        if version == 0:
            gradients = {name.removeprefix("exp_avg/"): whole(moment).clone() / 0.1
                         for name, moment in trainer._trainee.optimizer.moments().items() if name.startswith("exp_avg/")}
    lm = trainer._lm
    _write(gradients, place / "gradients.safetensors", rank=rank)
    _write({name: whole(parameter).clone() for name, parameter in lm.named_parameters()}, place / "weights.safetensors", rank=rank)
    trainer.save(Request("save", body={"folder": str(place / "checkpoint")}))
    trainer.saved(Request("saved", body={"wait": True}))
    trainer.export(Request("export", body={"folder": str(place / "export")}))
    facts = {"metrics": metrics, "forwards": forwards, "tied": lm.get_output_embeddings().weight is lm.get_input_embeddings().weight,
             "held": sum(local(parameter).numel() for parameter in lm.parameters()),
             "dtypes": sorted({str(parameter.dtype) for parameter in lm.parameters()})}
    (place / f"rank-{rank}.json").write_text(json.dumps(facts))
    trainer.close()


def _write(tensors: dict[str, Tensor], file: Path, *, rank: int) -> None:
    if rank == 0:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)


def _fork(job: Job, folder: Path) -> None:
    place = folder / job.name
    (place / "checkpoint").mkdir(parents=True)
    children = []
    for rank in range(max(1, job.ranks)):
        child = os.fork()
        if child == 0:
            try:
                _rank(job, rank, place)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = [code for code in (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) if code]
    if failed:
        raise SystemExit(f"{job.name}: a rank ended with {failed}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for described in json.loads(Path(sys.argv[1]).read_text()):
        _fork(Job(**described), Path(sys.argv[2]))
