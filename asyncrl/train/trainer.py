"""The controller's side of training: one object that steps, publishes and saves, whatever processes do the work. Needs no torch.

A dead rank costs time, not results. Batch files are kept from the newest checkpoint on; when a rank dies all are started
anew, load that checkpoint, and train the kept batches again in order: on the same machine with the same ranks bit for bit.

Checkpoints are written beside the steps: `checkpoint` returns once the ranks hold a copy of their state, a later call finds
the files written and makes the checkpoint whole. Until then the one before it is the newest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.channel import Reply
from asyncrl.errors import AsyncRLError, CheckpointError, ChildDied, ConfigError, RunAborted, StalenessError, WeightSyncError
from asyncrl.lora_config import adapters_of, require_peft
from asyncrl.metrics import Metrics
from asyncrl.model_folder import model_folder
from asyncrl.paths import RunPaths
from asyncrl.records import joined
from asyncrl.train import checkpoint_store
from asyncrl.train.batch import offsets, pack
from asyncrl.train.checkpoint_store import checkpoint_folder
from asyncrl.train.config import validated
from asyncrl.train.correction_config import CorrectionConfig
from asyncrl.train.export_form import ADAPTER_FOLDER, SHARD_BYTES, ExportDtype, ExportForm
from asyncrl.train.history import History, restore_request
from asyncrl.train.nonfinite import NonfiniteLimit
from asyncrl.train.publication import Publication
from asyncrl.train.rank_group import RankGroup, start_ranks
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.saving import CheckpointSaving
from asyncrl.types import Batch, Sequence
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest

_CLOSE_SAVING_S = 60.0
"""How long the end of a run waits for a checkpoint: at 100 MB/s, 6 GB a rank."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    version: int
    """Policy version after the step: batches consumed, skipped ones included."""
    metrics: Metrics
    skipped: bool
    """The weights are those of the version before: nothing to train on, no gradient, or one that is not finite. Not said of steps that
    trained a critic alone."""
    trained_tokens: int
    """Sampled tokens that had a weight in an applied update."""
    masked_tokens: int
    """Sampled tokens of the batch that had none."""


