"""What settings of attention, memory and sharding lead to, seen in one step of a rank that is alone in its process group."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from asyncrl.config import RunConfig
from asyncrl.train import layers
from asyncrl.train.batch import pack
from asyncrl.train.config import TrainConfig
from asyncrl.train.rank import RankTrainer
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.step import train_step
from asyncrl.weights.ends import TransportSpec
from tests.config_observers import Scene
from tests.train.train_data import random_batch


def sharded(config: RunConfig, scene: Scene) -> object:
    """Backend and why, layers compiled, bytes kept for the backward pass, gatherings of shards, what is gathered ahead, dtype of sums."""
    seen: dict[str, Any] = {"compiled": 0, "kept_bytes": 0, "gathered": 0, "reduced": set()}
    group = _fsdp_param_group.FSDPParamGroup
    gather, reduce = group._to_unsharded, _fsdp_param_group.foreach_reduce

    def compiled(forward: Any, **_: Any) -> Any:
        seen["compiled"] += 1
        return forward

    def gathered(self: Any) -> None:
        seen["gathered"] += 1
        gather(self)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        seen["reduced"] |= {argument for argument in (*args, *kwargs.values()) if argument in (torch.float32, torch.bfloat16)}
        return reduce(*args, **kwargs)

    def kept(tensor: Tensor) -> Tensor:
        seen["kept_bytes"] += tensor.nbytes
        return tensor

    scene.patch.setattr(layers.torch, "compile", compiled)
    scene.patch.setattr(group, "_to_unsharded", gathered)
    scene.patch.setattr(_fsdp_param_group, "foreach_reduce", reduced)
    settings = TrainConfig(trainer=config.trainer.model_copy(update={"dtype": "float32"}), advantages=config.advantages,
                           correction=config.correction, loss=config.loss)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        rank = RankTrainer(RankSpec(model=str(scene.model), rank=0, world_size=1, rendezvous=str(Path(folder) / "meet"),
                                    transport=TransportSpec.of(scene.paths), published_dtype="float32", config=settings))
        try:
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
                train_step(rank._trainee, pack(random_batch(0)))
            seen["ahead"] = [len(layer._get_fsdp_state()._states_to_forward_prefetch) for layer in layers.layers_of(rank._lm)]
            return rank.attention, sorted(seen.items(), key=str)
        finally:
            rank.close()
            torch.set_num_threads(threads)
