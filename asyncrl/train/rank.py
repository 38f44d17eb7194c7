"""One trainer rank: loads its shards, steps, scores, publishes, saves. Runs in a child or, alone, in the calling process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.adapters import add_adapters
from asyncrl.channel import Channel, Reply, Request, serve_calls
from asyncrl.lora_config import adapters_of
from asyncrl.records import TokenRecords
from asyncrl.train import checkpoint
from asyncrl.train.advantages_config import GAE
from asyncrl.train.batch import PackedBatch
from asyncrl.train.checkpoint_store import SavedFile
from asyncrl.train.critic import TrainedCritic, load_critic
from asyncrl.train.density_forecast import DensityForecast
from asyncrl.train.examples import PackedExamples
from asyncrl.train.export import export_folder
from asyncrl.train.export_form import ExportForm
from asyncrl.train.lora import adapters_off, base_digest, export_adapters, require_base, trained_tensors
from asyncrl.train.minibatch import alone
from asyncrl.train.model import Policy, load_policy
from asyncrl.train.optim import Optimizer
from asyncrl.train.optim_groups import freeze
from asyncrl.train.parallel import connect
from asyncrl.train.publication import SNAPSHOT_LOST
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.rate_scale import RateScale
from asyncrl.train.ready import make_ready
from asyncrl.train.recorded import MOST_RECORDED, keep_newest, save_recorded
from asyncrl.train.reference import Reference, load_reference
from asyncrl.train.residence import Residence
from asyncrl.train.sft_step import supervised_step
from asyncrl.train.step import train_step
from asyncrl.train.trainee import Trainee
from asyncrl.weights.ends import sink_of
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.torch_pieces import TensorBits, frozen_names, local_bits, local_pieces
from asyncrl.weights.torch_snapshot import snapshot_on


class RankTrainer:
    """The state of one rank. `handlers` are its operations; every rank gets the same calls in the same order."""

    def __init__(self, spec: RankSpec) -> None:
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(spec.deterministic or self._was_deterministic)
        torch.set_num_threads(spec.config.trainer.threads)
        self._spec = spec
        policy = load_policy(Path(spec.model), chunk_logits=spec.config.trainer.logits_chunk,
                             routing_replay=spec.config.trainer.routing_replay)
        freeze(policy.lm, spec.config.trainer.frozen)
        self._lora = adapters_of(spec.config.lora)
        if self._lora:
            add_adapters(policy.lm, self._lora)
        self._ranks = connect(rank=spec.rank, world_size=spec.world_size, rendezvous=Path(spec.rendezvous) if spec.rendezvous else None,
                              timeout_s=spec.config.trainer.step_timeout_s)
        self._lm = policy.lm
        self.attention = make_ready(policy, self._ranks, spec.config.trainer)
        optimizer = Optimizer(policy.lm.named_parameters(remove_duplicate=False), config=spec.config.trainer, ranks=self._ranks)
        rate_scale = RateScale(spec.config.trainer.learning_rate_scale, ranks=self._ranks)
        self._trainee = Trainee(policy=policy, optimizer=optimizer, rate_scale=rate_scale, ranks=self._ranks, config=spec.config,
                                reference=self._load_reference(policy), critic=self._load_critic())
        self._forecast = DensityForecast(optimizer, beta1=spec.config.trainer.betas[0], dtype=spec.published_dtype, ranks=self._ranks)
        self._residence = Residence.of(self._trainee)
        self._sink = sink_of(spec.transport, rank=spec.rank, ranks=spec.world_size, device=str(self._ranks.device))
        self._publisher = self._new_publisher()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[list[SavedFile]] | None = None

    def handlers(self) -> dict[str, Any]:
        """Operation by name, as `serve_calls` takes them. One that needs what is offloaded has it back for as long as it runs."""
        at_home = {"step": self.step, "fit": self.fit, "score": self.score, "publish": self.publish, "anchor": self.anchor,
                   "adopt": self.adopt, "save": self.save, "restore": self.restore, "export": self.export,
                   "export_adapters": self.export_adapters}
        return {"deliver": self.deliver, "committed": self.committed, "saved": self.saved, "offload": self.offload, "onload": self.onload,
                **{name: self._residence.at_home()(work) for name, work in at_home.items()}}

    def step(self, request: Request) -> Mapping[str, Any]:
        """Train on the batch in file `path`; rank 0 records it at `record`, where that is asked for."""
        batch = PackedBatch.load(Path(request.body["path"]))
        outcome = train_step(self._trainee, batch)
        record = request.body.get("record")
        if record and self._spec.rank == 0 and outcome.tokens is not None:
            save_recorded(outcome.tokens, Path(record))
            keep_newest(Path(record).parents[1], count=MOST_RECORDED)
        return {"metrics": outcome.metrics.to_wire(), "skipped": outcome.skipped, "nonfinite": outcome.nonfinite,
                "trained_tokens": outcome.trained_tokens}

    def fit(self, request: Request) -> Mapping[str, Any]:
        """Train on a batch of examples, by cross-entropy."""
        return supervised_step(self._trainee, PackedExamples(**request.arrays), version=request.body["version"])

    @torch.no_grad()
    def score(self, request: Request) -> Reply:
        """[T] logprobs of whole sequences, 0 at the first token of each, or where a `loss_mask` is not set; the same on every rank."""
        tokens, cu_seqlens = request.arrays["tokens"], request.arrays["cu_seqlens"]
        targets = np.array(request.arrays.get("loss_mask", np.ones(len(tokens), np.bool_)))
        targets[cu_seqlens[:-1][np.diff(cu_seqlens) > 0]] = False
        logprobs = torch.zeros(len(tokens), device=self._ranks.device)
        for inputs in alone(self._trainee, tokens, cu_seqlens=cu_seqlens, targets=targets, temperatures=request.arrays["temperatures"],
                            records=TokenRecords.of_arrays(request.arrays)):
            logprobs[inputs.places] = self._trainee.policy(inputs)[0]
        return Reply(arrays={"logprobs": self._ranks.sum(logprobs).cpu().numpy()})

    def publish(self, request: Request) -> Mapping[str, Any]:
        """Write what changed in this rank's shards since `base`, everything without one; pending until `committed`.

        A delta comes with the number of changes that was to be expected, where it can be told. Where the snapshot of `base` was lost,
        nothing is written and the reply says so: an anchor has to be asked for.
        """
        self._publisher.abandon()
        base = request.body["base"]
        if base is not None and self._publisher.version is None:
            return SNAPSHOT_LOST
        publication = self._publisher.publish(self._bits(anchor=base is None), version=request.body["version"], base=base)
        return {"publication": publication.to_wire(), "predicted": None if base is None else self._forecast.of_delta()}

    def deliver(self, request: Request) -> None:
        """Send the parts of `manifest` to `engines`, with all other ranks. Raises WeightSyncError."""
        self._sink.deliver(Manifest.from_json(request.body["manifest"]), engines=request.body["engines"])

    def anchor(self, request: Request) -> Mapping[str, Any]:
        """Write the version published last once more, whole: trained weights as they were published, frozen ones as they are."""
        return {"publication": self._publisher.anchor(self._bits()).to_wire()}

    def committed(self, request: Request) -> None:
        """`version` will not be taken back: it is durable, or every engine that serves has applied it."""
        self._publisher.committed(request.body["version"])
        self._forecast.published()

    def adopt(self, request: Request) -> Mapping[str, Any]:
        """Take the current weights for the published `version`; the reply's hash share must prove it."""
        hash_share = self._publisher.adopt(self._bits(), version=request.body["version"])
        self._forecast.published()
        return {"hash_share": hash_share}

    def save(self, request: Request) -> Mapping[str, Any]:
        """Copy this rank's state and begin to write it into `folder`, in a thread; `saved` gives the files. An older write is forgotten."""
        staged = checkpoint.stage(self._tensors(), rank=self._spec.rank)
        self._saving = self._writer.submit(checkpoint.write, staged, Path(request.body["folder"]), rank=self._spec.rank)
        return {"updates": self._trainee.optimizer.updates, "model": self._base_digest if self._lora and self._spec.rank == 0 else ""}

    def saved(self, request: Request) -> Mapping[str, Any]:
        """Whether the write is done, and its files; `wait` waits for it. Raises CheckpointError."""
        assert self._saving is not None, "save() comes first"
        if not request.body["wait"] and not self._saving.done():
            return {"done": False}
        return {"done": True, "files": [dataclasses.asdict(file) for file in self._saving.result()]}

    def restore(self, request: Request) -> None:
        """Load weights and optimizer from the checkpoint in `folder`, whatever number of ranks wrote it. Raises CheckpointError."""
        if self._lora:
            require_base(request.body["model"], found=self._base_digest, folder=Path(self._spec.model))
        checkpoint.load(self._tensors(), Path(request.body["folder"]))
        self._trainee.optimizer.updates = request.body["updates"]
        if self._trainee.critic is not None:
            self._trainee.critic.loaded()
        self._publisher = self._new_publisher()

    def offload(self, request: Request) -> Mapping[str, Any]:
        """Leave the device to others: the bytes that moved to the memory of the host."""
        return {"bytes": self._residence.offload()}

    def onload(self, request: Request) -> Mapping[str, Any]:
        """Come back: the bytes that moved."""
        return {"bytes": self._residence.onload()}

    def export(self, request: Request) -> None:
        """Write a Hugging Face folder to `folder`, in the `form` asked for."""
        export_folder(self._lm, source=Path(self._spec.model), target=Path(request.body["folder"]), ranks=self._ranks,
                      form=ExportForm(**request.body.get("form", {})))

    def export_adapters(self, request: Request) -> None:
        """Write the adapters alone to `folder`."""
        assert self._lora is not None
        export_adapters(self._lm, Path(request.body["folder"]), config=self._lora, base=self._spec.model, ranks=self._ranks)

    def close(self) -> None:
        """Finish what is being written, leave the process group, and torch as it was."""
        torch.use_deterministic_algorithms(self._was_deterministic)
        self._writer.shutdown()
        self._ranks.close()

    @functools.cached_property
    def _base_digest(self) -> str:
        return base_digest(Path(self._spec.model))

    def _load_reference(self, policy: Policy) -> Reference | None:
        if self._spec.config.reference.kind == "none":
            return None
        if self._lora:
            return Reference(policy, untrained=adapters_off)
        return load_reference(Path(self._spec.model), self._ranks, settings=self._spec.config.trainer)

    def _load_critic(self) -> TrainedCritic | None:
        advantages, trainer = self._spec.config.advantages, self._spec.config.trainer
        if not isinstance(advantages, GAE):
            return None
        return load_critic(Path(self._spec.model), self._ranks, settings=advantages.critic, trainer=trainer)

    def _new_publisher(self) -> Publisher:
        return Publisher(local_pieces(self._lm, rank=self._spec.rank, dtype=self._spec.published_dtype), rank=self._spec.rank,
                         sink=self._sink, frozen=frozen_names(self._lm),
                         threads=self._spec.config.trainer.threads, snapshot=snapshot_on(self._ranks.device))

    def _bits(self, *, anchor: bool = True) -> TensorBits:
        but = frozenset() if anchor else frozen_names(self._lm)
        return local_bits(self._lm, rank=self._spec.rank, dtype=self._spec.published_dtype, but=but)

    def _tensors(self) -> dict[str, torch.Tensor]:
        model = {f"model/{name}": tensor for name, tensor in trained_tensors(self._lm).items()}
        critic = {} if self._trainee.critic is None else self._trainee.critic.tensors()
        return model | self._trainee.optimizer.moments() | self._trainee.rate_scale.tensors() | critic


def serve(channel: Channel, spec: Mapping[str, Any]) -> None:
    """A rank as a child process: answers until the controller closes it."""
    trainer = RankTrainer(RankSpec.from_wire(spec))
    print(f"attention: {trainer.attention.backend}, {trainer.attention.reason}", flush=True)  # into the rank's log
    try:
        serve_calls(channel, trainer.handlers())
    finally:
        trainer.close()