class Trainer:
    """Trains the model of a Hugging Face folder; settings are the fields of `TrainerConfig`. Raises ConfigError before any process starts.

    Args:
        model: the folder, or a Hugging Face id, which is fetched.
        advantages: "grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", or a
            mapping with `kind`.
        correction: "token_tis", "icepop", "none", the name of a preset, or a mapping with `kind`; must be chosen when data can be stale.
        loss: "decoupled_ppo", "ppo", "gspo", …, or a mapping with `kind`: those of docs/configuration.md.
        reference: "none", or a mapping with `kind`, "in_loss" or "in_reward": a KL to the model the run starts from.
        lora: "none", or a mapping with `kind` lora: what adapters are trained in the model's stead. The engines are made with the same.
    """

    def __init__(self, model: str | Path, *, advantages: Any = "grpo", correction: Any = None, loss: Any = "decoupled_ppo",
                 reference: Any = "none", lora: Any = "none", **settings: Any) -> None:
        self.model = model_folder(model)
        self.config = validated({"trainer": settings, "advantages": advantages, "correction": correction, "loss": loss,
                                 "reference": reference, "lora": lora})
        if adapters_of(self.config.lora):
            require_peft()
        self.version = 0
        self._history = History()
        self._saving = CheckpointSaving(self._history)
        self._checkpointed = self._starts = self._restarts_in_row = 0
        self._nonfinite = NonfiniteLimit(self.config.trainer.max_nonfinite_steps)
        self._since_last_step = Metrics()
        self._ranks: RankGroup | None = None
        self._alone = asyncio.Lock()
        self._deterministic = False
        self._paths: RunPaths
        self._publication: Publication

    @property
    def correction(self) -> CorrectionConfig | None:
        """The chosen correction, None when none was chosen."""
        return self.config.correction

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.config.trainer.learning_rate_at(self.version)

    @property
    def predicted_density(self) -> float | None:
        """Share of the values compared that the newest version should change; None of an anchor, and where it cannot be told."""
        return self._publication.predicted_density

    @property
    def checkpoint_due(self) -> bool:
        """Whether `checkpoint_every_steps` asks for one of this version."""
        every = self.config.trainer.checkpoint_every_steps
        return every is not None and self.version % every == 0 and self.version != self._checkpointed

    async def start(self, paths: RunPaths, *, weights: WeightsConfig | None = None, deterministic: bool = False) -> None:
        """Bring the ranks up with the initial model; `deterministic` holds torch to algorithms that give the same bits every time.

        Raises ConfigError, ChildDied or TimeoutError, leaving no process.
        """
        self._paths, self._deterministic = paths, deterministic
        self._publication = Publication(paths, config=weights or WeightsConfig())
        await self._start_ranks()

    async def step(self, batch: Batch) -> StepResult:
        """Train on a batch of the trainer's own version and make the next one.

        Raises StalenessError, ShapeError or NonFiniteError for a batch that cannot be trained, RunAborted when too many steps in a row
        had a gradient that is not finite, or too many restarts brought no finished step; CheckpointError when the step is done, and the
        checkpoint that was being written beside it cannot be.
        """
        if batch.version != self.version:
            raise StalenessError(f"the batch was made to be trained from version {batch.version}, the trainer is at {self.version}")
        packed = pack(batch)
        file = self._paths.batches / f"batch-{self.version:08d}.safetensors"
        packed.save(file)
        every, made = self.config.trainer.record_batches_every_steps, self.version + 1
        record = str(self._paths.recorded_batch(made)) if every is not None and made % every == 0 else ""
        try:
            reply = (await self._call("step", {"path": str(file), "record": record}))[0].body
        except Exception:
            # How much of the step was done is not known. The next call finds no rank and recovers this version.
            await self._kill_ranks()
            raise
        self.version += 1
        self._restarts_in_row = 0
        if self.config.trainer.processes:
            self._history.trained(self.version, file)
        else:
            file.unlink()
        await self._settle(wait=False)
        return self._result(reply, sampled_tokens=packed.num_sampled_tokens)

    async def score(self, sequences: SequenceOf[Sequence], *, temperature: float | SequenceOf[float] = 1.0) -> list[NDArray[np.float32]]:
        """[T] float32 logprobs of each sequence under the current weights, over kept sets, 0 at index 0. One temperature, or one each."""
        kept = list(sequences)
        if not kept:
            return []
        cu_seqlens = offsets(kept)
        arrays = {"tokens": np.concatenate([sequence.tokens for sequence in kept]), "cu_seqlens": cu_seqlens,
                  "temperatures": np.array(np.broadcast_to(temperature, len(kept)), np.float32),
                  **joined([(sequence.records, len(sequence)) for sequence in kept]).arrays()}
        logprobs = (await self._call("score", arrays=arrays))[0].arrays["logprobs"]
        return [logprobs[start:end] for start, end in itertools.pairwise(cu_seqlens.tolist())]

    async def publish(self) -> Manifest:
        """Make the current version durable: an anchor the first time, then deltas against the version published before.

        A second call for the same version gives the same manifest. Where parts are pushed, `deliver` and then `keep` are to follow.
        Raises WeightSyncError or NonFiniteError.
        """
        async with self._alone:
            while not self._publication.holds(self.version):
                try:
                    made = [reply.body for reply in await self._on_ranks("publish", self._publication.request(self.version))]
                    if self._publication.commit(made, version=self.version) and not self._publication.is_pushed:
                        await self._keep(self.version)
                except ChildDied as death:
                    await self._recover(death)
            return self._publication.manifest

    async def anchor(self) -> Manifest:
        """Make the version published last durable once more, whole. Raises WeightSyncError; then the next publication is an anchor."""
        try:
            return self._publication.commit_anchor([reply.body for reply in await self._call("anchor")])
        except WeightSyncError:
            self._publication.lose_snapshot()
            raise

    async def deliver(self, manifest: Manifest, engines: SequenceOf[str]) -> None:
        """Push a published version to engines that are fetching it now; where they pull, nothing is done. Raises WeightSyncError."""
        async with self._alone:
            await self._on_ranks("deliver", {"manifest": manifest.to_json(), "engines": list(engines)})

    async def keep(self, version: int) -> None:
        """A published version will not be taken back: the next one is a delta on it. `publish` does this itself where engines pull."""
        async with self._alone:
            try:
                await self._keep(version)
            except ChildDied as death:
                await self._recover(death)

    def retain(self, slowest: int | None) -> None:
        """Let go of published files that no engine needs any more: the slowest that serves holds version `slowest`; None: none serves."""
        self._publication.retain(slowest)

    async def checkpoint(self, state: bytes = b"") -> None:
        """Begin a checkpoint in the run's folder. Waits until the ranks hold a copy of their state, and for an earlier one to be whole.

        `state` is what the run around the trainer wants back. Of those made here the newest two are kept. Raises NonFiniteError or,
        of this one or an earlier, CheckpointError.
        """
        await self._settle(wait=True)
        self._checkpointed = self.version
        await self._begin_saving(checkpoint_folder(self._paths.checkpoints, self.version), state)

    async def settle(self) -> None:
        """Wait until the checkpoint that is being written, if any, is whole. Raises CheckpointError."""
        await self._settle(wait=True)

    async def save(self, path: str | Path, state: bytes = b"") -> None:
        """Write a checkpoint folder; an older one at `path` is replaced once this one is whole. Raises NonFiniteError, CheckpointError."""
        await self._settle(wait=True)
        await self._begin_saving(Path(path), state)
        while not await self._settle(wait=True):
            await self._begin_saving(Path(path), state)

    async def restore(self, path: str | Path) -> bytes:
        """Load a checkpoint folder, or the newest whole one under `path`, saved by any number of ranks. Returns the `state` saved with it.

        Engines may hold versions that will be made again: a new run epoch begins, and the next publication is an anchor.
        Raises CheckpointError.
        """
        folder = Path(path)
        found = folder if (folder / checkpoint_store.MANIFEST).exists() else checkpoint_store.newest(folder)
        if found is None:
            raise CheckpointError(f"there is no whole checkpoint under {folder}")
        manifest = checkpoint_store.verified(found)
        await self._settle(wait=True)
        await self._call("restore", restore_request(found, manifest))
        self._history.forget(self.version)
        self._history.rebase(found, manifest.version)
        self._history.take_over(checkpoint_store.listed(self._paths.checkpoints))
        self.version = self._checkpointed = manifest.version
        self._publication.restart(run_epoch=max(manifest.run_epoch, self._publication.run_epoch) + 1)
        return checkpoint_store.read_state(found)

    async def export(self, path: str | Path, *, dtype: ExportDtype = "source", max_shard_bytes: int = SHARD_BYTES) -> None:
        """Write a Hugging Face folder of the current weights, in files of `max_shard_bytes` at most unless one tensor is larger.

        Adapters are merged; with `lora.export_adapters` the folder has them apart too, in `adapter/`. It appears whole, in place of an
        older model folder at `path`. Raises NonFiniteError, ConfigError, CheckpointError.
        """
        form = ExportForm(dtype, max_shard_bytes)
        await self._call("export", {"folder": str(path), "form": dataclasses.asdict(form)})
        lora = adapters_of(self.config.lora)
        if lora and lora.export_adapters:
            await self.export_adapters(Path(path) / ADAPTER_FOLDER)

    async def export_adapters(self, path: str | Path) -> None:
        """Write the adapters alone, as `PeftModel.from_pretrained` reads them. Raises NonFiniteError, and ConfigError without any."""
        if adapters_of(self.config.lora) is None:
            raise ConfigError("lora.kind", value=self.config.lora.kind, allowed="lora, where adapters are to be exported",
                              remedy="Export the model, or train with lora: {kind: lora, rank: 8}.")
        await self._call("export_adapters", {"folder": str(path)})

    async def offload(self) -> int:
        """Leave the device to others; what an operation needs comes back while it runs. Bytes that moved to the host, over all ranks."""
        return sum(reply.body["bytes"] for reply in await self._call("offload"))

    async def onload(self) -> int:
        """Have the state on the device again; bytes that moved, over all ranks."""
        return sum(reply.body["bytes"] for reply in await self._call("onload"))

    async def close(self) -> None:
        """End every rank. Safe to call twice, and before `start`.

        A checkpoint that is being written becomes whole first, whatever the run ends with, unless its ranks are gone or take too long.
        """
        try:
            with suppress(AsyncRLError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SAVING_S):
                    await self._saving.commit(self._on_ranks, wait=True)
        finally:
            if self._ranks is not None:
                await self._ranks.close()
            self._give_up_saving()

    async def _call(self, op: str, body: dict[str, Any] | None = None, *, arrays: dict[str, NDArray[Any]] | None = None) -> list[Reply]:
        """An operation on every rank, one at a time, done again after a recovery when one died."""
        async with self._alone:
            while True:
                try:
                    return await self._on_ranks(op, body, arrays=arrays)
                except ChildDied as death:
                    await self._recover(death)

    async def _on_ranks(self, op: str, body: dict[str, Any] | None = None, *, arrays: dict[str, NDArray[Any]] | None = None) -> list[Reply]:
        assert self._ranks is not None, "start() comes first"
        return await self._ranks.call(op, body or {}, arrays=arrays or {}, timeout_s=self.config.trainer.step_timeout_s)

    async def _start_ranks(self) -> None:
        settings = self.config.trainer
        rendezvous = str(self._paths.shared / f"rendezvous-{self._starts}") if settings.processes else None
        self._starts += 1
        first = RankSpec(model=str(self.model.resolve()), rank=0, world_size=max(1, settings.processes), rendezvous=rendezvous,
                         transport=self._publication.transport, published_dtype=self._publication.dtype, config=self.config,
                         deterministic=self._deterministic)
        self._ranks = await start_ranks(first, logs=self._paths.logs)

    async def _recover(self, death: ChildDied | TimeoutError) -> None:
        """All ranks anew, at the version they had. Raises RunAborted after `max_restarts` without a finished step.

        Whatever it raises, no rank is left that holds another state.
        """
        while True:
            await self._kill_ranks()
            self._restarts_in_row += 1
            if self._restarts_in_row > self.config.trainer.max_restarts:
                raise RunAborted(f"trainer.max_restarts = {self.config.trainer.max_restarts}: no step finished in between; "
                                 f"the last death: {death}") from death
            try:
                await self._start_ranks()
                await self._redo()
            except (ChildDied, TimeoutError) as again:
                death = again
            except BaseException:
                await self._kill_ranks()
                raise
            else:
                self._since_last_step.sum("train/restarts/sum", 1)
                return

    async def _kill_ranks(self) -> None:
        if self._ranks is not None:
            await self._ranks.kill()
        self._give_up_saving()

    async def _redo(self) -> None:
        """Load the newest checkpoint (fresh ranks hold the initial model) and train the kept batches again, up to `version`.

        The publishers take up the published version on the way.
        """
        self._publication.lose_snapshot()
        version = 0
        base, batches = self._history.base, self._history.batches
        if base is not None:
            manifest = checkpoint_store.verified(base)
            await self._on_ranks("restore", restore_request(base, manifest))
            version = manifest.version
        await self._adopt_when_published(version)
        for made, file in enumerate(batches, start=version + 1):
            await self._on_ranks("step", {"path": str(file)})
            await self._adopt_when_published(made)
        self._since_last_step.sum("train/redone_steps/sum", len(batches))

    async def _adopt_when_published(self, version: int) -> None:
        if self._publication.last_version == version:
            replies = await self._on_ranks("adopt", {"version": version})
            self._publication.adopt([reply.body["hash_share"] for reply in replies])

    async def _begin_saving(self, folder: Path, state: bytes) -> None:
        automatic = folder == checkpoint_folder(self._paths.checkpoints, self.version)
        await self._saving.begin(folder, state, version=self.version, automatic=automatic, run_epoch=lambda: self._publication.run_epoch,
                                 call=self._call)

    async def _keep(self, version: int) -> None:
        if self._publication.is_to_be_kept(version):
            await self._on_ranks("committed", {"version": version})
            self._publication.taken_up()

    async def _settle(self, *, wait: bool) -> bool:
        """Make the checkpoint whole that is being written, once it is; whether one became whole. A death of ranks costs it."""
        async with self._alone:
            try:
                return await self._saving.commit(self._on_ranks, wait=wait)
            except ChildDied as death:
                await self._recover(death)
                return False
            except BaseException:
                self._give_up_saving()
                raise

    def _give_up_saving(self) -> None:
        if self._saving.give_up():
            self._since_last_step.sum("train/lost_checkpoints/sum", 1)

    def _result(self, reply: Any, *, sampled_tokens: int) -> StepResult:
        metrics, self._since_last_step = self._since_last_step, Metrics()
        metrics.merge(Metrics.from_wire(reply["metrics"]))
        metrics.sum("train/tokens/sum", reply["trained_tokens"])
        metrics.sum("train/skipped_steps/sum", int(reply["skipped"]))
        metrics.sum("train/nonfinite_steps/sum", int(reply["nonfinite"]))
        self._nonfinite.after_step(nonfinite=reply["nonfinite"])
        return StepResult(version=self.version, metrics=metrics, skipped=reply["skipped"], trained_tokens=reply["trained_tokens"],
                          masked_tokens=sampled_tokens - reply["trained_tokens"])
